"""Parts: the blocks of a model with sliding-window layers, stored separately for each attention span.

A part is a group of layers with the same window; a block holds its tokens' keys and values of one part. To continue
behind a prefix the model needs all blocks of a part without a window, and of a windowed part only those in the window
of the next token. So the prefix found is the longest at whose end every part has what it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skymemory.cache.blocks import TOO_SHORT, BlockCache, BlockSink, BlockSource, LoadTally, PhaseClock
from skymemory.cache.patience import ComputeRate, recompute_cost
from skymemory.cache.results import LoadResult
from skymemory.kv.block import BlockHash, Tokens
from skymemory.kv.value import PAYLOAD_AT


@dataclass(frozen=True, slots=True)
class Part:
    """Layers with the same attention window, and their blocks."""

    blocks: BlockCache
    window: int | None = None
    """Tokens that a token attends to, itself included; None: all before it."""

    def seen(self, tokens: int) -> range:
        """The blocks that the token behind the first ``tokens`` attends to, even in part."""
        block = self.blocks.layout.block_tokens
        first = 0 if self.window is None else max(0, tokens - self.window + 1)
        return range(first // block, -(-tokens // block))


@dataclass(frozen=True, slots=True)
class Saved:
    """Result of ``Parts.save``."""

    blocks: int = 0
    """Blocks of the first part."""
    size_bytes: int = 0
    raw_bytes: int = 0
    """The same blocks before the codec."""

    def __add__(self, other: Saved) -> Saved:
        return Saved(self.blocks + other.blocks, self.size_bytes + other.size_bytes, self.raw_bytes + other.raw_bytes)


class Parts:
    """All parts of one model in one store; the one without a window, if any, is the first.

    Blocks and tokens are counted for the first part, bytes for all.
    """

    def __init__(self, parts: Sequence[Part], compute: ComputeRate | None = None) -> None:
        """``compute``: the engine's speed, if it was measured before."""
        self.parts = tuple(parts)
        self.first = parts[0].blocks
        for part in parts:
            part.blocks.compute = compute if compute is not None else self.first.compute

    @property
    def value_bytes(self) -> int:
        """Stored bytes of all parts of a block, before any codec."""
        return sum(PAYLOAD_AT + part.blocks.layout.block_bytes for part in self.parts)

    def hashes(self, tokens: Tokens) -> list[list[BlockHash]]:
        """For each part, the hashes of the full blocks of ``tokens``."""
        return [part.blocks.hashes(tokens) for part in self.parts]

    def missing(self, hashes: Sequence[Sequence[BlockHash]]) -> list[list[int]]:
        """``BlockCache.missing`` for each part."""
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
        """``BlockCache.load`` with a sink for each part. Of a windowed part only the blocks in sight of its end are
        loaded.
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
        with recompute_cost(loading.computing_s):
            with phase("lookup"):
                wanted = min(count // block, -(-limit_tokens // block))
                found = loading.found(wanted)
                not_found = loading.miss_reason(found) if found < wanted else "" if hashes[0] else TOO_SHORT
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
        """Place the ``wanted`` blocks (ascending) of each part, as far as they can be loaded; none in a forked child,
        which does not own the store.
        """
        if self.first.owner.elsewhere:
            return
        computing_s = self.first.compute.seconds(len(tokens))
        for part, chain, sink, indices in zip(self.parts, self.hashes(tokens), sinks, wanted, strict=True):
            if asked := chain[indices[0] : indices[-1] + 1] if indices else []:
                tally = LoadTally()
                with recompute_cost(computing_s):
                    part.blocks.load_found(
                        asked, _From(sink, indices[0]), tally, PhaseClock(self.first.clock, {}), computing_s
                    )
                self.first.count_load(LoadResult(0, failed_blocks=tally.failed, size_bytes=tally.size_bytes), False)

    def __deepcopy__(self, memo: object) -> Parts:
        """A copied cache uses the same store."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A cache from another process has no store here."""
        return type(None), ()

    def save(
        self,
        hashes: Sequence[Sequence[BlockHash]],
        wanted: Sequence[Sequence[int]],
        sources: Sequence[BlockSource],
        seconds: dict[str, float] | None = None,
    ) -> Saved:
        """Store the ``wanted`` blocks of each part; the first part last, as lookups start with it."""
        saved = Saved()
        for number in reversed(range(len(self.parts))):
            blocks = self.parts[number].blocks
            stored, size_bytes = blocks.save(
                hashes[number], wanted[number], sources[number], seconds, account=not number
            )
            saved += Saved(0 if number else stored, size_bytes, stored * blocks.layout.block_bytes)
        return saved


class _Loading:
    """One prompt's load: which blocks of each part the store has, and which are in place."""

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
        """For each part, the tier of each block that is in place."""
        self._failed: Counter[str] = Counter()
        self.size_bytes = 0
        self.retransmitted = 0

    def _end(self, blocks: int) -> int:
        return min(blocks * self._parts[0].blocks.layout.block_tokens, self._limit_tokens)

    def found(self, wanted: int) -> int:
        """The longest prefix, at most ``wanted`` blocks, of which every part has what it needs."""
        if self._parts[0].window is None:
            wanted = self._parts[0].blocks.prefix(self._hashes[0][:wanted])
            self._known[0] = {wanted: False}
        return self._longest(wanted)

    def _longest(self, most: int) -> int:
        """The longest prefix, up to ``most`` blocks, at whose end all windowed parts have what is in sight."""
        if most and all(self._stored(number, self._seen(number, most)).all() for number in self._windows):
            return most
        good = np.ones(most + 1, bool)
        for number in self._windows if most else ():
            lacking = np.concatenate([[0], np.cumsum(~self._stored(number, range(most)))])
            for blocks in range(1, most + 1):
                seen = self._seen(number, blocks)
                good[blocks] &= bool(lacking[seen.stop] == lacking[seen.start])
        return int(np.flatnonzero(good)[-1])

    def _seen(self, number: int, blocks: int) -> range:
        return self._parts[number].seen(self._end(blocks))

    def _stored(self, number: int, indices: range) -> npt.NDArray[np.bool_]:
        """Of these blocks of a part, whether the store has them; each is looked up once."""
        known = self._known[number]
        if unknown := [index for index in indices if index not in known]:
            asked = range(unknown[0], unknown[-1] + 1)
            presence = self._parts[number].blocks.stored(self._hashes[number][asked.start : asked.stop])
            for index, present in zip(asked, presence, strict=True):
                known.setdefault(index, present)  # a failed load outweighs the lookup
        return np.array([known[index] for index in indices], bool)

    def miss_reason(self, found: int) -> str:
        """Why no more than ``found`` blocks were found: the reason of the first missing block behind them."""
        for number, part in enumerate(self._parts):
            seen = self._seen(number, found + 1) if part.window is not None else range(found, found + 1)
            for index in seen:
                if not self._known[number].get(index, True):
                    return part.blocks.miss_reason(self._hashes[number][index])
        return ""

    def load(self, found: int) -> int:
        """Place what is needed of the first ``found`` blocks; returns the length of the prefix that is in place."""
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
        """Place the blocks of a part that are not in place yet; whether all succeeded."""
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
        """The tier of each leading block; blocks out of every window were not loaded and take the tier of the next."""
        placed = next((there for there in self._placed if there), {})
        nearest = next(iter(placed.values()), "")
        return [placed.get(index, nearest) for index in range(loaded)]

    def failures(self, blocks: int) -> dict[str, int]:
        """Reasons for ``blocks`` blocks that were found and are not used."""
        if not blocks:
            return {}
        reason = next(iter(self._failed))
        return {reason: 1, "behind a failed block": blocks - 1} if blocks > 1 else {reason: 1}


class _From:
    """A sink whose block 0 is block ``first`` of ``sink``."""

    def __init__(self, sink: BlockSink, first: int) -> None:
        self._sink = sink
        self._first = first

    def place(self, index: int, block: memoryview) -> None:
        self._sink.place(self._first + index, block)
