"""The closing report of the moving demo: what was moved, lost and computed again, and how reads fared."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from skymemory.placement.locate import Moves
from skymemory.units import format_duration, format_size

Counts = tuple[int, int]
"""Reads that came back right, of how many."""


def counted(moves: Moves) -> str:
    """``(1, 2)`` → "1 slot move and 2 plane moves"."""
    slots, planes = moves
    return f"{slots} slot move{'s' * (slots != 1)} and {planes} plane move{'s' * (planes != 1)}"


def copies(count: int) -> str:
    """``2`` → "2 copies"."""
    return "1 copy" if count == 1 else f"{count} copies"


def minus(later: Counts, earlier: Counts) -> Counts:
    """What came between."""
    return later[0] - earlier[0], later[1] - earlier[1]


@dataclass(frozen=True, slots=True)
class ReadReport:
    """Reads of the values that have so many copies: before the plane died, while it was dead, after its return."""

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
    """Counts, bytes and seconds of one run. Chunks and bytes moved are what satellites handed to each other."""

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
        """No wrong byte ever; in the end everybody is back and everything can be read."""
        whole = self.readable_at_end == self.values and self.satellites_at_end == self.satellites
        return self.wrong == 0 and all(one.right > 0 for one in self.reads) and whole

    def as_object(self) -> dict[str, object]:
        return {"sound": self.sound, "values": self.values, "wrong": self.wrong, **asdict(self)}

    def lines(self) -> list[str]:
        """The report for people."""
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
