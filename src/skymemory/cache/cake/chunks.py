"""The chunks of a prompt out of the store's blocks: fetched, verified, decoded straight into their place, and told of.

Every fetch is a lease and a load of its own, so that a chunk that is computed instead is never leased.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock

from skymemory.cache.blocks import TIER_FAILURES, BlockCache, BlockSink
from skymemory.cache.cake.scheduler import PromptChunk
from skymemory.cache.patience import Usual
from skymemory.kv.block import BlockHash
from skymemory.store.base import KeyReport, LoadTicket


@dataclass(frozen=True, slots=True)
class ChunkOrigin:
    """Where the blocks of a chunk that was put in its place came from."""

    tiers: tuple[str, ...]
    """Of each block."""
    size_bytes: int
    retransmitted: int


class BlockChunks:
    """``chunks`` of the prompt with these block hashes, out of the store of ``blocks`` into ``sink``."""

    def __init__(
        self,
        blocks: BlockCache,
        hashes: Sequence[BlockHash],
        chunks: Sequence[PromptChunk],
        sink: BlockSink,
        usual: Usual,
    ) -> None:
        """``usual`` is given the seconds of each fetch that succeeds."""
        self._blocks = blocks
        self._usual = usual
        self._hashes = hashes
        self._chunks = chunks
        self._sink: BlockSink | None = sink
        self._lock = Lock()
        self._late: set[int] = set()
        self.origins: dict[int, ChunkOrigin] = {}
        """Of the chunks put in their place, by index."""
        self._failed: Counter[str] = Counter()

    def fetch(self, index: int) -> FetchedBlocks | None:
        """A chunk's blocks, leased and loaded; None where one of them did not come."""
        first, hashes = self._blocks_of(index)
        store, clock = self._blocks.store, self._blocks.clock
        ticket, began_s = None, clock()
        try:
            ticket = store.prepare_load(hashes)
            values = store.complete_load(ticket)
            report = ticket.report
        except BaseException as error:
            if ticket is not None:
                self._blocks.release(ticket)
            if not isinstance(error, TIER_FAILURES):
                raise
            self._blocks.tier_failed()
            self._fail(index, "unreachable", len(hashes))
            return None
        told = report.keys if report is not None and len(report.keys) == len(hashes) else ()
        there = [value for value in values if value is not None]
        if len(there) < len(hashes) or len(values) != len(hashes):
            for at in range(len(hashes)):
                if at >= len(values) or values[at] is None:
                    self._fail(index, (told[at].reason if told else "") or "unreachable")
            self._blocks.forget_sealed(hashes, told)
            self._blocks.release(ticket)
            return None
        resent = report.retransmitted if report is not None else 0
        self._usual.took(clock() - began_s, sum(value.nbytes for value in there))
        return FetchedBlocks(self, index, first, hashes, there, ticket, told, resent)

    def _blocks_of(self, index: int) -> tuple[int, Sequence[BlockHash]]:
        chunk, tokens = self._chunks[index], self._blocks.layout.block_tokens
        first = chunk.first_token // tokens
        return first, self._hashes[first : first + chunk.tokens // tokens]

    def give_up(self, index: int) -> None:
        """The chunk did not come in time; what still becomes of it is not told of any more."""
        _, hashes = self._blocks_of(index)
        self._blocks.tier_failed()
        self._fail(index, "deadline", len(hashes))
        with self._lock:
            self._late.add(index)

    def close(self) -> None:
        """Nothing is put in its place any more: a fetch that hangs must not keep the engine's memory."""
        self._sink = None

    def failures(self) -> dict[str, int]:
        """Blocks that did not come or were wrong, by reason."""
        with self._lock:
            return dict(self._failed)

    def _fail(self, index: int, reason: str, blocks: int = 1) -> None:
        with self._lock:
            if index not in self._late:
                self._failed[reason] += blocks

    def place(self, fetched: FetchedBlocks) -> bool:
        """Put a fetched chunk in its place; False from the first block on that is not what it should be."""
        if (sink := self._sink) is None:
            return False
        for offset, (block_hash, value) in enumerate(zip(fetched.hashes, fetched.values, strict=True)):
            if failure := self._blocks.place(sink, fetched.first + offset, block_hash, value):
                self._fail(fetched.index, failure)
                fetched.wrong = block_hash, failure
                return False
        store, told = self._blocks.store, fetched.told
        tiers = tuple(one.tier or store.name for one in told) if told else (store.name,) * len(fetched.hashes)
        size_bytes = sum(value.nbytes for value in fetched.values)
        with self._lock:
            self.origins[fetched.index] = ChunkOrigin(tiers, size_bytes, fetched.retransmitted)
        return True

    def let_go(self, fetched: FetchedBlocks) -> None:
        """Give it back; a block that was wrong is removed now, for while it was put in its place others waited."""
        self._blocks.release(fetched.ticket)
        if fetched.wrong is not None:
            self._blocks.forget_wrong(*fetched.wrong)


@dataclass(slots=True)
class FetchedBlocks:
    """One chunk's stored values, as the store handed them out."""

    source: BlockChunks
    index: int
    first: int
    """Number of its first block in the prompt."""
    hashes: Sequence[BlockHash]
    values: list[memoryview]
    ticket: LoadTicket
    told: Sequence[KeyReport]
    retransmitted: int
    wrong: tuple[BlockHash, str] | None = None
    """The block that was not what it should be, and why."""

    def place(self) -> bool:
        return self.source.place(self)

    def release(self) -> None:
        self.values = []
        self.source.let_go(self)


class ChunksOfParts:
    """Chunks whose blocks are stored in several parts, each of which is all there or the chunk does not come."""

    def __init__(self, sources: Sequence[BlockChunks]) -> None:
        """The first says where a chunk came from."""
        self._sources = sources

    @property
    def origins(self) -> dict[int, ChunkOrigin]:
        """As of ``BlockChunks``, with the bytes of all parts."""
        first, *others = (source.origins for source in self._sources)
        return {
            index: replace(
                origin,
                size_bytes=sum((one[index].size_bytes for one in others), origin.size_bytes),
                retransmitted=sum((one[index].retransmitted for one in others), origin.retransmitted),
            )
            for index, origin in first.items()
            if all(index in one for one in others)
        }

    def fetch(self, index: int) -> FetchedParts | None:
        there: list[FetchedBlocks] = []
        for source in self._sources:
            part = source.fetch(index)
            if part is None:
                FetchedParts(there).release()
                return None
            there.append(part)
        return FetchedParts(there)

    def give_up(self, index: int) -> None:
        self._sources[0].give_up(index)

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def failures(self) -> dict[str, int]:
        return dict(sum((Counter(source.failures()) for source in self._sources), Counter()))


@dataclass(frozen=True, slots=True)
class FetchedParts:
    """One chunk, part by part."""

    parts: Sequence[FetchedBlocks]

    def place(self) -> bool:
        return all(part.place() for part in self.parts)

    def release(self) -> None:
        for part in self.parts:
            part.release()
