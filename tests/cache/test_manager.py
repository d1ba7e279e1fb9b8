"""BlockCache: prefixes out, blocks in, the account, and stores that fail or lie."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.hostile_store import FAULTS, OUTAGES, HostileStore

from skymemory.cache.blocks import BlockCache, LoadResult, Part, Parts, StoreResult
from skymemory.cache.tiers.store import TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.errors import CodecUnavailable, InvalidInput, MalformedPacket, ValueTooLarge
from skymemory.keys import KeyRing, SecretKey, first_ring
from skymemory.kv.block import KVLayout, OpaqueLayout
from skymemory.kv.codec.codec_base import RAW
from skymemory.kv.context import CacheContext
from skymemory.kv.value import PAYLOAD_AT, block_header
from skymemory.store.base import KeyReport, LoadReport, LoadTicket
from skymemory.store.memory import MemoryStore
from skymemory.store.sealed import SealedStore

BLOCK = 4
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, block_tokens=BLOCK, dtype="float32")


def context(lossless: bool = True, model: str = "m", salt: bytes = b"") -> CacheContext:
    return CacheContext(
        model, "w", "t", LAYOUT.dtype, LAYOUT.describe(), lossless=lossless, block_tokens=BLOCK, tenant_salt=salt
    )


class Engine:
    """Blocks whose contents are a function of their tokens: source and sink in one."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.placed: dict[int, bytes] = {}

    def truth(self, index: int) -> bytes:
        seed = self.tokens[: (index + 1) * BLOCK].tolist()
        return np.random.default_rng(seed).bytes(LAYOUT.block_bytes)

    def read(self, index: int, out: memoryview) -> None:
        out[:] = self.truth(index)

    def place(self, index: int, block: memoryview) -> None:
        self.placed[index] = bytes(block)

    def right(self, result: LoadResult) -> bool:
        """What is counted as loaded was placed, and is the truth."""
        return all(self.placed.get(i) == self.truth(i) for i in range(result.loaded_blocks))


def save(cache: BlockCache, tokens: np.ndarray) -> int:
    hashes = cache.hashes(tokens)
    return cache.save(hashes, cache.missing(hashes), Engine(tokens))[0]


def load(cache: BlockCache, tokens: np.ndarray) -> tuple[LoadResult, Engine]:
    engine = Engine(tokens)
    result = Parts([Part(cache)]).load(tokens, [engine])
    assert engine.right(result)
    assert result.prompt_tokens == result.computed_tokens + sum(result.hit_tokens.values())
    assert result.found_blocks == result.loaded_blocks + sum(result.failed_blocks.values())
    return result, engine


TOKENS = np.arange(22)


def test_what_was_saved_is_loaded() -> None:
    cache = BlockCache(context(), LAYOUT, MemoryStore())
    assert load(cache, TOKENS)[0].cached_tokens == 0
    assert save(cache, TOKENS) == 5
    result, engine = load(cache, TOKENS)
    assert (result.blocks, result.found_blocks, result.loaded_blocks) == (5, 5, 5)
    assert result.hit_tokens == {"memory": 20} and result.computed_tokens == 2
    assert set(engine.placed) == set(range(5))
    assert list(result.seconds) == ["hash", "lookup", "fetch", "decode"]
    assert result.size_bytes == 5 * (PAYLOAD_AT + LAYOUT.block_bytes)


def test_a_full_hit_leaves_one_token_to_compute() -> None:
    cache = BlockCache(context(), LAYOUT, MemoryStore())
    save(cache, TOKENS[:20])
    result, _ = load(cache, TOKENS[:20])
    assert result.loaded_blocks == 5 and result.hit_tokens == {"memory": 19} and result.computed_tokens == 1


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_prompt_shorter_than_a_block_has_none(count: int) -> None:
    cache = BlockCache(context(), LAYOUT, MemoryStore())
    assert save(cache, TOKENS[:count]) == 0
    result, engine = load(cache, TOKENS[:count])
    assert result.blocks == 0 and result.computed_tokens == count and not engine.placed


def test_the_limit_bounds_what_is_supplied() -> None:
    cache = BlockCache(context(), LAYOUT, MemoryStore())
    save(cache, TOKENS)
    result = Parts([Part(cache)]).load(TOKENS, [Engine(TOKENS)], limit_tokens=9)
    assert result.loaded_blocks == 3 and result.cached_tokens == 9
    assert Parts([Part(cache)]).load(TOKENS[:20], [Engine(TOKENS)], limit_tokens=20).cached_tokens == 20
    assert Parts([Part(cache)]).load(TOKENS, [Engine(TOKENS)], limit_tokens=0).cached_tokens == 0


def test_two_prompts_share_what_they_begin_with() -> None:
    cache = BlockCache(context(), LAYOUT, MemoryStore())
    save(cache, TOKENS)
    other = TOKENS.copy()
    other[9] = 99
    assert load(cache, other)[0].cached_tokens == 8
    assert save(cache, other) == 3


@pytest.mark.parametrize("other", [context(model="other"), context(salt=b"tenant"), context(lossless=False)])
def test_another_context_is_a_miss(other: CacheContext) -> None:
    store = MemoryStore()
    save(BlockCache(context(), LAYOUT, store), TOKENS)
    assert load(BlockCache(other, LAYOUT, store), TOKENS)[0].cached_tokens == 0


def test_large_prompts_go_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymemory.cache.blocks.LOAD_BATCH_BYTES", 3 * 1152)
    monkeypatch.setattr("skymemory.cache.blocks.STORE_BATCH_BYTES", 2 * 1152)
    store = MemoryStore()
    cache = BlockCache(context(), LAYOUT, store)
    tokens = np.arange(100)
    assert save(cache, tokens) == 25
    assert load(cache, tokens)[0].loaded_blocks == 25
    store.delete([cache.hashes(tokens)[13]])
    assert load(cache, tokens)[0].loaded_blocks == 13
    assert store.stats()["open_leases"] == 0


def test_of_several_batches_none_behind_a_failed_block_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymemory.cache.blocks.LOAD_BATCH_BYTES", 2 * (PAYLOAD_AT + LAYOUT.block_bytes))
    store = MemoryStore()
    cache = BlockCache(context(), LAYOUT, store)
    save(cache, TOKENS)
    hashes = cache.hashes(TOKENS)
    monkeypatch.setattr(store, "prefix", len)  # as a tier does whose index is behind
    store.delete(hashes[1:2])
    result, engine = load(cache, TOKENS)
    assert result.loaded_blocks == 1 and set(engine.placed) == {0}
    assert result.failed_blocks == {"absent": 1, "behind a failed block": 3}


class Foreign(MemoryStore):
    """A store of someone else, with a reason of its own."""

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        values = super().complete_load(ticket)
        ticket.report = LoadReport(tuple(KeyReport(reason="on strike") for _ in values), 0.0)  # type: ignore[arg-type]
        return [None] * len(values)


@pytest.mark.parametrize("tiered", [False, True])
def test_an_unknown_reason_is_counted_by_its_text(tiered: bool) -> None:
    store = Foreign()
    cache = BlockCache(context(), LAYOUT, TieredStore([(store, TierSettings())]) if tiered else store)
    save(cache, TOKENS)
    result = load(cache, TOKENS)[0]
    assert result.failed_blocks == {"on strike": 1, "behind a failed block": 4}
    assert "1 blocks on strike" in result.describe()
    assert cache.counters.get("failed_blocks_total", "on strike") == 1
    cache.store.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lying_store_is_a_miss(fault: str) -> None:
    store = HostileStore(fault)
    cache = BlockCache(context(), LAYOUT, store)
    save(cache, TOKENS)
    result, _ = load(cache, TOKENS)
    assert result.loaded_blocks == 0
    assert sum(result.failed_blocks.values()) == result.found_blocks - result.loaded_blocks
    assert cache.counters.total("failed_blocks_total") > 0
    # What came wrong is dropped, so that the next storing replaces it.
    store.fault = ""
    if fault != "drop":
        assert save(cache, TOKENS) == 1
    assert load(cache, TOKENS)[0].loaded_blocks == 5


@pytest.mark.parametrize("outage", OUTAGES)
@pytest.mark.parametrize("error", [ConnectionError("gone"), TimeoutError(), RuntimeError("x"), ValueError("y")])
def test_a_failing_store_is_a_miss(outage: str, error: Exception) -> None:
    store = HostileStore("flip" if outage == "delete" else "")
    cache = BlockCache(context(), LAYOUT, store)
    save(cache, TOKENS)
    store.outage, store.error = outage, error
    load(cache, TOKENS)
    save(cache, np.arange(50, 90))
    assert cache.counters.total("tier_failures_total") > 0
    store.outage = store.fault = ""
    assert load(cache, TOKENS)[0].loaded_blocks == 5


@settings(max_examples=80, deadline=None)
@given(
    fault=st.sampled_from(FAULTS),
    rate=st.floats(0, 1),
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
)
def test_never_wrong_and_always_accounted(fault: str, rate: float, seed: int, lengths: list[int]) -> None:
    cache = BlockCache(context(), LAYOUT, HostileStore(fault, rate, seed=seed))
    for length in lengths:
        load(cache, np.arange(length))
        save(cache, np.arange(length))
        load(cache, np.arange(length + 3))
    counters = cache.counters
    assert counters.total("lookup_tokens_total") == sum(2 * length + 3 for length in lengths)
    assert counters.total("lookup_tokens_total") == (
        counters.total("computed_tokens_total") + counters.total("hit_tokens_total")
    )


def test_a_sink_that_fails_leaves_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymemory.cache.blocks.LOAD_BATCH_BYTES", 2 * (PAYLOAD_AT + LAYOUT.block_bytes))
    store = MemoryStore()
    cache = BlockCache(context(), LAYOUT, store)
    save(cache, TOKENS)

    class Full(Engine):
        def place(self, index: int, block: memoryview) -> None:
            raise MemoryError("no room on the device")

    with pytest.raises(MemoryError):
        Parts([Part(cache)]).load(TOKENS, [Full(TOKENS)])
    assert store.stats()["open_leases"] == 0


def test_a_store_that_counts_wrong_is_bounded() -> None:
    class Boaster(MemoryStore):
        claim = 99

        def prefix(self, keys: object) -> int:
            return self.claim

    store = Boaster()
    cache = BlockCache(context(), LAYOUT, store)
    assert load(cache, TOKENS)[0].failed_blocks == {"absent": 1, "behind a failed block": 4}
    store.claim = -3
    assert load(cache, TOKENS)[0].found_blocks == 0


def test_a_store_without_room_refuses_the_end_of_the_chain() -> None:
    cache = BlockCache(context(), LAYOUT, MemoryStore(3 * (PAYLOAD_AT + LAYOUT.block_bytes)))
    assert save(cache, TOKENS) == 3
    assert cache.counters.get("refused_blocks_total", "memory") == 2
    assert load(cache, TOKENS)[0].loaded_blocks == 3


def test_a_store_too_small_for_a_block_says_so() -> None:
    cache = BlockCache(context(), LAYOUT, MemoryStore(100))
    with pytest.raises(ValueTooLarge, match="budget"):
        save(cache, TOKENS)


class HalfCodec:
    """Loses the low half of every number."""

    name, codec_id, lossless = "half", 200, False
    refuse = False

    def encode(self, block: memoryview, layout: KVLayout) -> bytes:
        if self.refuse:
            raise InvalidInput("not finite")
        return np.frombuffer(block, "<u4").astype("<u4").__rshift__(16).astype("<u2").tobytes()

    def decode(self, payload: bytes | bytearray | memoryview, layout: KVLayout, out: memoryview) -> None:
        if memoryview(payload).nbytes * 2 != layout.block_bytes:
            raise MalformedPacket("size")
        np.frombuffer(out, "<u4")[:] = np.frombuffer(payload, "<u2").astype("<u4") << 16


def test_a_lossy_codec_needs_a_context_that_allows_loss() -> None:
    with pytest.raises(InvalidInput, match="lossless"):
        BlockCache(context(), LAYOUT, MemoryStore(), HalfCodec())
    with pytest.raises(InvalidInput, match="tokens"):
        BlockCache(context(), KVLayout(2, 2, 8, 8, "float32"), MemoryStore())


def test_codecs_are_distinguished_by_the_header() -> None:
    store = MemoryStore()
    lossy, raw = (BlockCache(context(lossless=False), LAYOUT, store, codec) for codec in (HalfCodec(), RAW))
    hashes = lossy.hashes(TOKENS)
    assert lossy.save(hashes, [0, 1], Engine(TOKENS)) == (2, 2 * (PAYLOAD_AT + LAYOUT.block_bytes // 2))
    assert raw.save(hashes, [2, 3, 4], Engine(TOKENS))[0] == 3
    engine = Engine(TOKENS)
    assert Parts([Part(lossy)]).load(TOKENS, [engine]).loaded_blocks == 5
    assert engine.placed[4] == engine.truth(4)
    assert np.frombuffer(engine.placed[0], "<u4").tolist() == [
        number & 0xFFFF0000 for number in np.frombuffer(engine.truth(0), "<u4").tolist()
    ]
    # One that cannot read the codec takes it as a miss, and leaves it to those who can.
    unreadable = Parts([Part(raw)]).load(TOKENS, [engine])
    assert unreadable.loaded_blocks == 0 and unreadable.failed_blocks["codec not readable"] == 1
    assert Parts([Part(lossy)]).load(TOKENS, [engine]).loaded_blocks == 5


def test_a_block_that_the_codec_refuses_ends_the_storing() -> None:
    codec = HalfCodec()
    cache = BlockCache(context(lossless=False), LAYOUT, MemoryStore(), codec)
    codec.refuse = True
    assert save(cache, TOKENS) == 0
    assert cache.counters.get("codec_refused_blocks_total", "half") == 1


def test_no_batch_behind_a_block_that_the_codec_refuses_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymemory.cache.blocks.STORE_BATCH_BYTES", 2 * (PAYLOAD_AT + LAYOUT.block_bytes))
    codec, store = HalfCodec(), MemoryStore()
    cache = BlockCache(context(lossless=False), LAYOUT, store, codec)
    encode, encoded = codec.encode, []

    def refuse_the_second(block: memoryview, layout: KVLayout) -> bytes:
        encoded.append(block)
        codec.refuse = len(encoded) == 2
        return encode(block, layout)

    monkeypatch.setattr(codec, "encode", refuse_the_second)
    assert save(cache, TOKENS) == 1
    assert store.prefix(cache.hashes(TOKENS)) == 1 and store.stats()["entries"] == 1, "presence stays prefix-closed"


def test_a_codec_that_is_not_installed_is_a_miss() -> None:
    class Absent(HalfCodec):
        def decode(self, payload: object, layout: KVLayout, out: memoryview) -> None:
            raise CodecUnavailable("pip install")

    store = MemoryStore()
    save(BlockCache(context(lossless=False), LAYOUT, store, HalfCodec()), TOKENS)
    cache = BlockCache(context(lossless=False), LAYOUT, store, Absent())
    assert load(cache, TOKENS)[0].failed_blocks["codec not installed"] == 1


def test_a_value_of_another_layout_or_block_is_foreign() -> None:
    store = MemoryStore()
    cache = BlockCache(context(), LAYOUT, store)
    first, second = cache.hashes(TOKENS)[:2]
    payload = Engine(TOKENS).truth(0)
    other = KVLayout(2, 2, 4, 2 * BLOCK, "float32")
    for header in (
        block_header(second, LAYOUT, RAW.codec_id, payload),
        block_header(first, other, RAW.codec_id, payload),
    ):
        store.put_many([(first, header + payload)])
        assert load(cache, TOKENS)[0].failed_blocks == {"foreign": 1}
        assert store.get_many([first]) == [None]


def test_a_block_of_an_opaque_layout_has_its_size_and_no_codec() -> None:
    layout = OpaqueLayout("packed", BLOCK, 3 * BLOCK)
    store = MemoryStore()
    cache = BlockCache(context(), layout, store)
    first = cache.hashes(TOKENS)[0]
    out = bytearray(layout.block_bytes)
    sink = SimpleNamespace(place=lambda index, block: memoryview(out).__setitem__(slice(None), block))
    payload = bytes(range(3 * BLOCK))
    good = block_header(first, layout, RAW.codec_id, payload) + payload
    assert cache.place(sink, 0, first, memoryview(good)) is None and out == payload
    shorter = OpaqueLayout("packed", BLOCK, 2 * BLOCK)
    small = block_header(first, shorter, RAW.codec_id, payload[: 2 * BLOCK]) + payload[: 2 * BLOCK]
    of_keys_and_values = block_header(first, LAYOUT, RAW.codec_id, Engine(TOKENS).truth(0)) + Engine(TOKENS).truth(0)
    for value in (small, of_keys_and_values):
        assert cache.place(sink, 0, first, memoryview(value)) == "foreign"
    for codec in (
        SimpleNamespace(name="lossy", codec_id=9, lossless=False),
        SimpleNamespace(name="x", codec_id=8, lossless=True),
    ):
        with pytest.raises(InvalidInput, match="opaque"):
            BlockCache(context(lossless=False), layout, store, codec)


def test_what_no_key_of_the_ring_opens_any_more_is_stored_again() -> None:
    pytest.importorskip("cryptography")
    below = MemoryStore(1 << 24)
    rings = [KeyRing((SecretKey(number, bytes([number]) * 32, 0.0),)) for number in (1, 2)]
    before, after = (
        BlockCache(context(), LAYOUT, SealedStore(below, lambda ring=ring: ring, lambda: 1.0)) for ring in rings
    )
    assert save(before, TOKENS) == 5
    assert load(after, TOKENS)[0].failed_blocks["not authentic"] == 1
    assert save(after, TOKENS) == 5
    assert load(after, TOKENS)[0].loaded_blocks == 5


def test_what_a_key_that_has_not_come_yet_has_sealed_is_left_alone() -> None:
    """One host has rotated; another gets the new file late. Then it does, and the old key is retired."""
    pytest.importorskip("cryptography")
    below = MemoryStore(1 << 24)
    old = first_ring(bytes(32))
    new = old.with_key(bytes([2]) * 32, 0.0)
    rings = {"early": new, "late": old}
    early, late = (
        BlockCache(context(), LAYOUT, SealedStore(below, lambda host=host: rings[host], lambda: 1.0)) for host in rings
    )
    assert save(early, TOKENS) == 5
    for _ in range(5):
        assert load(late, TOKENS)[0].failed_blocks["unknown key"] == 1
        assert save(late, TOKENS) == 0, "it is there, for those who have the key"
    assert load(early, TOKENS)[0].loaded_blocks == 5
    rings["late"] = new
    assert load(late, TOKENS)[0].loaded_blocks == 5


def test_results_say_what_happened_in_a_line() -> None:
    cache = BlockCache(context(), LAYOUT, MemoryStore())
    save(cache, TOKENS)
    assert load(cache, TOKENS)[0].describe().startswith("22 tokens: 20 from memory, 2 to compute; 5 of 5 blocks")
    assert "none cached" in load(cache, TOKENS[:2])[0].describe()
    assert "0 blocks to store" in StoreResult(prompt_tokens=3).describe()
    assert "1 refused" in StoreResult(9, 2, stored_blocks=1, refused_blocks=1).describe()
