"""One satellite of a host: its machine, its socket, and what the kernel has not taken yet."""

from __future__ import annotations

import asyncio
import math
from collections import deque

from skymemory.protocol.satellite import SatelliteMachine
from skymemory.protocol.segments import SegmentBatch
from skymemory.transport.host_spec import Endpoint
from skymemory.transport.udp_socket import BatchSocket

_BACKLOGS = 4
"""Beyond its ``max_backlog_bytes`` a satellite answers no GET; at so many times as much it passes nothing on either."""


class UdpSatellite:
    """A machine and its socket; nothing leaves by it once it is closed."""

    def __init__(self, machine: SatelliteMachine, sock: BatchSocket, loop: asyncio.AbstractEventLoop) -> None:
        self.machine = machine
        self.sock = sock
        self.timer: asyncio.TimerHandle | None = None
        self.timer_s = self.alarm_s = 0.0
        """What the machine asked for, and when that was to go off."""
        self.full_since_s = math.inf
        """Since when there has always been more in its socket than was taken at once."""
        self.waits = False
        """Whether it waits for a slice of background work."""
        self.closed = False
        self._loop = loop
        self._backlog: deque[tuple[Endpoint, SegmentBatch]] = deque()

    def transmit(self, batch: SegmentBatch, endpoint: Endpoint) -> None:
        """Send, after what waits already."""
        if self.closed:
            return
        rest = batch if self._backlog else self.sock.send(batch, endpoint)
        if rest is not None:
            self.wait_to_send(rest, endpoint)

    def wait_to_send(self, rest: SegmentBatch, endpoint: Endpoint) -> None:
        """What the kernel did not take now. Beyond a bound it is lost, as on any full link, and asked for again."""
        if self.machine.backlog_bytes > _BACKLOGS * self.machine.config.max_backlog_bytes:
            self.machine.counters.add("packets_dropped", rest.count)
            return
        if not self._backlog:
            self._loop.add_writer(self.sock.fileno(), self._writable)
        self._backlog.append((endpoint, rest))
        self.machine.backlog_bytes += rest.total_bytes

    def _writable(self) -> None:
        while self._backlog:
            endpoint, batch = self._backlog.popleft()
            rest = self.sock.send(batch, endpoint)
            self.machine.backlog_bytes -= batch.total_bytes
            if rest is not None:
                self._backlog.appendleft((endpoint, rest))
                self.machine.backlog_bytes += rest.total_bytes
                return
        self._loop.remove_writer(self.sock.fileno())

    def close(self) -> None:
        """Neither hears nor speaks from now on."""
        self.closed = True
        self._loop.remove_reader(self.sock.fileno())
        self._loop.remove_writer(self.sock.fileno())
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self._backlog.clear()
        self.sock.close()
