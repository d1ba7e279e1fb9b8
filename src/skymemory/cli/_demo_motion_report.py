"""The closing report of the moving demo: what was moved, lost and computed again, and how reads fared."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from skymemory.placement.locate import Moves
from skymemory.units import format_duration, format_size


def counted(moves: Moves) -> str:
    """``(1, 2)`` → "1 slot move and 2 plane moves"."""
    slots, planes = moves
    return f"{slots} slot move{'s' * (slots != 1)} and {planes} plane move{'s' * (planes != 1)}"


@dataclass(frozen=True, slots=True)
class MotionReport:
    """Counts, bytes and seconds of one run. Chunks and bytes moved are what satellites handed to each other."""

    seconds: float
    satellite_seconds: float
    slot_moves: int
    plane_moves: int
    values: int
    value_bytes: int
    reads: int
    right: int
    wrong: int
    missed: int
    recomputed: int
    recompute_refused: int
    recomputed_bytes: int
    chunks_moved: int
    bytes_moved: int
    chunks_lost: int
    bytes_lost: int
    killed_host: str
    down_s: float
    reads_while_down: int
    right_while_down: int
    read_p50_s: float
    read_p99_s: float
    longest_miss_s: float
    readable_at_end: int
    satellites_at_end: int
    satellites: int

    @property
    def sound(self) -> bool:
        """No wrong byte ever; in the end everybody is back and everything can be read."""
        whole = self.readable_at_end == self.values and self.satellites_at_end == self.satellites
        return self.wrong == 0 and self.right > 0 and whole

    def as_object(self) -> dict[str, object]:
        return {"sound": self.sound, **asdict(self)}

    def lines(self) -> list[str]:
        """The report for people."""
        lines = [
            f"flown     {self.satellite_seconds / 60:.0f} minutes of orbit in {self.seconds:.0f} s: "
            f"{counted((self.slot_moves, self.plane_moves))}",
            f"moved     {self.chunks_moved:,} chunks, {format_size(self.bytes_moved)}, from satellite to satellite",
        ]
        if self.killed_host:
            lines.append(
                f"lost      {self.chunks_lost:,} chunks, {format_size(self.bytes_lost)}, with {self.killed_host}, "
                f"which was dead for {self.down_s:.1f} s"
            )
        lines += [
            f"computed  {self.recomputed} values again, {format_size(self.recomputed_bytes)} "
            f"({self.recompute_refused} more while the sky could not take them)",
            f"reads     {self.reads:,}: {self.right:,} right, {self.missed:,} missed, {self.wrong} wrong"
            f"; while it was dead {self.right_while_down} of {self.reads_while_down} right",
            f"times     p50 {format_duration(self.read_p50_s)}, p99 {format_duration(self.read_p99_s)} for "
            f"{format_size(self.value_bytes)}; the longest miss took {format_duration(self.longest_miss_s)}",
            f"in the end {self.readable_at_end} of {self.values} values can be read, "
            f"{self.satellites_at_end} of {self.satellites} satellites answer",
        ]
        return lines
