"""Handover of prompts between engines through a store: one engine saves blocks while it prefills, another fetches them.

Late, lost and damaged blocks are recomputed: the store never changes an answer.
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
from skymemory.pacing import Backoff
from skymemory.store.base import LoadTicket, Presence, Store
from skymemory.store.memory import MemoryStore
from skymemory_lab.engine.caches import PrefixCaches
from skymemory_lab.engine.generation import Generation
from skymemory_lab.engine.metrics import PublishedMetrics

FIRST_PAUSE_S, LAST_PAUSE_S = 0.002, 0.05
_BATCH_BYTES = 4 << 20  # bytes of one store call
_AHEAD_BLOCKS = 256
_FETCH_THREADS = 4
_LEAST_CALL_S = 1.0
_STORED_S = 0.5  # time limit for a block reported as stored
_MOST_OFFERS = 4096  # limit of queued offers, whose blocks are leased
_LATE = (
    "%d of %d blocks did not come within %g s, and are computed: the engine that prefills must have the same model, "
    "data type, --block-tokens and --store"
)
_LOG = logging.getLogger(__name__)

T = TypeVar("T")


class EngineTurns(Protocol):
    """The engine's thread; only it may use the prefix cache."""

    def call(self, act: Callable[[], T]) -> Future[T]: ...


@dataclass(slots=True, eq=False)
class Outgoing:
    """Progress of saving a request's blocks to the shared store."""

    eager: bool = False
    """True: save after each prefill step."""
    offered: int = 0
    """Leading blocks queued so far; used only in the engine's thread."""
    stored: int = 0
    """Leading blocks stored; written only by the saver's thread."""
    ended: Future[int] = field(default_factory=Future)  # with the final ``stored``


@dataclass(frozen=True, slots=True)
class _Offer:
    """Queued request to save a prompt's blocks from ``first`` on."""

    outgoing: Outgoing
    chains: list[list[BlockHash]]  # of the whole prompt, for each part of the model (layers with the same window)
    first: int
    tickets: list[LoadTicket]  # leases of the blocks in the prefix cache, until they are saved


class BlockSaver:
    """Writer of the prefix cache's blocks to a store, in its own thread."""

    def __init__(self, store: Store, cache: MemoryStore, value_bytes: int, metrics: PublishedMetrics) -> None:
        """``value_bytes``: a block's size over all parts."""
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
        """Lease the prompt's new blocks in the cache and queue them for saving. Called in the engine's thread."""
        first = outgoing.offered
        if len(chains[0]) <= first:
            return
        offer = _Offer(outgoing, chains, first, [self._cache.prepare_load(chain[first:]) for chain in chains])
        try:
            self._queue.put_nowait(offer)
        except queue.Full:  # not saved: the other engine recomputes them
            self._release(offer)
            self._metrics.saved(0, len(chains[0]) - first)
        outgoing.offered = len(chains[0])

    def end(self, outgoing: Outgoing) -> None:
        """Resolve ``outgoing.ended`` once all queued offers are saved."""
        try:
            self._queue.put_nowait(outgoing)
        except queue.Full:
            outgoing.ended.set_result(outgoing.stored)

    def close(self, drain_s: float) -> None:
        """Stop the thread; save queued offers for at most ``drain_s``."""
        self._drain_until_s = time.monotonic() + drain_s
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Outgoing):  # from ``end``; its offers precede it in the queue
                item.ended.set_result(item.stored)
                continue
            saved = 0
            try:
                if time.monotonic() < self._drain_until_s:
                    saved = self._save(item)
            except ValueTooLarge as error:
                if not self._too_large:  # every block of the model is too large: log only once
                    _LOG.warning("blocks are not saved: %s", error)
                self._too_large = True
            except TIER_FAILURES as error:
                _LOG.warning("%d blocks were not saved: %s", len(item.chains[0]) - item.first, error)
            except Exception:
                _LOG.exception("blocks were not saved")
            finally:
                self._release(item)
            # Another engine can use only leading blocks: blocks after a gap do not count.
            if item.outgoing.stored == item.first:
                item.outgoing.stored += saved

    def _release(self, offer: _Offer) -> None:
        for ticket in offer.tickets:
            self._cache.release(ticket)

    def _save(self, offer: _Offer) -> int:
        """Return the leading blocks stored."""
        total = len(offer.chains[0])
        for start in range(offer.first, total, self._at_once):
            stop = min(total, start + self._at_once)
            stored = 0
            try:
                # The first part is written last because readers look it up: if a block of it exists, all its other
                # parts exist.
                *_, stored = [self._put(chain, range(start, stop)) for chain in reversed(offer.chains)]
            finally:  # a failed store call has stored nothing
                self._metrics.saved(stored, stop - start - stored)
            if stored < stop - start:
                return start + stored - offer.first
        return total - offer.first

    def _put(self, chain: list[BlockHash], blocks: range) -> int:
        """Store the missing blocks; return the leading blocks stored or accepted."""
        presence = self._store.lookup(chain[blocks.start : blocks.stop])
        missing = [index for index, status in zip(blocks, presence, strict=True) if status is Presence.MISS]
        values = self._cache.get_now([chain[index] for index in missing])
        items = [(index, value) for index, value in zip(missing, values, strict=True) if value is not None]
        unstored = set(missing)
        if items:
            places = places_in(chain, [index for index, _ in items])
            results = self._store.put_many([(chain[index], value) for index, value in items], places)
            unstored -= {index for (index, _), stored in zip(items, results, strict=True) if stored}
        return next((at for at, index in enumerate(blocks) if index in unstored), len(blocks))


class BlockFetcher:
    """Loader of blocks from a store into the prefix cache. Used in the event loop."""

    def __init__(
        self, store: Store, engine: EngineTurns, caches: PrefixCaches, metrics: PublishedMetrics, wait_s: float
    ) -> None:
        """``wait_s``: time limit for the next block."""
        self._store = store
        self._engine = engine
        self._caches = caches
        self._metrics = metrics
        self._wait_s = wait_s
        self._call_s = max(_LEAST_CALL_S, wait_s)
        self._at_once = max(1, _BATCH_BYTES // caches.value_bytes)
        self._threads = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="block fetcher")

    async def load_blocks(self, generation: Generation) -> None:
        """Load the prompt's stored blocks; if another engine prefills it, wait until a block is late."""
        caches, remote = self._caches, generation.remote_prefill
        chains, at = await asyncio.wrap_future(
            self._engine.call(lambda: caches.find_cached_blocks(generation.salt, generation.ids))
        )
        expected = len(chains[0])
        if remote is not None and remote.tokens is not None:
            expected = min(expected, remote.tokens // caches.block_tokens)
        wait_s = self._wait_s if remote is None or remote.wait_s is None else remote.wait_s
        if remote is not None and remote.tokens is not None:
            wait_s = min(wait_s, _STORED_S)
        started_s, timed_out = time.monotonic(), False
        try:
            timed_out = not await self._load_blocks_from(
                generation, chains, at, expected if remote is not None else 0, wait_s
            )
        finally:
            if remote is not None:
                self._metrics.waited(time.monotonic() - started_s, timed_out)

    async def _load_blocks_from(
        self, generation: Generation, chains: list[list[BlockHash]], at: int, expected: int, wait_s: float
    ) -> bool:
        """Load blocks from ``at`` on; return False if the first ``expected`` did not arrive in time."""
        progress_s, pauses = time.monotonic(), Backoff(FIRST_PAUSE_S, LAST_PAUSE_S)
        while at < len(chains[0]):
            count = await self._next(generation, chains, at)
            if count:
                at, progress_s, pauses.failures = at + count, time.monotonic(), 0
                continue
            if count is None or at >= expected:
                break
            remaining_s = progress_s + wait_s - time.monotonic()
            if remaining_s <= 0:
                _LOG.warning(_LATE, expected - at, expected, wait_s)
                return False
            await asyncio.sleep(min(pauses.next_s(), remaining_s))
        return True

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    async def _next(self, generation: Generation, chains: list[list[BlockHash]], at: int) -> int | None:
        """Load the next blocks; return their number, or None if the cache has no room."""
        keys = chains[0][at : at + _AHEAD_BLOCKS]
        count = await self._in_thread(0, lambda: self._store.prefix(keys))
        if not count:
            return 0
        stop = at + min(count, self._at_once)
        no_parts: list[list[bytes | None]] = []
        parts = await self._in_thread(no_parts, lambda: [self._load(chain[at:stop]) for chain in chains])
        if not parts or parts[0][0] is None:
            return 0
        caches, salt, ids = self._caches, generation.salt, generation.ids
        admitted = await asyncio.wrap_future(self._engine.call(lambda: caches.admit(salt, ids, chains, at, parts)))
        self._metrics.fetched(admitted)
        return admitted or None

    def _load(self, keys: Sequence[BlockHash]) -> list[bytes | None]:
        """Return the values; damaged values are deleted, and None here."""
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
        """Return the result, or ``otherwise`` if the store fails or is late."""
        loop = asyncio.get_running_loop()
        try:
            # Not ``wait_for``: in Python 3.11 it loses a cancellation that arrives together with the result. A request
            # whose client has disconnected would then keep waiting.
            async with asyncio.timeout(self._call_s):
                return await loop.run_in_executor(self._threads, act)
        except TIER_FAILURES as error:  # a timeout is an OSError
            _LOG.warning("the %s store: %s", self._store.name, error or "no answer in time")
            return otherwise
