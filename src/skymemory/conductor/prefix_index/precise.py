"""The index of who listens to engines: what they say they hold, and nothing else.

Every engine numbers its batches of events. A number left out means events were lost: from then on the engine's slot is
*stale*, and nothing is believed of it until the lost batches were replayed, until it says that it cleared everything,
or until whoever listens begins anew with an empty slot (``begin_anew``): blocks that were stored before then are not
found, which costs hits, and never are ones believed that are gone. Engines do not evict the ends of prefixes first: a
block may be held whose prefix is not, and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from skymemory import native
from skymemory.conductor.prefix_index.base import Blocks
from skymemory.conductor.prefix_index.engine_blocks import Change, EngineBlocks
from skymemory.conductor.prefix_index.events import AllCleared, Batch, BlocksRemoved, BlocksStored, Event
from skymemory.errors import InvalidInput
from skymemory.metrics import Counters
from skymemory.native.twin_holders import MAX_MEDIA

WEIGHTS: Mapping[str, float] = MappingProxyType({"GPU": 1.0, "CPU": 0.8})
FARTHER = 0.5
"""What a block counts that is neither in the GPU's memory nor in the host's: a disk, another machine."""
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

    ``weights``: what a block counts by its medium, in ``weighted``; names of media are compared in capitals.
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
        self._weights = {name.upper(): weight for name, weight in weights.items()}
        self._engines: dict[int, _Engine] = {}
        self._numbers: dict[str, int] = {}
        self._order: list[tuple[int, float]] = []
        """The table's number of each medium and what a block counts there, the best first."""
        try:
            self._table = table() if secret is None else table(secret)
        except (ValueError, OverflowError) as error:
            raise InvalidInput(str(error)) from None

    def follow(self, slot: int, model: str) -> None:
        """Events of ``slot`` will come, of an engine that serves ``model``; nothing is known of it yet."""
        self.forget(slot)
        self._engines[slot] = _Engine(EngineBlocks(model, self.block_tokens))

    def apply(self, slot: int, batch: Batch, replayed: bool = False) -> bool:
        """Take a batch, live or ``replayed`` on request; False: some are missing from ``missing(slot)`` on.

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
        self._take(slot, engine, batch)
        while (held := engine.waiting.pop(engine.expected, None)) is not None:
            self._take(slot, engine, held)
        engine.waiting = {number: one for number, one in engine.waiting.items() if number > engine.expected}
        engine.stale = bool(engine.waiting) or engine.last_live >= engine.expected
        return not engine.stale

    def _take(self, slot: int, engine: _Engine, batch: Batch) -> None:
        engine.expected = batch.sequence + 1
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
        if isinstance(event, BlocksStored):
            self._add(slot, blocks.stored(event))
        elif isinstance(event, BlocksRemoved):
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
        chain = np.ascontiguousarray(blocks, dtype=np.uint64).data
        believed = [slot for slot in slots if (engine := self._engines.get(slot)) is not None and not engine.stale]
        found = self._table.match(chain, believed, self._order)
        if len(believed) == len(slots):
            return found
        depths, sums = (dict(zip(believed, figures, strict=True)) for figures in found)
        return [int(depths.get(slot, 0)) for slot in slots], [float(sums.get(slot, 0.0)) for slot in slots]

    def learn(self, slot: int, blocks: Blocks) -> None:
        """Nothing: the engine will tell."""

    def correct(self, slot: int, blocks: Blocks, cached_blocks: int) -> int:
        """No block is dropped: an engine that holds one tells so once, and would not tell again.

        But a block that it lacked has no second copy: an engine that tells only when the last copy goes (which vLLM is
        about to do) would else be believed to hold for ever what it had twice.
        """
        engine = self._engines.get(slot)
        if engine is not None and 0 <= cached_blocks < len(blocks):
            engine.blocks.single(set(blocks[cached_blocks:].tolist()))
        return 0

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

    def _weight(self, medium: str) -> float:
        return self._weights.get(medium.upper(), FARTHER)

    def _add(self, slot: int, changes: Iterable[Change]) -> None:
        for medium, block in changes:
            self._table.add(self._number(medium), slot, block)

    def _take_away(self, slot: int, changes: Iterable[Change]) -> None:
        for medium, block in changes:
            self._table.take(self._number(medium), slot, block)

    def _number(self, medium: str) -> int:
        """What the table calls a medium. Those that come when it has no number left are one, the last."""
        number = self._numbers.get(medium)
        if number is None:
            if len(self._numbers) >= MAX_MEDIA - 1:
                return MAX_MEDIA - 1
            number = self._numbers[medium] = len(self._numbers)
            weights = {number: self._weight(name) for name, number in self._numbers.items()} | {MAX_MEDIA - 1: FARTHER}
            self._order = sorted(weights.items(), key=lambda one: one[1], reverse=True)
        return number

    def _clear(self, slot: int) -> None:
        engine = self._engines[slot]
        for medium, held in engine.blocks.media.items():
            self._take_away(slot, ((medium, block) for block in held.values()))
        engine.blocks = EngineBlocks(engine.blocks.model, self.block_tokens)
