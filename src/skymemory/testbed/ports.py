"""Are the UDP ports of a plan free? Asked before any process is started, so that the answer can name one."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable

from skymemory.errors import ConstellationError
from skymemory.testbed.plan import DEFAULT_BASE_PORT, ConstellationPlan, HostShare


class PortTaken(ConstellationError):
    """A port of the plan is somebody else's."""


_LAST_BASE_PORT = 32_768
"""From here on kernels hand out ports to clients, which come and go."""


def _bind_error(address: tuple[str, int]) -> int:
    """0 if ``address`` can be bound, else the error number."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno or errno.EINVAL
    return 0


def check_ports(plan: ConstellationPlan) -> None:
    """Raise ``ConstellationError`` naming the first satellite of the plan whose port cannot be bound here."""
    for host in plan.hosts:
        check_host_ports(plan, host)


def check_host_ports(plan: ConstellationPlan, host: HostShare, listen: str | None = None) -> None:
    """The same for one host, which may ``listen`` on another address than the plan's."""
    for satellite, (planned_ip, port) in plan.addresses_of(host):
        ip = listen or planned_ip
        number = _bind_error((ip, port))
        if number == 0:
            continue
        where = f"UDP port {port} on {ip} ({host.name}, plane {satellite.plane}, slot {satellite.slot})"
        if number == errno.EADDRINUSE:
            raise PortTaken(
                f"{where} is taken by another process: stop it, or choose other ports "
                "with --base-port PORT or --base-port auto"
            )
        if number == errno.EADDRNOTAVAIL:
            raise ConstellationError(
                f"{ip} of {host.name} is not an address of this computer: run that host's share "
                "there with `skymemory satellite`"
            )
        raise ConstellationError(f"{where} cannot be used: {errno.errorcode.get(number, number)}")


def _all_free(ip: str, ports: Iterable[int]) -> bool:
    return all(_bind_error((ip, port)) == 0 for port in ports)


def free_base_port(count: int, ip: str = "127.0.0.1") -> int:
    """A base port with ``count`` free UDP ports in a row, between the default one and those of clients.

    Where the search begins depends on the process, so that two that search at once find different ones.
    """
    candidates = range(DEFAULT_BASE_PORT, _LAST_BASE_PORT - count, max(count, 50))
    first = os.getpid() % max(1, len(candidates))
    order: list[int] = [*candidates[first:], *candidates[:first]]
    for base_port in order:
        if _all_free(ip, range(base_port, base_port + count)):
            return base_port
    raise ConstellationError(
        f"no {count} free UDP ports in a row on {ip} between {DEFAULT_BASE_PORT} and {_LAST_BASE_PORT}: "
        "choose some with --base-port PORT"
    )
