"""Cake for an engine: cuts a prompt into chunks, loaded and computed from both ends.

``Cake.open`` returns a ``CakeLoad``; the engine computes the steps of its session and calls ``finish``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Literal

from skymemory.cache.blocks import TIER_FAILURES, BlockCache, BlockSink, LoadResult, Parts, PhaseClock
from skymemory.cache.cake.pace import SpeedEstimate
from skymemory.cache.cake.scheduler import BidirectionalLoader, PromptChunk, cut_prompt
from skymemory.cache.cake.session import LoadingSession
from skymemory.cache.patience import Latencies, patience_s, patience_while_computing_s, recompute_cost
from skymemory.cache.tiers.workers import TierWorkers, WorkerCall
from skymemory.errors import InvalidInput
from skymemory.kv.block import BlockHash, Tokens
from skymemory.reasons import Miss
from skymemory.store.base import LoadTicket, Presence

Sides = Literal["both", "compute", "load"]
"""Sides that move; what cannot be loaded is computed in any case."""

_KEPT_SAMPLES = 16.0
_WAITING = 1 << 16


@dataclass(frozen=True, slots=True)
class CakeSettings:
    """Settings of Cake: loading a prompt from its end while computing it from its beginning."""

    step_tokens: int = 512
    """Tokens of an engine step, over all requests."""
    chunk_tokens: int | None = None
    """Whole blocks; None: this prompt's share of a step. Small chunks meet more exactly, but each costs a request."""
    in_flight_bytes: int = 64 << 20
    """Limit of requested bytes; a single chunk is always allowed."""
    fetch_threads: int = 3
    """With three, a chunk is placed, the next is loaded, and another waits."""
    deadline_s: float = 10.0
    """Time to load a chunk, besides its bytes at ``least_bytes_per_s``."""
    least_bytes_per_s: float = 1e6
    """Rate of the slowest link not considered broken."""

    def check(self, block_tokens: int) -> None:
        if self.step_tokens < block_tokens or self.step_tokens % block_tokens:
            raise InvalidInput(f"step_tokens is {self.step_tokens}: expected whole blocks of {block_tokens} tokens")
        if self.chunk_tokens is not None and (
            not block_tokens <= self.chunk_tokens <= self.step_tokens or self.chunk_tokens % block_tokens
        ):
            raise InvalidInput(
                f"chunk_tokens is {self.chunk_tokens}: expected whole blocks of {block_tokens} tokens, at most "
                f"step_tokens={self.step_tokens}"
            )
        if self.in_flight_bytes < 1 or self.fetch_threads < 1:
            raise InvalidInput("in_flight_bytes and fetch_threads must be at least 1")
        if not self.deadline_s > 0 or not self.least_bytes_per_s > 0:
            raise InvalidInput("deadline_s and least_bytes_per_s must be above 0")

    def patience_s(self, size_bytes: int) -> float:
        return self.deadline_s + size_bytes / self.least_bytes_per_s


class Cake:
    """Cake of a model's ``Parts``. All parts of each block are loaded, as it is unknown where the sides will meet."""

    def __init__(self, parts: Parts, settings: CakeSettings | None = None) -> None:
        self.settings = settings or CakeSettings()
        self.settings.check(parts.first.layout.block_tokens)
        self.parts = parts
        self.pace = SpeedEstimate()
        self._stored_block_bytes = float(parts.value_bytes)  # expected; each load corrects it
        self._last_late: tuple[int, float] | None = None  # bytes and seconds of a load that computing overtook
        self._workers = TierWorkers("cake", self.settings.fetch_threads, _WAITING)
        self._lookups = TierWorkers("cake lookup", 1)
        self._lookup_latencies, self._fetch_latencies = Latencies(), Latencies()

    @property
    def blocks(self) -> BlockCache:
        return self.parts.first

    def open(
        self,
        tokens: Tokens,
        sinks: Sequence[BlockSink],
        *,
        limit_tokens: int,
        budget_tokens: int,
        sides: Sides = "both",
        seconds: dict[str, float] | None = None,
        account: bool = True,
        on_chunks: Callable[[int], object] | None = None,
        on_settled: Callable[[int, str], object] | None = None,
    ) -> CakeLoad:
        """Look ``tokens`` up and begin to load, each part into its sink.

        ``budget_tokens``: this prompt's tokens of the first step. ``limit_tokens`` limits the tokens counted as
        supplied. ``on_chunks`` gets the number of chunks, ``on_settled`` index and origin of each in place.
        """
        self.blocks.owner.check()
        blocks, block_tokens = self.blocks, self.blocks.layout.block_tokens
        phase = PhaseClock(seconds if seconds is not None else {})
        wanted = min(len(tokens) // block_tokens, -(-min(limit_tokens, len(tokens)) // block_tokens))
        with phase("hash"):
            hashes = self.parts.hashes(tokens)
        if blocks.on_prompt is not None:
            for chain in hashes:
                blocks.on_prompt(chain)
        computing_s = self._computing_s(len(tokens))
        with phase("lookup"), recompute_cost(computing_s):
            stored = [] if self._workers.any_hung else self._look_up([chain[:wanted] for chain in hashes])
        reach = len(stored) - stored[::-1].index(True) if True in stored else 0
        chunks: tuple[PromptChunk, ...] = ()
        session = None
        chunk_tokens = (
            self.settings.chunk_tokens or min(budget_tokens, self.settings.step_tokens) or self.settings.step_tokens
        )
        if reach:
            size_bytes = round(self._stored_block_bytes)
            chunks = cut_prompt(
                reach * block_tokens,
                step_tokens=max(1, chunk_tokens // block_tokens) * block_tokens,
                block_tokens=block_tokens,
                stored_blocks=[size_bytes if is_stored else None for is_stored in stored[:reach]],
            )
        parts = [part.blocks for part in self.parts.parts]
        source = StoredChunks(parts, hashes, sinks, chunks, self._fetch_latencies)
        if chunks:
            if on_chunks is not None:
                on_chunks(len(chunks))
            self.pace.fade(_KEPT_SAMPLES)
            late, self._last_late = self._last_late, None
            if late is not None and not self.pace.loads_are_recent:
                # Computing overtook every load: the late loads are the only measurement of the rate.
                self.pace.load_took(*late, from_idle=True)
            loader = BidirectionalLoader(
                max_in_flight_bytes=self.settings.in_flight_bytes,
                budget_tokens=budget_tokens,
                pace=self.pace,
                computes=sides != "load",
                loads=sides != "compute",
                others_fill=budget_tokens < self.settings.step_tokens,
            )
            session = LoadingSession(
                loader,
                chunks,
                source,
                self._workers,
                on_settled=on_settled,
                on_late=self._came_late,
                patience_s=lambda size_bytes: self._fetch_patience_s(size_bytes, len(tokens)),
            )
        return CakeLoad(
            self, session, chunks, source, len(tokens), limit_tokens, len(hashes[0]), sum(stored), phase, account
        )

    def _look_up(self, hashes: list[list[BlockHash]]) -> list[bool]:
        """Return for each block if all its parts are stored; [] if that takes too long."""
        if not hashes[0]:
            return []

        def ask() -> list[bool]:
            presence = [self.blocks.store.lookup(chain) for chain in hashes]
            return [all(state is Presence.HIT for state in block) for block in zip(*presence, strict=True)]

        call: WorkerCall[object] = WorkerCall(ask)
        submitted = not self._lookups.all_hung and self._lookups.submit(call)
        started_s = time.monotonic()
        patience = min(self.settings.deadline_s, patience_s(self._lookup_latencies))

        def answered(result: object = None) -> None:
            self._lookup_latencies.record(time.monotonic() - started_s)

        if not submitted or (not self._lookups.wait(call, patience) and call.give_up(answered)):
            self.blocks.tier_failed()
            return []
        answered()
        if call.error is not None:
            if not isinstance(call.error, TIER_FAILURES):
                raise call.error
            self.blocks.tier_failed()
        stored = call.result
        return stored if isinstance(stored, list) and len(stored) == len(hashes[0]) else []

    def _computing_s(self, tokens: int) -> float | None:
        return self.pace.prompt_s(tokens, self.settings.step_tokens) or self.blocks.compute.seconds(tokens)

    def _fetch_patience_s(self, size_bytes: int, tokens: int) -> float:
        """Return how long to wait for a fetch, given the time to compute the prompt."""
        computing_s = self._computing_s(tokens) if self.blocks.compute.measured else None
        if computing_s is None:
            return self.settings.patience_s(size_bytes)
        return min(
            self.settings.patience_s(size_bytes),
            patience_while_computing_s(computing_s, self._fetch_latencies, size_bytes),
        )

    def _came_late(self, size_bytes: int, seconds: float) -> None:
        self._last_late = (size_bytes, seconds)

    def learn(self, blocks: int, size_bytes: int) -> None:
        if blocks:
            self._stored_block_bytes = size_bytes / blocks

    def close(self) -> None:
        self._workers.close()
        self._lookups.close()


@dataclass(slots=True)
class CakeLoad:
    """Load of a prompt; ``session`` is None if nothing is stored."""

    cake: Cake
    session: LoadingSession | None
    chunks: tuple[PromptChunk, ...]
    source: StoredChunks
    prompt_tokens: int
    limit_tokens: int
    blocks: int
    found_blocks: int
    phase: PhaseClock
    account: bool

    @property
    def reach_tokens(self) -> int:
        return self.chunks[-1].first_token + self.chunks[-1].tokens if self.chunks else 0

    def finish(self) -> LoadResult:
        """End the session; return and count its results."""
        tokens, block_tokens = Counter[str](), self.cake.blocks.layout.block_tokens
        size_bytes = retransmitted = loaded_blocks = 0
        loader_result = None
        if self.session is not None:
            self.session.close()
            loader_result = self.session.result()
            for index, origin in self.source.origins.items():
                if self.session.origin(index) != "loaded":
                    continue  # loaded after the chunk had been computed
                for at, tier in enumerate(origin.tiers):
                    first = self.chunks[index].first_token + at * block_tokens
                    tokens[tier] += max(0, min(self.limit_tokens - first, block_tokens))
                loaded_blocks += len(origin.tiers)
                size_bytes += origin.size_bytes
                retransmitted += origin.retransmitted
            self.cake.learn(loaded_blocks, size_bytes)
            loader_result = replace(loader_result, loaded_bytes=size_bytes)
        result = LoadResult(
            prompt_tokens=self.prompt_tokens,
            hit_tokens=dict(tokens),
            blocks=self.blocks,
            found_blocks=self.found_blocks,
            loaded_blocks=loaded_blocks,
            failed_blocks=self.source.failures(),
            size_bytes=size_bytes,
            retransmitted=retransmitted,
            seconds=self.phase.seconds,
            loader=loader_result,
        )
        self.cake.blocks.count_load(result, self.account)
        return result


# --- the source of a session's chunks: blocks of the store, fetched, verified and decoded into the engine's memory ---
#
# Every fetch is a separate lease and load, so that a chunk that is computed instead is never leased. A chunk's blocks
# are stored part by part (``Parts``), and it counts as loaded only if all its parts are.


@dataclass(frozen=True, slots=True)
class ChunkOrigin:
    tiers: tuple[str, ...]
    size_bytes: int
    retransmitted: int


class StoredChunks:
    """Source of a session's chunks: blocks of the store, fetched, then placed."""

    def __init__(
        self,
        parts: Sequence[BlockCache],
        hashes: Sequence[Sequence[BlockHash]],
        sinks: Sequence[BlockSink],
        chunks: Sequence[PromptChunk],
        latencies: Latencies,
    ) -> None:
        self._parts = list(zip(parts, hashes, strict=True))
        self._sinks: Sequence[BlockSink] | None = sinks
        self._chunks = chunks
        self._latencies = latencies
        self._lock = Lock()
        self._late: set[int] = set()  # chunks whose fetch was given up
        self.origins: dict[int, ChunkOrigin] = {}
        self._failed: Counter[Miss] = Counter()

    def fetch(self, index: int) -> FetchedParts | None:
        """Load a chunk's blocks of all parts, or none."""
        chunk, tokens = self._chunks[index], self._parts[0][0].layout.block_tokens
        first = chunk.first_token // tokens
        fetched: list[FetchedBlocks] = []
        try:
            for blocks, chain in self._parts:
                part = self._fetch_blocks(index, blocks, chain[first : first + chunk.tokens // tokens])
                if part is None:
                    _release(fetched)
                    return None
                fetched.append(part)
        except BaseException:
            _release(fetched)
            raise
        return FetchedParts(self, index, first, fetched)

    def _fetch_blocks(self, index: int, blocks: BlockCache, hashes: Sequence[BlockHash]) -> FetchedBlocks | None:
        """Lease and load a chunk's blocks of a part, or none, counting the reasons."""
        ticket, started_s = None, time.perf_counter()
        try:
            ticket = blocks.store.prepare_load(hashes)
            values = blocks.store.complete_load(ticket)
            report = ticket.report
        except BaseException as error:
            if ticket is not None:
                blocks.release(ticket)
            if not isinstance(error, TIER_FAILURES):
                raise
            blocks.tier_failed()
            self._fail(index, Miss.UNREACHABLE, len(hashes))
            return None
        reports = report.keys if report is not None and len(report.keys) == len(hashes) else ()
        loaded = [value for value in values if value is not None]
        if len(loaded) < len(hashes) or len(values) != len(hashes):
            for at in range(len(hashes)):
                if at >= len(values) or values[at] is None:
                    self._fail(index, (reports[at].reason if reports else None) or Miss.UNREACHABLE)
            blocks.delete_sealed(hashes, reports)
            blocks.release(ticket)
            return None
        self._latencies.record(time.perf_counter() - started_s, sum(value.nbytes for value in loaded))
        retransmitted = report.retransmitted if report is not None else 0
        tiers = tuple(report.tier or blocks.store.name for report in reports) or (blocks.store.name,) * len(hashes)
        return FetchedBlocks(blocks, hashes, loaded, ticket, tiers, retransmitted)

    def place(self, fetched: FetchedParts) -> bool:
        """Verify, decode and place a chunk; False at its first invalid block."""
        if (sinks := self._sinks) is None:
            return False
        for part, sink in zip(fetched.parts, sinks, strict=True):
            for index, (block_hash, value) in enumerate(zip(part.hashes, part.values, strict=True), fetched.first):
                if failure := part.blocks.place(sink, index, block_hash, value):
                    self._fail(fetched.index, failure)
                    part.wrong = block_hash, failure
                    return False
        size_bytes = sum(value.nbytes for part in fetched.parts for value in part.values)
        retransmitted = sum(part.retransmitted for part in fetched.parts)
        with self._lock:
            self.origins[fetched.index] = ChunkOrigin(fetched.parts[0].tiers, size_bytes, retransmitted)
        return True

    def give_up(self, index: int) -> None:
        blocks = self._parts[0][0]
        blocks.tier_failed()
        self._fail(index, Miss.DEADLINE, self._chunks[index].tokens // blocks.layout.block_tokens)
        with self._lock:
            self._late.add(index)

    def close(self) -> None:
        self._sinks = None

    def failures(self) -> dict[Miss, int]:
        with self._lock:
            return dict(self._failed)

    def _fail(self, index: int, reason: Miss, blocks: int = 1) -> None:
        with self._lock:
            if index not in self._late:
                self._failed[reason] += blocks


@dataclass(slots=True)
class FetchedBlocks:
    """Loaded blocks of a part, under a lease. ``wrong``: an invalid block, and why."""

    blocks: BlockCache
    hashes: Sequence[BlockHash]
    values: list[memoryview]
    ticket: LoadTicket
    tiers: tuple[str, ...]
    retransmitted: int
    wrong: tuple[BlockHash, Miss] | None = None


@dataclass(slots=True)
class FetchedParts:
    """Loaded chunk: blocks of all parts, from ``first`` on."""

    source: StoredChunks
    index: int
    first: int
    parts: list[FetchedBlocks]

    def place(self) -> bool:
        return self.source.place(self)

    def release(self) -> None:
        _release(self.parts)


def _release(parts: Sequence[FetchedBlocks]) -> None:
    # Not while placing: other threads wait then.
    for part in parts:
        part.values = []
        part.blocks.release(part.ticket)
        if part.wrong is not None:
            part.blocks.delete_invalid(*part.wrong)
