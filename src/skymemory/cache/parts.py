"""The blocks of a model whose layers do not all see equally far back: each part of them stored apart.

A block holds all tokens' keys and values of its part. To go on behind a prompt's first tokens the model needs all of
them in a part without a window, and of a part with one those that its next token sees. So a prompt is found as far as
the first part has it from its beginning, and each other part where the window touches; where one is lacking there, up
to the last place where all have what is seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skymemory.cache.blocks import PAYLOAD_AT, SHORT, BlockCache, BlockSink, BlockSource, LoadTally, PhaseClock
from skymemory.cache.pace import ComputeRate
from skymemory.cache.patience import worth
from skymemory.cache.results import LoadResult
from skymemory.kv.block import BlockHash, Tokens


@dataclass(frozen=True, slots=True)
class Part:
    """Layers that see equally far back, and their blocks."""

    blocks: BlockCache
    window: int | None = None
    """A token sees so many, itself among them; None: all before it."""

    def seen(self, tokens: int) -> range:
        """The blocks that the token behind the first ``tokens`` sees something of."""
        block = self.blocks.layout.block_tokens
        first = 0 if self.window is None else max(0, tokens - self.window + 1)
        return range(first // block, -(-tokens // block))


@dataclass(frozen=True, slots=True)
class Saved:
    """What came of a saving."""

    blocks: int = 0
    """Of the first part."""
    size_bytes: int = 0
    raw_bytes: int = 0
    """Before the codec."""

    def __add__(self, other: Saved) -> Saved:
        return Saved(self.blocks + other.blocks, self.size_bytes + other.size_bytes, self.raw_bytes + other.raw_bytes)


class Parts:
    """All parts of one model in one store. If there is one without a window, it is the first.

    Blocks and tokens are counted by the first part, bytes by all of them.
    """

    def __init__(self, parts: Sequence[Part], compute: ComputeRate | None = None) -> None:
        """``compute``: how fast the engine computes, as far as that is known already."""
        self.parts = tuple(parts)
        self.first = parts[0].blocks
        for part in parts:
            part.blocks.compute = compute if compute is not None else self.first.compute

    @property
    def value_bytes(self) -> int:
        """What all parts of a block take in the store, before any codec."""
        return sum(PAYLOAD_AT + part.blocks.layout.block_bytes for part in self.parts)

    def hashes(self, tokens: Tokens) -> list[list[BlockHash]]:
        """Of each part those of the full blocks of ``tokens``."""
        return [part.blocks.hashes(tokens) for part in self.parts]

    def missing(self, hashes: Sequence[Sequence[BlockHash]]) -> list[list[int]]:
        """As ``BlockCache.missing``, of each part."""
        return [part.blocks.missing(chain) if chain else [] for part, chain in zip(self.parts, hashes, strict=True)]

    def load(
        self,
        tokens: Tokens,
        sinks: Sequence[BlockSink],
        *,
        limit_tokens: int,
        seconds: dict[str, float] | None = None,
        account: bool = True,
    ) -> LoadResult:
        """As ``BlockCache.load``, with a sink for each part. A part with a window gets the blocks that are seen from
        the end of what was found; others only where a load that failed has left them.
        """
        first = self.first
        if len(self.parts) == 1 and self.parts[0].window is None:
            return first.load(
                tokens, lambda found: sinks[0], limit_tokens=limit_tokens, seconds=seconds, account=account
            )
        first.owner.check()
        phase = PhaseClock(first.clock, seconds if seconds is not None else {})
        count, block = len(tokens), first.layout.block_tokens
        limit_tokens = min(limit_tokens, count)
        with phase("hash"):
            hashes = self.hashes(tokens)
        if first.on_prompt is not None:
            for chain in hashes:
                first.on_prompt(chain)
        loading = _Loading(self.parts, hashes, sinks, limit_tokens, phase, first.compute.seconds(count))
        with worth(loading.computing_s):
            with phase("lookup"):
                wanted = min(count // block, -(-limit_tokens // block))
                found = loading.found(wanted)
                not_found = loading.why_not(found) if found < wanted else "" if hashes[0] else SHORT
            loaded = loading.load(found)
        result = LoadResult(
            prompt_tokens=count,
            hit_tokens=LoadTally(loading.tiers(loaded)).tokens_by_tier(block, limit_tokens),
            blocks=len(hashes[0]),
            found_blocks=found,
            not_found=not_found,
            loaded_blocks=loaded,
            failed_blocks=loading.failures(found - loaded),
            size_bytes=loading.size_bytes,
            retransmitted=loading.retransmitted,
            seconds=phase.seconds,
        )
        first.count_load(result, account)
        return result

    def bring(self, tokens: Tokens, sinks: Sequence[BlockSink], wanted: Sequence[Sequence[int]]) -> None:
        """Place those blocks of ``tokens`` that are ``wanted`` of each part, ascending, as far as they come: none in a
        forked child, whose the store is not.
        """
        if self.first.owner.elsewhere:
            return
        computing_s = self.first.compute.seconds(len(tokens))
        for part, chain, sink, indices in zip(self.parts, self.hashes(tokens), sinks, wanted, strict=True):
            if asked := chain[indices[0] : indices[-1] + 1] if indices else []:
                tally = LoadTally()
                with worth(computing_s):
                    part.blocks.load_found(
                        asked, _From(sink, indices[0]), tally, PhaseClock(self.first.clock, {}), computing_s
                    )
                self.first.count_load(LoadResult(0, failed_blocks=tally.failed, size_bytes=tally.size_bytes), False)

    def __deepcopy__(self, memo: object) -> Parts:
        """A copied cache has blocks brought from the same store."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A cache that comes from elsewhere has no store here."""
        return type(None), ()

    def save(
        self,
        hashes: Sequence[Sequence[BlockHash]],
        wanted: Sequence[Sequence[int]],
        sources: Sequence[BlockSource],
        seconds: dict[str, float] | None = None,
    ) -> Saved:
        """Store the blocks ``wanted`` of each part, the first part last: it says what is found."""
        saved = Saved()
        for number in reversed(range(len(self.parts))):
            blocks = self.parts[number].blocks
            stored, size_bytes = blocks.save(
                hashes[number], wanted[number], sources[number], seconds, account=not number
            )
            saved += Saved(0 if number else stored, size_bytes, stored * blocks.layout.block_bytes)
        return saved


class _Loading:
    """One prompt: what is known of each part's blocks, and which of them are in their place."""

    def __init__(
        self,
        parts: Sequence[Part],
        hashes: Sequence[list[BlockHash]],
        sinks: Sequence[BlockSink],
        limit_tokens: int,
        phase: PhaseClock,
        computing_s: float | None,
    ) -> None:
        self._parts = parts
        self._hashes = hashes
        self._sinks = sinks
        self._limit_tokens = limit_tokens
        self._phase = phase
        self.computing_s = computing_s
        self._windows = [number for number, part in enumerate(parts) if part.window is not None]
        self._known: list[dict[int, bool]] = [{} for _ in parts]
        self._placed: list[dict[int, str]] = [{} for _ in parts]
        """The tier of each block that is in its place."""
        self._failed: Counter[str] = Counter()
        self.size_bytes = 0
        self.retransmitted = 0

    def _end(self, blocks: int) -> int:
        return min(blocks * self._parts[0].blocks.layout.block_tokens, self._limit_tokens)

    def found(self, wanted: int) -> int:
        """Leading blocks of which every part has what is needed, at most ``wanted``."""
        if self._parts[0].window is None:
            wanted = self._parts[0].blocks.prefix(self._hashes[0][:wanted])
            self._known[0] = {wanted: False}
        return self._longest(wanted)

    def _longest(self, most: int) -> int:
        """The most blocks, up to ``most``, from whose end all parts with windows have what is seen."""
        if most and all(self._there(number, self._seen(number, most)).all() for number in self._windows):
            return most
        good = np.ones(most + 1, bool)
        for number in self._windows if most else ():
            lacking = np.concatenate([[0], np.cumsum(~self._there(number, range(most)))])
            for blocks in range(1, most + 1):
                seen = self._seen(number, blocks)
                good[blocks] &= bool(lacking[seen.stop] == lacking[seen.start])
        return int(np.flatnonzero(good)[-1])

    def _seen(self, number: int, blocks: int) -> range:
        return self._parts[number].seen(self._end(blocks))

    def _there(self, number: int, indices: range) -> npt.NDArray[np.bool_]:
        """Of these blocks of a part, whether the store says it has them; asked once."""
        known = self._known[number]
        if unknown := [index for index in indices if index not in known]:
            asked = range(unknown[0], unknown[-1] + 1)
            presence = self._parts[number].blocks.there(self._hashes[number][asked.start : asked.stop])
            for index, present in zip(asked, presence, strict=True):
                known.setdefault(index, present)  # of one whose load has failed more is known than the store says
        return np.array([known[index] for index in indices], bool)

    def why_not(self, found: int) -> str:
        """Why no more than ``found`` blocks were found: of the first that is known to be lacking behind them."""
        for number, part in enumerate(self._parts):
            seen = self._seen(number, found + 1) if part.window is not None else range(found, found + 1)
            for index in seen:
                if not self._known[number].get(index, True):
                    return part.blocks.why_not(self._hashes[number][index])
        return ""

    def load(self, found: int) -> int:
        """Place what is needed of the first ``found`` blocks; how many came, whatever of them failed on its way."""
        loaded = found
        if found and self._parts[0].window is None:
            self._place(0, range(found))
            loaded = len(self._placed[0])
        while loaded := self._longest(loaded):
            if all(self._place(number, self._seen(number, loaded)) for number in self._windows):
                break
            if "deadline" in self._failed:
                return 0
        return loaded

    def _place(self, number: int, indices: range) -> bool:
        """Place those of a part that are not yet; whether all came."""
        placed, blocks = self._placed[number], self._parts[number].blocks
        rest = [index for index in indices if index not in placed]
        if not rest:
            return True
        start, stop = rest[0], rest[-1] + 1
        tally = LoadTally()
        sink = _From(self._sinks[number], start)
        blocks.load_found(self._hashes[number][start:stop], sink, tally, self._phase, self.computing_s)
        placed.update(enumerate(tally.tiers, start))
        self.size_bytes += tally.size_bytes
        self.retransmitted += tally.retransmitted
        if tally.failed:
            self._known[number][start + len(tally.tiers)] = False
            self._failed[next(iter(tally.failed))] += 1
        return not tally.failed

    def tiers(self, loaded: int) -> list[str]:
        """The tier of each of the leading blocks. One that is out of every window came with those that are not."""
        placed = next((there for there in self._placed if there), {})
        nearest = next(iter(placed.values()), "")
        return [placed.get(index, nearest) for index in range(loaded)]

    def failures(self, blocks: int) -> dict[str, int]:
        """Of so many that were found and are not used, why."""
        if not blocks:
            return {}
        reason = next(iter(self._failed))
        return {reason: 1, "behind a failed block": blocks - 1} if blocks > 1 else {reason: 1}


class _From:
    """A sink whose block 0 is block ``first`` of another."""

    def __init__(self, sink: BlockSink, first: int) -> None:
        self._sink = sink
        self._first = first

    def place(self, index: int, block: memoryview) -> None:
        self._sink.place(self._first + index, block)
