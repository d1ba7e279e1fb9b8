"""The address by which this computer talks to others, so that a client listens there and nowhere else."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

ANY = "0.0.0.0"


def source_towards(ip: str) -> str | None:
    """Our own address on the way to ``ip``, by this computer's routes; None where there is no way. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((ip, 9))  # of a datagram socket: choose the route, no more
        except OSError:
            return None
        return str(sock.getsockname()[0])


def source_address(ips: Iterable[str]) -> str | None:
    """The one address from which all of ``ips`` can be talked to; None where none of them can be reached.

    Loopback only where all are on this computer: from its other addresses it reaches itself, too. ``ANY`` where the
    routes leave by different addresses, and one socket has to answer to several.
    """
    found = {source for ip in ips if (source := source_towards(ip)) is not None}
    outward = sorted(source for source in found if not ipaddress.IPv4Address(source).is_loopback)
    if len(outward) > 1:
        return ANY
    return outward[0] if outward else next(iter(sorted(found)), None)
