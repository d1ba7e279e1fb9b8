"""Runs: the path-compressed forest under the radix index, without what is known of its blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from skymemory.errors import InvalidInput, MalformedPacket


class Run:
    """``keys`` stand at depths ``start``, ``start + 1``, …; ``keys[0]`` follows ``parent`` (None at depth 0)."""

    __slots__ = ("closed", "epoch", "keys", "parent", "start")

    def __init__(self, start: int, parent: bytes | None, keys: list[bytes]) -> None:
        self.start = start
        self.parent = parent
        self.keys = keys
        self.closed = False
        self.epoch = -1
        """The forest's epoch at which ``closed`` was found; at another one it has to be asked again."""


class Forest:
    """Blocks in runs: maximal chains without a hole, each hanging under the hash before it.

    A branch hangs in the middle of a run without splitting it; a run hangs under its parent's hash whether that
    block is present or not. So opening or closing a hole touches one run, whatever grows above it.
    """

    def __init__(self) -> None:
        self.rows: dict[bytes, int] = {}
        """Hash → row number; rows of removed blocks are used again."""
        self.run_of: list[Run] = []
        self.depths = array("I")
        self.epoch = 0
        """Grows whenever a hole opens or closes above something present."""
        self._free: list[int] = []
        self._hanging: dict[bytes, dict[Run, None]] = {}
        """Hash → the runs that follow it, an ordered set."""

    def runs(self) -> list[Run]:
        """Every run once."""
        return list(dict.fromkeys(self.run_of[at] for at in self.rows.values()))

    def check(self, hashes: Sequence[bytes], start: int, parent: bytes | None) -> None:
        """Raises :class:`InvalidInput` when a well-formed chain contradicts what is known."""
        at = None if parent is None else self.rows.get(parent)
        if at is not None and self.depths[at] != start - 1:
            raise InvalidInput(f"the parent stands at depth {self.depths[at]}, not at {start - 1}")
        if parent is not None and any(run.start != start for run in self._hanging.get(parent, ())):
            raise InvalidInput(f"what follows block {parent.hex()} is known not to be at depth {start}")
        previous = parent
        for depth, key in enumerate(hashes, start):
            at = self.rows.get(key)
            if at is None:
                if any(run.start != depth + 1 for run in self._hanging.get(key, ())):
                    raise InvalidInput(f"what follows block {key.hex()} is known not to be at depth {depth + 1}")
            elif self.depths[at] != depth or self._parent_of(at) != previous:
                raise InvalidInput(f"block {key.hex()} is known at depth {self.depths[at]} of another chain")
            previous = key

    def place_of(self, key: bytes) -> tuple[int, bytes | None] | None:
        """Depth of a block and the hash before it; None if it is not present."""
        at = self.rows.get(key)
        return None if at is None else (self.depths[at], self._parent_of(at))

    def depth_below(self, key: bytes) -> int | None:
        """Depth of what follows a block, which may be absent; None where nothing does."""
        return next((run.start for run in self._hanging.get(key, ())), None)

    def insert(self, key: bytes, depth: int, previous: bytes | None) -> int:
        """Puts a new block behind ``previous``, at the end of its run or as its own; returns its row."""
        run = None
        above_at = None if previous is None else self.rows.get(previous)
        if above_at is not None:
            above = self.run_of[above_at]
            previous = above.keys[depth - 1 - above.start]  # the copy that is already held
            if previous is above.keys[-1]:
                run = above
                run.keys.append(key)
        if run is None:
            run = Run(depth, previous, [key])
            self._hang(run)
        if self._free:
            at = self._free.pop()
            self.run_of[at] = run
            self.depths[at] = depth
        else:
            at = len(self.run_of)
            self.run_of.append(run)
            self.depths.append(depth)
        self.rows[key] = at
        hanging = self._hanging.get(key)
        if hanging:
            self.epoch += 1
            self._merge(run, max(hanging, key=lambda below: len(below.keys)))
        return at

    def remove(self, key: bytes) -> bool:
        """Takes a block out; what follows it becomes a run hanging under the absent hash. False if absent."""
        at = self.rows.pop(key, None)
        if at is None:
            return False
        self._free.append(at)
        run = self.run_of[at]
        offset = self.depths[at] - run.start
        head, tail = run.keys[:offset], run.keys[offset + 1 :]
        if not tail:
            run.keys.pop()
            if not head:
                self._unhang(run)
        elif len(head) >= len(tail):
            below = Run(run.start + offset + 1, run.keys[offset], tail)
            run.keys = head
            self._label(tail, below)
            self._hang(below)
        else:
            self._unhang(run)
            if head:
                above = Run(run.start, run.parent, head)
                self._label(head, above)
                self._hang(above)
            run.start, run.parent, run.keys = run.start + offset + 1, run.keys[offset], tail
            self._hang(run)
        if key in self._hanging:
            self.epoch += 1
        return True

    def is_closed(self, run: Run) -> bool:
        """Whether every block before the run is present; remembered for all runs on the way up."""
        asked = []
        while run.epoch != self.epoch:
            asked.append(run)
            at = None if run.parent is None else self.rows.get(run.parent)
            if at is None:
                closed = run.parent is None
                break
            run = self.run_of[at]
        else:
            closed = run.closed
        for one in asked:
            one.closed, one.epoch = closed, self.epoch
        return closed

    def load(self, heads: Sequence[tuple[int, bytes | None, int]], keys: Sequence[bytes]) -> None:
        """Fills an empty forest: runs of (start, parent, blocks) whose ``keys`` follow one another.

        Raises :class:`MalformedPacket` when they contradict each other.
        """
        self.rows = {key: at for at, key in enumerate(keys)}
        if len(self.rows) != len(keys):
            raise MalformedPacket("an index that names a block twice")
        first = 0
        for start, parent, blocks in heads:
            run = Run(start, parent, list(keys[first : first + blocks]))
            self.run_of += [run] * blocks
            self.depths.extend(range(start, start + blocks))
            self._hang(run)
            first += blocks
        for parent, hanging in self._hanging.items():
            at = self.rows.get(parent)
            depths = {run.start - 1 for run in hanging} | ({self.depths[at]} if at is not None else set())
            if len(depths) != 1:
                raise MalformedPacket("an index in which a block stands at two depths")

    def _parent_of(self, at: int) -> bytes | None:
        run = self.run_of[at]
        offset = self.depths[at] - run.start
        return run.keys[offset - 1] if offset else run.parent

    def _merge(self, above: Run, below: Run) -> None:
        """One run of two, ``below`` following the last block of ``above``. Relabels the shorter."""
        self._unhang(below)
        if len(above.keys) >= len(below.keys):
            self._label(below.keys, above)
            above.keys += below.keys
            return
        self._unhang(above)
        self._label(above.keys, below)
        below.start, below.parent, below.keys = above.start, above.parent, above.keys + below.keys
        self._hang(below)

    def _label(self, keys: list[bytes], run: Run) -> None:
        for key in keys:
            self.run_of[self.rows[key]] = run

    def _hang(self, run: Run) -> None:
        if run.parent is not None:
            self._hanging.setdefault(run.parent, {})[run] = None

    def _unhang(self, run: Run) -> None:
        if run.parent is not None:
            hanging = self._hanging[run.parent]
            del hanging[run]
            if not hanging:
                del self._hanging[run.parent]
