"""Ground host over a UDP socket: drives the client's state machine in the callers' own threads.

A waiting thread serves the socket for all; while satellites are silent, a ``ProbeThread`` serves the timers between
calls.
"""

from __future__ import annotations

import math
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import GroundHost
from skymemory.errors import SkyMemoryError
from skymemory.forks import OwnLock
from skymemory.native import Landing, Rows, Run, Tally
from skymemory.protocol.client.machine import ClientConfig, ClientMachine, Finished
from skymemory.protocol.client.transfer import Striping, ValueInfo
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.wire import Buffer, SegmentBatch
from skymemory.reasons import Miss
from skymemory.transport.udp_socket import PLACE, PLACE_MARK, BatchSocket
from skymemory.transport.unix_clock import UnixClock

Endpoint = tuple[str, int]
_SPIN_US = 40
_PLAIN_SPIN_US = 300
_MAX_RECEIVES = 64
_ANNOUNCE_EVERY_S = 1.0
DRAIN_BYTES_PER_S = 400e6


class FairLock:
    """Lock that threads get in turn: with ``OwnLock`` alone, a thread that retakes it would keep all others out."""

    __slots__ = ("_gate", "_lock")

    def __init__(self, lock: OwnLock) -> None:
        self._lock = lock
        self._gate = threading.Lock()

    def __enter__(self) -> None:
        lock = self._lock
        if lock.owner.elsewhere or lock._is_owned():
            lock.__enter__()
            return
        with self._gate:  # the thread that holds it is next
            lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__(None, None, None)


class _WaitingThread:
    """Thread that waits for operations: for all, or for ``any_of_them`` until ``until_s``."""

    __slots__ = ("_wakes", "any_of_them", "finished", "until_s", "waiting")

    def __init__(self, numbers: Iterable[int], until_s: float = math.inf, *, any_of_them: bool = False) -> None:
        self.waiting = set(numbers)
        self.finished: dict[int, Finished] = {}
        self.until_s = until_s
        self.any_of_them = any_of_them
        self._wakes = threading.Lock()
        self._wakes.acquire()

    def take(self, event: Finished) -> bool:
        self.finished[event.number] = event
        self.waiting.discard(event.number)
        return self.any_of_them or not self.waiting

    def is_over(self, now_s: Callable[[], float]) -> bool:
        return not self.waiting or (self.any_of_them and (bool(self.finished) or now_s() >= self.until_s))

    def sleep(self, seconds: float) -> None:
        self._wakes.acquire(timeout=max(0.0, seconds) if seconds < threading.TIMEOUT_MAX else -1)

    def wake(self) -> None:
        if self._wakes.locked():
            self._wakes.release()


class UdpClient:
    """Driver of a ``ClientMachine`` over UDP, thread-safe. It replaces the config's ``window_bytes``."""

    def __init__(
        self,
        config: ClientConfig,
        sky: SkyMap,
        clock: MoveClock,
        satellites: Mapping[SatelliteId, Endpoint],
        bind_ip: str = "127.0.0.1",
        refresh: Callable[[], float] = lambda: math.inf,
        place: GroundHost | None = None,
        hosts: Iterable[Endpoint] = (),
        unix_at_boot_s: float | None = None,
    ) -> None:
        """Open the socket.

        Args:
            refresh: may replace the authority's keys; returns when (``time.monotonic``) to call it again.
            place: location of this host, if not the plan's; announced to ``hosts``.
            unix_at_boot_s: see ``UnixClock.count_from``.
        """
        self._place = b"" if place is None else PLACE.pack(PLACE_MARK, place.latitude_deg, place.longitude_deg)
        self._hosts = tuple(hosts)
        self._announce_s = -math.inf
        self._refresh = refresh
        self._refresh_s = -math.inf
        self._sock = BatchSocket(bind_ip, 0)
        window_bytes = self._sock.receive_buffer_bytes // 2 + int(config.expected_rtt_s * DRAIN_BYTES_PER_S)
        first_request_id = 1 + secrets.randbelow(
            0xFFFFFFFF
        )  # no stranger can guess it, or answer with recorded packets
        self.machine = ClientMachine(replace(config, window_bytes=window_bytes), sky, clock, first_request_id)
        self._satellites = dict(satellites)
        self._clock = UnixClock()
        self._clock.count_from(unix_at_boot_s)
        self._authority = config.authority
        self._backlog: deque[tuple[Endpoint, SegmentBatch]] = deque()
        self._poll = select.poll()
        self._poll.register(self._sock.fileno(), select.POLLIN)
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._poll.register(self._woken.fileno(), select.POLLIN)
        self._own = OwnLock("the connection to the constellation", self._close_in_child)
        self._lock = FairLock(self._own)
        self._calls: dict[_WaitingThread, None] = {}
        self._waiting: dict[int, _WaitingThread] = {}
        self._unclaimed: dict[int, Finished] = {}
        self._leader: _WaitingThread | None = None
        self._leader_sleeps_until_s = -math.inf
        self._probe_thread: ProbeThread | None = None
        self._closed = False

    def now_s(self) -> float:
        return self._clock.now_s()

    @property
    def lock(self) -> FairLock:
        """Return the lock, held only while operations are begun; in a forked child it raises WrongProcess."""
        return self._lock

    @property
    def address(self) -> Endpoint:
        return self._sock.address

    def run(self, numbers: Iterable[int]) -> dict[int, Finished]:
        """Send and receive until these operations have ended. An interruption (Ctrl-C) cancels them."""
        return self._run(_WaitingThread(numbers))

    def run_any(self, numbers: Iterable[int], until_s: float) -> dict[int, Finished]:
        """Send and receive until any operation has ended, or ``until_s`` (of ``now_s``)."""
        return self._run(_WaitingThread(numbers, until_s, any_of_them=True))

    def read(self, info: ValueInfo, out: memoryview | Rows, replicas: int = 1) -> Finished:
        """Read a value into ``out``; a small, near value takes the fast path."""
        machine = self.machine
        with self._lock:
            self._look_at_wall_clock()
            now_s = self.now_s()
            plain_read = machine.plain_get(info, out, now_s) if replicas == 1 and self._is_idle() else None
            if plain_read is None:
                number = machine.get(info, out, now_s, replicas)
            else:
                self._sock.send_each([(plain_read.packet, *self._satellites[plain_read.satellite])])
                tallies, runs = self._receive_plain({plain_read.request_id: plain_read.landing})
                now_s = self.now_s()
                outcome = machine.end_plain_get(plain_read, tallies, now_s)
                if runs:
                    machine.receive_runs(runs, now_s)
                if isinstance(outcome, Finished):
                    return outcome
                number = outcome
        return self.run([number])[number]

    def write(
        self,
        key: bytes,
        value: Buffer,
        striping: Striping,
        meanwhile: Callable[[ValueInfo], object] = lambda info: None,
    ) -> Finished:
        """Write a value; ``meanwhile`` runs while a small value's packets are under way."""
        machine = self.machine
        with self._lock:
            self._look_at_wall_clock()
            how = key, value, striping, self.now_s()
            plain_write = machine.plain_put(*how) if striping.replicas == 1 and self._is_idle() else None
            if plain_write is None:
                number, info = machine.put(*how)
                meanwhile(info)
            else:
                endpoint = self._satellites[plain_write.satellite]
                unsent = self._sock.send(plain_write.batch, endpoint)
                if unsent is not None:
                    self._backlog.append((endpoint, unsent))
                meanwhile(plain_write.transfer.info)
                outcome = None
                while outcome is None:
                    _, runs = self._receive_plain({})
                    outcome = machine.end_plain_put(plain_write, runs, self.now_s())
                if isinstance(outcome, Finished):
                    return outcome
                number = outcome
        return self.run([number])[number]

    def _is_idle(self) -> bool:
        return not self._backlog and not self._closed

    def _receive_plain(self, awaited: dict[int, Landing]) -> tuple[list[Tally], list[Run]]:
        return self._sock.receive_awaited(awaited, _MAX_RECEIVES, _PLAIN_SPIN_US)

    def _look_at_wall_clock(self) -> None:
        """Read the wall clock, with the lock held; follow it only between operations: deadlines would pass."""
        if self._authority is not None:
            self._authority.wall_shift_s = self._clock.wall_shift_s()
        elif self.machine.idle:
            self._clock.follow_wall()

    # Several threads may wait for operations at the same time. One of them, the leader, sends, receives and serves the
    # timers for all. A call whose operations have ended returns; a leader then hands over to another thread. So a call
    # that waits for a dead satellite blocks no other call, and a single caller needs no second thread. No thread sleeps
    # with the lock held.

    def _run(self, call: _WaitingThread) -> dict[int, Finished]:
        """Wait for a call's operations, as leader or asleep. If interrupted, cancel them."""
        try:
            with self._lock:
                self._look_at_wall_clock()
                self._begin(call)
            while not call.is_over(self.now_s):
                if self._leader is call:
                    self._lead(call)
                else:
                    call.sleep(call.until_s - self.now_s())
                    with self._lock:
                        self._leader = self._leader or call
            return call.finished
        except BaseException:
            with self._lock:
                for number in call.waiting:
                    self.machine.cancel(number)
                    self._unclaimed.pop(number, None)
            raise
        finally:
            with self._lock:
                self._end(call)

    def _begin(self, call: _WaitingThread) -> None:
        """Register a call and send what it needs; wake the leader if a timer is earlier now."""
        if time.monotonic() >= self._refresh_s:
            self._refresh_s = self._refresh()
        if self._place and time.monotonic() >= self._announce_s:
            self._announce_s = time.monotonic() + _ANNOUNCE_EVERY_S
            self._sock.send_each([(self._place, *endpoint) for endpoint in self._hosts])
        for number in call.waiting & self._unclaimed.keys():
            call.take(self._unclaimed.pop(number))
        if call.waiting:
            self._calls[call] = None
            self._waiting.update(dict.fromkeys(call.waiting, call))
        if self.machine.probing and not call.any_of_them:  # answers to earlier probes
            self._process(*self._sock.receive_awaited(self.machine.awaited, _MAX_RECEIVES, 0))
        self._send_and_deliver()
        due_s = self.machine.next_timer_s()
        if self._leader is None:
            self._leader = call
        elif self._backlog or (due_s is not None and due_s < self._leader_sleeps_until_s):
            self._wake_leader()

    def _end(self, call: _WaitingThread) -> None:
        """Leave a call; another waiting thread becomes the leader, or a thread serves the timers of probes."""
        self._calls.pop(call, None)
        for number in call.waiting:
            self._waiting.pop(number, None)
        if self._leader is call:
            self._leader, self._leader_sleeps_until_s = None, -math.inf
        if self._leader is None and self._calls:
            next(iter(self._calls)).wake()
        self._look_at_wall_clock()
        if self._closed and not self._calls:
            self._close_sockets()
        elif self.machine.probing and self._probe_thread is None and not call.any_of_them and not self._closed:
            self._probe_thread = ProbeThread(self._serve_timers, self._sock.fileno())

    def _lead(self, call: _WaitingThread) -> None:
        """Send, receive and serve timers for all calls, until ``call`` is over."""
        while True:
            with self._lock:
                self._send_and_deliver()
                if call.is_over(self.now_s):
                    return
                if self._receive():
                    continue
                wait_s, events = self._wait_s(call.until_s), select.POLLIN | (select.POLLOUT if self._backlog else 0)
                self._leader_sleeps_until_s = self.now_s() + wait_s
            self._sleep(wait_s, events)
            with self._lock:
                self._leader_sleeps_until_s = -math.inf
                self._process(*self._sock.receive_awaited(self.machine.awaited, _MAX_RECEIVES, 0))

    def _send_and_deliver(self) -> None:
        """Send packets, and give each ended operation to the call that waits for it."""
        machine = self.machine
        if machine.wants_to_send or self._backlog:
            self._send()
        while (event := machine.next_event()) is not None:
            if event.report.failure is Miss.REFUSED and self._authority is not None:
                self._authority.on_refused(self.now_s())
            call = self._waiting.pop(event.number, None)
            if call is None:
                self._unclaimed[event.number] = event
            elif call.take(event):
                if call is not self._leader:
                    call.wake()
                elif self._leader_sleeps_until_s > -math.inf:
                    self._wake_leader()

    def _receive(self) -> bool:
        """Process what has arrived. Return False if nothing has."""
        machine = self.machine
        # With something to send, each answer may open a window: process it at once.
        calls = 1 if machine.wants_to_send or self._backlog else _MAX_RECEIVES
        tallies, runs = self._sock.receive_awaited(machine.awaited, calls, _SPIN_US)
        if not tallies and not runs:
            return False
        self._process(tallies, runs)
        return True

    def _serve_timers(self) -> float | None:
        """Do a step of the probe thread. Return the seconds until the next; None ends it."""
        with self._lock:
            if self._closed:
                return None
            if time.monotonic() >= self._refresh_s:
                with suppress(SkyMemoryError):  # the next call raises it
                    self._refresh_s = self._refresh()
            self._process(*self._sock.receive_awaited(self.machine.awaited, _MAX_RECEIVES, 0))
            self._send_and_deliver()
            due_s = self.machine.next_timer_s()
            if not self.machine.probing or due_s is None:
                self._probe_thread = None
                return None
            return max(due_s - self.now_s(), 0.001)

    def close(self) -> None:
        """Close the client. Calls under way end normally; the last closes the socket."""
        if self._own.owner.elsewhere:
            return
        with self._lock:
            self._closed = True
            probe_thread, self._probe_thread = self._probe_thread, None
            if not self._calls:
                self._close_sockets()
        if probe_thread is not None:
            probe_thread.stop()

    def _close_sockets(self) -> None:
        for end in (self._sock, self._waker, self._woken):
            end.close()

    def _close_in_child(self) -> None:
        self._probe_thread, self._closed = None, True
        self._close_sockets()

    def _send(self) -> None:
        """Send the machine's bursts; what the kernel does not take yet waits in the backlog."""
        for batches in self.machine.bursts_to_send(self.now_s()):
            # Single packets (GETs) go out in one call for all satellites; each burst of SETs has its own call.
            first = 0
            if len(batches) > 1 and not self._backlog and all(batch.is_one_packet for batch, _ in batches):
                first = self._sock.send_each(
                    [(packet.headers, *self._satellites[destination]) for packet, destination in batches]
                )
            for batch, satellite in batches[first:]:
                endpoint = self._satellites[satellite]
                unsent = batch if self._backlog else self._sock.send(batch, endpoint)
                if unsent is not None:
                    self._backlog.append((endpoint, unsent))
        while self._backlog:
            endpoint, batch = self._backlog.popleft()
            unsent = self._sock.send(batch, endpoint)
            if unsent is not None:
                self._backlog.appendleft((endpoint, unsent))
                return

    def _process(self, tallies: Sequence[Tally], runs: list[Run]) -> None:
        machine, now_s = self.machine, self.now_s()
        if tallies:
            machine.receive_placed(tallies, now_s)
        if runs:
            machine.receive_runs(runs, now_s)
        due_s = machine.next_timer_s()
        if due_s is not None and due_s <= now_s:
            machine.handle_timer(now_s)

    def _wait_s(self, until_s: float) -> float:
        due_s, now_s = self.machine.next_timer_s(), self.now_s()
        wait_s = max(0.0, due_s - now_s) if due_s is not None else 1.0
        return max(0.0, min(wait_s, until_s - now_s))

    def _sleep(self, wait_s: float, events: int) -> None:
        self._poll.modify(self._sock.fileno(), events)
        if any(fd == self._woken.fileno() for fd, _ in self._poll.poll(wait_s * 1e3)):
            with suppress(BlockingIOError):
                self._woken.recv(64)

    def _wake_leader(self) -> None:
        with suppress(BlockingIOError):
            self._waker.send(b".")


class ProbeThread:
    """Thread that serves a client's timers between calls until all satellites answer: ``step`` returns the seconds
    until the next call, or None.
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
