"""Addresses to listen at: one grammar for every verb and setting, and one way to write them."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from skymemory.errors import InvalidInput, quoted

_TCP_FORMS = "HOST:PORT, [IPv6]:PORT or :PORT (0 to 65535), such as 127.0.0.1:8080, with or without tcp://"


def format_address(host: str, port: int) -> str:
    """``127.0.0.1:8080`` or ``[::1]:8080``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A TCP port (0: any that is free), or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str, *, unix: bool = False) -> ListenAddress:
        """Of ``127.0.0.1:8080``, ``[::1]:8080``, ``:8080`` (which is 127.0.0.1) or ``tcp://127.0.0.1:8080``; with
        ``unix`` also of ``unix:/run/sky.sock`` and ``unix:///run/sky.sock``.

        Raises:
            InvalidInput: another form, or a port above 65535.
        """
        kind, colon, rest = text.partition(":")
        if kind == "unix" and colon and not (rest.isascii() and rest.isdigit()):
            path = rest.removeprefix("//")
            if unix and path:
                return cls(path=path)
            raise InvalidInput(f"{quoted(text)}: {f'no path; {cls._forms(unix)}' if unix else cls._forms(unix)}")
        host, colon, port = text.removeprefix("tcp://").rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if (
            not colon
            or not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16)
            or (bare != host and not _is_ipv6(bare))
            # Without brackets it is accepted as it always was, where the rest is an address.
            or (":" in host and bare == host and not _is_ipv6(host))
            or any(letter in bare for letter in "/[] \t")
        ):
            raise InvalidInput(f"{quoted(text)} is not an address to listen at: {cls._forms(unix)}")
        return cls(host=bare or "127.0.0.1", port=int(port))

    @staticmethod
    def _forms(unix: bool) -> str:
        return f"expected {_TCP_FORMS}{', or unix:PATH' if unix else ''}"

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.path else f"tcp://{format_address(self.host, self.port)}"

    @property
    def is_local(self) -> bool:
        """Whether no other computer can connect."""
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
    """``url`` of a server without ``/v1`` and what follows it, which is added to each request."""
    url = url.rstrip("/")
    for ending in ("/chat/completions", "/completions", "/models", "/v1"):
        url = url.removesuffix(ending).rstrip("/")
    return url


def host_and_port(listen: str) -> tuple[str, int]:
    """Parts of a TCP address in any form that ``ListenAddress.parse`` reads."""
    address = ListenAddress.parse(listen)
    return address.host, address.port
