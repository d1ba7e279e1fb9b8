"""A ground host over one UDP socket: drives the client's state machine in the caller's own thread.

There is no thread and no event loop while all satellites answer: a read is a function call that returns when its bytes
are there. Beams of different satellites share the socket; satellites delay what they send by the length of the beam.
While satellites are silent, a thread serves the machine's timers between calls (``ProbeThread``).
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
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
from skymemory.protocol.wire import SegmentBatch
from skymemory.transport.udp_socket import BatchSocket, UnixClock

Endpoint = tuple[str, int]
_SPIN_US = 40
"""How long to poll an empty socket before sleeping: the next datagrams of an answer come sooner than a thread wakes."""
_MAX_RECEIVES = 64
"""Receive calls before the machine processes what came, unless it has something to send: then one."""
DRAIN_BYTES_PER_S = 400e6
"""What this side can certainly receive per second: beside what its receive buffer holds, this much may be in flight on
long beams. A computer that cannot keep up loses datagrams and halves its window.
"""


class UdpClient:
    """Drives a ``ClientMachine`` over UDP. Thread-safe; the operations of one call run together.

    The config's ``window_bytes`` is replaced by what the socket's receive buffer and the round trip allow.
    """

    def __init__(
        self,
        config: ClientConfig,
        sky: SkyMap,
        clock: MoveClock,
        satellites: Mapping[SatelliteId, Endpoint],
        bind_ip: str = "127.0.0.1",
        refresh: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """``refresh`` may replace the keys of the config's authority. It is called before operations run, and returns
        before what time (``time.monotonic``) it need not be called again.
        """
        self._refresh = refresh
        self._refresh_s = -math.inf
        self._sock = BatchSocket(bind_ip, 0)
        window_bytes = self._sock.receive_buffer_bytes // 2 + int(config.expected_rtt_s * DRAIN_BYTES_PER_S)
        self.machine = ClientMachine(replace(config, window_bytes=window_bytes), sky, clock)
        self._satellites = dict(satellites)
        self._clock = UnixClock()
        self._backlog: deque[tuple[Endpoint, SegmentBatch]] = deque()
        self._poll = select.poll()
        self._poll.register(self._sock.fileno(), select.POLLIN)
        self._lock = OwnLock("the connection to the constellation", self._close_in_child)
        self._unclaimed: dict[int, Finished] = {}
        """Operations that ended while a call waited for others."""
        self._probe_thread: ProbeThread | None = None
        self._closed = False

    def now_s(self) -> float:
        return self._clock.now_s()

    @property
    def lock(self) -> OwnLock:
        """Held while operations are begun and run. Raises WrongProcess in a forked child: two processes on one socket
        would take each other's answers.
        """
        return self._lock

    @property
    def address(self) -> Endpoint:
        """Where it receives."""
        return self._sock.address

    def run(self, numbers: Iterable[int]) -> dict[int, Finished]:
        """Send and receive until all these operations have ended; returns the end of each, by its number.

        An interruption (Ctrl-C) cancels them: nothing is received into their buffers any more.
        """
        return self._run(set(numbers))

    def run_any(self, numbers: Iterable[int], until_s: float) -> dict[int, Finished]:
        """Send and receive until one of these operations has ended, at most until ``until_s`` (of ``now_s``); returns
        those that have. The caller runs the others again, or cancels them; an interruption cancels them all.
        """
        return self._run(set(numbers), until_s, any_of_them=True)

    def _run(self, waiting: set[int], until_s: float = math.inf, *, any_of_them: bool = False) -> dict[int, Finished]:
        """Until all have ended; with ``any_of_them`` until one has, or that time."""
        self._clock.follow_wall()
        if time.monotonic() >= self._refresh_s:
            self._refresh_s = self._refresh()
        machine, finished = self.machine, dict[int, Finished]()
        with self._lock:
            try:
                for number in waiting & self._unclaimed.keys():
                    finished[number] = self._unclaimed.pop(number)
                waiting -= finished.keys()
                if machine.probing and not any_of_them:  # answers to earlier probes
                    self._process(*self._sock.receive_awaited(machine.awaited, _MAX_RECEIVES, 0))
                while True:
                    if machine.wants_to_send or self._backlog:
                        self._send()
                    while (event := machine.next_event()) is not None:
                        (finished if event.number in waiting else self._unclaimed)[event.number] = event
                        waiting.discard(event.number)
                    if not waiting or (any_of_them and (finished or self.now_s() >= until_s)):
                        return finished
                    self._receive_or_wait(until_s)
            except BaseException:
                for number in waiting:
                    machine.cancel(number)
                    self._unclaimed.pop(number, None)
                raise
            finally:
                if machine.probing and self._probe_thread is None and not any_of_them and not self._closed:
                    self._probe_thread = ProbeThread(self._serve_timers, self._sock.fileno())

    def _serve_timers(self) -> float | None:
        """A step of the probe thread; returns the seconds until the next, None when all satellites answer again."""
        with self._lock:
            if self._closed:
                return None
            if time.monotonic() >= self._refresh_s:
                with suppress(SkyMemoryError):  # the next call raises it
                    self._refresh_s = self._refresh()
            self._process(*self._sock.receive_awaited(self.machine.awaited, _MAX_RECEIVES, 0))
            if self.machine.wants_to_send or self._backlog:
                self._send()
            due_s = self.machine.next_timer_s()
            if not self.machine.probing or due_s is None:
                self._probe_thread = None
                return None
            return max(due_s - self.now_s(), 0.001)

    def close(self) -> None:
        if self._lock.owner.elsewhere:
            return
        with self._lock:
            self._closed = True
            probe_thread, self._probe_thread = self._probe_thread, None
        if probe_thread is not None:
            probe_thread.stop()
        self._sock.close()

    def _close_in_child(self) -> None:
        """In a forked child: the probe thread and its socket pair are the parent's."""
        self._probe_thread, self._closed = None, True
        self._sock.close()

    def _send(self) -> None:
        for batches in self.machine.bursts_to_send(self.now_s()):
            # Single packets (GETs) go out in one call for all satellites; a burst of SETs has a call of its own.
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

    def _receive_or_wait(self, until_s: float) -> None:
        """Process what has come; if nothing has, sleep until something comes, a timer is due, or until ``until_s``."""
        machine = self.machine
        # With something to send, each answer may open a window: process it at once.
        calls = 1 if machine.wants_to_send or self._backlog else _MAX_RECEIVES
        tallies, runs = self._sock.receive_awaited(machine.awaited, calls, _SPIN_US)
        if not tallies and not runs:
            self._sleep(until_s)
            tallies, runs = self._sock.receive_awaited(machine.awaited, calls, 0)
        self._process(tallies, runs)

    def _process(self, tallies: Sequence[Tally], runs: list[Run]) -> None:
        """Give the machine what has come, and serve its timer."""
        machine, now_s = self.machine, self.now_s()
        if tallies:
            machine.receive_placed(tallies, now_s)
        if runs:
            machine.receive_runs(runs, now_s)
        due_s = machine.next_timer_s()
        if due_s is not None and due_s <= now_s:
            machine.handle_timer(now_s)

    def _sleep(self, until_s: float) -> None:
        """Until something comes, can be sent, or is due."""
        due_s, now_s = self.machine.next_timer_s(), self.now_s()
        wait_s = max(0.0, due_s - now_s) if due_s is not None else 1.0
        wait_s = max(0.0, min(wait_s, until_s - now_s))
        if self._backlog:
            self._poll.modify(self._sock.fileno(), select.POLLIN | select.POLLOUT)
        self._poll.poll(wait_s * 1e3)
        if self._backlog:
            self._poll.modify(self._sock.fileno(), select.POLLIN)


class ProbeThread:
    """Serves a client's timers between calls while satellites are silent; ends when all answer again.

    Calls ``step`` when the descriptor ``readable`` is, or after the seconds that the last step returned; None ends it.
    """

    def __init__(self, step: Callable[[], float | None], readable: int) -> None:
        self._step = step
        self._stopper, self._stopped = socket.socketpair()
        self._poll = select.poll()
        self._poll.register(readable, select.POLLIN)
        self._poll.register(self._stopped.fileno(), select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="skymemory-probes", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it, and join it."""
        with suppress(OSError):  # it has ended
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
