"""Listening addresses: the same grammar for every command and setting."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from skymemory.errors import InvalidInput, quoted

_TCP_FORMS = "HOST:PORT, [IPv6]:PORT or :PORT (0 to 65535), such as 127.0.0.1:8080, with or without tcp://"


def format_address(host: str, port: int) -> str:
    """Return ``127.0.0.1:8080`` or ``[::1]:8080``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """TCP port (0: any free port), or path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str, *, unix: bool = False) -> ListenAddress:
        """Parse ``127.0.0.1:8080``, ``[::1]:8080``, ``:8080`` (127.0.0.1) or with ``tcp://``; with ``unix`` also
        ``unix:/run/sky.sock`` and ``unix:///run/sky.sock``.

        Raises:
            InvalidInput: another form, or a port above 65535.
        """
        kind, colon, remainder = text.partition(":")
        if kind == "unix" and colon and not (remainder.isascii() and remainder.isdigit()):
            path = remainder.removeprefix("//")
            if unix and path:
                return cls(path=path)
            raise InvalidInput(f"{quoted(text)}: {f'no path; {cls._forms(unix)}' if unix else cls._forms(unix)}")
        host, colon, port = text.removeprefix("tcp://").rpartition(":")
        host_name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if (
            not colon
            or not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16)
            or (host_name != host and not _is_ipv6(host_name))
            # An IPv6 address without brackets is still accepted, for compatibility.
            or (":" in host and host_name == host and not _is_ipv6(host))
            or any(letter in host_name for letter in "/[] \t")
        ):
            raise InvalidInput(f"{quoted(text)} is not an address to listen at: {cls._forms(unix)}")
        return cls(host=host_name or "127.0.0.1", port=int(port))

    @staticmethod
    def _forms(unix: bool) -> str:
        return f"expected {_TCP_FORMS}{', or unix:PATH' if unix else ''}"

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.path else f"tcp://{format_address(self.host, self.port)}"

    @property
    def is_local(self) -> bool:
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_UNIX if self.path else socket.AF_INET6 if ":" in self.host else socket.AF_INET


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def without_api_path(url: str) -> str:
    url = url.rstrip("/")
    for ending in ("/chat/completions", "/completions", "/models", "/v1"):
        url = url.removesuffix(ending).rstrip("/")
    return url


def host_and_port(listen: str) -> tuple[str, int]:
    address = ListenAddress.parse(listen)
    return address.host, address.port
