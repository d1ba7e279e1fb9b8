"""BlockCache: loads and saves a prompt's blocks, for any engine and any store.

It sees token ids, hashes, tiers and seconds; never tensors, never satellites. An engine passes a sink for loaded blocks
and a source of blocks to save. Failures of the store become misses here.

A load: hash the prompt's blocks, look up the longest stored prefix, lease it in batches, and for each batch fetch, then
verify, decode and place block by block. The first block that fails ends the prefix.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

from skymemory.cache.patience import ComputeRate, recompute_cost
from skymemory.cache.results import LoadResult
from skymemory.errors import (
    CodecUnavailable,
    InvalidInput,
    LaterVersion,
    MalformedPacket,
    SkyMemoryError,
    ValueTooLarge,
)
from skymemory.forks import Owner
from skymemory.kv.block import BlockHash, KVLayout, Tokens, hash_blocks, places_in
from skymemory.kv.codec.base import RAW, Codec
from skymemory.kv.context import CacheContext
from skymemory.kv.value import LATER_VERSION, PAYLOAD_AT, ForeignBlock, block_header, open_block
from skymemory.metrics import Counters
from skymemory.store.base import KeyReport, LoadTicket, Places, Presence, Store
from skymemory.store.sealed import NOT_AUTHENTIC

_log = logging.getLogger(__name__)

TIER_FAILURES = (SkyMemoryError, OSError, RuntimeError, ValueError, LookupError, EOFError)
"""What a broken tier may raise; programming errors (TypeError, AttributeError …) are not caught."""
FAILING_REASONS = frozenset({"unreachable", "timeout"})
"""Miss reasons that mean the store did not answer, rather than that the value is absent."""
TOO_SHORT = "shorter than a block"
"""Miss reason of a prompt without a full block."""
_INVALID = ("corrupt", "foreign")
"""Reasons that mean that the bytes are wrong for any reader; their block is deleted."""

LOAD_BATCH_BYTES = 128 << 20
STORE_BATCH_BYTES = 64 << 20
"""Bounds on the bytes in flight, loading and storing."""


class BlockSink(Protocol):
    """Where an engine wants loaded blocks."""

    def place(self, index: int, block: memoryview) -> None:
        """Copy block ``index``'s raw bytes (``KVLayout.shape``, C order) out of ``block`` before returning."""


class BlockSource(Protocol):
    """Where an engine's blocks to be saved come from."""

    def read(self, index: int, out: memoryview) -> None:
        """Write block ``index``'s raw bytes (``KVLayout.shape``, C order) into ``out``."""


class PhaseClock:
    """Seconds by phase, summed, in order of first use."""

    def __init__(self, clock: Callable[[], float], seconds: dict[str, float]) -> None:
        self._clock = clock
        self.seconds = seconds

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started_s = self._clock()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + self._clock() - started_s


@dataclass(frozen=True, slots=True)
class LeasedBatch:
    """Consecutive blocks of a prompt that are fetched together."""

    start: int
    hashes: list[BlockHash]
    ticket: LoadTicket | None
    """None where the store failed to give a lease."""


@dataclass(slots=True)
class LoadTally:
    """Progress of a load."""

    tiers: list[str] = field(default_factory=list)
    """The tier of each block placed, in order."""
    failed: Counter[str] = field(default_factory=Counter)
    """Failed blocks, by reason."""
    size_bytes: int = 0
    retransmitted: int = 0

    def tokens_by_tier(self, block_tokens: int, limit_tokens: int) -> dict[str, int]:
        """Tokens each tier supplied, up to ``limit_tokens`` in all."""
        tokens: Counter[str] = Counter()
        for index, tier in enumerate(self.tiers):
            tokens[tier] += min(limit_tokens - index * block_tokens, block_tokens)
        return dict(tokens)


class BlockCache:
    """The blocks of one context in one store.

    New blocks are encoded with ``codec``; blocks in RAW, ``codec`` or any of ``readable`` are read. Raises InvalidInput
    for a lossy codec in a lossless context.
    """

    def __init__(
        self,
        context: CacheContext,
        layout: KVLayout,
        store: Store,
        codec: Codec = RAW,
        *,
        readable: Sequence[Codec] = (),
        counters: Counters | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if context.block_tokens != layout.block_tokens:
            raise InvalidInput(
                f"the context has blocks of {context.block_tokens} tokens, the layout of {layout.block_tokens}"
            )
        if context.lossless and not codec.lossless:
            raise InvalidInput(
                f"codec {codec.name!r} loses precision and the context is lossless: make it lossless=False"
            )
        self.context = context
        self.layout = layout
        self.store = store
        self.codec = codec
        self.counters = counters if counters is not None else Counters()
        self._digest = context.digest()
        self._readable = {
            known.codec_id: known for known in (RAW, *readable, codec) if known.lossless or not context.lossless
        }
        self.clock = clock
        self.compute = ComputeRate()
        """The engine's speed, as far as it is reported: it bounds how long a tier is waited for."""
        self.owner = Owner("this BlockCache")
        self._logged_answering = True
        self._failures = Lock()  # loads of several threads may fail at once
        self.on_prompt: Callable[[Sequence[BlockHash]], object] | None = None
        """Called with the full blocks of every prompt that is looked up (for ``PrefetchScheduler.saw``)."""

    def hashes(self, tokens: Tokens) -> list[BlockHash]:
        """Chained hashes of the full blocks of ``tokens``."""
        return hash_blocks(self._digest, tokens, self.layout.block_tokens)

    def load(
        self,
        tokens: Tokens,
        open_sink: Callable[[int], BlockSink],
        *,
        limit_tokens: int | None = None,
        seconds: dict[str, float] | None = None,
        account: bool = True,
    ) -> LoadResult:
        """Place the longest cached prefix of ``tokens`` in the sink that ``open_sink(found_blocks)`` returns.

        ``limit_tokens`` bounds the tokens counted as supplied (default: all but the last). ``account=False`` keeps this
        load out of the token counters.
        """
        self.owner.check()
        phase = PhaseClock(self.clock, seconds if seconds is not None else {})
        count = len(tokens)
        limit_tokens = max(0, count - 1) if limit_tokens is None else min(limit_tokens, count)
        wanted = min(count // self.layout.block_tokens, -(-limit_tokens // self.layout.block_tokens))
        with phase("hash"):
            hashes = self.hashes(tokens)
        if self.on_prompt is not None:
            self.on_prompt(hashes)
        computing_s = self.compute.seconds(count)
        tally = LoadTally()
        with recompute_cost(computing_s):
            with phase("lookup"):
                found = self.prefix(hashes[:wanted])
                not_found = self.miss_reason(hashes[found]) if found < wanted else "" if hashes else TOO_SHORT
            if found:
                self.load_found(hashes[:found], open_sink(found), tally, phase, computing_s)
        result = LoadResult(
            prompt_tokens=count,
            hit_tokens=tally.tokens_by_tier(self.layout.block_tokens, limit_tokens),
            blocks=len(hashes),
            found_blocks=found,
            not_found=not_found,
            loaded_blocks=len(tally.tiers),
            failed_blocks=dict(tally.failed),
            size_bytes=tally.size_bytes,
            retransmitted=tally.retransmitted,
            seconds=phase.seconds,
        )
        self.count_load(result, account)
        return result

    def load_found(
        self, hashes: list[BlockHash], sink: BlockSink, tally: LoadTally, phase: PhaseClock, computing_s: float | None
    ) -> None:
        """Place these consecutively, from block 0 of ``sink`` on: batch after batch until a block fails, or
        ``computing_s`` (the time to compute the whole prompt instead) is over.
        """
        batches = self._lease(hashes)
        started_s = self.clock()
        try:
            while batches and not tally.failed:
                if tally.tiers and computing_s is not None and self.clock() - started_s > computing_s:
                    tally.failed["deadline"] += 1
                    break
                self._load_batch(batches[0], sink, tally, phase)
                self._release(batches.pop(0))
        finally:
            for batch in batches:
                self._release(batch)
        if tally.failed and (behind := len(hashes) - len(tally.tiers) - 1):
            tally.failed["behind a failed block"] += behind

    def stored(self, hashes: Sequence[BlockHash]) -> list[bool]:
        """Of each block, whether the store has it."""
        try:
            presence = self.store.lookup(hashes)
        except TIER_FAILURES:
            self.tier_failed()
            return [False] * len(hashes)
        return [one is Presence.HIT for one in presence]

    def missing(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Positions of the blocks that are neither in the store nor being stored."""
        self.owner.check()
        try:
            with recompute_cost(self.compute.seconds(len(hashes) * self.layout.block_tokens)):
                presence = self.store.lookup(hashes)
        except TIER_FAILURES:
            self.tier_failed()
            return list(range(len(hashes)))
        return [index for index, present in enumerate(presence) if present is Presence.MISS]

    def save(
        self,
        hashes: Sequence[BlockHash],
        indices: Sequence[int],
        source: BlockSource,
        seconds: dict[str, float] | None = None,
        account: bool = True,
    ) -> tuple[int, int]:
        """Store the blocks ``indices`` (ascending); returns the number acknowledged, and their bytes.

        Stops at the first block that the codec refuses, so that what is stored of a prompt stays a prefix. Raises
        ValueTooLarge for a block that can never fit the store; on any other failure of the tier nothing is stored.
        ``account=False`` keeps the blocks out of the counters; their bytes count.
        """
        self.owner.check()
        phase = PhaseClock(self.clock, seconds if seconds is not None else {})
        value_bytes = PAYLOAD_AT + self.layout.block_bytes
        batch = max(1, STORE_BATCH_BYTES // value_bytes)
        buffers = [bytearray(value_bytes) for _ in range(min(batch, len(indices)))]
        stored = size_bytes = 0
        for start in range(0, len(indices), batch):
            part = indices[start : start + batch]
            items: list[tuple[bytes, memoryview]] = []
            with phase("encode"):
                for index, buffer in zip(part, buffers, strict=False):
                    value = self._encode(hashes[index], index, source, buffer)
                    if value is None:
                        break
                    items.append((hashes[index], value))
            with phase("store"):
                done = self._put(items, places_in(hashes, part[: len(items)]))
            stored += sum(done)
            size_bytes += sum(len(value) for (_, value), ok in zip(items, done, strict=True) if ok)
            if len(items) < len(part):
                break
        self.counters.add("stored_bytes_total", size_bytes, self.store.name)
        if account:
            self.counters.add("stored_blocks_total", stored, self.store.name)
            self.counters.add("refused_blocks_total", len(indices) - stored, self.store.name)
        return stored, size_bytes

    def prefix(self, hashes: list[BlockHash]) -> int:
        """Number of leading blocks that the store has."""
        if not hashes:
            return 0
        try:
            return min(max(self.store.prefix(hashes), 0), len(hashes))
        except TIER_FAILURES:
            self.tier_failed()
            return 0

    def miss_reason(self, block_hash: BlockHash) -> str:
        """Why a block that the lookup did not find is missing: the reason that a load reports."""
        try:
            ticket = self.store.prepare_load([block_hash])
            loaded = self.store.complete_load(ticket)[0] is not None
            report = ticket.report
            self.store.release(ticket)
        except TIER_FAILURES:
            self.tier_failed()
            reason = "unreachable"
        else:
            reason = "stored just now" if loaded else report.keys[0].reason if report is not None else "absent"
        self._log_state(reason not in FAILING_REASONS)
        return reason

    def _log_state(self, answering: bool) -> None:
        """One line each time that the store stops or resumes answering."""
        if answering is not self._logged_answering:
            self._logged_answering = answering
            if answering:
                _log.warning("the %s store answers again", self.store.name)
            else:
                _log.warning("the %s store does not answer: prompts are computed meanwhile", self.store.name)

    def _lease(self, hashes: list[BlockHash]) -> list[LeasedBatch]:
        """Leases on all of ``hashes``, in batches of bounded bytes."""
        size = max(1, LOAD_BATCH_BYTES // (PAYLOAD_AT + self.layout.block_bytes))
        batches = []
        for start in range(0, len(hashes), size):
            part = hashes[start : start + size]
            try:
                batches.append(LeasedBatch(start, part, self.store.prepare_load(part)))
            except TIER_FAILURES:
                self.tier_failed()
                batches.append(LeasedBatch(start, part, None))
        return batches

    def _load_batch(self, batch: LeasedBatch, sink: BlockSink, tally: LoadTally, phase: PhaseClock) -> None:
        values: list[memoryview | None] = []
        with phase("fetch"):
            if batch.ticket is not None:
                try:
                    values = self.store.complete_load(batch.ticket)
                except TIER_FAILURES:
                    self.tier_failed()
        report = batch.ticket.report if batch.ticket is not None else None
        keys = report.keys if report is not None and len(report.keys) == len(batch.hashes) else ()
        if report is not None:
            tally.retransmitted += report.retransmitted
        with phase("decode"):
            for offset, block_hash in enumerate(batch.hashes):
                value = values[offset] if offset < len(values) else None
                if value is None:
                    tally.failed[(keys[offset].reason if keys else "") or "unreachable"] += 1
                    self.delete_sealed(batch.hashes, keys)
                    return
                failure = self.place(sink, batch.start + offset, block_hash, value)
                if failure:
                    tally.failed[failure] += 1
                    self.delete_invalid(block_hash, failure)
                    return
                tally.tiers.append((keys[offset].tier if keys else "") or self.store.name)
                tally.size_bytes += value.nbytes

    def fetch(self, block_hash: BlockHash, sink: BlockSink) -> str:
        """Place one block in ``sink`` as block 0; returns the reason of a failure, or ""."""
        self.owner.check()
        try:
            with recompute_cost(self.compute.seconds(self.layout.block_tokens)):
                (value,) = self.store.get_many([block_hash])
        except TIER_FAILURES:
            self.tier_failed()
            return "unreachable"
        if value is None:
            return "absent"
        if failure := self.place(sink, 0, block_hash, value):
            self.delete_invalid(block_hash, failure)
        return failure

    def place(self, sink: BlockSink, index: int, block_hash: BlockHash, value: memoryview) -> str:
        """Verify and decode one stored block and hand it to ``sink``; returns the reason of a failure, or ""."""
        layout = self.layout
        try:
            codec_id, payload = open_block(value, block_hash, layout)
            codec = self._readable.get(codec_id)
            if codec is None:
                return "codec not readable"
            if codec is RAW and payload.nbytes == layout.block_bytes:
                sink.place(index, payload)
                return ""
            block = memoryview(bytearray(layout.block_bytes))
            codec.decode(payload, layout, block)
            sink.place(index, block)
        except CodecUnavailable:
            return "codec not installed"
        except ForeignBlock:
            return "foreign"
        except LaterVersion:
            return LATER_VERSION
        except MalformedPacket:
            return "corrupt"
        return ""

    def _encode(self, block_hash: BlockHash, index: int, source: BlockSource, buffer: bytearray) -> memoryview | None:
        """Block ``index`` as a value, in ``buffer`` if it is stored raw. None if the codec refuses it."""
        value = memoryview(buffer)
        source.read(index, value[PAYLOAD_AT:])
        if self.codec is RAW:
            value[:PAYLOAD_AT] = block_header(block_hash, self.layout, RAW.codec_id, value[PAYLOAD_AT:])
            return value
        try:
            payload = self.codec.encode(value[PAYLOAD_AT:], self.layout)
        except InvalidInput:
            self.counters.add("codec_refused_blocks_total", label=self.codec.name)
            return None
        return memoryview(block_header(block_hash, self.layout, self.codec.codec_id, payload) + payload)

    def _put(self, items: list[tuple[bytes, memoryview]], places: Places) -> list[bool]:
        try:
            with recompute_cost(self.compute.seconds(len(items) * self.layout.block_tokens)):
                return self.store.put_many(items, places) if items else []
        except ValueTooLarge:
            raise
        except TIER_FAILURES:
            self.tier_failed()
            return [False] * len(items)

    def _delete(self, block_hash: BlockHash) -> None:
        try:
            self.store.delete([block_hash])
        except TIER_FAILURES:
            self.tier_failed()

    def delete_invalid(self, block_hash: BlockHash, failure: str) -> None:
        """Delete a block whose bytes were wrong, so that it is stored again; one that only this reader cannot read
        stays.
        """
        if failure in _INVALID:
            self._delete(block_hash)

    def delete_sealed(self, hashes: Sequence[BlockHash], reports: Sequence[KeyReport]) -> None:
        """Delete blocks that no key of ours opens (retired keys, another owner): they would be permanent misses, as
        blocks that are present are not stored again. Those of a key not distributed yet stay (``UNKNOWN_KEY``).
        """
        for block_hash, report in zip(hashes, reports, strict=False):
            if report.reason == NOT_AUTHENTIC:
                self._delete(block_hash)

    def _release(self, batch: LeasedBatch) -> None:
        if batch.ticket is not None:
            self.release(batch.ticket)

    def release(self, ticket: LoadTicket) -> None:
        """Release a lease or its values."""
        try:
            self.store.release(ticket)
        except TIER_FAILURES:
            self.tier_failed()

    def tier_failed(self) -> None:
        """Count a call that failed."""
        with self._failures:
            self.counters.add("tier_failures_total", label=self.store.name)

    def count_load(self, result: LoadResult, account: bool) -> None:
        """Add a load to the counters, with ``account`` including its tokens."""
        for reason, blocks in result.failed_blocks.items():
            self.counters.add("failed_blocks_total", blocks, reason)
        self.counters.add("loaded_bytes_total", result.size_bytes, self.store.name)
        if account:
            self.count_tokens(result)

    def count_tokens(self, result: LoadResult) -> None:
        """Add the tokens of a prompt to the counters, by tier."""
        self.counters.add("lookup_tokens_total", result.prompt_tokens)
        self.counters.add("computed_tokens_total", result.computed_tokens)
        for tier, tokens in result.hit_tokens.items():
            self.counters.add("hit_tokens_total", tokens, tier)
