"""Which endpoints there are: named once, in a file that is read again, or behind a DNS name that is asked again."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from skymemory.conductor.picker import Picker
from skymemory.errors import InvalidInput


class Source(Protocol):
    async def endpoints(self) -> tuple[str, ...] | None:
        """All there are now, as ``ip:port``; None where that cannot be learnt, so the last word stands."""
        ...


def parse_endpoint(text: str) -> str:
    """``127.0.0.1:8000`` or ``[::1]:8000``, as data planes read it.

    Raises:
        InvalidInput: it is neither; a host name is none (see ``NameSource``).
    """
    host, _, port = text.strip().rpartition(":")
    try:
        address = ipaddress.ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
        number = int(port)
    except ValueError as error:
        raise InvalidInput(f"{text!r} is no endpoint; expected IP:PORT, as 10.0.0.7:8000 or [fd00::7]:8000") from error
    if not 0 < number < 65536 or (address.version == 6) != host.startswith("["):
        raise InvalidInput(f"{text!r} is no endpoint; expected a port of 1 to 65535, and IPv6 in brackets")
    return f"[{address}]:{number}" if address.version == 6 else f"{address}:{number}"


class FixedSource:
    """Those that were named."""

    def __init__(self, endpoints: Collection[str]) -> None:
        self._endpoints = tuple(dict.fromkeys(parse_endpoint(endpoint) for endpoint in endpoints))

    async def endpoints(self) -> tuple[str, ...] | None:
        return self._endpoints


class FileSource:
    """One endpoint a line; what follows a ``#`` is a remark. Read again when it changes."""

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self._path = path
        self._complain = complain
        self._seen: tuple[int, int] | None = None
        self._endpoints = self._read()

    async def endpoints(self) -> tuple[str, ...] | None:
        """The last good ones while the file is gone or cannot be used: a file half written empties no pool."""
        try:
            status = self._path.stat()
            if self._seen != (status.st_mtime_ns, status.st_size):
                self._endpoints = self._read()
        except (OSError, InvalidInput) as error:
            self._complain(f"endpoints stay as they were: {error}")
            return None
        return self._endpoints

    def _read(self) -> tuple[str, ...]:
        status = self._path.stat()
        self._seen = (status.st_mtime_ns, status.st_size)
        found: dict[str, None] = {}
        for number, line in enumerate(self._path.read_text("utf-8").splitlines(), 1):
            if text := line.partition("#")[0].strip():
                try:
                    found[parse_endpoint(text)] = None
                except InvalidInput as error:
                    raise InvalidInput(f"{self._path}, line {number}: {error}") from error
        return tuple(found)


class NameSource:
    """Every address of a DNS name. In Kubernetes a Service without a cluster address (``clusterIP: None``) is such a
    name: it has one address for each ready pod.
    """

    def __init__(self, name_and_port: str, complain: Callable[[str], None]) -> None:
        name, _, port = name_and_port.rpartition(":")
        if not name or not port.isdigit() or not 0 < int(port) < 65536:
            raise InvalidInput(f"{name_and_port!r}: expected NAME:PORT, as vllm.default.svc:8000")
        self._name, self._port = name, int(port)
        self._complain = complain

    async def endpoints(self) -> tuple[str, ...] | None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            self._complain(f"endpoints stay as they were: {self._name!r} is not resolved: {error}")
            return None
        hosts = sorted({str(address[0]) for *_, address in found})
        return tuple(f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in hosts)


def update(picker: Picker, endpoints: Collection[str]) -> tuple[list[str], list[str]]:
    """Make the fleet what ``endpoints`` says: (came, left). Those that stay keep what is known of them."""
    left = [server.name for server in picker.fleet if server.name not in endpoints]
    came = [name for name in endpoints if name not in picker.fleet.servers]
    for name in left:
        picker.remove(name)
    for name in came:
        picker.fleet.add(name)
    return came, left
