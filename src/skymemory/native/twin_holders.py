"""Which servers hold which blocks, and in which medium: the twin, and what the compiled table must do.

As ``twin_prefix``, but blocks come and go one by one, in any order, as engines tell of them: a slot may hold a block
whose prefix it does not hold. Media are numbers below ``MAX_MEDIA``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, repeat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_SLOTS = 65_536
MAX_MEDIA = 16
_RUN_BLOCKS = 128
_MASK = (1 << 64) - 1


class HolderTable:
    """``secret`` (odd): as ``twin_prefix.PrefixTable``'s; the twin's dictionaries do not use it."""

    def __init__(self, secret: int = 0x9E3779B97F4A7C15) -> None:
        if not 0 <= secret <= _MASK:
            raise OverflowError("the secret of a table has 64 bits")
        if not secret & 1:
            raise ValueError("the secret of a table must be odd")
        self._media: list[dict[int, int]] = [{} for _ in range(MAX_MEDIA)]
        """Per medium, for each block, the slots that hold it as bits; no block without a bit."""

    def add(self, medium: int, slot: int, block: int) -> None:
        """``slot`` holds the block in that medium; it may have done so before."""
        _check(medium, slot, block)
        held = self._media[medium]
        held[block] = held.get(block, 0) | 1 << slot

    def take(self, medium: int, slot: int, block: int) -> None:
        """It holds it there no longer, if it did."""
        _check(medium, slot, block)
        held = self._media[medium]
        left = held.get(block, 0) & ~(1 << slot)
        if left:
            held[block] = left
        else:
            held.pop(block, None)

    def add_all(self, medium: int, slot: int, blocks: Buffer) -> None:
        """``add`` of each."""
        _check(medium, slot, 0)
        for block in _hashes(blocks):
            self.add(medium, slot, block)

    def take_all(self, medium: int, slot: int, blocks: Buffer) -> None:
        """``take`` of each."""
        _check(medium, slot, 0)
        for block in _hashes(blocks):
            self.take(medium, slot, block)

    def match(
        self, blocks: Buffer, slots: Sequence[int], media: Sequence[tuple[int, float]]
    ) -> tuple[list[int], list[float]]:
        """How many blocks from the first on, without a gap, each of ``slots`` holds in any of ``media``; and what
        they count: each the weight of the first of ``media`` that has it.
        """
        for slot in slots:
            _check(0, slot, 0)
        if len(media) > MAX_MEDIA:
            raise ValueError(f"{len(media)} media: expected at most {MAX_MEDIA}")
        for medium, _ in media:
            _check(medium, 0, 0)
        depths = dict.fromkeys(slots, 0)
        counts = [dict.fromkeys(slots, 0) for _ in media]
        left, at = 0, 0
        for slot in depths:
            left |= 1 << slot
        for holders, run in self._runs(blocks, [medium for medium, _ in media]):
            still = 0
            for count, held in zip(counts, holders, strict=True):
                here = held & left & ~still
                still |= here
                for slot in _slots(here):
                    count[slot] += run
            for slot in _slots(left & ~still):
                depths[slot] = at
            left = still
            if not left:
                break
            at += run
        for slot in _slots(left):
            depths[slot] = at
        weights = [weight for _, weight in media]
        sums = [sum(weight * count[slot] for weight, count in zip(weights, counts, strict=True)) for slot in slots]
        return [depths[slot] for slot in slots], [float(total) for total in sums]

    def _runs(self, blocks: Buffer, media: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
        """Holders per medium, and how many blocks in a row have the same: a prompt has few such runs.

        In pieces, since most prompts are known to a part only.
        """
        hashes = _hashes(blocks)
        for begin in range(0, len(hashes), _RUN_BLOCKS):
            piece = hashes[begin : begin + _RUN_BLOCKS]
            columns = [list(map(self._media[medium].get, piece, repeat(0))) for medium in media]
            rows = zip(*columns, strict=True) if columns else repeat((), len(piece))
            for holders, run in groupby(rows):
                yield holders, sum(1 for _ in run)

    def blocks(self) -> int:
        """Different blocks that are held, summed over the media."""
        return sum(map(len, self._media))


def _hashes(blocks: Buffer) -> list[int]:
    view = memoryview(blocks).cast("B")
    if len(view) % 8:
        raise ValueError(f"{len(view)} bytes are not a whole number of 8-byte hashes")
    hashes: list[int] = view.cast("Q").tolist()
    return hashes


def _slots(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _check(medium: int, slot: int, block: int) -> None:
    if not 0 <= medium < MAX_MEDIA:
        raise ValueError(f"medium {medium}: expected 0 to {MAX_MEDIA - 1}")
    if not 0 <= slot < MAX_SLOTS:
        raise ValueError(f"slot {slot}: expected 0 to {MAX_SLOTS - 1}")
    if not 0 <= block <= _MASK:
        raise OverflowError(f"block {block} is no hash of 64 bits")
