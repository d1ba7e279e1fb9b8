"""Are the UDP ports of a plan free? Asked before any process is started, so that the answer can name one."""

from __future__ import annotations

import errno
import os
import socket
from itertools import pairwise

from skymemory.errors import ConstellationError
from skymemory.testbed.plan import DEFAULT_BASE_PORT, MAX_PORT, ConstellationPlan, HostShare, Ports


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


def free_ports(count: int, ip: str = "127.0.0.1", attempt: int = 0) -> Ports:
    """``count`` free UDP ports: in a row where there are so many between the default one and those of clients, else all
    that are free from there on, whatever lies between.

    Where the search begins depends on the process and the ``attempt``, so that two that search at once find others.
    """
    starts = range(DEFAULT_BASE_PORT, _LAST_BASE_PORT - count, max(count, 50))
    first = (os.getpid() + attempt) % max(1, len(starts))
    for base_port in (*starts[first:], *starts[:first]):
        if all(_bind_error((ip, port)) == 0 for port in range(base_port, base_port + count)):
            return Ports(base_port)
    # The higher the port, the likelier a client gets it from the kernel while we start.
    for some in (range(DEFAULT_BASE_PORT, _LAST_BASE_PORT), range(1024, _LAST_BASE_PORT), range(1024, MAX_PORT + 1)):
        free = [port for port in some if _bind_error((ip, port)) == 0][:count]
        if len(free) == count:
            gaps = ((low + 1, high - 1) for low, high in pairwise(free) if high > low + 1)
            return Ports(free[0], tuple(gaps))
    raise ConstellationError(
        f"no {count} free UDP ports on {ip}, there are {len(free)}: stop what uses them, or start fewer satellites"
    )
