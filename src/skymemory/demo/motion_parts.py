"""Reads that go on while everything moves: known values, compared byte for byte, computed again where they are gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from skymemory.cli._demo_motion_report import Counts, ReadReport, copies, minus
from skymemory.store.constellation import ConstellationStore
from skymemory.units import format_duration


@dataclass(slots=True)
class ReadTally:
    """What the reads have come to. Seconds are of reads that came back right, in the order they were made."""

    right: int = 0
    wrong: int = 0
    missed: int = 0
    recomputed: int = 0
    refused: int = 0
    """Computed again, but the sky could not take it back (yet)."""
    recomputed_bytes: int = 0
    longest_miss_s: float = 0.0
    seconds: list[float] = field(default_factory=list)

    @property
    def reads(self) -> int:
        return self.right + self.wrong + self.missed

    @property
    def counts(self) -> Counts:
        return self.right, self.reads

    def percentile_s(self, share: float) -> float:
        """The time within which this share of the right reads came; 0 where none did."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class Reader(threading.Thread):
    """Reads ``values`` in turn until stopped. A miss is computed again: the value, which we know, is stored anew."""

    def __init__(self, store: ConstellationStore, values: Mapping[bytes, bytes], pause_s: float) -> None:
        super().__init__(name="reader", daemon=True)
        self.tally = ReadTally()
        self.copies = store.settings.replicas
        self.absent: set[bytes] = set()
        """Keys that were missed and that the sky has not taken since."""
        self.at_death: Counts = (0, 0)
        self.at_return: Counts = (0, 0)
        self.error: Exception | None = None
        """What ended the reader before it was stopped."""
        self._store = store
        self._values = values
        self._pause_s = pause_s
        self._stopping = threading.Event()

    @property
    def keys(self) -> list[bytes]:
        return list(self._values)

    def store(self, key: bytes) -> bool:
        """Put the value of ``key`` into the sky; whether it took it."""
        return self._store.put_many([(key, self._values[key])])[0]

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                for key in self._values:
                    self.read(key)
                    if self._stopping.wait(self._pause_s):
                        break
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        """Ends after the read in progress; returns when it has."""
        self._stopping.set()
        if self.is_alive():
            self.join()

    def read(self, key: bytes) -> bool:
        """One read, verified; True if the bytes came and are right. A miss is stored again."""
        tally, value = self.tally, self._values[key]
        began_s = time.perf_counter()
        ticket = self._store.prepare_load([key])
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
        """How its reads fare, in one line."""
        tally = self.tally
        return (
            f"{copies(self.copies)}: {tally.right:,} of {tally.reads:,} reads right, {tally.missed} missed, "
            f"{tally.wrong} wrong, {tally.recomputed} computed again, p50 {format_duration(tally.percentile_s(0.5))}"
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
            p50_s=tally.percentile_s(0.5),
            p99_s=tally.percentile_s(0.99),
            longest_miss_s=tally.longest_miss_s,
        )
