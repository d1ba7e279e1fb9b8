"""Precise prefix index, fed by the engines' KV cache events.

Engines do not evict the ends of prefixes first: a held block with an evicted prefix does not count. Some media
(LMCache's) do not report removals: only their latest blocks count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from skymemory import native
from skymemory.conductor.prefix_index.approximate import Blocks
from skymemory.conductor.prefix_index.events import (
    CPU,
    DISK,
    GPU,
    MEDIA,
    OTHER,
    REMOTE,
    AllCleared,
    BlocksStored,
    Change,
    EngineBlocks,
    Event,
    EventBatch,
    medium_of,
)
from skymemory.errors import InvalidInput
from skymemory.metrics import Counters

WEIGHTS: Mapping[str, float] = MappingProxyType({GPU: 1.0, CPU: 0.8, DISK: 0.5, REMOTE: 0.5})
"""Weight by medium; the first two are llm-d's (``pkg/kvcache/backend.go``). Others have the least weight."""
_NUMBERS: Mapping[str, int] = MappingProxyType({medium: number for number, medium in enumerate(MEDIA)})
MAX_WAITING = 1024
"""Batches kept after a gap; later batches are dropped and replayed."""
Table = type[native.HolderTable]


@dataclass(slots=True)
class _Engine:
    """Blocks of an engine, and its stream of numbered event batches."""

    blocks: EngineBlocks
    expected: int = 0  # number of the next batch
    last_live: int = -1  # largest number received live, not replayed
    waiting: dict[int, EventBatch] = field(default_factory=dict)  # batches after a gap
    stale: bool = False  # true while batches are missing: nothing matches
    trouble: str = ""


class PreciseIndex:
    """Prefix index fed by KV events.

    ``block_tokens`` is that of all engines and prompts. ``secret`` is as in ``ApproximatePrefixIndex``.
    """

    def __init__(
        self,
        block_tokens: int,
        weights: Mapping[str, float] = WEIGHTS,
        secret: int | None = None,
        table: Table = native.HolderTable,
    ) -> None:
        if block_tokens < 1:
            raise InvalidInput(f"block_tokens is {block_tokens}; expected 1 or more")
        self.block_tokens = block_tokens
        self.secret = secret
        self.counters = Counters()
        self._weights = {**WEIGHTS, **{medium_of(name): float(weight) for name, weight in weights.items()}}
        if not all(0 <= weight < math.inf for weight in self._weights.values()):
            raise InvalidInput(f"weights of media {dict(weights)}; expected 0 or more each, such as 0.8")
        self._weights[OTHER] = min(self._weights.values())
        self._engines: dict[int, _Engine] = {}
        self._media: list[str] = []  # media, the fastest first
        self._order: list[tuple[int, float]] = []  # media's numbers and weights, the largest weight first
        try:
            self._table = table() if secret is None else table(secret)
        except (ValueError, OverflowError) as error:
            raise InvalidInput(str(error)) from None

    def follow(self, slot: int, model: str) -> None:
        """Start or restart with an empty slot."""
        self.forget(slot)
        self._engines[slot] = _Engine(EngineBlocks(model, self.block_tokens, counters=self.counters))

    def apply(self, slot: int, batch: EventBatch, replayed: bool = False, more: bool = False) -> bool:
        """Apply a batch; return False if batches from ``missing(slot)`` on are missing.

        With ``more`` the next call continues the replayed batch under the same number.

        Raises:
            InvalidInput: an unknown slot, or unusable events. The slot is then empty, and ``trouble`` returns the
                reason.
        """
        # Cases by the number of the batch (``expected`` is the next number):
        #
        #   number < expected     known: a replay overlaps with live batches
        #   number = expected     apply it, then all waiting batches that follow without a gap
        #   number > expected     a gap: the slot is stale, the batch waits, the caller requests a replay of ``missing``
        #   live, not rising      the engine restarted and counts from 0: the slot starts empty and not stale
        #
        # Invariant: while a slot is not stale, its blocks are what the engine reported before ``expected``. It stays
        # stale while batches wait, or if a live batch from ``expected`` on was received: beyond ``MAX_WAITING`` batches
        # are not kept.
        engine = self._engine(slot)
        if not replayed:
            if batch.sequence <= engine.last_live:
                self.counters.add("engine_restarts")
                self.follow(slot, engine.blocks.model)
                engine = self._engines[slot]
            engine.last_live = batch.sequence
        if batch.sequence < engine.expected:
            return not engine.stale
        if batch.sequence > engine.expected:
            if not engine.stale:
                self.counters.add("event_gaps")
                engine.stale = True
            # After a clear no earlier batch matters, lost or not: the gap is closed without a replay.
            if any(isinstance(event, AllCleared) for event in batch.events):
                self._clear(slot)
                engine.expected = batch.sequence
            elif len(engine.waiting) < MAX_WAITING:
                engine.waiting[batch.sequence] = batch
                return False
            else:
                return False
        self._take(slot, engine, batch, more)
        while (next_batch := engine.waiting.pop(engine.expected, None)) is not None:
            self._take(slot, engine, next_batch)
        engine.waiting = {number: waiting for number, waiting in engine.waiting.items() if number > engine.expected}
        engine.stale = bool(engine.waiting) or engine.last_live >= engine.expected
        return not engine.stale

    def _take(self, slot: int, engine: _Engine, batch: EventBatch, more: bool = False) -> None:
        # Apply the expected batch. ``more``: it has further parts under the same number.
        engine.expected = batch.sequence + (not more)
        try:
            for event in batch.events:
                self.take(slot, event)
        except InvalidInput as error:
            self.counters.add("events_refused")
            self._clear(slot)
            engine.trouble = str(error)
            raise

    def take(self, slot: int, event: Event) -> None:
        """Apply an event of an engine that does not number its events."""
        blocks = self._engine(slot).blocks
        if isinstance(event, AllCleared):
            self._clear(slot)
            return
        # Other groups than the first have layers with sliding windows or state, and hold no whole prefixes.
        if event.group != 0:
            self.counters.add("events_of_other_groups")
            return
        if medium_of(event.medium) == OTHER:
            self.counters.add("events_of_unknown_media")
        if isinstance(event, BlocksStored):
            self._add(slot, blocks.stored(event))
            self._take_away(slot, blocks.surplus())
        else:
            self._take_away(slot, blocks.removed(event))

    def resume_empty(self, slot: int, sequence: int) -> None:
        """Give up lost batches: continue from number ``sequence`` with no blocks, which costs hits but matches no
        evicted block.
        """
        engine = self._engine(slot)
        self.counters.add("slots_begun_anew")  # a metric's name; words: keep
        self._clear(slot)
        waiting = {number: batch for number, batch in engine.waiting.items() if number >= sequence}
        engine.expected, engine.waiting = sequence, {}
        engine.stale = engine.last_live >= sequence
        for batch in waiting.values():
            self.apply(slot, batch, replayed=True)

    def stale(self, slot: int) -> bool:
        return self._engine(slot).stale

    def missing(self, slot: int) -> int:
        return self._engine(slot).expected

    def trouble(self, slot: int) -> str:
        """Return the reason for unusable events, or an empty text."""
        engine = self._engines.get(slot)
        return "" if engine is None else engine.trouble

    def orphans(self, slot: int) -> int:
        return self._engine(slot).blocks.orphans

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        return self.match_weighted(blocks, slots)[0]

    def weighted(self, blocks: Blocks, slots: Sequence[int]) -> list[float]:
        """Return the matched blocks, each weighted by the best of its media."""
        return self.match_weighted(blocks, slots)[1]

    def match_weighted(self, blocks: Blocks, slots: Sequence[int]) -> tuple[list[int], list[float]]:
        return self._walk(blocks, slots, self._order)

    @property
    def beyond_gpu(self) -> bool:
        return any(medium != GPU for medium in self._media)

    def costs(self, blocks: Blocks, slots: Sequence[int], costs: Mapping[str, float]) -> list[float]:
        """Return the sum of ``costs`` over matched blocks, each by the fastest of its media."""
        order = [(_NUMBERS[medium], costs.get(medium, 0.0)) for medium in self._media]
        return self._walk(blocks, slots, order)[1]

    def _walk(
        self, blocks: Blocks, slots: Sequence[int], order: Sequence[tuple[int, float]]
    ) -> tuple[list[int], list[float]]:
        # Return matched blocks and their weight per slot; a block counts in the first medium of ``order``, numbers and
        # weights.
        # A stale slot may hold evicted blocks, and a wrong hit costs a whole prefill: it matches nothing.
        chain = np.ascontiguousarray(blocks, dtype=np.uint64).data
        usable = [slot for slot in slots if (engine := self._engines.get(slot)) is not None and not engine.stale]
        matches = self._table.match(chain, usable, order)
        if len(usable) == len(slots):
            return matches
        depths, sums = (dict(zip(usable, figures, strict=True)) for figures in matches)
        return [int(depths.get(slot, 0)) for slot in slots], [float(sums.get(slot, 0.0)) for slot in slots]

    def learn(self, slot: int, blocks: Blocks) -> None:
        """Do nothing: the engine reports its blocks itself."""

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        """Drop the missing blocks from media without reported removals; return their number."""
        engine = self._engines.get(slot)
        if engine is None or not 0 <= cached_blocks < len(blocks):
            return 0
        lacked = blocks[cached_blocks:].tolist()
        # If an engine reports only the last copy's removal (as vLLM plans to), counted copies would stay forever.
        engine.blocks.drop_copies(set(lacked))
        if not (media_without_removals := engine.blocks.media_without_removals):
            return 0
        matched = self.match(blocks, (slot,))[0]
        self._take_away(slot, ((medium, block) for medium in media_without_removals for block in lacked))
        return matched - self.match(blocks, (slot,))[0]

    def forget(self, slot: int) -> None:
        if slot in self._engines:
            self._clear(slot)
            del self._engines[slot]

    @property
    def table_rows(self) -> int:
        return self._table.blocks()

    def blocks_of(self, slot: int) -> int:
        engine = self._engines.get(slot)
        return 0 if engine is None else len(set().union(*(names.values() for names in engine.blocks.media.values())))

    def _engine(self, slot: int) -> _Engine:
        engine = self._engines.get(slot)
        if engine is None:
            raise InvalidInput(f"events of slot {slot} without a subscription: call follow() first")
        return engine

    def _add(self, slot: int, changes: Iterable[Change]) -> None:
        for medium, block in changes:
            # Media are added at their first block: most fleets have a single medium, and each costs lookups per match.
            if medium not in self._media:
                self._media = [name for name in MEDIA if name == medium or name in self._media]
                weights = [(_NUMBERS[name], self._weights[name]) for name in self._media]
                self._order = sorted(weights, key=lambda pair: pair[1], reverse=True)
            self._table.add(_NUMBERS[medium], slot, block)

    def _take_away(self, slot: int, changes: Iterable[Change]) -> None:
        # The engine no longer has these blocks there.
        for medium, block in changes:
            self._table.take(_NUMBERS[medium], slot, block)

    def _clear(self, slot: int) -> None:
        engine = self._engines[slot]
        for medium, names in engine.blocks.media.items():
            self._take_away(slot, ((medium, block) for block in names.values()))
        engine.blocks = EngineBlocks(engine.blocks.model, self.block_tokens, counters=self.counters)
