"""Host process: serves its satellites until a signal, or until its supervisor's socket closes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

from skymemory.errors import ConstellationError, InvalidInput
from skymemory.testbed.connect import host_spec
from skymemory.testbed.control import read_outages
from skymemory.testbed.flight import become_daemon, daemon_path, share_text
from skymemory.testbed.key_file import LOOK_S, KeyFollower
from skymemory.testbed.plan import ConstellationPlan, HostShare, check_exposure, follower_of
from skymemory.testbed.run_directory import Kind, RunDirectory, check_host_ports
from skymemory.testbed.supervisor import READY, STAY
from skymemory.transport.udp_host import UdpHost, serve_host

_AGAIN_S = 0.25


class _Line:
    """Our end of the supervisor's socket; sets ``stop`` if it closes before ``STAY``."""

    def __init__(self, fd: int, stop: asyncio.Event) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._stop = stop
        asyncio.get_running_loop().add_reader(self._socket, self._received)

    def _received(self) -> None:
        if self._socket.recv(len(STAY)) != STAY:
            self._stop.set()
        self.close()

    def ready(self) -> None:
        with suppress(BrokenPipeError):
            self._socket.send(READY)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop loop if installed: faster for single packets."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _follow(keys: KeyFollower) -> None:
    while True:
        await asyncio.sleep(LOOK_S / 4)
        keys.refresh()


async def _serve(
    plan: ConstellationPlan,
    host: HostShare,
    listen: str | None,
    fd: int | None,
    say: Callable[[str], None],
    directory: RunDirectory | None,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    line = _Line(fd, stop) if fd is not None else None
    keys = follower_of(plan, say)
    following = loop.create_task(_follow(keys)) if keys is not None else None
    authority = keys.authority if keys is not None else None

    def ready(shortfall: str) -> None:
        if shortfall:
            say(f"{host.name}: {shortfall}; bursts may be lost and retransmitted")
        say(f"{host.name}: {len(host.planes) * plan.slots_per_plane} satellites listen")
        if line is not None:
            line.ready()

    def follow_outages(served: UdpHost) -> None:
        """Apply disabled satellites, now and at each SIGHUP; retry taken ports, which a search for free ports briefly
        binds.
        """
        # ``again`` is the pending retry; a signal replaces it, so that at most one is pending.
        trouble, again = "", loop.call_soon(lambda: None)

        def apply_outages() -> None:
            nonlocal trouble, again
            again.cancel()
            before, trouble = trouble, ""
            try:
                served.set_dead(read_outages(directory) if directory is not None else frozenset())
            except (OSError, InvalidInput) as error:
                trouble = str(error)
                if trouble != before:
                    say(f"{host.name}: {error}; trying again")
                again = loop.call_later(_AGAIN_S, apply_outages)

        loop.add_signal_handler(signal.SIGHUP, apply_outages)
        apply_outages()

    try:
        await serve_host(host_spec(plan, host, listen, authority), stop, ready, follow_outages)
    finally:
        if following is not None:
            following.cancel()
        if line is not None:
            line.close()


def run_host(
    plan: ConstellationPlan,
    host: HostShare,
    *,
    listen: str | None = None,
    say: Callable[[str], None],
    directory: RunDirectory | None = None,
    supervisor_fd: int | None = None,
    insecure: bool = False,
    kind: Kind = "python",
) -> None:
    """Serve ``host`` until stopped; with ``kind`` ``c`` this process becomes the daemon."""
    # Recorded before the sockets are bound: `down` must find this process even if it hangs there.
    check_exposure(plan, host, listen, insecure)
    share = ""
    if kind == "c":
        daemon_path()  # checked before anything is recorded
        share = share_text(plan, host, listen, directory.pid_path(host.name) if directory is not None else None)
    if directory is not None:
        earlier = directory.read_record(host.name)
        if earlier is not None and earlier.alive and earlier.pid != os.getpid():
            raise ConstellationError(f"{host.name} already runs as process {earlier.pid}, in {directory.path}")
        directory.write_record(host.name, os.getpid(), kind)
    if kind == "c":
        become_daemon(share, host, directory.path if directory is not None else None, supervisor_fd)
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(_serve(plan, host, listen, supervisor_fd, say, directory))
    except OSError as error:
        check_host_ports(plan, host, listen)
        raise ConstellationError(f"{host.name} cannot serve its satellites: {error.strerror or error}") from error
    # After a crash the record stays, so that `status` can distinguish a crash from a stop.
    if directory is not None:
        directory.forget(host.name)
