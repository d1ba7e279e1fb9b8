"""Reads that go on while everything moves: known values, compared byte for byte, computed again where they are gone."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from skymemory.constellation.torus import SatelliteId
from skymemory.metrics import percentile
from skymemory.placement.locate import Moves
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.control import Housekeeping, ping_all
from skymemory.testbed.plan import ConstellationPlan
from skymemory.units import format_duration, format_size


@dataclass(slots=True)
class ReadTally:
    """Counters of reads; ``seconds`` are of correct reads, in order."""

    right: int = 0
    wrong: int = 0
    missed: int = 0
    recomputed: int = 0
    refused: int = 0
    """Computed again, but not (yet) stored."""
    recomputed_bytes: int = 0
    longest_miss_s: float = 0.0
    seconds: list[float] = field(default_factory=list)

    @property
    def reads(self) -> int:
        return self.right + self.wrong + self.missed

    @property
    def counts(self) -> Counts:
        return self.right, self.reads

    def percentile_s(self, percent: float) -> float:
        """Percentile of correct reads; 0 without any."""
        return percentile(self.seconds, percent) if self.seconds else 0.0


class Reader(threading.Thread):
    """Reads ``values`` in turn until stopped. After a miss the (known) value is stored again."""

    def __init__(self, store: ConstellationStore, values: Mapping[bytes, bytes], pause_s: float) -> None:
        super().__init__(name="reader", daemon=True)
        self.tally = ReadTally()
        self.copies = store.settings.replicas
        self.absent: set[bytes] = set()
        """Missed keys that are not stored again yet."""
        self.at_death: Counts = (0, 0)
        self.at_return: Counts = (0, 0)
        self.error: Exception | None = None
        """The error that ended the reader early."""
        self._store = store
        self._values = values
        self._pause_s = pause_s
        self._stopping = threading.Event()

    @property
    def keys(self) -> list[bytes]:
        return list(self._values)

    def store(self, key: bytes) -> bool:
        """Stores the value of ``key``; returns whether that succeeded."""
        return self._store.put_many([(key, self._values[key])])[0]

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                for key in self._values:
                    self.read(key)
                    if self._stopping.wait(self._pause_s):
                        break
        # Kept for the main thread, which raises it: a thread's own trace would be drawn over.
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        """Stops after the read in progress, and waits for it."""
        self._stopping.set()
        if self.is_alive():
            self.join()

    def read(self, key: bytes) -> bool:
        """One verified read; True if its bytes are correct. A miss is stored again."""
        tally, value = self.tally, self._values[key]
        began_s = time.perf_counter()
        ticket = self._store.prepare_load([key])
        # The view is memory of the store: compare before it is released.
        view = self._store.complete_load(ticket)[0]
        seconds = time.perf_counter() - began_s
        right = view is not None and bytes(view) == value
        self._store.release(ticket)
        if right:
            tally.seconds.append(seconds)
            tally.right += 1
            self.absent.discard(key)
        elif view is not None:
            tally.wrong += 1
        else:
            tally.missed += 1
            self.absent.add(key)
            tally.longest_miss_s = max(tally.longest_miss_s, seconds)
            self._recompute(key)
        return right

    def _recompute(self, key: bytes) -> None:
        if self.store(key):
            self.absent.discard(key)
            self.tally.recomputed += 1
            self.tally.recomputed_bytes += len(self._values[key])
        else:
            self.tally.refused += 1

    @property
    def words(self) -> str:
        """A one-line summary."""
        tally = self.tally
        return (
            f"{copies(self.copies)}: {tally.right:,} of {tally.reads:,} reads right, {tally.missed} missed, "
            f"{tally.wrong} wrong, {tally.recomputed} computed again, p50 {format_duration(tally.percentile_s(50))}"
        )

    def report(self) -> ReadReport:
        tally = self.tally
        return ReadReport(
            copies=self.copies,
            values=len(self._values),
            right=tally.right,
            wrong=tally.wrong,
            missed=tally.missed,
            before=self.at_death,
            while_down=minus(self.at_return, self.at_death),
            after=minus(tally.counts, self.at_return),
            recomputed=tally.recomputed,
            recompute_refused=tally.refused,
            recomputed_bytes=tally.recomputed_bytes,
            p50_s=tally.percentile_s(50),
            p99_s=tally.percentile_s(99),
            longest_miss_s=tally.longest_miss_s,
        )


Counts = tuple[int, int]
"""Correct reads, and all reads."""


def counted(moves: Moves) -> str:
    """``(1, 2)`` → "1 slot move and 2 plane moves"."""
    slots, planes = moves
    return f"{slots} slot move{'s' * (slots != 1)} and {planes} plane move{'s' * (planes != 1)}"


def copies(count: int) -> str:
    """``2`` → "2 copies"."""
    return "1 copy" if count == 1 else f"{count} copies"


def minus(later: Counts, earlier: Counts) -> Counts:
    """The difference."""
    return later[0] - earlier[0], later[1] - earlier[1]


@dataclass(frozen=True, slots=True)
class ReadReport:
    """Reads of values with ``copies`` copies: before the plane died, while it was dead, after its return."""

    copies: int
    values: int
    right: int
    wrong: int
    missed: int
    before: Counts
    while_down: Counts
    after: Counts
    recomputed: int
    recompute_refused: int
    recomputed_bytes: int
    p50_s: float
    p99_s: float
    longest_miss_s: float

    def line(self) -> str:
        before, down, after = (f"{right:,} of {reads:,}" for right, reads in (self.before, self.while_down, self.after))
        again = f"{self.recomputed} values, {format_size(self.recomputed_bytes)}"
        times = f"{format_duration(self.p50_s)}, {format_duration(self.p99_s)}"
        return f"{copies(self.copies):<10}{before:<15}{down:<15}{after:<15}{again:<21}{times}"


_HEAD = f"{'right':<10}{'before':<15}{'while dead':<15}{'after':<15}{'computed again':<21}time p50, p99"


@dataclass(frozen=True, slots=True)
class MotionReport:
    """Counts, bytes and seconds of one run. Moved chunks and bytes are between satellites."""

    seconds: float
    satellite_seconds: float
    slot_moves: int
    plane_moves: int
    value_bytes: int
    chunks_moved: int
    bytes_moved: int
    chunks_lost: int
    bytes_lost: int
    killed_host: str
    down_s: float
    readable_at_end: int
    satellites_at_end: int
    satellites: int
    reads: tuple[ReadReport, ...]
    """By the number of copies."""

    @property
    def wrong(self) -> int:
        return sum(one.wrong for one in self.reads)

    @property
    def values(self) -> int:
        return sum(one.values for one in self.reads)

    @property
    def sound(self) -> bool:
        """No wrong byte; at the end all satellites answer and all values are readable."""
        whole = self.readable_at_end == self.values and self.satellites_at_end == self.satellites
        return self.wrong == 0 and all(one.right > 0 for one in self.reads) and whole

    def as_object(self) -> dict[str, object]:
        return {"sound": self.sound, "values": self.values, "wrong": self.wrong, **asdict(self)}

    def lines(self) -> list[str]:
        """The report as text."""
        refused = sum(one.recompute_refused for one in self.reads)
        return [
            f"flown     {self.satellite_seconds / 60:.0f} minutes of orbit in {self.seconds:.0f} s: "
            f"{counted((self.slot_moves, self.plane_moves))}",
            f"moved     {self.chunks_moved:,} chunks, {format_size(self.bytes_moved)}, from satellite to satellite",
            f"lost      {self.chunks_lost:,} chunks, {format_size(self.bytes_lost)}, with {self.killed_host}, "
            f"which was dead for {self.down_s:.1f} s",
            f"reads     {_HEAD}",
            *(f"          {one.line()}" for one in self.reads),
            f"          {self.wrong} reads wrong; values of {format_size(self.value_bytes)}; the longest miss took "
            f"{format_duration(max(one.longest_miss_s for one in self.reads))}",
            f"          {refused} times a value was computed again and the sky could not take it yet",
            f"in the end {self.readable_at_end} of {self.values} values can be read, "
            f"{self.satellites_at_end} of {self.satellites} satellites answer",
        ]


_COUNTED = ("chunks_migrated_out", "chunks_served", "chunks_set", "chunks_evicted", "migrations_retransmitted")
_PATIENCE_S = 0.4
_EVERY_S = 0.6


class Watch(threading.Thread):
    """Polls all satellites. Counters of a restarted one continue from their last values."""

    def __init__(self, plan: ConstellationPlan) -> None:
        super().__init__(name="watch", daemon=True)
        self._plan = plan
        self._latest: dict[SatelliteId, Housekeeping] = {}
        self._earlier: defaultdict[str, int] = defaultdict(int)
        self._asking = threading.Lock()
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            self.ask()

    def stop(self) -> None:
        self._stopping.set()
        if self.is_alive():
            self.join()

    def ask(self) -> int:
        """Ask all satellites now; how many answered."""
        with self._asking:
            answers = ping_all(self._plan, _PATIENCE_S)
            for satellite, found in answers.items():
                if found is not None:
                    before = self._latest.get(satellite)
                    # A counter that fell: the process was restarted between two answers, and counts from 0 again.
                    if before is not None and any(found[name] < before[name] for name in _COUNTED):
                        self._keep(before)
                    self._latest[satellite] = found
            return sum(found is not None for found in answers.values())

    def died(self, satellites: Iterable[SatelliteId]) -> tuple[int, int]:
        """Removes dead satellites: ``(chunks, bytes)`` that they held at their last answer."""
        with self._asking:
            gone = [found for satellite in satellites if (found := self._latest.pop(satellite, None)) is not None]
            for found in gone:
                self._keep(found)
        return sum(found["chunks_held"] for found in gone), sum(found["memory_used_bytes"] for found in gone)

    def _keep(self, found: Housekeeping) -> None:
        for name in _COUNTED:
            self._earlier[name] += found[name]

    def total(self, name: str) -> int:
        """Sum of a counter over all satellites since the start."""
        return self._earlier[name] + sum(found[name] for found in list(self._latest.values()))

    @property
    def holding(self) -> frozenset[SatelliteId]:
        """Satellites that held chunks at their last answer."""
        return frozenset(satellite for satellite, found in list(self._latest.items()) if found["chunks_held"])


def wait_for_answers(watch: Watch, satellites: int, patience_s: float) -> int:
    """Number of satellites that answer, once all do or after ``patience_s``."""
    deadline_s = time.monotonic() + patience_s
    while (answering := watch.ask()) < satellites and time.monotonic() < deadline_s:
        time.sleep(_EVERY_S / 4)
    return answering
