"""Prompts loaded from both ends: what the store has of a prompt is cut into chunks and given to the loader.

An engine asks the ``CakeLoad`` it gets for steps, computes them, and takes the result. Everything that is not torch is
here, and the same for every engine and every tier.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from skymemory.cache.blocks import TIER_FAILURES, BlockCache, BlockSink, PhaseClock
from skymemory.cache.cake.chunks import BlockChunks, ChunksOfParts
from skymemory.cache.cake.scheduler import BidirectionalLoader, PromptChunk, cut_prompt
from skymemory.cache.cake.session import LoadingSession
from skymemory.cache.pace import Pace
from skymemory.cache.parts import Parts
from skymemory.cache.patience import Usual, worth
from skymemory.cache.results import LoadResult
from skymemory.cache.tiers.tier import LEAST_PATIENCE_S, TIMES_USUAL, WORTH_SHARE, patience_s
from skymemory.cache.tiers.workers import Call, TierWorkers
from skymemory.errors import InvalidInput
from skymemory.kv.block import BlockHash, Tokens
from skymemory.store.base import Presence

Sides = Literal["both", "compute", "load"]
"""Which of the two pointers move: both, or (to compare with) one. What cannot be loaded is computed in any case."""

_KEPT_SAMPLES = 16.0
_WAITING = 1 << 16


@dataclass(frozen=True, slots=True)
class CakeSettings:
    """How prompts are loaded from both ends."""

    step_tokens: int = 512
    """Tokens of one step of the engine, those of other requests included; whole blocks."""
    chunk_tokens: int | None = None
    """Tokens that are loaded at once, in whole blocks; None: what a step takes of ours. Small ones let both sides meet
    more exactly, and each costs a request to the tier."""
    in_flight_bytes: int = 64 << 20
    """Asked for and not here, at most; one chunk always may be."""
    fetch_threads: int = 3
    """Three: a chunk is verified and put in its place, the next is on its way, and one more waits for its turn."""
    deadline_s: float = 10.0
    """What the tier has not answered by then is computed; for a chunk's bytes it has the time they take besides, at
    ``least_bytes_per_s``. A thread whose call did not end in time is not used until it comes back; while none is left,
    everything is computed."""
    least_bytes_per_s: float = 1e6
    """Of a link that is slow rather than broken."""

    def check(self, block_tokens: int) -> None:
        if self.step_tokens < block_tokens or self.step_tokens % block_tokens:
            raise InvalidInput(f"step_tokens is {self.step_tokens}: not whole blocks of {block_tokens} tokens")
        if self.chunk_tokens is not None and (
            not block_tokens <= self.chunk_tokens <= self.step_tokens or self.chunk_tokens % block_tokens
        ):
            raise InvalidInput(
                f"chunk_tokens is {self.chunk_tokens}: not whole blocks of {block_tokens} tokens in a step"
            )
        if self.in_flight_bytes < 1 or self.fetch_threads < 1:
            raise InvalidInput("in_flight_bytes and fetch_threads must be at least 1")
        if not self.deadline_s > 0 or not self.least_bytes_per_s > 0:
            raise InvalidInput("deadline_s and least_bytes_per_s must be above 0")

    def patience_s(self, size_bytes: int) -> float:
        """How long a load of so many bytes may take."""
        return self.deadline_s + size_bytes / self.least_bytes_per_s


class Cake:
    """Loads the prompts of one model's ``Parts``. The speeds it has measured are kept from prompt to prompt.

    Where the sides meet is not known before: so of each block it loads, it loads all parts.
    """

    def __init__(self, parts: Parts, settings: CakeSettings | None = None) -> None:
        self.settings = settings or CakeSettings()
        self.settings.check(parts.first.layout.block_tokens)
        self.parts = parts
        self.pace = Pace()
        self._stored_block_bytes = float(parts.value_bytes)
        self._late: deque[tuple[int, float]] = deque(maxlen=1)
        self._workers = TierWorkers("cake", self.settings.fetch_threads, _WAITING)
        self._lookups = TierWorkers("cake look-up", 1)
        self._usual_lookup, self._usual_fetch = Usual(), Usual()

    @property
    def blocks(self) -> BlockCache:
        """Those of the first part."""
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
        """Look ``tokens`` up and begin to load, each part into its sink. ``budget_tokens``: of a step, those that are
        ours to begin with.

        The load reaches up to the end of the last block that the store has; blocks before it that are missing are
        computed. ``limit_tokens`` bounds the tokens counted as supplied.
        """
        self.blocks.owner.check()
        blocks, block_tokens = self.blocks, self.blocks.layout.block_tokens
        phase = PhaseClock(blocks.clock, seconds if seconds is not None else {})
        wanted = min(len(tokens) // block_tokens, -(-min(limit_tokens, len(tokens)) // block_tokens))
        with phase("hash"):
            hashes = self.parts.hashes(tokens)
        if blocks.on_prompt is not None:
            for chain in hashes:
                blocks.on_prompt(chain)
        computing_s = self._computing_s(len(tokens))
        with phase("lookup"), worth(computing_s):
            there = [] if self._workers.awaited else self._there([chain[:wanted] for chain in hashes])
        reach = len(there) - there[::-1].index(True) if True in there else 0
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
                stored_blocks=[size_bytes if one else None for one in there[:reach]],
            )
        source = ChunksOfParts(
            [
                BlockChunks(part.blocks, chain, chunks, sink, self._usual_fetch)
                for part, chain, sink in zip(self.parts.parts, hashes, sinks, strict=True)
            ]
        )
        if chunks:
            if on_chunks is not None:
                on_chunks(len(chunks))
            self.pace.fade(_KEPT_SAMPLES)
            if self._late and not self.pace.loads_are_recent:
                # Every load was overtaken by computing: what came too late is all that tells the rate.
                self.pace.load_took(*self._late.pop(), from_idle=True)
            self._late.clear()
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
            self, session, chunks, source, len(tokens), limit_tokens, len(hashes[0]), sum(there), phase, account
        )

    def _there(self, hashes: list[list[BlockHash]]) -> list[bool]:
        """Of each block, whether the store says it has all parts of it; nothing where it does not say it in time."""
        if not hashes[0]:
            return []

        def ask() -> list[bool]:
            presence = [self.blocks.store.lookup(chain) for chain in hashes]
            return [all(one is Presence.HIT for one in block) for block in zip(*presence, strict=True)]

        call: Call[object] = Call(ask)
        asked = not self._lookups.held_up and self._lookups.submit(call)
        began_s = time.monotonic()
        patience = min(self.settings.deadline_s, patience_s(self._usual_lookup.p99_s()))

        def answered(result: object = None) -> None:
            self._usual_lookup.took(time.monotonic() - began_s)

        if not asked or (not self._lookups.wait(call, patience) and call.give_up(answered)):
            self.blocks.tier_failed()
            return []
        answered()
        if call.error is not None:
            if not isinstance(call.error, TIER_FAILURES):
                raise call.error
            self.blocks.tier_failed()
        there = call.result
        return there if isinstance(there, list) and len(there) == len(hashes[0]) else []

    def _computing_s(self, tokens: int) -> float | None:
        """What computing all of a prompt would take, as far as is known now."""
        return self.pace.prompt_s(tokens, self.settings.step_tokens) or self.blocks.compute.seconds(tokens)

    def _fetch_patience_s(self, size_bytes: int, tokens: int) -> float:
        """How long one fetch may take. Waiting for it costs nothing while the engine computes the rest; when that is
        done, and a tenth of it has been waited besides, its chunk is computed too. Before anything was computed
        nothing is given up by an estimate: the first step tells.
        """
        computing_s = self._computing_s(tokens) if self.blocks.compute.measured else None
        if computing_s is None:
            return self.settings.patience_s(size_bytes)
        usual_s = TIMES_USUAL * (self._usual_fetch.p99_s(size_bytes) or 0.0)
        return min(
            self.settings.patience_s(size_bytes), max((1 + WORTH_SHARE) * computing_s, usual_s, LEAST_PATIENCE_S)
        )

    def _came_late(self, size_bytes: int, seconds: float) -> None:
        self._late.append((size_bytes, seconds))

    def learn(self, blocks: int, size_bytes: int) -> None:
        """So many bytes came for so many blocks: what the next ones are expected to be."""
        if blocks:
            self._stored_block_bytes = size_bytes / blocks

    def close(self) -> None:
        """The threads end with the calls they are at."""
        self._workers.close()
        self._lookups.close()


@dataclass(slots=True)
class CakeLoad:
    """One prompt on its way. ``session`` is None where the store has nothing of it."""

    cake: Cake
    session: LoadingSession | None
    chunks: tuple[PromptChunk, ...]
    source: ChunksOfParts
    prompt_tokens: int
    limit_tokens: int
    blocks: int
    found_blocks: int
    phase: PhaseClock
    account: bool

    @property
    def reach_tokens(self) -> int:
        """Tokens from the first on that are in their place at the end."""
        return self.chunks[-1].first_token + self.chunks[-1].tokens if self.chunks else 0

    def finish(self) -> LoadResult:
        """Close it, and say what came from where."""
        tokens, block_tokens = Counter[str](), self.cake.blocks.layout.block_tokens
        size_bytes = retransmitted = loaded_blocks = 0
        told = None
        if self.session is not None:
            self.session.close()
            told = self.session.result()
            for index, origin in self.source.origins.items():
                if self.session.origin(index) != "loaded":
                    continue  # it came when the chunk had been computed
                for at, tier in enumerate(origin.tiers):
                    first = self.chunks[index].first_token + at * block_tokens
                    tokens[tier] += max(0, min(self.limit_tokens - first, block_tokens))
                loaded_blocks += len(origin.tiers)
                size_bytes += origin.size_bytes
                retransmitted += origin.retransmitted
            self.cake.learn(loaded_blocks, size_bytes)
            told = replace(told, loaded_bytes=size_bytes)
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
            loader=told,
        )
        self.cake.blocks.count_load(result, self.account)
        return result
