"""Allow list of prefill servers that a sidecar's requests may name, against server-side request forgery."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from skymemory.errors import InvalidInput, quoted

HEADER, LATER_HEADER = "x-prefiller-host-port", "x-llm-d-prefiller-host-port"
"""Headers for a sidecar; llm-d's later releases send the second."""
PRIVATE = ("127.0.0.0/8", "::1", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
"""Networks that the internet does not route, except link-local networks: clouds serve credentials there."""
HOST_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63})*\.?")


class Prefillers:
    """Allow list of networks (``10.0.0.0/8``), addresses and host names, with optional ports.

    A host name needs its own entry, whatever it resolves to: the sender may own it.

    Raises:
        InvalidInput: an entry is none of these.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._networks: list[tuple[IPv4Network | IPv6Network, int | None]] = []
        self._names: set[tuple[str, int | None]] = set()
        for entry in entries:
            host, port = _host_and_maybe_port(entry.strip())
            try:
                self._networks.append((ip_network(host), port))
            except ValueError as error:
                if "/" in host or not HOST_NAME.fullmatch(host.lower()) or host.replace(".", "").isdigit():
                    raise InvalidInput(
                        f"prefillers: {entry!r}: expected a network, an address or a host name, perhaps with a port, "
                        "such as 10.0.0.0/8 or prefill-0.example:8000"
                    ) from error
                self._names.add((host.lower(), port))

    def allow(self, host: str, port: int) -> bool:
        try:
            address = ip_address(host)
        except ValueError:
            return (host.lower(), None) in self._names or (host.lower(), port) in self._names
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network and of_port in (None, port) for network, of_port in self._networks)


def _host_and_maybe_port(entry: str) -> tuple[str, int | None]:
    """Split ``host``, ``host:port`` or ``[ipv6]:port``; the port may be None."""
    if entry.startswith("["):
        host, _, after_bracket = entry[1:].partition("]")
        port = after_bracket.removeprefix(":")
    elif entry.count(":") == 1:
        host, _, port = entry.partition(":")
    else:
        host, port = entry, ""
    if port and not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise InvalidInput(f"prefillers: {quoted(entry)}: expected a port from 1 to 65535 behind the colon")
    return host, int(port) if port else None


def read_host_port(word: str) -> tuple[str, int]:
    """Parse ``host:port`` or ``[::1]:port``, with an optional ``http://``.

    Raises:
        InvalidInput: anything else.
    """
    try:
        host, port = _host_and_maybe_port(word.strip().removeprefix("http://"))
    except InvalidInput:
        host, port = "", None
    if port is None or not (_is_address(host) or HOST_NAME.fullmatch(host.lower())):
        raise InvalidInput(f"{word[:100]!r} is not a prefill server: expected host:port, such as 10.0.0.7:8000")
    return host.lower(), port


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return "%" not in host  # a zone identifier is free text
