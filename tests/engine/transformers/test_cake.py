"""Prompts loaded from both ends: the same tokens as without a cache, whichever end is faster or shares the steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.transformers.generation import BLOCK, cake, tokens_of  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from skymemory import KVCManager  # noqa: E402
from skymemory.cache.cake.cake import CakeSettings  # noqa: E402
from skymemory.engine.transformers.cake_prefill import OtherPrompts  # noqa: E402
from skymemory.errors import InvalidInput  # noqa: E402
from skymemory.store.base import LoadTicket, Presence  # noqa: E402
from skymemory.store.memory import MemoryStore  # noqa: E402
from skymemory.store.wrappers import RateLimited  # noqa: E402

pytestmark = pytest.mark.engine

SLOW, FAST = 300 << 10, 100 << 20  # bytes per second; the prompt has 240 KiB


@pytest.fixture
def store(model: Any, ids: Any) -> MemoryStore:
    memory = MemoryStore()
    with cake(model, memory) as kvc:
        assert kvc.add_blocks_ids(ids).stored_blocks == 20
    return memory


class Turns:
    """Gives the loaded prompt what ``shares`` say, step by step, and computes nothing, for ``pause_s`` a step."""

    def __init__(self, *shares: int, pause_s: float = 0.0) -> None:
        self.shares, self.pause_s = list(shares), pause_s

    def ours(self, step_tokens: int) -> int:
        return self.shares.pop(0) if len(self.shares) > 1 else self.shares[0]

    def run(self, tokens: int, until: Callable[[], bool]) -> int:
        time.sleep(self.pause_s)
        return 0


@pytest.mark.brief("104857600-load", "307200-compute")
@pytest.mark.parametrize("loading", ["cake", "compute", "load"])
@pytest.mark.parametrize("rate", [SLOW, FAST])
def test_the_same_tokens_whichever_end_is_faster(
    model: Any, ids: Any, plain: list[int], store: MemoryStore, loading: str, rate: float
) -> None:
    with cake(model, RateLimited(store, rate), loading) as kvc:
        for _ in range(2):
            assert tokens_of(model, ids, kvc.get_cache_ids(ids)) == plain
            last = kvc.last
            progress = last.loader
            assert progress is not None and progress.computed_tokens + progress.loaded_tokens == 20 * BLOCK
            assert last.prompt_tokens == last.computed_tokens + sum(last.hit_tokens.values())
            assert last.left_tokens == 5 and last.size_bytes == progress.loaded_bytes
            assert list(last.seconds) == ["hash", "lookup", "cake"]
            if loading != "cake":
                assert (progress.loaded_tokens, progress.computed_tokens)[loading == "load"] == 0
            elif rate == SLOW:
                assert progress.computed_tokens > 0 and f"{progress.computed_tokens} computed" in last.describe()
        counters = kvc.counters
        assert counters.total("lookup_tokens_total") == (
            counters.total("computed_tokens_total") + counters.total("hit_tokens_total")
        )
        assert kvc.add_blocks_ids(ids).present_blocks == 20


def test_both_ends_meet_and_nothing_is_moved_on_the_way(
    model: Any, ids: Any, plain: list[int], store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*args: Any, **options: Any) -> Any:
        raise AssertionError("keys and values must not be concatenated")

    with cake(model, RateLimited(store, 1 << 20)) as kvc:
        kvc.cake.beside = Turns(3 * BLOCK // 2, pause_s=0.03)  # whole chunks are 0.06 s to compute and 0.012 s to load
        monkeypatch.setattr("transformers.cache_utils.DynamicLayer.update", forbidden)
        cache = kvc.get_cache_ids(ids)
        progress = cache.result.loader
        assert progress.loaded_tokens > 0 and progress.computed_tokens > 0
        assert progress.met_at_token is not None and f"met at {progress.met_at_token}" in cache.result.describe()
        cache.begin()
        assert {layer.keys.untyped_storage().data_ptr() for layer in cache.layers} == {cache._room.data_ptr()}
        assert cache.begin() == 20 * BLOCK
        assert tokens_of(model, ids, cache) == plain


@pytest.mark.brief("load-17", "cake-15", "compute-80", "cake-16")
@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 1])
@pytest.mark.parametrize("loading", ["cake", "compute", "load"])
def test_every_length_leaves_a_token(model: Any, ids: Any, store: MemoryStore, length: int, loading: str) -> None:
    some = ids[:, :length]
    with cake(model, store, loading) as kvc:
        cache = kvc.get_cache_ids(some)
        assert cache.begin() == min(length // BLOCK * BLOCK, length - 1)
        assert cache.result.computed_tokens + cache.result.cached_tokens == length
        assert tokens_of(model, some, cache) == tokens_of(model, some)


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_others_are_computed_in_the_same_steps(
    model: Any, ids: Any, plain: list[int], store: MemoryStore, share: float
) -> None:
    others = [ids[:, 7 : 7 + 90], ids[:, 50 : 50 + 140]]
    with cake(model, RateLimited(store, SLOW)) as kvc:
        beside = OtherPrompts(model, others, share, piece_tokens=24)
        kvc.cake.beside = beside
        assert tokens_of(model, ids, kvc.get_cache_ids(ids)) == plain
        # Also with all of a step for this prompt they get those in which none of its blocks can be computed.
        assert beside.computed_tokens > 0 or share == 1
        while len(beside.finished) < 2:
            beside.run(64, lambda: False)
    for number, other in enumerate(others):
        alone = DynamicCache()
        with torch.inference_mode():
            model(input_ids=other, past_key_values=alone, use_cache=True)
        ours = beside.finished[number]
        for one, two in zip(ours.layers, alone.layers, strict=True):
            assert torch.allclose(one.keys, two.keys, atol=1e-4)
            assert torch.allclose(one.values, two.values, atol=1e-4)


def test_with_no_budget_it_loads_on_and_with_some_again_it_computes(
    model: Any, ids: Any, plain: list[int], store: MemoryStore
) -> None:
    hashes = cake(model).blocks.hashes(ids[0].numpy())
    store.delete([hashes[0], hashes[11]])
    with cake(model, store) as kvc:
        kvc.cake.beside = Turns(*[0] * 20, BLOCK // 2, 2 * BLOCK)
        assert tokens_of(model, ids, kvc.get_cache_ids(ids)) == plain
        assert kvc.last.loader.computed_tokens == 2 * BLOCK and kvc.last.loaded_blocks == 18


def test_blocks_behind_a_hole_are_used_and_the_hole_is_stored(
    model: Any, ids: Any, plain: list[int], store: MemoryStore
) -> None:
    with cake(model, store) as kvc:
        hashes = kvc.blocks.hashes(ids[0].numpy())
        store.delete([hashes[3], hashes[17]])
        kvc.loading = "load"
        assert tokens_of(model, ids, kvc.get_cache_ids(ids)) == plain
        assert (kvc.last.found_blocks, kvc.last.loaded_blocks) == (18, 18)
        assert kvc.last.loader.computed_tokens == 2 * BLOCK
        added = kvc.add_blocks_ids(ids)
        assert added.stored_blocks == 2 and added.prefilled_tokens == 0
        assert kvc.get_cache_ids(ids).result.loaded_blocks == 20


@pytest.mark.parametrize("loading", ["cake", "compute", "load"])
def test_of_a_full_hit_the_last_token_is_left(model: Any, ids: Any, store: MemoryStore, loading: str) -> None:
    with cake(model, store, loading) as kvc:
        cache = kvc.get_cache_ids(ids[:, : 20 * BLOCK])
        assert cache.begin() == 20 * BLOCK - 1 and kvc.last.left_tokens == 1


def test_a_chunk_is_what_a_step_takes_of_ours(model: Any, ids: Any, store: MemoryStore) -> None:
    counts: list[int] = []
    with cake(model, store, settings=CakeSettings(step_tokens=10 * BLOCK)) as kvc:
        kvc.cake.on_chunks = counts.append
        for share in (1.0, 0.9, 0.5, 0.1, 0.0):
            kvc.cake.beside = OtherPrompts(model, [ids], share, again=True)
            kvc.get_cache_ids(ids)
    assert counts == [2, 3, 4, 20, 2]


class Stubborn(MemoryStore):
    """Says that it has everything, and then answers ``late_s`` later with nothing, or raises."""

    def __init__(self, late_s: float, error: Exception | None = None) -> None:
        super().__init__()
        self.late_s, self.error = late_s, error

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        return [Presence.HIT] * len(keys)

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        time.sleep(self.late_s)
        if self.error is not None:
            raise self.error
        return super().complete_load(ticket)


@pytest.mark.parametrize(("late_s", "error"), [(0.0, None), (0.0, OSError("gone")), (30.0, None)])
def test_a_store_that_promises_and_does_not_give(
    model: Any, ids: Any, plain: list[int], late_s: float, error: Exception | None
) -> None:
    with cake(model, Stubborn(late_s, error)) as kvc:
        began_s = time.monotonic()
        assert tokens_of(model, ids, kvc.get_cache_ids(ids)) == plain
        assert time.monotonic() - began_s < 25
        assert kvc.last.cached_tokens == 0 and kvc.last.loader.computed_tokens == 20 * BLOCK
        # Of those asked for before they were computed; one that hangs may meet its deadline, where computing is slow.
        failed = set(kvc.last.failed_blocks)
        assert failed <= {"deadline"} if late_s else failed == {"unreachable" if error else "absent"}


@pytest.mark.brief()
def test_codecs_come_to_their_place_too(model: Any, ids: Any) -> None:
    pytest.importorskip("constriction")
    memory = MemoryStore()
    with cake(model, memory, codec="cachegen-finest") as kvc:
        kvc.add_blocks_ids(ids)
        one = kvc.get_cache_ids(ids)
        kvc.loading = "load"
        kvc.get_cache_ids(ids)  # learns what a stored block has
        two = kvc.get_cache_ids(ids)
        assert two.result.loader.loaded_tokens == 20 * BLOCK and two.result.size_bytes < 20 * kvc.layout.block_bytes / 2
        assert one.begin() == two.begin()
        for a, b in zip(one.layers, two.layers, strict=True):
            assert torch.allclose(a.keys, b.keys, atol=0.2)


def test_an_engine_that_fails_leaves_no_writer_behind(model: Any, ids: Any, store: MemoryStore) -> None:
    with cake(model, RateLimited(store, SLOW)) as kvc:

        class Broken:
            device = torch.device("cpu")

            def forward(self, **options: Any) -> Any:
                raise RuntimeError("out of memory")

            __call__ = forward

        kvc.cake._model = Broken()  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="out of memory"):
            kvc.get_cache_ids(ids)
        kvc.cake._model = model
        assert kvc.get_cache_ids(ids).begin() == 20 * BLOCK


@pytest.mark.parametrize("loading", ["cake", "compute", "load"])
def test_chunks_may_be_smaller_than_steps(
    model: Any, ids: Any, plain: list[int], store: MemoryStore, loading: str
) -> None:
    settings = CakeSettings(step_tokens=8 * BLOCK, chunk_tokens=BLOCK)
    with cake(model, RateLimited(store, SLOW), loading, settings=settings) as kvc:
        counted: list[int] = []
        settled: list[int] = []
        passes: list[int] = []
        kvc.cake.on_chunks = counted.append
        kvc.cake.on_settled = lambda index, origin: settled.append(index)
        compute = kvc.cake._compute
        kvc.cake._compute = lambda step, *rest: (passes.append(step.tokens), compute(step, *rest))
        assert tokens_of(model, ids, kvc.get_cache_ids(ids)) == plain
        assert counted == [20] and sorted(settled) == list(range(20))
        if loading == "compute":
            assert passes == [8 * BLOCK, 8 * BLOCK, 4 * BLOCK]


def test_bad_settings_are_refused(model: Any) -> None:
    with pytest.raises(InvalidInput, match="choose one of prefix, cake"):
        KVCManager(model, None, loading="both")  # type: ignore[arg-type]
    for settings in (CakeSettings(step_tokens=BLOCK + 1), CakeSettings(step_tokens=0)):
        with pytest.raises(InvalidInput, match="whole blocks"):
            cake(model, settings=settings)
    with pytest.raises(InvalidInput, match="at least 1"):
        cake(model, settings=CakeSettings(step_tokens=BLOCK, fetch_threads=0))
    for chunk_tokens in (0, BLOCK + 1, 3 * BLOCK):
        with pytest.raises(InvalidInput, match="chunk_tokens"):
            cake(model, settings=CakeSettings(step_tokens=2 * BLOCK, chunk_tokens=chunk_tokens))
    with pytest.raises(InvalidInput, match="share"):
        OtherPrompts(model, [], 1.5)
    with pytest.raises(InvalidInput, match="no tokens"):
        OtherPrompts(model, [[1, 2], []], 0.5)
    with KVCManager(model, None, block_tokens=96, weights="w", loading="cake") as kvc:
        assert kvc.cake.cake.settings.step_tokens == 576
