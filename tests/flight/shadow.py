"""Both satellites at once: each event goes to the Python machine and to that in C, and all that they do is compared.

``ShadowMachine`` stands in for ``SatelliteMachine``; the Python one's packets are those that leave. Times are rounded
to whole microseconds, as C counts. Python's are later by a few picoseconds each time: so what is due at the very time
of an event is due in both, whatever the rounding of its sums.

As a pytest plugin (``-p tests.flight.shadow``) it puts itself, or the satellite in C alone, in place of every satellite
that tests make, as the environment variable ``SATELLITES`` says: ``both`` (default), ``c``, ``half`` (in C those whose
plane and slot have an even sum).
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.flight.machine import FlightMachine, counter_names, us, us_from

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.satellite import machine as python_machine
from skymemory.protocol.satellite.overload import Lateness
from skymemory.protocol.satellite.state import SatelliteConfig
from skymemory.protocol.wire import Buffer, LinkEnd, SegmentBatch

PythonMachine = python_machine.SatelliteMachine
TOLERATED_US = 2
"""Between timers: C rounds up to microseconds what Python adds up in fractions of them."""


_STEP_S = 1e-11
_COUNTERS_EVERY = 16
"""Events: to look at all counters costs more than the event."""
_NEVER_FULL = ("outbox_full", "pools_full")


class Divergence(AssertionError):
    """The two satellites did not do the same."""


def packets_of(batches: list[tuple[SegmentBatch, LinkEnd]]) -> list[tuple[LinkEnd, bytes]]:
    """Every packet, with its link, in the order in which they leave."""
    found = []
    for batch, link in batches:
        headers, width = bytes(batch.headers), batch.header_bytes
        payloads = list(batch.payloads or [])
        for n, at in enumerate(range(0, len(headers), width)):
            payload = bytes(payloads[n]) if payloads else b""
            found.append((link, headers[at : at + width] + payload))
    return found


class ShadowMachine:
    """A satellite in Python, and its shadow in C."""

    def __init__(
        self,
        config: SatelliteConfig,
        sky: SkyMap,
        clock: MoveClock,
        now_s: float,
        lateness: Lateness | None = None,
        transport_figures: Callable[[], dict[str, int]] = dict,
    ) -> None:
        now_s = _whole(now_s)
        lateness = lateness or Lateness()
        self._count, self._compared, self._now_s = 0, 0, now_s
        self.python = PythonMachine(config, sky, clock, now_s, lateness, transport_figures)
        self.shadow = FlightMachine(config, sky, clock, now_s, lateness, transport_figures)
        self.store = _Store(self)
        self.neighbours = _Neighbours(self)
        self.events: deque[tuple[str, Any]] = deque(maxlen=8)
        """The latest events, for the report of a difference."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.python, name)

    @property
    def backlog_bytes(self) -> int:
        return self.python.backlog_bytes

    @backlog_bytes.setter
    def backlog_bytes(self, size_bytes: int) -> None:
        self.python.backlog_bytes = self.shadow.backlog_bytes = size_bytes

    def plain_requests(self, now_s: float) -> None:
        """None: all packets go through the machines."""

    def routes(self, now_s: float) -> None:
        """None: likewise."""

    def relay(self, batch: SegmentBatch, source: SatelliteId, now_s: float) -> None:
        """None: likewise."""

    def _python_s(self, now_s: float) -> float:
        self._count += now_s != self._now_s
        self._now_s = now_s
        return now_s + self._count * _STEP_S

    def _did(self, what: str, about: Any = None) -> None:
        self.events.append((what, about))

    def receive_batch(self, data: Buffer, segment_bytes: int, source: LinkEnd, now_s: float) -> None:
        self.receive_runs([(memoryview(data), segment_bytes)], source, now_s)

    def receive_runs(self, runs: list[native.Run], source: LinkEnd, now_s: float) -> None:
        now_s = _whole(now_s)
        copies = [(memoryview(bytearray(view)), size) for view, size in runs]
        for view, size in runs:
            self._did("receive", (now_s, source, size, bytes(view[:140]).hex()))
        self.python.receive_runs(runs, source, self._python_s(now_s))
        for view, size in copies:
            self.shadow.receive_batch(view, size, source, now_s)
        self.compare(now_s)

    def handle_timer(self, now_s: float) -> None:
        now_s = _whole(now_s)
        self._did("timer", now_s)
        self.python.handle_timer(self._python_s(now_s))
        self.shadow.handle_timer(now_s)
        self.compare(now_s)

    def work(self, now_s: float) -> native.Run | None:
        now_s = _whole(now_s)
        self._did("work", now_s)
        done = self.python.work(self._python_s(now_s))
        self.shadow.work(now_s)
        self.compare(now_s)
        return done

    def datagrams_to_send(self, now_s: float) -> list[tuple[SegmentBatch, LinkEnd]]:
        now_s = _whole(now_s)
        batches = self.python.datagrams_to_send(self._python_s(now_s))
        ours, theirs = packets_of(batches), packets_of(self.shadow.datagrams_to_send(now_s))
        if ours != theirs:
            at = next(
                (n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
                min(len(ours), len(theirs)),
            )
            self.fail(
                f"packet {at} of {len(ours)} and {len(theirs)} at {now_s}: "
                f"{_shown(ours[at : at + 1])} is {_shown(theirs[at : at + 1])}, "
                f"from byte {_first(ours[at:], theirs[at:])}"
            )
        self.compare(now_s)
        return batches

    def next_timer_s(self) -> float | None:
        ours, theirs = self.python.next_timer_s(), self.shadow.next_timer_s()
        if ours is None or theirs is None:
            if ours is not theirs:
                self.fail(f"next timer {ours} is {theirs}")
            return None
        ours_us, theirs_us = us_from(ours - self._count * _STEP_S), us(theirs)
        if ours_us != theirs_us and abs(ours_us - theirs_us) > TOLERATED_US and max(ours_us, theirs_us) > 0:
            self.fail(f"next timer {ours!r} is {theirs!r}")
        return max(ours_us, theirs_us) / 1e6

    def compare(self, now_s: float, whole: bool = False) -> None:
        """What is cheap to look at after every event; the counters after some, and with ``whole``."""
        ours, theirs = self.python, self.shadow
        figures: dict[str, tuple[Any, Any]] = {
            "used_bytes": (ours.store.used_bytes, theirs.store.used_bytes),
            "at_rest": (ours.handover.at_rest, theirs.handover.at_rest),
        }
        self._compared += 1
        if whole or self._compared % _COUNTERS_EVERY == 0:
            figures |= {
                "moves": (ours.moves, theirs.moves),
                "chunks": (len(ours.store), len(theirs.store)),
                "pinned_bytes": (ours.store.pinned_bytes, theirs.store.pinned_bytes),
                "idle": (ours.handover.idle, theirs.handover.idle),
                "retransmitted": (ours.handover.retransmitted, theirs.handover.retransmitted),
                "wants_work": (ours.wants_work, theirs.wants_work),
                "hidden_work": (ours.hidden_work, theirs.hidden_work),
            }
            names = counter_names().keys() - _NEVER_FULL
            figures |= {name: (ours.counters.get(name), theirs.counters.get(name)) for name in names}
            figures |= {name: (0, theirs.counters.get(name)) for name in _NEVER_FULL}
        wrong = {name: pair for name, pair in figures.items() if pair[0] != pair[1]}
        if wrong:
            self.fail(f"at {now_s}: {wrong}")

    def compare_all(self, now_s: float) -> None:
        """The counters, and all chunks in the order of eviction."""
        self.compare(now_s, whole=True)
        ours = [(name, tuple(chunk)) for name, chunk in self.python.store.items()]
        theirs = [(name, tuple(chunk)) for name, chunk in self.shadow.store.items()]
        if ours != theirs:
            self.fail("other chunks, or another order of eviction")

    def fail(self, what: str) -> None:
        said = "\n".join(f"  {name} {about}" for name, about in self.events)
        raise Divergence(f"satellite {self.python.config.address}: {what}; before:\n{said}")


class _Store:
    """The memory of both: what tests change there by hand is changed twice."""

    def __init__(self, both: ShadowMachine) -> None:
        object.__setattr__(self, "_both", (both.python.store, both.shadow.store))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._both[0], name)
        if name not in ("put", "remove", "remove_key", "_evict"):
            return found

        def twice(*about: Any) -> Any:
            getattr(self._both[1], name)(*about[:3])
            return found(*about)

        return twice

    def __setattr__(self, name: str, value: Any) -> None:
        for store in self._both:
            setattr(store, name, value)

    def __len__(self) -> int:
        return len(self._both[0])


class _Neighbours:
    """What transports and tests do with ``SatelliteMachine.neighbours``."""

    def __init__(self, both: ShadowMachine) -> None:
        self._both, self._ours, self._theirs = both, both.python.neighbours, both.shadow.neighbours

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)

    def greet(self, now_s: float) -> None:
        self._ours.greet(self._both._python_s(_whole(now_s)))
        self._theirs.greet(_whole(now_s))

    def on_packet_sent(self, link: LinkEnd, now_s: float) -> None:
        self._ours.on_packet_sent(link, self._both._python_s(_whole(now_s)))
        self._theirs.on_packet_sent(link, _whole(now_s))

    def on_packet_received(self, neighbour: SatelliteId, now_s: float) -> None:
        self._ours.on_packet_received(neighbour, self._both._python_s(_whole(now_s)))
        self._theirs.on_packet_received(neighbour, _whole(now_s))


def _whole(time_s: float) -> float:
    return time_s if math.isinf(time_s) else us(time_s) / 1e6


def _shown(packets: list[tuple[LinkEnd, bytes]]) -> str:
    shown = (f"by {link} {len(packet)} bytes {packet[:200].hex(' ', -4)}" for link, packet in packets)
    return "\n    " + (", ".join(shown) or "nothing")


def _first(ours: list[tuple[LinkEnd, bytes]], theirs: list[tuple[LinkEnd, bytes]]) -> list[int]:
    """The bytes in which the first packets differ."""
    if not ours or not theirs:
        return []
    return [n for n, pair in enumerate(zip(ours[0][1], theirs[0][1], strict=False)) if pair[0] != pair[1]][:16]


def _chosen(config: SatelliteConfig, *more: Any, **named: Any) -> Any:
    which = os.environ.get("SATELLITES", "both")
    in_c = which == "c" or (which == "half" and sum(config.address) % 2 == 0)
    kind = ShadowMachine if which == "both" else FlightMachine if in_c else PythonMachine
    return kind(config, *more, **named)


def pytest_configure() -> None:
    """As a plugin: every satellite that tests make from now on."""
    from skymemory.transport import simulated

    python_machine.SatelliteMachine = _chosen  # type: ignore[assignment,misc]
    simulated.SatelliteMachine = _chosen  # type: ignore[assignment,misc]
