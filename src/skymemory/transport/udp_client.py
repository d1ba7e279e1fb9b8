"""A ground host over one UDP socket: the client machine, driven by the caller's own thread.

No thread and no event loop of its own while all is well: a read is a function call that returns when the bytes are
there. Beams of different satellites share the socket; the satellites hold what they send for the delay of the beam.
While somebody is silent, a thread asks him now and then (``healer``).
"""

from __future__ import annotations

import math
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import SkyMemoryError
from skymemory.forks import OwnLock
from skymemory.native import Run, Tally
from skymemory.protocol.client.machine import ClientConfig, ClientMachine, Finished
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.segments import SegmentBatch
from skymemory.transport.udp_socket import BatchSocket
from skymemory.transport.unix_clock import UnixClock

Endpoint = tuple[str, int]
_PATIENCE_US = 40
"""How long to look at an empty socket before sleeping: an answer that streams in comes sooner than a sleeper wakes."""
_CALLS = 64
"""Receives with something there before the machine hears of it, unless it has something to send: then at the first."""

DRAIN_BYTES_PER_S = 400e6
"""What this side surely takes in a second: beside what its receive buffer holds, so much may be under way on long
beams. A machine that cannot keep up loses datagrams and halves its window.
"""


class UdpClient:
    """Drives a ``ClientMachine`` over UDP. Safe to share between threads; operations of one call run together.

    The config's ``window_bytes`` is replaced by what the socket's real receive buffer and the round trip allow.
    """

    def __init__(
        self,
        config: ClientConfig,
        sky: SkyMap,
        clock: MoveClock,
        satellites: Mapping[SatelliteId, Endpoint],
        bind_ip: str = "127.0.0.1",
        refresh: Callable[[], None] | None = None,
    ) -> None:
        """``refresh`` is called before operations are run: it may replace the keys of the config's authority."""
        self._refresh = refresh
        self._sock = BatchSocket(bind_ip, 0)
        window_bytes = self._sock.receive_buffer_bytes // 2 + int(config.expected_rtt_s * DRAIN_BYTES_PER_S)
        self.machine = ClientMachine(replace(config, window_bytes=window_bytes), sky, clock)
        self._satellites = dict(satellites)
        self._clock = UnixClock()
        self._backlog: deque[tuple[Endpoint, SegmentBatch]] = deque()
        self._poll = select.poll()
        self._poll.register(self._sock.fileno(), select.POLLIN)
        self._lock = OwnLock("the connection to the constellation", self._let_go)
        self._unclaimed: dict[int, Finished] = {}
        self._healer: Healer | None = None
        self._closed = False

    def now_s(self) -> float:
        return self._clock.now_s()

    @property
    def lock(self) -> OwnLock:
        """To be held while operations are begun and run. Raises WrongProcess in a forked child: two processes on one
        socket would take each other's answers.
        """
        return self._lock

    @property
    def address(self) -> Endpoint:
        """Where it listens."""
        return self._sock.address

    def run(self, numbers: Iterable[int]) -> dict[int, Finished]:
        """Carry datagrams until all these operations have ended; how each did, by its number.

        Where it is interrupted (Ctrl-C), they are given up: nothing is received into their buffers any more.
        """
        self._clock.follow_wall()
        if self._refresh is not None:
            self._refresh()
        waiting, finished = set(numbers), dict[int, Finished]()
        machine = self.machine
        with self._lock:
            try:
                for number in waiting & self._unclaimed.keys():
                    finished[number] = self._unclaimed.pop(number)
                waiting -= finished.keys()
                if machine.ailing:
                    self._take(*self._sock.receive_awaited(machine.awaited, _CALLS, 0))  # answers to earlier probes
                while True:
                    self._turn(waiting, finished)
                    if not waiting:
                        return finished
                    self._receive_or_wait()
            finally:
                self._give_up(waiting)
                if machine.ailing and self._healer is None and not self._closed:
                    self._healer = Healer(self._heal, self._sock.fileno())

    def _let_go(self) -> None:
        """In a forked child: the healer and its line are the parent's."""
        self._healer, self._closed = None, True
        self._sock.close()

    def run_any(self, numbers: Iterable[int], until_s: float) -> dict[int, Finished]:
        """Carry datagrams until one of these operations has ended, at most until ``until_s`` (of ``now_s``): those that
        have. The others go on in a later call, or are to be cancelled; an interruption cancels them all.
        """
        self._clock.follow_wall()
        if self._refresh is not None:
            self._refresh()
        waiting, finished = set(numbers), dict[int, Finished]()
        with self._lock:
            try:
                for number in waiting & self._unclaimed.keys():
                    finished[number] = self._unclaimed.pop(number)
                waiting -= finished.keys()
                while True:
                    self._turn(waiting, finished)
                    if finished or self.now_s() >= until_s:
                        return finished
                    self._receive_or_wait(until_s)
            except BaseException:
                self._give_up(waiting)
                raise

    def _turn(self, waiting: set[int], finished: dict[int, Finished]) -> None:
        """Send what there is to send, and sort what has ended: what is not ``waiting`` is kept for a later call."""
        if self.machine.wants_to_send or self._backlog:
            self._send()
        while (event := self.machine.next_event()) is not None:
            (finished if event.number in waiting else self._unclaimed)[event.number] = event
            waiting.discard(event.number)

    def _give_up(self, waiting: Iterable[int]) -> None:
        for number in waiting:
            self.machine.cancel(number)
            self._unclaimed.pop(number, None)

    def close(self) -> None:
        if self._lock.owner.elsewhere:
            return
        with self._lock:
            self._closed = True
            healer, self._healer = self._healer, None
        if healer is not None:
            healer.stop()
        self._sock.close()

    def _heal(self) -> float | None:
        """Whatever is due while nobody calls; how long it may rest then, None if all is well again."""
        with self._lock:
            if self._closed:
                return None
            if self._refresh is not None:
                with suppress(SkyMemoryError):  # whoever calls next is told
                    self._refresh()
            self._take(*self._sock.receive_awaited(self.machine.awaited, _CALLS, 0))
            if self.machine.wants_to_send or self._backlog:
                self._send()
            due_s = self.machine.next_timer_s()
            if not self.machine.ailing or due_s is None:
                self._healer = None
                return None
            return max(due_s - self.now_s(), 0.001)

    def _send(self) -> None:
        for batches in self.machine.each_to_send(self.now_s()):
            first = 0
            if len(batches) > 1 and not self._backlog and all(batch.is_one_packet for batch, _ in batches):
                first = self._sock.send_each([(one.headers, *self._satellites[to]) for one, to in batches])
            for batch, satellite in batches[first:]:
                endpoint = self._satellites[satellite]
                rest = batch if self._backlog else self._sock.send(batch, endpoint)
                if rest is not None:
                    self._backlog.append((endpoint, rest))
        while self._backlog:
            endpoint, batch = self._backlog.popleft()
            rest = self._sock.send(batch, endpoint)
            if rest is not None:
                self._backlog.appendleft((endpoint, rest))
                return

    def _receive_or_wait(self, until_s: float = math.inf) -> None:
        """Take what is there; with nothing there, sleep until something comes, a timer is due, or until then."""
        machine = self.machine
        calls = 1 if machine.wants_to_send or self._backlog else _CALLS
        tallies, runs = self._sock.receive_awaited(machine.awaited, calls, _PATIENCE_US)
        if not tallies and not runs:
            self._sleep(until_s)
            tallies, runs = self._sock.receive_awaited(machine.awaited, calls, 0)
        self._take(tallies, runs)

    def _take(self, tallies: Sequence[Tally], runs: list[Run]) -> None:
        """What has come, and whatever is due."""
        machine, now_s = self.machine, self.now_s()
        if tallies:
            machine.placed(tallies, now_s)
        if runs:
            machine.receive_runs(runs, now_s)
        due_s = machine.next_timer_s()
        if due_s is not None and due_s <= now_s:
            machine.handle_timer(now_s)

    def _sleep(self, until_s: float) -> None:
        """Until something comes, may be sent, or is due."""
        due_s, now_s = self.machine.next_timer_s(), self.now_s()
        wait_s = max(0.0, due_s - now_s) if due_s is not None else 1.0
        wait_s = max(0.0, min(wait_s, until_s - now_s))
        if self._backlog:
            self._poll.modify(self._sock.fileno(), select.POLLIN | select.POLLOUT)
        self._poll.poll(wait_s * 1e3)
        if self._backlog:
            self._poll.modify(self._sock.fileno(), select.POLLIN)


# A thread that serves a client's timers while somebody is silent, so that it heals with nobody calling.
#
# There is none while all is well: it is started by the operation that met with silence, and ends with it.


class Healer:
    """Calls ``step`` when ``readable`` (a socket's number) has something or the time is up that the last step named,
    in seconds; ``step`` answers None to end it.
    """

    def __init__(self, step: Callable[[], float | None], readable: int) -> None:
        self._step = step
        self._stopper, self._stopped = socket.socketpair()
        self._poll = select.poll()
        self._poll.register(readable, select.POLLIN)
        self._poll.register(self._stopped.fileno(), select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="skymemory-healer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, and wait until it has ended."""
        with suppress(OSError):  # it has ended already
            self._stopper.send(b".")
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        with self._stopper, self._stopped:
            wait_s = self._step()
            while wait_s is not None:
                ready = self._poll.poll(wait_s * 1e3)
                if any(fd == self._stopped.fileno() for fd, _ in ready):
                    return
                wait_s = self._step()
