"""A prompt's chunks as blocks of the store: fetched, verified and decoded straight into the engine's memory.

Every fetch is a lease and a load of its own, so that a chunk that is computed instead is never leased.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock

from skymemory.cache.blocks import TIER_FAILURES, BlockCache, BlockSink
from skymemory.cache.cake.scheduler import PromptChunk
from skymemory.cache.patience import Latencies
from skymemory.kv.block import BlockHash
from skymemory.store.base import KeyReport, LoadTicket


@dataclass(frozen=True, slots=True)
class ChunkOrigin:
    """Where the blocks of a placed chunk came from."""

    tiers: tuple[str, ...]
    """The tier of each block."""
    size_bytes: int
    retransmitted: int


class BlockChunks:
    """``chunks`` of the prompt with these block hashes, loaded from the store of ``blocks`` into ``sink``."""

    def __init__(
        self,
        blocks: BlockCache,
        hashes: Sequence[BlockHash],
        chunks: Sequence[PromptChunk],
        sink: BlockSink,
        latencies: Latencies,
    ) -> None:
        self._blocks = blocks
        self._latencies = latencies
        self._hashes = hashes
        self._chunks = chunks
        self._sink: BlockSink | None = sink
        self._lock = Lock()
        self._late: set[int] = set()
        self.origins: dict[int, ChunkOrigin] = {}
        """Origins of the placed chunks, by index."""
        self._failed: Counter[str] = Counter()

    def fetch(self, index: int) -> FetchedBlocks | None:
        """A chunk's blocks, leased and loaded; None if one of them did not come."""
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
        reports = report.keys if report is not None and len(report.keys) == len(hashes) else ()
        loaded = [value for value in values if value is not None]
        if len(loaded) < len(hashes) or len(values) != len(hashes):
            for at in range(len(hashes)):
                if at >= len(values) or values[at] is None:
                    self._fail(index, (reports[at].reason if reports else "") or "unreachable")
            self._blocks.delete_sealed(hashes, reports)
            self._blocks.release(ticket)
            return None
        retransmitted = report.retransmitted if report is not None else 0
        self._latencies.took(clock() - began_s, sum(value.nbytes for value in loaded))
        return FetchedBlocks(self, index, first, hashes, loaded, ticket, reports, retransmitted)

    def _blocks_of(self, index: int) -> tuple[int, Sequence[BlockHash]]:
        chunk, tokens = self._chunks[index], self._blocks.layout.block_tokens
        first = chunk.first_token // tokens
        return first, self._hashes[first : first + chunk.tokens // tokens]

    def give_up(self, index: int) -> None:
        """The fetch of this chunk timed out; its late failures are not counted again."""
        _, hashes = self._blocks_of(index)
        self._blocks.tier_failed()
        self._fail(index, "deadline", len(hashes))
        with self._lock:
            self._late.add(index)

    def close(self) -> None:
        """Place nothing from now on; a fetch that hangs must not keep the engine's memory alive."""
        self._sink = None

    def failures(self) -> dict[str, int]:
        """Number of blocks that did not come or were invalid, by reason."""
        with self._lock:
            return dict(self._failed)

    def _fail(self, index: int, reason: str, blocks: int = 1) -> None:
        with self._lock:
            if index not in self._late:
                self._failed[reason] += blocks

    def place(self, fetched: FetchedBlocks) -> bool:
        """Verify, decode and place a fetched chunk; False at its first invalid block."""
        if (sink := self._sink) is None:
            return False
        for offset, (block_hash, value) in enumerate(zip(fetched.hashes, fetched.values, strict=True)):
            if failure := self._blocks.place(sink, fetched.first + offset, block_hash, value):
                self._fail(fetched.index, failure)
                fetched.wrong = block_hash, failure
                return False
        name, reports = self._blocks.store.name, fetched.reports
        tiers = tuple(one.tier or name for one in reports) if reports else (name,) * len(fetched.hashes)
        size_bytes = sum(value.nbytes for value in fetched.values)
        with self._lock:
            self.origins[fetched.index] = ChunkOrigin(tiers, size_bytes, fetched.retransmitted)
        return True

    def release(self, fetched: FetchedBlocks) -> None:
        """Release its lease, and delete an invalid block: not in ``place``, where other threads wait."""
        self._blocks.release(fetched.ticket)
        if fetched.wrong is not None:
            self._blocks.delete_invalid(*fetched.wrong)


@dataclass(slots=True)
class FetchedBlocks:
    """One chunk's stored values, leased from the store."""

    source: BlockChunks
    index: int
    first: int
    """Number of its first block in the prompt."""
    hashes: Sequence[BlockHash]
    values: list[memoryview]
    ticket: LoadTicket
    reports: Sequence[KeyReport]
    retransmitted: int
    wrong: tuple[BlockHash, str] | None = None
    """The invalid block, and why."""

    def place(self) -> bool:
        return self.source.place(self)

    def release(self) -> None:
        self.values = []
        self.source.release(self)


class ChunksOfParts:
    """Chunks whose blocks are stored in several parts; a chunk counts as loaded only if all its parts are."""

    def __init__(self, sources: Sequence[BlockChunks]) -> None:
        """The first part determines a chunk's origin."""
        self._sources = sources

    @property
    def origins(self) -> dict[int, ChunkOrigin]:
        """As in ``BlockChunks``, with the bytes of all parts."""
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
        fetched: list[FetchedBlocks] = []
        for source in self._sources:
            part = source.fetch(index)
            if part is None:
                FetchedParts(fetched).release()
                return None
            fetched.append(part)
        return FetchedParts(fetched)

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
