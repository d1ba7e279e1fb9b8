"""Loads and saves of a prompt's blocks, for any engine and store; the store's failures become misses.

A load (``Parts.load``): hash the prompt's blocks, look up the longest stored prefix, lease it in batches; fetch each
batch, then verify, decode and place block by block. The first block that fails ends the prefix.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from skymemory.cache.patience import ComputeRate, recompute_cost
from skymemory.errors import (
    CodecUnavailable,
    InvalidInput,
    LaterVersion,
    MalformedPacket,
    SkyMemoryError,
    ValueTooLarge,
)
from skymemory.forks import Owner
from skymemory.kv.block import BlockHash, KVLayout, OpaqueLayout, Tokens, hash_blocks, places_in
from skymemory.kv.codec.codec_base import RAW, Codec
from skymemory.kv.context import CacheContext
from skymemory.kv.value import (
    PAYLOAD_AT,
    ForeignBlock,
    block_header,
    check_placed_block,
    open_block,
)
from skymemory.metrics import Counters
from skymemory.native import Rows
from skymemory.reasons import INVALID, UNANSWERED, Miss
from skymemory.store.base import KeyReport, LoadTicket, Places, Presence, Store
from skymemory.units import format_duration, format_size

_log = logging.getLogger(__name__)

TIER_FAILURES = (SkyMemoryError, OSError, RuntimeError, ValueError, LookupError, EOFError)
"""Exceptions that a broken tier may raise; others are programming errors."""

LOAD_BATCH_BYTES = 128 << 20
STORE_BATCH_BYTES = 64 << 20


class BlockSink(Protocol):
    def place(self, index: int, block: memoryview) -> None:
        """Copy block ``index`` (raw bytes of ``KVLayout.shape``) before returning.

        A sink may set ``threads``: how many threads call ``place`` concurrently.
        """


@runtime_checkable
class RowSink(BlockSink, Protocol):
    """Sink into which a store may write raw blocks."""

    def rows(self, index: int, head: memoryview) -> Rows | None:
        """Return the places of block ``index``'s raw bytes, after ``head``; None: use ``place``. They must hold nothing
        in use: a failed block leaves arbitrary bytes.
        """

    def on_block(self, index: int) -> None:
        """Record that block ``index`` is in its rows."""


class BlockSource(Protocol):
    def read(self, index: int, out: memoryview) -> None:
        """Write block ``index``'s raw bytes into ``out``."""


# --- results: tokens by source, bytes, and seconds by phase ---


@dataclass(slots=True, eq=False)
class TokenUsage:
    """Use of a load's tokens, ``first`` to ``end`` of the prompt; the engine updates it. At the end each counts once:
    ``end - first == used_tokens + sum(unused_tokens.values())``.
    """

    first: int = 0
    end: int = 0
    used_tokens: int = 0
    unused_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens computed all the same, or not needed, by reason."""
    is_in_use: bool = False
    has_warned: bool = False
    _reached: int = 0  # tokens before are counted as used
    _holders: int = 1  # copies that share this object

    @property
    def open_tokens(self) -> int:
        return self.end - self.first - self.used_tokens - sum(self.unused_tokens.values())

    def use(self, start: int, stop: int) -> int:
        """Count skipped tokens; returns how many are new."""
        new = min(self._loaded_in(start, stop), self.open_tokens)
        self._reached = max(self._reached, stop)
        self.used_tokens += new
        self.is_in_use = True
        return new

    def refuse(self, start: int, stop: int, reason: str) -> int:
        new = min(self._loaded_in(start, stop), self.open_tokens)
        if new:
            self.unused_tokens[reason] = self.unused_tokens.get(reason, 0) + new
        return new

    def drop(self) -> bool:
        self._holders -= 1
        return self._holders <= 0

    def _loaded_in(self, start: int, stop: int) -> int:
        return max(0, min(stop, self.end) - max(start, self.first, self._reached))

    def __deepcopy__(self, memo: object) -> TokenUsage:
        self._holders += 1
        return self


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of a prompt's lookup: ``prompt_tokens == computed_tokens + sum(hit_tokens.values())``."""

    prompt_tokens: int
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens supplied, by tier."""
    blocks: int = 0
    found_blocks: int = 0
    loaded_blocks: int = 0
    """Leading valid blocks; of windowed layers, those in the last window."""
    failed_blocks: Mapping[Miss, int] = field(default_factory=dict)
    """Blocks found but unusable, by reason."""
    not_found: Miss | None = None
    """Reason why the next block was not found, if any."""
    size_bytes: int = 0
    retransmitted: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Phases: tokenize, hash, lookup, then fetch and decode, or cake."""
    loader: LoaderResult | None = None
    usage: TokenUsage = field(default_factory=TokenUsage, compare=False, repr=False)

    @property
    def cached_tokens(self) -> int:
        return sum(self.hit_tokens.values())

    @property
    def used_tokens(self) -> int:
        return self.usage.used_tokens

    @property
    def unused_tokens(self) -> Mapping[str, int]:
        return self.usage.unused_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens not supplied; at least 1 if there are any."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def left_tokens(self) -> int:
        if self.loader is None:
            return self.computed_tokens
        return max(self.computed_tokens - self.loader.computed_tokens, 1)  # the last token, for its logits

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def describe(self) -> str:
        tiers = ", ".join(f"{tokens} from {tier}" for tier, tokens in self.hit_tokens.items())
        failed = "".join(f", {count} blocks {reason}" for reason, count in self.failed_blocks.items())
        if self.not_found and not self.failed_blocks:
            failed = f", the next is {self.not_found}" if self.blocks else f", {self.not_found}"
        meanwhile = ""
        if self.loader is not None:
            met = self.loader.met_at_token
            meanwhile = f", {self.loader.computed_tokens} computed" + (f" (met at {met})" if met is not None else "")
        used, left_tokens = "", self.left_tokens
        if tiers and (self.usage.is_in_use or self.unused_tokens):
            reasons = "".join(f", {count} not: {reason}" for reason, count in self.unused_tokens.items())
            used = f" ({self.used_tokens} used{reasons})"
            left_tokens += self.cached_tokens - self.used_tokens
        return (
            f"{self.prompt_tokens} tokens: {tiers or 'none cached'}{used}{meanwhile}, {left_tokens} to compute; "
            f"{self.loaded_blocks} of {self.blocks} blocks, {format_size(self.size_bytes)} in "
            f"{format_duration(self.total_s)}{failed}"
        )


@dataclass(frozen=True, slots=True)
class StoreResult:
    """Result of storing blocks. ``blocks == present + stored + refused``."""

    prompt_tokens: int
    blocks: int = 0
    present_blocks: int = 0  # stored before, or being stored
    stored_blocks: int = 0
    refused_blocks: int = 0
    prefilled_tokens: int = 0  # computed only to be stored
    size_bytes: int = 0
    raw_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Phases: tokenize, hash, lookup, prefill, encode, store."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def describe(self) -> str:
        if not self.blocks:
            return f"{self.prompt_tokens} tokens: shorter than a block, 0 blocks to store"
        refused = f", {self.refused_blocks} refused" if self.refused_blocks else ""
        return (
            f"{self.prompt_tokens} tokens: {self.stored_blocks} of {self.blocks} blocks stored, "
            f"{self.present_blocks} there before{refused}; {format_size(self.size_bytes)} in "
            f"{format_duration(self.total_s)}, {self.prefilled_tokens} tokens computed for it"
        )


@dataclass(frozen=True, slots=True)
class LoaderResult:
    """Result of a prompt computed from its beginning while it was loaded from its end (Cake)."""

    resident_tokens: int  # in the engine before
    computed_tokens: int
    loaded_tokens: int
    loaded_bytes: int
    met_at_token: int | None
    """First token of the chunk at which both sides met, if they did."""
    wasted_bytes: int
    """Bytes of cancelled, late or failed loads."""
    wasted_tokens: int
    """Tokens computed for chunks that were loaded first."""
    failed_loads: int
    seconds: float
    aborted: bool


class PhaseClock:
    """Stopwatch: adds the time in ``with clock(phase)`` to ``seconds[phase]``."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started_s


@dataclass(frozen=True, slots=True)
class LeasedBatch:
    start: int
    hashes: list[BlockHash]
    ticket: LoadTicket | None


@dataclass(slots=True)
class LoadTally:
    tiers: list[str] = field(default_factory=list)
    failed: Counter[Miss] = field(default_factory=Counter)
    size_bytes: int = 0
    retransmitted: int = 0


class BlockCache:
    """Blocks of a context in a store.

    Saves encode with ``codec``; loads read RAW, ``codec`` and ``readable``. InvalidInput for a lossy codec in a
    lossless context.
    """

    def __init__(
        self,
        context: CacheContext,
        layout: KVLayout | OpaqueLayout,
        store: Store,
        codec: Codec = RAW,
        *,
        readable: Sequence[Codec] = (),
        counters: Counters | None = None,
    ) -> None:
        if context.block_tokens != layout.block_tokens:
            raise InvalidInput(
                f"the context has blocks of {context.block_tokens} tokens, the layout of {layout.block_tokens}"
            )
        if isinstance(layout, OpaqueLayout) and codec is not RAW:
            raise InvalidInput(f"codec {codec.name!r} cannot read blocks of an opaque layout: store them raw")
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
        self.compute = ComputeRate()
        self.owner = Owner("this BlockCache")
        self._logged_answering = True  # state of the store that was last logged
        self._failures = Lock()  # loads of several threads may fail concurrently
        self.on_prompt: Callable[[Sequence[BlockHash]], object] | None = None  # gets each prompt's hashes

    def hashes(self, tokens: Tokens) -> list[BlockHash]:
        return hash_blocks(self._digest, tokens, self.layout.block_tokens)

    def load_found(
        self, hashes: list[BlockHash], sink: BlockSink, tally: LoadTally, phase: PhaseClock, computing_s: float | None
    ) -> None:
        """Load blocks into ``sink``, from its block 0 on, until a failure, or until computing the prompt
        (``computing_s``) is sooner. ``tally`` gets the results.
        """
        batches = self._lease(hashes)
        started_s = time.perf_counter()
        try:
            while batches and not tally.failed:
                if tally.tiers and computing_s is not None and time.perf_counter() - started_s > computing_s:
                    tally.failed[Miss.DEADLINE] += 1
                    break
                self._load_batch(batches[0], sink, tally, phase)
                self.release(batches.pop(0).ticket)
        finally:
            for batch in batches:
                self.release(batch.ticket)
        if tally.failed and (following := len(hashes) - len(tally.tiers) - 1):
            tally.failed[Miss.BEHIND_FAILED] += following

    def stored(self, hashes: Sequence[BlockHash]) -> list[bool]:
        try:
            presence = self.store.lookup(hashes)
        except TIER_FAILURES:
            self.tier_failed()
            return [False] * len(hashes)
        return [state is Presence.HIT for state in presence]

    def missing(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the blocks neither stored nor being stored."""
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

        Stops at a block that the codec refuses, so that the stored blocks stay a prefix. ``account=False`` counts
        nothing. Raises ValueTooLarge.
        """
        self.owner.check()
        phase = PhaseClock(seconds if seconds is not None else {})
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
                done = self.put(items, places_in(hashes, part[: len(items)]))
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
        if not hashes:
            return 0
        try:
            return min(max(self.store.prefix(hashes), 0), len(hashes))
        except TIER_FAILURES:
            self.tier_failed()
            return 0

    def miss_reason(self, block_hash: BlockHash) -> Miss | None:
        """Return why a block is a miss, by trying to load it."""
        ticket = None
        try:
            ticket = self.store.prepare_load([block_hash])
            loaded = self.store.complete_load(ticket)[0] is not None
            report = ticket.report
        except TIER_FAILURES:
            self.tier_failed()
            reason: Miss | None = Miss.UNREACHABLE
        else:
            reason = Miss.STORED_JUST_NOW if loaded else report.keys[0].reason if report is not None else Miss.ABSENT
        finally:
            self.release(ticket)
        self._log_state(reason not in UNANSWERED)
        return reason

    def _log_state(self, answering: bool) -> None:
        if answering is not self._logged_answering:
            self._logged_answering = answering
            if answering:
                _log.warning("the %s store answers again", self.store.name)
            else:
                _log.warning("the %s store does not answer: prompts are computed meanwhile", self.store.name)

    def _lease(self, hashes: list[BlockHash]) -> list[LeasedBatch]:
        """Lease the blocks in batches, without ticket if the store fails."""
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
        """Load a batch, and place its blocks until a failure; ``tally`` gets the results."""
        values: list[memoryview | None] = []
        with phase("fetch"):
            if batch.ticket is not None:
                if self.codec is RAW and isinstance(sink, RowSink):
                    indices = range(batch.start, batch.start + len(batch.hashes))
                    heads = memoryview(bytearray(PAYLOAD_AT * len(indices)))
                    batch.ticket.rows = [
                        sink.rows(index, heads[PAYLOAD_AT * at :][:PAYLOAD_AT]) for at, index in enumerate(indices)
                    ]
                try:
                    values = self.store.complete_load(batch.ticket)
                except TIER_FAILURES:
                    self.tier_failed()
        report = batch.ticket.report if batch.ticket is not None else None
        keys = report.keys if report is not None and len(report.keys) == len(batch.hashes) else ()
        if report is not None:
            tally.retransmitted += report.retransmitted
        with phase("decode"), self._placing(sink, batch, values) as placing:
            for offset, block_hash in enumerate(batch.hashes):
                value = values[offset] if offset < len(values) else None
                if value is None:
                    tally.failed[(keys[offset].reason if keys else None) or Miss.UNREACHABLE] += 1
                    self.delete_sealed(batch.hashes, keys)
                    return
                crc = batch.ticket.placed.get(offset) if batch.ticket is not None else None
                size_bytes = value.nbytes
                if crc is not None and isinstance(sink, RowSink):
                    size_bytes = PAYLOAD_AT + self.layout.block_bytes
                    failure = self._verify_placed(sink, batch.start + offset, block_hash, value, crc)
                elif placing:
                    failure = placing[offset].result()
                else:
                    failure = self.place(sink, batch.start + offset, block_hash, value)
                if failure:
                    tally.failed[failure] += 1
                    self.delete_invalid(block_hash, failure)
                    return
                tally.tiers.append((keys[offset].tier if keys else "") or self.store.name)
                tally.size_bytes += size_bytes

    @contextmanager
    def _placing(
        self, sink: BlockSink, batch: LeasedBatch, values: list[memoryview | None]
    ) -> Iterator[list[Future[Miss | None]]]:
        """Place a batch's blocks in the sink's ``threads``; yield the results to come, none for a single thread."""
        threads = min(getattr(sink, "threads", 1), len(values))
        if threads < 2 or (batch.ticket is not None and batch.ticket.placed):
            yield []
            return
        with ThreadPoolExecutor(threads) as pool:  # for this call alone: a forked process inherits no dead threads
            yield [
                pool.submit(self.place, sink, batch.start + at, batch.hashes[at], value)
                if value is not None
                else Future()
                for at, value in enumerate(values[: len(batch.hashes)])
            ]

    def fetch(self, block_hash: BlockHash, sink: BlockSink) -> None:
        """Place a stored block as block 0."""
        self.owner.check()
        try:
            with recompute_cost(self.compute.seconds(self.layout.block_tokens)):
                (value,) = self.store.get_many([block_hash])
        except TIER_FAILURES:
            self.tier_failed()
            return
        if value is not None and (failure := self.place(sink, 0, block_hash, value)):
            self.delete_invalid(block_hash, failure)

    def _verify_placed(
        self, sink: RowSink, index: int, block_hash: BlockHash, head: memoryview, value_crc: int
    ) -> Miss | None:
        """Check a block written into the sink's rows, by header and CRC-32; return the reason of a failure."""

        def check() -> Miss | None:
            size_bytes = PAYLOAD_AT + self.layout.block_bytes
            if check_placed_block(head, size_bytes, value_crc, block_hash, self.layout) != RAW.codec_id:
                return Miss.CODEC_NOT_READABLE  # as large as a raw block, and so in the wrong places
            sink.on_block(index)
            return None

        return _failure_of(check)

    def place(self, sink: BlockSink, index: int, block_hash: BlockHash, value: memoryview) -> Miss | None:
        """Verify, decode and place a block; returns the reason of a failure."""
        return _failure_of(lambda: self._decode(sink, index, block_hash, value))

    def _decode(self, sink: BlockSink, index: int, block_hash: BlockHash, value: memoryview) -> Miss | None:
        """Do as ``place``, but raise for invalid bytes."""
        layout = self.layout
        codec_id, payload = open_block(value, block_hash, layout)
        codec = self._readable.get(codec_id)
        if codec is None:
            return Miss.CODEC_NOT_READABLE
        if codec is RAW and payload.nbytes == layout.block_bytes:  # straight from the store's memory: one copy less
            sink.place(index, payload)
            return None
        if isinstance(layout, OpaqueLayout):
            return Miss.FOREIGN
        block = memoryview(bytearray(layout.block_bytes))
        codec.decode(payload, layout, block)
        sink.place(index, block)
        return None

    def _encode(self, block_hash: BlockHash, index: int, source: BlockSource, buffer: bytearray) -> memoryview | None:
        """Return a block as stored, in ``buffer`` if raw; None if the codec refuses it."""
        value = memoryview(buffer)
        source.read(index, value[PAYLOAD_AT:])
        if self.codec is RAW or isinstance(self.layout, OpaqueLayout):
            value[:PAYLOAD_AT] = block_header(block_hash, self.layout, RAW.codec_id, value[PAYLOAD_AT:])
            return value
        try:
            payload = self.codec.encode(value[PAYLOAD_AT:], self.layout)
        except InvalidInput:
            self.counters.add("codec_refused_blocks_total", label=self.codec.name)
            return None
        return memoryview(block_header(block_hash, self.layout, self.codec.codec_id, payload) + payload)

    def put(self, items: list[tuple[bytes, memoryview]], places: Places) -> list[bool]:
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

    def delete_invalid(self, block_hash: BlockHash, failure: Miss) -> None:
        if failure in INVALID:
            self._delete(block_hash)

    def delete_sealed(self, hashes: Sequence[BlockHash], reports: Sequence[KeyReport]) -> None:
        """Delete blocks that no key opens, now or later."""
        for block_hash, report in zip(hashes, reports, strict=False):
            if report.reason is Miss.NOT_AUTHENTIC:
                self._delete(block_hash)

    def release(self, ticket: LoadTicket | None) -> None:
        try:
            if ticket is not None:
                self.store.release(ticket)
        except TIER_FAILURES:
            self.tier_failed()

    def tier_failed(self) -> None:
        with self._failures:
            self.counters.add("tier_failures_total", label=self.store.name)

    def count_load(self, result: LoadResult, account: bool) -> None:
        for reason, blocks in result.failed_blocks.items():
            self.counters.add("failed_blocks_total", blocks, reason)
        self.counters.add("loaded_bytes_total", result.size_bytes, self.store.name)
        if account:
            self.count_tokens(result)

    def count_tokens(self, result: LoadResult) -> None:
        self.counters.add("lookup_tokens_total", result.prompt_tokens)
        self.counters.add("computed_tokens_total", result.computed_tokens)
        for tier, tokens in result.hit_tokens.items():
            self.counters.add("hit_tokens_total", tokens, tier)


def _failure_of(place: Callable[[], Miss | None]) -> Miss | None:
    """Call ``place``; return its reason, or the exception's."""
    try:
        return place()
    except CodecUnavailable:
        return Miss.CODEC_NOT_INSTALLED
    except ForeignBlock:
        return Miss.FOREIGN
    except LaterVersion:
        return Miss.LATER_VERSION
    except MalformedPacket:
        return Miss.CORRUPT


# --- parts: the blocks of a model with sliding-window layers, stored separately for each attention span ---
#
# A part is a group of layers with the same window; a block holds its tokens' keys and values of one part. To continue
# after a prefix the model needs all blocks of a part without a window, but of a windowed part only the blocks in the
# window of the next token. So the prefix found is the longest at whose end every part has what it needs.


@dataclass(frozen=True, slots=True)
class Part:
    """Layers with the same attention window, stored in blocks of their own."""

    blocks: BlockCache
    window: int | None = None
    """Tokens that a token attends to, itself included; None: all."""

    def get_visible_blocks(self, tokens: int) -> range:
        """Return the blocks that the token after ``tokens`` attends to."""
        block = self.blocks.layout.block_tokens
        first = 0 if self.window is None else max(0, tokens - self.window + 1)
        return range(first // block, -(-tokens // block))


@dataclass(frozen=True, slots=True)
class Saved:
    """Blocks stored, with their encoded and raw bytes."""

    blocks: int = 0
    size_bytes: int = 0
    raw_bytes: int = 0

    def __add__(self, other: Saved) -> Saved:
        return Saved(self.blocks + other.blocks, self.size_bytes + other.size_bytes, self.raw_bytes + other.raw_bytes)


class Parts:
    """Parts of a model in a store; a part without a window is the first.

    Blocks and tokens are counted for the first part, bytes for all.
    """

    def __init__(self, parts: Sequence[Part], compute: ComputeRate | None = None) -> None:
        self.parts = tuple(parts)
        self.first = parts[0].blocks
        for part in parts:
            part.blocks.compute = compute if compute is not None else self.first.compute

    @property
    def value_bytes(self) -> int:
        return sum(PAYLOAD_AT + part.blocks.layout.block_bytes for part in self.parts)

    def hashes(self, tokens: Tokens) -> list[list[BlockHash]]:
        return [part.blocks.hashes(tokens) for part in self.parts]

    def missing(self, hashes: Sequence[Sequence[BlockHash]]) -> list[list[int]]:
        return [part.blocks.missing(chain) if chain else [] for part, chain in zip(self.parts, hashes, strict=True)]

    def load(
        self,
        tokens: Tokens,
        sinks: Sequence[BlockSink],
        *,
        limit_tokens: int | None = None,
        seconds: dict[str, float] | None = None,
        account: bool = True,
    ) -> LoadResult:
        """Place the longest cached prefix of ``tokens``, each part in its sink, of windowed parts only the last window.

        ``limit_tokens`` limits the tokens counted as supplied (default: all but the last).
        """
        first = self.first
        if first.owner.elsewhere:
            first.owner.check()
        phase = PhaseClock(seconds if seconds is not None else {})
        count, block = len(tokens), first.layout.block_tokens
        limit_tokens = max(0, count - 1) if limit_tokens is None else min(limit_tokens, count)
        with phase("hash"):
            hashes = self.hashes(tokens)
        if first.on_prompt is not None:
            for chain in hashes:
                first.on_prompt(chain)
        loading = _Loading(self.parts, hashes, sinks, limit_tokens, phase, first.compute.seconds(count))
        with recompute_cost(loading.computing_s):
            with phase("lookup"):
                wanted = min(count // block, -(-limit_tokens // block))
                found_blocks = loading.find_prefix(wanted)
                not_found = None if hashes[0] else Miss.TOO_SHORT
                if found_blocks < wanted:
                    not_found = loading.miss_reason(found_blocks)
            loaded = loading.load(found_blocks)
        result = LoadResult(
            prompt_tokens=count,
            hit_tokens=loading.tokens_by_tier(loaded),
            blocks=len(hashes[0]),
            found_blocks=found_blocks,
            not_found=not_found,
            loaded_blocks=loaded,
            failed_blocks=loading.failures(found_blocks - loaded),
            size_bytes=loading.size_bytes,
            retransmitted=loading.retransmitted,
            seconds=phase.seconds,
        )
        first.count_load(result, account)
        return result

    def load_blocks(self, tokens: Tokens, sinks: Sequence[BlockSink], wanted: Sequence[Sequence[int]]) -> None:
        """Place the ``wanted`` blocks (ascending) of each part."""
        if self.first.owner.elsewhere:
            return
        computing_s = self.first.compute.seconds(len(tokens))
        for part, chain, sink, indices in zip(self.parts, self.hashes(tokens), sinks, wanted, strict=True):
            if span := chain[indices[0] : indices[-1] + 1] if indices else []:
                tally = LoadTally()
                with recompute_cost(computing_s):
                    part.blocks.load_found(span, _OffsetSink(sink, indices[0]), tally, PhaseClock({}), computing_s)
                self.first.count_load(LoadResult(0, failed_blocks=tally.failed, size_bytes=tally.size_bytes), False)

    def __deepcopy__(self, memo: object) -> Parts:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def save(
        self,
        hashes: Sequence[Sequence[BlockHash]],
        wanted: Sequence[Sequence[int]],
        sources: Sequence[BlockSource],
        seconds: dict[str, float] | None = None,
    ) -> Saved:
        """Store the ``wanted`` blocks of each part; the first part last, as lookups start with it."""
        # Otherwise a lookup could find blocks before their other parts are stored. The result counts the blocks of the
        # first part and the bytes of all; ``seconds`` collects times by phase.
        saved = Saved()
        for number in reversed(range(len(self.parts))):
            blocks = self.parts[number].blocks
            stored, size_bytes = blocks.save(
                hashes[number], wanted[number], sources[number], seconds, account=not number
            )
            saved += Saved(0 if number else stored, size_bytes, stored * blocks.layout.block_bytes)
        return saved


class BlockLookup:
    """Lookup of a prompt's blocks, each once."""

    def __init__(
        self, parts: Sequence[Part], hashes: Sequence[list[BlockHash]], limit_tokens: int, first: int = 0
    ) -> None:
        """``limit_tokens``: of the longest prefix; the engine has blocks before ``first``."""
        self._parts = parts
        self._hashes = hashes
        self._limit_tokens = limit_tokens
        self._first = first
        self._windows = [number for number, part in enumerate(parts) if part.window is not None]
        self._known: list[dict[int, bool]] = [dict.fromkeys(range(first), True) for _ in parts]

    def _end(self, blocks: int) -> int:
        return min(blocks * self._parts[0].blocks.layout.block_tokens, self._limit_tokens)

    def find_prefix(self, wanted: int) -> int:
        """Return the longest prefix of which every part has what it needs."""
        for number, part in enumerate(self._parts):
            if part.window is None:
                wanted = self._first + part.blocks.prefix(self._hashes[number][self._first : wanted])
                self._known[number][wanted] = False
        return self._longest(wanted)

    def _longest(self, most: int) -> int:
        """Return the longest prefix, up to ``most``, with completely stored windows."""
        if most and all(self._stored(number, self._get_visible_blocks(number, most)).all() for number in self._windows):
            return most
        # Running counts of missing blocks: a window has all its blocks if the count is the same at both of its ends.
        good = np.ones(most + 1, bool)
        for number in self._windows if most else ():
            missing = np.concatenate([[0], np.cumsum(~self._stored(number, range(most)))])
            for blocks in range(1, most + 1):
                visible = self._get_visible_blocks(number, blocks)
                good[blocks] &= bool(missing[visible.stop] == missing[visible.start])
        return int(np.flatnonzero(good)[-1])

    def _get_visible_blocks(self, number: int, blocks: int) -> range:
        return self._parts[number].get_visible_blocks(self._end(blocks))

    def _stored(self, number: int, indices: range) -> npt.NDArray[np.bool_]:
        """Return which of a part's blocks are stored, each looked up once."""
        known = self._known[number]
        if unknown := [index for index in indices if index not in known]:
            span = range(unknown[0], unknown[-1] + 1)
            presence = self._parts[number].blocks.stored(self._hashes[number][span.start : span.stop])
            for index, present in zip(span, presence, strict=True):
                known.setdefault(index, present)  # a failed load outweighs the lookup
        return np.array([known[index] for index in indices], bool)

    def miss_reason(self, found_blocks: int) -> Miss | None:
        """Return why the prefix ends at ``found_blocks``."""
        for number, part in enumerate(self._parts):
            visible = (
                self._get_visible_blocks(number, found_blocks + 1)
                if part.window is not None
                else range(found_blocks, found_blocks + 1)
            )
            for index in visible:
                if not self._known[number].get(index, True):
                    return part.blocks.miss_reason(self._hashes[number][index])
        return None


class _Loading(BlockLookup):
    """Lookup of a prompt, and load of what it finds."""

    def __init__(
        self,
        parts: Sequence[Part],
        hashes: Sequence[list[BlockHash]],
        sinks: Sequence[BlockSink],
        limit_tokens: int,
        phase: PhaseClock,
        computing_s: float | None,
    ) -> None:
        super().__init__(parts, hashes, limit_tokens)
        self._sinks = sinks
        self._phase = phase
        self.computing_s = computing_s
        self._placed: list[dict[int, str]] = [{} for _ in parts]  # by part: blocks in place, with their tiers
        self._failed: Counter[Miss] = Counter()
        self.size_bytes = 0
        self.retransmitted = 0

    def load(self, found_blocks: int) -> int:
        """Load the prefix found; return its number of usable blocks."""
        loaded = found_blocks
        if found_blocks and self._parts[0].window is None:
            self._place(0, range(found_blocks))
            loaded = len(self._placed[0])
        # A block that fails shortens the prefix, and the windows of a shorter prefix include other blocks: these are
        # loaded then, until all blocks in the windows are in place.
        while loaded := self._longest(loaded):
            if all(self._place(number, self._get_visible_blocks(number, loaded)) for number in self._windows):
                break
            if Miss.DEADLINE in self._failed:
                return 0
        return loaded

    def _place(self, number: int, indices: range) -> bool:
        """Load a part's blocks that are not in place; False at a failure."""
        tiers, blocks = self._placed[number], self._parts[number].blocks
        remaining = [index for index in indices if index not in tiers]
        if not remaining:
            return True
        start, stop = remaining[0], remaining[-1] + 1
        tally = LoadTally()
        sink = _OffsetSink(self._sinks[number], start)
        blocks.load_found(self._hashes[number][start:stop], sink, tally, self._phase, self.computing_s)
        tiers.update(enumerate(tally.tiers, start))
        self.size_bytes += tally.size_bytes
        self.retransmitted += tally.retransmitted
        if tally.failed:
            self._known[number][start + len(tally.tiers)] = False
            self._failed[next(iter(tally.failed))] += 1
        return not tally.failed

    def tokens_by_tier(self, loaded: int) -> dict[str, int]:
        """Count tokens by tier; blocks outside all windows count as the first loaded."""
        tiers = next((part_tiers for part_tiers in self._placed if part_tiers), {})
        nearest = next(iter(tiers.values()), "")
        tokens: Counter[str] = Counter()
        for index in range(loaded):
            tokens[tiers.get(index, nearest)] += self._end(index + 1) - self._end(index)
        return dict(tokens)

    def failures(self, blocks: int) -> dict[Miss, int]:
        if not blocks:
            return {}
        reason = next(iter(self._failed))
        return {reason: 1, Miss.BEHIND_FAILED: blocks - 1} if blocks > 1 else {reason: 1}


class _OffsetSink:
    """Sink that passes blocks to another, numbered from ``first`` on."""

    def __init__(self, sink: BlockSink, first: int) -> None:
        self._sink = sink
        self._first = first

    def place(self, index: int, block: memoryview) -> None:
        self._sink.place(self._first + index, block)

    def rows(self, index: int, head: memoryview) -> Rows | None:
        return self._sink.rows(self._first + index, head) if isinstance(self._sink, RowSink) else None

    def on_block(self, index: int) -> None:
        if isinstance(self._sink, RowSink):
            self._sink.on_block(self._first + index)
