"""BlockCache: a prompt's blocks out of a store and into it, for any engine.

It sees token ids, hashes, tiers and seconds; never tensors, never satellites. An engine gives it a sink to place
blocks in and a source to read them from. This is the one place where a tier's failure becomes a miss.
"""

from __future__ import annotations

import base64
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

from skymemory import native
from skymemory.cache.pace import ComputeRate
from skymemory.cache.patience import worth
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
from skymemory.kv.block import BlockHash, Tokens, hash_blocks, places_in
from skymemory.kv.codec.base import RAW, Codec
from skymemory.kv.context import CacheContext
from skymemory.kv.layout import KVLayout
from skymemory.kv.value import HEADER_BYTES, LATER_VERSION, ValueHeader, unpack_value
from skymemory.metrics import Counters
from skymemory.store.base import KeyReport, LoadTicket, Places, Presence, Store
from skymemory.store.sealed import NOT_AUTHENTIC

TIER_FAILURES = (SkyMemoryError, OSError, RuntimeError, ValueError, LookupError, EOFError)
"""What a broken tier may raise; programming errors (TypeError, AttributeError …) still surface."""

FAILING_REASONS = frozenset({"unreachable", "timeout"})
"""Misses that say that the store, and not the value, was not there."""
SHORT = "shorter than a block"
"""Why nothing of a prompt is found that has no block."""
_log = logging.getLogger(__name__)

LOAD_BATCH_BYTES = 128 << 20
STORE_BATCH_BYTES = 64 << 20
"""Bytes in flight at most, loading and storing."""


class BlockCache:
    """The blocks of one context in one store.

    ``codec`` is what new blocks are written with; blocks written with any of ``readable`` (and RAW) are read.
    A lossy codec under a context that promises no loss raises InvalidInput.
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
        """How fast the engine computes, as far as it reports: it bounds how long a tier is waited for."""
        self.owner = Owner("this BlockCache")
        self._answers = True
        self._failures = Lock()  # loads of several threads may fail at once
        self.on_prompt: Callable[[Sequence[BlockHash]], object] | None = None
        """Told of the full blocks of every prompt that is looked up (``PrefetchScheduler.saw`` wants to know)."""

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
        """Place the longest cached prefix of ``tokens`` in the sink that ``open_sink(found_blocks)`` gives.

        ``limit_tokens`` bounds the tokens counted as supplied (default: all but the last). Blocks behind the first
        one that fails are not used. ``account=False`` keeps this load out of the token counters.
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
        with worth(computing_s):
            with phase("lookup"):
                found = self.prefix(hashes[:wanted])
                not_found = self.why_not(hashes[found]) if found < wanted else "" if hashes else SHORT
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
        """Place these, one behind another from block 0 of ``sink`` on: batch after batch until one fails, or until
        computing all of the prompt would have taken as long.
        """
        batches = self._lease(hashes)
        started_s = self.clock()
        try:
            while batches and not tally.failed:
                if tally.tiers and computing_s is not None and self.clock() - started_s > computing_s:
                    tally.failed["deadline"] += 1
                    break
                self._load_batch(batches[0], sink, tally, phase)
                self._let_go(batches.pop(0))
        finally:
            for batch in batches:
                self._let_go(batch)
        if tally.failed and (behind := len(hashes) - len(tally.tiers) - 1):
            tally.failed["behind a failed block"] += behind

    def there(self, hashes: Sequence[BlockHash]) -> list[bool]:
        """Of each block, whether the store says it has it."""
        try:
            presence = self.store.lookup(hashes)
        except TIER_FAILURES:
            self.tier_failed()
            return [False] * len(hashes)
        return [one is Presence.HIT for one in presence]

    def missing(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Positions of the blocks that the store does not have and that are not being stored."""
        self.owner.check()
        try:
            with worth(self.compute.seconds(len(hashes) * self.layout.block_tokens)):
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
        """Store the blocks ``indices`` (ascending); how many were acknowledged, and their bytes.

        Stops at the first block that the codec cannot take, so that presence stays prefix-closed. Raises
        ValueTooLarge when a block can never fit the store; any other failure of the tier stores nothing.
        ``account=False`` keeps them out of the counters of blocks; their bytes count.
        """
        self.owner.check()
        phase = PhaseClock(self.clock, seconds if seconds is not None else {})
        value_bytes = PAYLOAD_AT + self.layout.block_bytes
        batch = max(1, STORE_BATCH_BYTES // value_bytes)
        rooms = [bytearray(value_bytes) for _ in range(min(batch, len(indices)))]
        stored = size_bytes = 0
        for start in range(0, len(indices), batch):
            part = indices[start : start + batch]
            items: list[tuple[bytes, memoryview]] = []
            with phase("encode"):
                for index, room in zip(part, rooms, strict=False):
                    value = self._encode(hashes[index], index, source, room)
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
        """Leading blocks that the store says it has."""
        if not hashes:
            return 0
        try:
            return min(max(self.store.prefix(hashes), 0), len(hashes))
        except TIER_FAILURES:
            self.tier_failed()
            return 0

    def why_not(self, block_hash: BlockHash) -> str:
        """Why a block that look-up does not know of is not there: by the report of a load, which says so."""
        try:
            ticket = self.store.prepare_load([block_hash])
            came = self.store.complete_load(ticket)[0] is not None
            report = ticket.report
            self.store.release(ticket)
        except TIER_FAILURES:
            self.tier_failed()
            reason = "unreachable"
        else:
            reason = "stored just now" if came else report.keys[0].reason if report is not None else "absent"
        self._tell(reason not in FAILING_REASONS)
        return reason

    def _tell(self, answers: bool) -> None:
        """A log has a line for each time that the store goes or comes back."""
        if answers is not self._answers:
            self._answers = answers
            if answers:
                _log.warning("the %s store answers again", self.store.name)
            else:
                _log.warning("the %s store does not answer: prompts are computed meanwhile", self.store.name)

    def _lease(self, hashes: list[BlockHash]) -> list[LeasedBatch]:
        """Leases for all of ``hashes`` at once, in batches of bounded bytes; fewer where the store fails."""
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
                    self.forget_sealed(batch.hashes, keys)
                    return
                failure = self.place(sink, batch.start + offset, block_hash, value)
                if failure:
                    tally.failed[failure] += 1
                    self.forget_wrong(block_hash, failure)
                    return
                tally.tiers.append((keys[offset].tier if keys else "") or self.store.name)
                tally.size_bytes += value.nbytes

    def fetch(self, block_hash: BlockHash, sink: BlockSink) -> str:
        """Place one block, whatever is before it, in ``sink`` as block 0; why that could not be, or empty."""
        self.owner.check()
        try:
            with worth(self.compute.seconds(self.layout.block_tokens)):
                (value,) = self.store.get_many([block_hash])
        except TIER_FAILURES:
            self.tier_failed()
            return "unreachable"
        if value is None:
            return "absent"
        if failure := self.place(sink, 0, block_hash, value):
            self.forget_wrong(block_hash, failure)
        return failure

    def place(self, sink: BlockSink, index: int, block_hash: BlockHash, value: memoryview) -> str:
        """Verify, decode and hand over one block; why it could not be used, or empty."""
        return place_block(sink, index, block_hash, value, self.layout, self._readable)

    def _encode(self, block_hash: BlockHash, index: int, source: BlockSource, room: bytearray) -> memoryview | None:
        """Block ``index`` as a value; in ``room`` if it is stored raw. None if the codec cannot take it."""
        value = memoryview(room)
        source.read(index, value[PAYLOAD_AT:])
        if self.codec is RAW:
            value[:PAYLOAD_AT] = block_header(block_hash, self.layout, RAW, value[PAYLOAD_AT:])
            return value
        try:
            payload = self.codec.encode(value[PAYLOAD_AT:], self.layout)
        except InvalidInput:
            self.counters.add("codec_refused_blocks_total", label=self.codec.name)
            return None
        return memoryview(block_header(block_hash, self.layout, self.codec, payload) + payload)

    def _put(self, items: list[tuple[bytes, memoryview]], places: Places) -> list[bool]:
        try:
            with worth(self.compute.seconds(len(items) * self.layout.block_tokens)):
                return self.store.put_many(items, places) if items else []
        except ValueTooLarge:
            raise
        except TIER_FAILURES:
            self.tier_failed()
            return [False] * len(items)

    def _forget(self, block_hash: BlockHash) -> None:
        """A block that came wrong is removed, so that the next storing replaces it."""
        try:
            self.store.delete([block_hash])
        except TIER_FAILURES:
            self.tier_failed()

    def forget_wrong(self, block_hash: BlockHash, failure: str) -> None:
        """Remove a block whose bytes were wrong; one that only this reader cannot read stays."""
        if failure in WRONG:
            self._forget(block_hash)

    def forget_sealed(self, hashes: Sequence[BlockHash], reports: Sequence[KeyReport]) -> None:
        """Blocks that none of our keys opens (it was retired, or they are somebody else's) would be misses for ever:
        the tier has them, so they would not be stored again. Those of a key that is to come stay (``UNKNOWN_KEY``).
        """
        for block_hash, report in zip(hashes, reports, strict=False):
            if report.reason == NOT_AUTHENTIC:
                self._forget(block_hash)

    def _let_go(self, batch: LeasedBatch) -> None:
        if batch.ticket is not None:
            self.release(batch.ticket)

    def release(self, ticket: LoadTicket) -> None:
        """Give a lease or its values back."""
        try:
            self.store.release(ticket)
        except TIER_FAILURES:
            self.tier_failed()

    def tier_failed(self) -> None:
        """Count a call that the store did not answer."""
        with self._failures:
            self.counters.add("tier_failures_total", label=self.store.name)

    def count_load(self, result: LoadResult, account: bool) -> None:
        """Add a load to the counters; with ``account`` its tokens, too."""
        for reason, blocks in result.failed_blocks.items():
            self.counters.add("failed_blocks_total", blocks, reason)
        self.counters.add("loaded_bytes_total", result.size_bytes, self.store.name)
        if account:
            self.count_tokens(result)

    def count_tokens(self, result: LoadResult) -> None:
        """Add the tokens of a prompt to the counters, by where they come from."""
        self.counters.add("lookup_tokens_total", result.prompt_tokens)
        self.counters.add("computed_tokens_total", result.computed_tokens)
        for tier, tokens in result.hit_tokens.items():
            self.counters.add("hit_tokens_total", tokens, tier)


# What an engine lends the cache: a sink for loaded blocks, a source of blocks to store; and a load's own notes.


class BlockSink(Protocol):
    """Where loaded blocks go."""

    def place(self, index: int, block: memoryview) -> None:
        """Copy block ``index``'s raw bytes (``KVLayout.shape``, C order) out of ``block`` before returning."""


class BlockSource(Protocol):
    """Where blocks to be stored come from."""

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
    """None where the store failed to give one."""


@dataclass(slots=True)
class LoadTally:
    """What a load has come to so far."""

    tiers: list[str] = field(default_factory=list)
    """The tier of each block placed, in order."""
    failed: Counter[str] = field(default_factory=Counter)
    size_bytes: int = 0
    retransmitted: int = 0

    def tokens_by_tier(self, block_tokens: int, limit_tokens: int) -> dict[str, int]:
        """Tokens each tier supplied; what lies past ``limit_tokens`` in the last block is not counted."""
        tokens: Counter[str] = Counter()
        for index, tier in enumerate(self.tiers):
            tokens[tier] += min(limit_tokens - index * block_tokens, block_tokens)
        return dict(tokens)


# One stored value into its place in the engine's memory: verified, decoded, copied once.


WRONG = ("corrupt", "foreign")
"""The reasons that say that the bytes are wrong, and not that this reader cannot read them."""


def place_block(
    sink: BlockSink,
    index: int,
    block_hash: BlockHash,
    value: memoryview,
    layout: KVLayout,
    readable: Mapping[int, Codec],
) -> str:
    """Hand block ``index`` over to ``sink``; why it could not be used, or empty."""
    try:
        codec_id, payload = open_block(value, block_hash, layout)
        codec = readable.get(codec_id)
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


# One block as a stored value: its header names the block and carries the payload's checksum.
#
# The name is 64 characters, so that the payload begins at byte 128, aligned for any engine's copy.


NAME_BYTES = 64
PAYLOAD_AT = HEADER_BYTES + NAME_BYTES
_NAME = "block {} crc32 {:08x}"


class ForeignBlock(MalformedPacket):
    """A sound value, but not of the block, layout or loss that was asked for."""


def block_name(block_hash: BlockHash, payload_crc: int) -> str:
    """``block <43 characters of base64> crc32 <8 of hex>``: ties the payload to its block hash."""
    return _NAME.format(base64.urlsafe_b64encode(block_hash).decode().rstrip("="), payload_crc)


def block_header(block_hash: BlockHash, layout: KVLayout, codec: Codec, payload: memoryview | bytes) -> bytes:
    """The ``PAYLOAD_AT`` bytes that go in front of ``payload``."""
    name = block_name(block_hash, native.crc32(payload))
    return ValueHeader(codec.codec_id, layout.block_bytes, len(payload), layout, name).pack()


def is_sound_block(block_hash: BlockHash, value: memoryview) -> bool:
    """Whether these bytes are a stored block of this hash, undamaged; of whichever layout. What a later release wrote
    passes: it is not for us to judge, and is kept and moved as it is.
    """
    try:
        header, payload = unpack_value(value)
    except LaterVersion:
        return True
    except MalformedPacket:
        return False
    return header.name == block_name(block_hash, native.crc32(payload))


def open_block(value: memoryview, block_hash: BlockHash, layout: KVLayout) -> tuple[int, memoryview]:
    """Codec id and payload of a stored block, after every check.

    Raises MalformedPacket for damaged bytes, and its subclasses ForeignBlock for another block or layout, LaterVersion
    for what a later release wrote.
    """
    header, payload = unpack_value(value)
    if header.layout != layout:
        raise ForeignBlock(f"a block of {header.layout}, expected {layout}")
    expected = block_name(block_hash, 0)[:-8]
    if header.name[:-8] != expected:
        raise ForeignBlock(f"a value named {header.name!r}, expected {expected}…")
    if header.name[-8:] != f"{native.crc32(payload):08x}":
        raise MalformedPacket("a block's payload differs from its checksum")
    return header.codec_id, payload
