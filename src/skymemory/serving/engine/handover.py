"""Prompts handed over between engines through a store: one saves blocks while it prefills, another fetches them.

A prefill engine offers the blocks of each prefill step to ``BlockSaver``, whose thread writes them to the store. A
decode engine asks ``BlockFetcher`` for a prompt's blocks: it waits for them outside the engine's thread, as they come,
and puts them into the engine's own prefix cache, from which the prompt then begins. A block that is late, lost or
damaged is computed: the store never decides what is answered.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from skymemory.cache.blocks import TIER_FAILURES
from skymemory.errors import ValueTooLarge
from skymemory.kv.block import BlockHash, places_in
from skymemory.kv.value import is_sound_block
from skymemory.serving.engine.caches import PrefixCaches
from skymemory.serving.engine.generation import Generation
from skymemory.serving.engine.metrics import EngineMetrics
from skymemory.store.base import LoadTicket, Presence, Store
from skymemory.store.memory import MemoryStore

FIRST_PAUSE_S, LAST_PAUSE_S = 0.002, 0.05
"""Pause between two questions for blocks that are not there yet; it doubles while none comes."""
_BATCH_BYTES = 4 << 20
"""Bytes of one call to the store. What came counts as progress, and is in use, call by call."""
_AHEAD_BLOCKS = 256
"""Blocks of one question."""
_FETCH_THREADS = 4
"""Calls to the store at a time. Requests that wait hold none of them."""
_LEAST_CALL_S = 1.0
_STORED_S = 0.5
"""How long a block that the other engine says is stored is asked for: time for a store to answer late, or to hand it
over meanwhile; one that has been evicted does not come back.
"""
_MOST_OFFERS = 4096
"""Offers that wait to be saved; their blocks are leased in the prefix cache, so that its budget bounds their bytes."""
_LATE = (
    "%d of %d blocks did not come within %g s, and are computed: the engine that prefills must have the same model, "
    "--dtype, --block-tokens and --store"
)
_LOG = logging.getLogger(__name__)

T = TypeVar("T")


class Turns(Protocol):
    """The engine's thread, which alone may use the prefix cache."""

    def call(self, act: Callable[[], T]) -> Future[T]:
        """``act``'s result, between two turns."""


@dataclass(slots=True, eq=False)
class Outgoing:
    """What of one prompt is on its way to the store."""

    eager: bool = False
    """Save after each prefill step: another engine waits for it."""
    offered: int = 0
    """Leading blocks offered so far; used in the engine's thread."""
    stored: int = 0
    """Leading blocks that are stored; written by the saver's thread."""
    ended: Future[int] = field(default_factory=Future)
    """``stored``, once nothing is on its way any more."""


@dataclass(frozen=True, slots=True)
class _Offer:
    outgoing: Outgoing
    chains: list[list[BlockHash]]
    """For each part of the model, the blocks' hashes from the prompt's beginning."""
    first: int
    """The first block that was not offered before."""
    tickets: list[LoadTicket]
    """Keep the blocks in the prefix cache until they are read."""


class BlockSaver:
    """Writes blocks of the prefix cache to a store, in a thread of its own, in the order of the offers."""

    def __init__(self, store: Store, cache: MemoryStore, value_bytes: int, metrics: EngineMetrics) -> None:
        """``value_bytes``: of a block's values of all parts."""
        self._store = store
        self._cache = cache
        self._at_once = max(1, _BATCH_BYTES // value_bytes)
        self._metrics = metrics
        self._queue: queue.Queue[_Offer | Outgoing | None] = queue.Queue(_MOST_OFFERS)
        self._drain_until_s = float("inf")
        self._too_large = False
        self._thread = threading.Thread(target=self._run, name="block saver", daemon=True)
        self._thread.start()

    def offer(self, chains: list[list[BlockHash]], outgoing: Outgoing) -> None:
        """Save these blocks of a prompt, as far as they were not offered before. Called in the engine's thread."""
        first = outgoing.offered
        if len(chains[0]) <= first:
            return
        offer = _Offer(outgoing, chains, first, [self._cache.prepare_load(chain[first:]) for chain in chains])
        try:
            self._queue.put_nowait(offer)
        except queue.Full:  # not saved: another engine computes them
            self._release(offer)
            self._metrics.saved(0, len(chains[0]) - first)
        outgoing.offered = len(chains[0])

    def end(self, outgoing: Outgoing) -> None:
        """Nothing more is offered of this prompt."""
        try:
            self._queue.put_nowait(outgoing)
        except queue.Full:
            outgoing.ended.set_result(outgoing.stored)

    def close(self, drain_s: float) -> None:
        """Stop; what waits is saved for at most ``drain_s`` longer, and a call under way ends first."""
        self._drain_until_s = time.monotonic() + drain_s
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (one := self._queue.get()) is not None:
            if isinstance(one, Outgoing):
                one.ended.set_result(one.stored)
                continue
            saved = 0
            try:
                if time.monotonic() < self._drain_until_s:
                    saved = self._save(one)
            except ValueTooLarge as error:
                if not self._too_large:
                    _LOG.warning("blocks are not saved: %s", error)
                self._too_large = True
            except TIER_FAILURES as error:
                _LOG.warning("%d blocks were not saved: %s", len(one.chains[0]) - one.first, error)
            except Exception:
                _LOG.exception("blocks were not saved")
            finally:
                self._release(one)
            # A gap ends what another engine can use: blocks behind it do not count.
            if one.outgoing.stored == one.first:
                one.outgoing.stored += saved

    def _release(self, offer: _Offer) -> None:
        for ticket in offer.tickets:
            self._cache.release(ticket)

    def _save(self, offer: _Offer) -> int:
        """Leading blocks of the offer that are in the store now."""
        total = len(offer.chains[0])
        for start in range(offer.first, total, self._at_once):
            stop = min(total, start + self._at_once)
            stored = 0
            try:
                # The first part last, as readers look for it: what they find of it has all its other parts.
                *_, stored = [self._put(chain, range(start, stop)) for chain in reversed(offer.chains)]
            finally:  # a store that fails has not taken them
                self._metrics.saved(stored, stop - start - stored)
            if stored < stop - start:
                return start + stored - offer.first
        return total - offer.first

    def _put(self, chain: list[BlockHash], blocks: range) -> int:
        """Leading ones of ``blocks`` that the store has, or says it has taken."""
        presence = self._store.lookup(chain[blocks.start : blocks.stop])
        missing = [index for index, there in zip(blocks, presence, strict=True) if there is Presence.MISS]
        values = self._cache.get_now([chain[index] for index in missing])
        items = [(index, value) for index, value in zip(missing, values, strict=True) if value is not None]
        lacking = set(missing)
        if items:
            places = places_in(chain, [index for index, _ in items])
            done = self._store.put_many([(chain[index], value) for index, value in items], places)
            lacking -= {index for (index, _), stored in zip(items, done, strict=True) if stored}
        return next((at for at, index in enumerate(blocks) if index in lacking), len(blocks))


class BlockFetcher:
    """Brings prompts' blocks from a store into the prefix cache. Used in the event loop."""

    def __init__(
        self, store: Store, engine: Turns, caches: PrefixCaches, metrics: EngineMetrics, wait_s: float
    ) -> None:
        """``wait_s``: how long the next block of a prompt under way elsewhere is waited for."""
        self._store = store
        self._engine = engine
        self._caches = caches
        self._metrics = metrics
        self._wait_s = wait_s
        self._call_s = max(_LEAST_CALL_S, wait_s)
        self._at_once = max(1, _BATCH_BYTES // caches.value_bytes)
        self._threads = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="block fetcher")

    async def bring(self, generation: Generation) -> None:
        """Bring what the store has of this prompt; and, where another engine prefills it, what comes until none has
        come for the time to wait.
        """
        caches, remote = self._caches, generation.remote_prefill
        chains, at = await asyncio.wrap_future(self._engine.call(lambda: caches.look(generation.salt, generation.ids)))
        expected = len(chains[0])
        if remote is not None and remote.tokens is not None:
            expected = min(expected, remote.tokens // caches.block_tokens)
        wait_s = self._wait_s if remote is None or remote.wait_s is None else remote.wait_s
        if remote is not None and remote.tokens is not None:
            wait_s = min(wait_s, _STORED_S)
        began_s, given_up = time.monotonic(), False
        try:
            given_up = not await self._come(generation, chains, at, expected if remote is not None else 0, wait_s)
        finally:
            if remote is not None:
                self._metrics.waited(time.monotonic() - began_s, given_up)

    async def _come(
        self, generation: Generation, chains: list[list[BlockHash]], at: int, expected: int, wait_s: float
    ) -> bool:
        """Bring the blocks from ``at`` on; False where the ``expected`` first ones did not come in time."""
        came_s, pause_s = time.monotonic(), FIRST_PAUSE_S
        while at < len(chains[0]):
            came = await self._next(generation, chains, at)
            if came:
                at, came_s, pause_s = at + came, time.monotonic(), FIRST_PAUSE_S
                continue
            if came is None or at >= expected:
                break
            left_s = came_s + wait_s - time.monotonic()
            if left_s <= 0:
                _LOG.warning(_LATE, expected - at, expected, wait_s)
                return False
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        return True

    def close(self) -> None:
        """Calls under way end first."""
        self._threads.shutdown(cancel_futures=True)

    async def _next(self, generation: Generation, chains: list[list[BlockHash]], at: int) -> int | None:
        """Bring the next blocks from ``at`` on; returns how many came, None where the prefix cache has no room."""
        asked = chains[0][at : at + _AHEAD_BLOCKS]
        found = await self._in_thread(0, lambda: self._store.prefix(asked))
        if not found:
            return 0
        stop = at + min(found, self._at_once)
        nothing: list[list[bytes | None]] = []
        parts = await self._in_thread(nothing, lambda: [self._load(chain[at:stop]) for chain in chains])
        if not parts or parts[0][0] is None:
            return 0
        caches, salt, ids = self._caches, generation.salt, generation.ids
        kept = await asyncio.wrap_future(self._engine.call(lambda: caches.admit(salt, ids, chains, at, parts)))
        self._metrics.fetched(kept)
        return kept or None

    def _load(self, keys: Sequence[BlockHash]) -> list[bytes | None]:
        """The values; None: missing, or damaged. A damaged one is deleted, so that it is saved again."""
        ticket = self._store.prepare_load(keys)
        try:
            values = self._store.complete_load(ticket)
            loaded: list[bytes | None] = []
            for key, value in zip(keys, values, strict=True):
                if value is not None and not is_sound_block(key, value):
                    self._store.delete([key])
                    value = None
                loaded.append(None if value is None else bytes(value))
            return loaded
        finally:
            self._store.release(ticket)

    async def _in_thread(self, otherwise: T, act: Callable[[], T]) -> T:
        """``act``'s result; ``otherwise`` where the store fails, or does not answer in time."""
        loop = asyncio.get_running_loop()
        try:
            # Not ``wait_for``: in Python 3.11 it forgets a cancellation that comes with the result, and a request whose
            # client has left would wait on.
            async with asyncio.timeout(self._call_s):
                return await loop.run_in_executor(self._threads, act)
        except TIER_FAILURES as error:  # a timeout is an OSError
            _LOG.warning("the %s store: %s", self._store.name, error or "no answer in time")
            return otherwise
