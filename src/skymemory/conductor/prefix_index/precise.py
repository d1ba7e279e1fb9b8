"""The index of who listens to engines: what they say they hold, and nothing else.

Every engine numbers its batches of events. A number left out means events were lost: from then on the engine's slot is
*stale*, and nothing is believed of it until the lost batches were replayed, until it says that it cleared everything,
or until whoever listens begins anew with an empty slot (``begin_anew``): blocks that were stored before then are not
found, which costs hits, and never are ones believed that are gone. Engines do not evict the ends of prefixes first: a
block may be held whose prefix is not, and counts for nothing.

A block may be in several media, and is found as long as it is in one. Some media never tell what they evict (LMCache's
none): of those, the blocks told last are believed, and what an engine lacked of a prompt is no longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from skymemory import native
from skymemory.conductor.prefix_index.base import Blocks
from skymemory.conductor.prefix_index.engine_blocks import Change, EngineBlocks
from skymemory.conductor.prefix_index.events import (
    CPU,
    DISK,
    GPU,
    MEDIA,
    OTHER,
    REMOTE,
    AllCleared,
    Batch,
    BlocksStored,
    Event,
    medium_of,
)
from skymemory.errors import InvalidInput
from skymemory.metrics import Counters

WEIGHTS: Mapping[str, float] = MappingProxyType({GPU: 1.0, CPU: 0.8, DISK: 0.5, REMOTE: 0.5})
"""What a block counts by its medium. The first two are llm-d's (``pkg/kvcache/backend.go``), in which a medium without
a weight counts 1, as if nothing had to be loaded: not followed."""
_NUMBERS: Mapping[str, int] = MappingProxyType({medium: number for number, medium in enumerate(MEDIA)})
"""What the table calls each medium."""
MAX_WAITING = 1024
"""Batches kept behind a gap; more are lost, and replayed with the rest."""
Table = type[native.HolderTable]


@dataclass(slots=True)
class _Engine:
    blocks: EngineBlocks
    expected: int = 0
    """The number of the next batch."""
    last_live: int = -1
    waiting: dict[int, Batch] = field(default_factory=dict)
    """Batches from behind a gap, by number."""
    stale: bool = False
    trouble: str = ""


class PreciseIndex:
    """``block_tokens``: tokens of a block, the same for all engines and for the prompts that are matched.

    ``weights``: what a block counts by its medium, in ``weighted``, where that is not as in ``WEIGHTS``. A medium of
    unknown name counts as the one of least weight.
    ``secret``, ``table``: as of ``ApproximatePrefixIndex``.
    """

    def __init__(
        self,
        block_tokens: int,
        weights: Mapping[str, float] = WEIGHTS,
        secret: int | None = None,
        table: Table = native.HolderTable,
    ) -> None:
        if block_tokens < 1:
            raise InvalidInput(f"blocks of {block_tokens} tokens: expected 1 or more")
        self.block_tokens = block_tokens
        self.secret = secret
        self.counters = Counters()
        self._weights = {**WEIGHTS, **{medium_of(name): float(weight) for name, weight in weights.items()}}
        if not all(0 <= weight < math.inf for weight in self._weights.values()):
            raise InvalidInput(f"weights of media {dict(weights)}; expected 0 or more each, such as 0.8")
        self._weights[OTHER] = min(self._weights.values())
        self._engines: dict[int, _Engine] = {}
        self._media: list[str] = []
        """Those that blocks were told of, the nearest first."""
        self._order: list[tuple[int, float]] = []
        """The table's number of each and what a block counts there, the best first."""
        try:
            self._table = table() if secret is None else table(secret)
        except (ValueError, OverflowError) as error:
            raise InvalidInput(str(error)) from None

    def follow(self, slot: int, model: str) -> None:
        """Events of ``slot`` will come, of an engine that serves ``model``; nothing is known of it yet."""
        self.forget(slot)
        self._engines[slot] = _Engine(EngineBlocks(model, self.block_tokens, counters=self.counters))

    def apply(self, slot: int, batch: Batch, replayed: bool = False, more: bool = False) -> bool:
        """Take a batch, live or ``replayed`` on request; False: some are missing from ``missing(slot)`` on. With
        ``more`` it goes on in the next call, under the same number, and must be replayed.

        A live number that is not above the last one means that the engine was started anew: it holds nothing.

        Raises:
            InvalidInput: a slot that is not followed, or events that cannot be followed (blocks of another size): the
                slot is believed to hold nothing from then on, and ``trouble`` says why.
        """
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
            if any(isinstance(event, AllCleared) for event in batch.events):
                self._clear(slot)
                engine.expected = batch.sequence
            elif len(engine.waiting) < MAX_WAITING:
                engine.waiting[batch.sequence] = batch
                return False
            else:
                return False
        self._take(slot, engine, batch, more)
        while (held := engine.waiting.pop(engine.expected, None)) is not None:
            self._take(slot, engine, held)
        engine.waiting = {number: one for number, one in engine.waiting.items() if number > engine.expected}
        engine.stale = bool(engine.waiting) or engine.last_live >= engine.expected
        return not engine.stale

    def _take(self, slot: int, engine: _Engine, batch: Batch, more: bool = False) -> None:
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
        """One event, whatever its number: for engines that do not number them."""
        blocks = self._engine(slot).blocks
        if isinstance(event, AllCleared):
            self._clear(slot)
            return
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

    def begin_anew(self, slot: int, sequence: int) -> None:
        """What was lost cannot be had again: an empty slot, and the next batch is ``sequence``."""
        engine = self._engine(slot)
        self.counters.add("slots_begun_anew")
        self._clear(slot)
        waiting = {number: batch for number, batch in engine.waiting.items() if number >= sequence}
        engine.expected, engine.waiting = sequence, {}
        engine.stale = engine.last_live >= sequence
        for batch in waiting.values():
            self.apply(slot, batch, replayed=True)

    def stale(self, slot: int) -> bool:
        """Whether events of ``slot`` are missing, so that nothing is believed of it."""
        return self._engine(slot).stale

    def missing(self, slot: int) -> int:
        """The number of the first batch that has not come."""
        return self._engine(slot).expected

    def trouble(self, slot: int) -> str:
        """Why the events of ``slot`` cannot be followed; empty where they can."""
        engine = self._engines.get(slot)
        return "" if engine is None else engine.trouble

    def aside(self, slot: int) -> int:
        """Blocks of ``slot`` that wait for a parent that is not known."""
        return self._engine(slot).blocks.aside

    def match(self, blocks: Blocks, slots: Sequence[int]) -> list[int]:
        return self.match_weighted(blocks, slots)[0]

    def weighted(self, blocks: Blocks, slots: Sequence[int]) -> list[float]:
        """As ``match``, but each block counts the weight of the best medium that holds it."""
        return self.match_weighted(blocks, slots)[1]

    def match_weighted(self, blocks: Blocks, slots: Sequence[int]) -> tuple[list[int], list[float]]:
        """What ``match`` and ``weighted`` say, for one walk along the chain."""
        return self._walk(blocks, slots, self._order)

    @property
    def farther(self) -> bool:
        """Whether any block was told to be elsewhere than in the GPU's memory."""
        return any(medium != GPU for medium in self._media)

    def costs(self, blocks: Blocks, slots: Sequence[int], costs: Mapping[str, float]) -> list[float]:
        """Of the blocks that ``match`` counts, the sum of ``costs``: each by the nearest medium that holds it."""
        order = [(_NUMBERS[medium], costs.get(medium, 0.0)) for medium in self._media]
        return self._walk(blocks, slots, order)[1]

    def _walk(
        self, blocks: Blocks, slots: Sequence[int], order: Sequence[tuple[int, float]]
    ) -> tuple[list[int], list[float]]:
        chain = np.ascontiguousarray(blocks, dtype=np.uint64).data
        believed = [slot for slot in slots if (engine := self._engines.get(slot)) is not None and not engine.stale]
        found = self._table.match(chain, believed, order)
        if len(believed) == len(slots):
            return found
        depths, sums = (dict(zip(believed, figures, strict=True)) for figures in found)
        return [int(depths.get(slot, 0)) for slot in slots], [float(sums.get(slot, 0.0)) for slot in slots]

    def learn(self, slot: int, blocks: Blocks) -> None:
        """Nothing: the engine will tell."""

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        """How many blocks are no longer believed: what a medium held that never tells what it evicts.

        Of others no block is dropped: an engine that holds one tells so once, and would not tell again. But a block
        that it lacked has no second copy: an engine that tells only when the last copy goes (which vLLM is about to
        do) would else be believed to hold for ever what it had twice.
        """
        engine = self._engines.get(slot)
        if engine is None or not 0 <= cached_blocks < len(blocks):
            return 0
        lacked = blocks[cached_blocks:].tolist()
        engine.blocks.single(set(lacked))
        if not (silent := engine.blocks.silent):
            return 0
        believed = self.match(blocks, (slot,))[0]
        self._take_away(slot, ((medium, block) for medium in silent for block in lacked))
        return believed - self.match(blocks, (slot,))[0]

    def forget(self, slot: int) -> None:
        if slot in self._engines:
            self._clear(slot)
            del self._engines[slot]

    @property
    def table_rows(self) -> int:
        """Different blocks that are held, summed over the media."""
        return self._table.blocks()

    def blocks_of(self, slot: int) -> int:
        engine = self._engines.get(slot)
        return 0 if engine is None else len(set().union(*(held.values() for held in engine.blocks.media.values())))

    def _engine(self, slot: int) -> _Engine:
        engine = self._engines.get(slot)
        if engine is None:
            raise InvalidInput(f"events of slot {slot}, which nobody follows: follow() it first")
        return engine

    def _add(self, slot: int, changes: Iterable[Change]) -> None:
        for medium, block in changes:
            if medium not in self._media:
                self._media = [each for each in MEDIA if each == medium or each in self._media]
                weights = [(_NUMBERS[each], self._weights[each]) for each in self._media]
                self._order = sorted(weights, key=lambda one: one[1], reverse=True)
            self._table.add(_NUMBERS[medium], slot, block)

    def _take_away(self, slot: int, changes: Iterable[Change]) -> None:
        for medium, block in changes:
            self._table.take(_NUMBERS[medium], slot, block)

    def _clear(self, slot: int) -> None:
        engine = self._engines[slot]
        for medium, held in engine.blocks.media.items():
            self._take_away(slot, ((medium, block) for block in held.values()))
        engine.blocks = EngineBlocks(engine.blocks.model, self.block_tokens, counters=self.counters)
