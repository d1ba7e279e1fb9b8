"""Sources of endpoints: backends named by their ``ip:port``."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from skymemory.config import known_keys, suggestion, texts, yes_or_no
from skymemory.errors import InvalidInput, os_reason
from skymemory.files import MAX_TABLE_BYTES, read_text
from skymemory.router.settings import BOTH, Backend, PickerSettings

_TRUTH = {"true": True, "false": False}


class EndpointSource(Protocol):
    async def endpoints(self) -> tuple[Backend, ...] | None:
        """Return the endpoints; None: they cannot be read now."""
        ...


def parse_endpoint(text: str) -> str:
    """Return an ``ip:port`` in its canonical form.

    Raises:
        InvalidInput: anything else, such as a host name.
    """
    host, _, port = text.strip().rpartition(":")
    try:
        address = ipaddress.ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
        number = int(port)
    except ValueError as error:
        raise InvalidInput(
            f"{text!r} is not an endpoint; expected IP:PORT, such as 10.0.0.7:80 or [fd00::7]:80"
        ) from error
    if not 0 < number < 65536 or (address.version == 6) != host.startswith("["):
        raise InvalidInput(f"{text!r} is not an endpoint; expected a port of 1 to 65535, and IPv6 in brackets")
    return f"[{address}]:{number}" if address.version == 6 else f"{address}:{number}"


def endpoint(text: str) -> Backend:
    name = parse_endpoint(text)
    return Backend(url=f"http://{name}", name=name)


def as_endpoint(backend: Backend) -> Backend:
    """Name a backend by its address.

    Raises:
        InvalidInput: it is elastic, or has a host name, a path or TLS.
    """
    _check_fixed(backend)
    parts = urlsplit(backend.url)
    if parts.scheme != "http" or parts.path:
        raise InvalidInput(f"{backend.url!r}: an endpoint for Envoy is http://IP:PORT")
    return replace(backend, name=parse_endpoint(parts.netloc))


def _check_fixed(backend: Backend) -> None:
    if backend.elastic:
        raise InvalidInput(
            f"{backend.name}: elastic: the picker sees no prefill's end, so its endpoints have fixed roles; leave it "
            "out, or use `skymemory route`"
        )


def completed(backend: Backend, settings: PickerSettings) -> Backend:
    """Add settings that all endpoints share."""
    host = backend.name.rpartition(":")[0]
    if not backend.events and settings.events_port:
        replay = f"tcp://{host}:{settings.replay_port}" if settings.replay_port else ""
        backend = replace(backend, events=f"tcp://{host}:{settings.events_port}", replay=replay)
    if not backend.models and settings.model:
        backend = replace(backend, models=(settings.model,))
    return backend


class SettingsSource:
    def __init__(self, backends: Sequence[Backend]) -> None:
        self.set(backends)

    def set(self, backends: Sequence[Backend]) -> None:
        """Replace the endpoints."""
        self._endpoints = tuple({backend.name: backend for backend in map(as_endpoint, backends)}.values())

    async def endpoints(self) -> tuple[Backend, ...] | None:
        return self._endpoints


class FileSource:
    """File with a line per endpoint: ``IP:PORT``, then a backend's settings (``models=a,b``); ``#`` begins comments."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._seen: tuple[int, int] | None = None
        self._endpoints = self._read()

    async def endpoints(self) -> tuple[Backend, ...] | None:
        """Return None if a change is invalid: a half-written file removes no endpoint."""
        try:
            status = self._path.stat()
            if self._seen != (status.st_mtime_ns, status.st_size):
                self._endpoints = self._read()
        except (OSError, InvalidInput) as error:
            why = os_reason(error) if isinstance(error, OSError) else str(error)
            self._warn(f"endpoints not reloaded; the former ones stay: {why}")
            return None
        return self._endpoints

    def _read(self) -> tuple[Backend, ...]:
        status = self._path.stat()
        text = read_text(self._path, MAX_TABLE_BYTES)
        self._seen = (status.st_mtime_ns, status.st_size)  # not before: what cannot be read now is read again
        endpoints: dict[str, Backend] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if words := line.partition("#")[0].strip():
                try:
                    backend = _of_line(words)
                except InvalidInput as error:
                    raise InvalidInput(f"{self._path}, line {number}: {error}") from error
                endpoints[backend.name] = backend
        return tuple(endpoints.values())


def _of_line(line: str) -> Backend:
    address, *words = line.split()
    fields = {key: setting for key, setting in known_keys(Backend).items() if key not in ("url", "name")}
    values = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in fields:
            raise InvalidInput(
                f"{word!r}: expected KEY=VALUE, a setting of a backend; {suggestion(key, sorted(fields))}"
            )
        read = fields[key].metadata["read"]
        raw = value.split(",") if read is texts else _TRUTH.get(value, value) if read is yes_or_no else value
        values[fields[key].name] = read(raw)
    backend = replace(endpoint(address), **values)
    _check_fixed(backend)
    return backend


class NameSource:
    """All addresses of a DNS name: a headless Service has one per ready pod."""

    def __init__(self, name_and_port: str, warn: Callable[[str], None], role: str = BOTH) -> None:
        self._role = role
        name, _, port = name_and_port.rpartition(":")
        if not name or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
            raise InvalidInput(f"{name_and_port!r}: expected NAME:PORT, such as vllm.default.svc:8000")
        self._name, self._port = name, int(port)
        self._warn = warn

    async def endpoints(self) -> tuple[Backend, ...] | None:
        loop = asyncio.get_running_loop()
        try:
            resolved = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            self._warn(
                f"endpoints not reloaded; the former ones stay: cannot resolve {self._name!r}: {os_reason(error)}"
            )
            return None
        hosts = sorted({str(address[0]) for *_, address in resolved})
        addresses = (f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in hosts)
        return tuple(replace(endpoint(address), role=self._role) for address in addresses)


class BothSources:
    """Endpoints of two sources, if both can be read."""

    def __init__(self, first: EndpointSource, second: EndpointSource) -> None:
        self._sources = first, second

    async def endpoints(self) -> tuple[Backend, ...] | None:
        endpoints: dict[str, Backend] = {}
        for source in self._sources:
            if (backends := await source.endpoints()) is None:
                return None
            for backend in backends:
                endpoints.setdefault(backend.name, backend)
        return tuple(endpoints.values())
