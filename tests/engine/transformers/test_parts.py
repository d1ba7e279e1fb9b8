"""Layers with a window apart from the others: of what is out of sight nothing is loaded, and nothing is ever seen."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.engine.transformers.families import FAMILIES, build, known  # noqa: E402

from skymemory import KVCManager, MemoryStore  # noqa: E402
from skymemory.cache.cake.cake import CakeSettings  # noqa: E402
from skymemory.engine.transformers.kv_cache import (  # noqa: E402
    GroupRoom,
    RoomPool,
    Staging,
)
from skymemory.errors import CacheMisuse  # noqa: E402
from skymemory.kv.value import PAYLOAD_AT  # noqa: E402

pytestmark = pytest.mark.engine

WINDOWED = ("Gemma 3", "Mistral 0.1", "Qwen2 with a window", "gpt-oss", "Llama 4")
ANNOUNCED = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 17)


class NoNumbers(RoomPool):
    """Memory in which all that was not written is NaN: a model that reads it yields no tokens."""

    def take(self, size_bytes: int) -> Any:
        return super().take(size_bytes).fill_(255)


@functools.cache
def model_of(name: str, window: int) -> Any:
    kind, config_kind, options = FAMILIES[name]
    key = "attention_chunk_size" if "attention_chunk_size" in options else "sliding_window"
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    FAMILIES["made"] = kind, config_kind, {**options, **(layers if name == "Gemma 3" else {}), key: window}
    try:
        return build("made")
    finally:
        del FAMILIES["made"]


def prompt_of(tokens: int, seed: int = 1) -> Any:
    return torch.randint(3, 1000, (1, tokens), generator=torch.Generator().manual_seed(seed))


def answer(model: Any, ids: Any, cache: Any = None, **options: Any) -> Any:
    torch.manual_seed(5)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, **options}
    return model.generate(ids, past_key_values=cache, **options)


def manager(model: Any, block: int, store: Any = None, **options: Any) -> KVCManager:
    kvc = KVCManager(model, None, store, block_tokens=block, weights="w", **options)
    kvc._pool = NoNumbers()
    return kvc


def values_of(store: MemoryStore) -> dict[bytes, int]:
    return {key: len(value) for key, value in store._values.items()}


def most_bytes(kvc: KVCManager, blocks: int) -> int:
    """What a hit of this many blocks may load."""
    windows = [kind.window for kind in kvc._identity.kinds if kind.attention]
    layer_bytes, total = kvc.layout.block_bytes // kvc.layout.layers, 0
    for window in set(windows):
        seen = blocks if window is None else min(blocks, -(-(window - 1) // kvc.layout.block_tokens) + 1)
        total += seen * (PAYLOAD_AT + windows.count(window) * layer_bytes)
    return total


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("name", WINDOWED)
def test_a_hit_loads_what_its_window_sees(name: str) -> None:
    if not known(name):
        pytest.skip("this transformers has no such family")
    model, ids = model_of(name, 20), prompt_of(163)
    plain = answer(model, ids)
    with manager(model, 8) as kvc:
        stored = kvc.add_blocks_ids(ids)
        assert stored.stored_blocks == 20
        cache = kvc.get_cache_ids(ids)
        assert cache.result.cached_tokens == 160 and cache.result.loaded_blocks == 20
        assert cache.result.size_bytes <= most_bytes(kvc, 20) < 20 * kvc.layout.block_bytes
        assert torch.equal(answer(model, ids, cache), plain)
        loaded = kvc.counters.total("loaded_bytes_total")
        assert loaded == cache.result.size_bytes


def expected_blocks(kvc: KVCManager, ids: Any) -> int:
    """The most blocks of which all that is seen is in the store: tried one by one."""
    tokens, limit = kvc.layout.block_tokens, ids.shape[1] - 1
    there = [part.blocks.stored(chain) for part, chain in zip(kvc.parts.parts, kvc.parts.hashes(ids[0]), strict=True)]
    for blocks in range(min(ids.shape[1] // tokens, -(-limit // tokens)), 0, -1):
        end = min(blocks * tokens, limit)
        firsts = [0 if one.window is None else max(0, end - one.window + 1) // tokens for one in kvc.parts.parts]
        if len(there[0]) >= blocks and all(all(one[first:blocks]) for one, first in zip(there, firsts, strict=True)):
            return blocks
    return 0


@pytest.mark.slow
@pytest.mark.seeded
@settings(max_examples=8)
@given(
    name=st.sampled_from(WINDOWED[:3]),
    window=st.sampled_from([3, 9, 20, 33]),
    block=st.sampled_from([1, 4, 8, 13]),
    tokens=st.integers(1, 120),
    gone=st.lists(st.tuples(st.integers(0, 1), st.floats(0, 1)), max_size=4),
)
@example(name="Gemma 3", window=20, block=8, tokens=64, gone=[])
@example(name="Gemma 3", window=9, block=8, tokens=65, gone=[(1, 0.99)])
@example(name="Mistral 0.1", window=20, block=8, tokens=100, gone=[(0, 0.0)])
@example(name="Mistral 0.1", window=20, block=8, tokens=100, gone=[(0, 0.9)])
def test_whatever_is_gone_the_tokens_are_the_same(
    name: str, window: int, block: int, tokens: int, gone: list[tuple[int, float]]
) -> None:
    model, ids, store = model_of(name, window), prompt_of(tokens, seed=tokens), MemoryStore()
    plain = answer(model, ids)
    with manager(model, block, store) as kvc:
        kvc.add_blocks_ids(ids)
        chains = kvc.parts.hashes(ids[0])
        for number, where in gone:
            chain = chains[number % len(chains)]
            store.delete(chain[int(where * (len(chain) - 1)) :][:1])
        for _ in range(2):
            blocks = expected_blocks(kvc, ids)
            cache = kvc.get_cache_ids(ids)
            result = cache.result
            assert result.loaded_blocks == result.found_blocks == blocks and not result.failed_blocks
            assert result.cached_tokens == min(blocks * block, tokens - 1)
            assert result.size_bytes <= most_bytes(kvc, blocks)
            wanted = min(tokens // block, -(-(tokens - 1) // block))
            assert bool(result.not_found) == (blocks < wanted or tokens < block)
            assert torch.equal(answer(model, ids, cache), plain)
            kvc.add_blocks_ids(ids)
            assert expected_blocks(kvc, ids) == wanted
        assert not kvc.counters.total("unused_tokens_total")
    with manager(model, block, store) as kvc:
        longer = torch.cat([plain, prompt_of(2 * block)], dim=1)
        assert torch.equal(answer(model, longer, kvc.get_cache_ids(longer)), answer(model, longer))


@pytest.mark.brief(
    "True-1-Mistral 0.1", "True-17-Gemma 3", "True-98-Mistral 0.1", "False-40-Mistral 0.1", "False-80-Gemma 3"
)
@pytest.mark.parametrize("name", WINDOWED[:2])
@pytest.mark.parametrize("at", [1, 17, 40, 80, 98])
@pytest.mark.parametrize("there", [True, False])
def test_a_prompt_that_differs_has_brought_or_computed_what_its_windows_lack(name: str, at: int, there: bool) -> None:
    model, ids, store = model_of(name, 20), prompt_of(99), MemoryStore()
    other = ids.clone()
    other[0, at] = (other[0, at] + 1) % 1000 + 3
    with manager(model, 8, store) as kvc:
        kvc.add_blocks_ids(ids)
        cache, whole = kvc.get_cache_ids(ids), kvc.counters.total("loaded_bytes_total")
        if not there:
            store.delete(list(values_of(store)))
        for prompt in (other, other[:, : at + 1], ids) if ANNOUNCED else (other,):
            assert torch.equal(answer(model, prompt, cache), answer(model, prompt))
        assert (kvc.counters.total("loaded_bytes_total") > whole) == (there and at < 98)
        added = kvc.add_blocks_ids(ids if ANNOUNCED else other)
        assert added.prefilled_tokens == 0
    with manager(model, 8, store) as kvc:
        assert torch.equal(answer(model, other, kvc.get_cache_ids(other)), answer(model, other))


@pytest.mark.parametrize("name", WINDOWED[:2])
def test_prompts_that_share_their_beginning_are_served_as_far_as_they_do(name: str) -> None:
    model, ids = model_of(name, 20), prompt_of(99)
    both = ids.repeat(2, 1)
    both[1, 70] = 5
    with manager(model, 8) as kvc:
        kvc.add_blocks_ids(ids)
        cache = kvc.get_cache_ids(ids)
        copied = copy.deepcopy(cache)
        plain = answer(model, both)
        assert torch.equal(answer(model, both, cache), plain)
        assert kvc.counters.total("unused_tokens_total") == 96 - 70
        assert torch.equal(answer(model, both, copied), plain)


WAYS: dict[str, dict[str, Any]] = {
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 3},
    "several answers": {"do_sample": True, "num_return_sequences": 2},
    "in chunks": {"prefill_chunk_size": 32},
    "in small chunks": {"prefill_chunk_size": 7},
    **({"prompt lookup": {"prompt_lookup_num_tokens": 3}} if ANNOUNCED else {}),
}


@pytest.mark.brief("prompt lookup-Mistral 0.1", "sampled-Gemma 3", "several answers-Mistral 0.1")
@pytest.mark.parametrize("name", WINDOWED[:2])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_decoding_with_holes(name: str, way: str) -> None:
    model, ids = model_of(name, 20), prompt_of(99)
    with manager(model, 8) as kvc:
        kvc.add_blocks_ids(ids)
        for prompt in (ids, ids.repeat(2, 1)) if way != "prompt lookup" else (ids,):
            cache = kvc.get_cache_ids(ids)
            assert cache.result.cached_tokens == 96
            assert torch.equal(answer(model, prompt, cache, **WAYS[way]), answer(model, prompt, **WAYS[way]))


@pytest.mark.brief()
@pytest.mark.parametrize("name", WINDOWED[:3])
def test_five_turns_load_a_window_each_and_compute_what_is_new(name: str) -> None:
    model, turn = model_of(name, 20), prompt_of(60)
    with manager(model, 8) as kvc:
        kvc.add_blocks_ids(turn)
        for _ in range(5):
            cache = kvc.get_cache_ids(turn)
            assert cache.result.size_bytes <= most_bytes(kvc, cache.result.loaded_blocks)
            said = answer(model, turn, cache)
            assert torch.equal(said, answer(model, turn))
            added = kvc.add_blocks_ids(said)
            assert added.prefilled_tokens == 0 and added.refused_blocks == 0
            turn = torch.cat([said, prompt_of(11, seed=2)], dim=1)
            assert kvc.get_cache_ids(turn).result.computed_tokens <= 11 + 8


@pytest.mark.parametrize("name", WINDOWED[:2])
@pytest.mark.parametrize("cut", [1, 12, 40])
def test_a_cache_that_is_cut_to_where_its_window_is_not(name: str, cut: int) -> None:
    model, ids = model_of(name, 20), prompt_of(99)
    with manager(model, 8) as kvc, torch.inference_mode():
        kvc.add_blocks_ids(ids)
        cache = kvc.get_cache_ids(ids)
        held = cache.begin()
        assert held == 96
        model(ids[:, held:], past_key_values=cache)
        cache.crop(-cut)
        left = 99 - cut
        assert cache.get_seq_length() == left
        behind = prompt_of(4, seed=3)
        got = model(behind, past_key_values=cache).logits
        whole = model(torch.cat([ids[:, :left], behind], dim=1)).logits[:, -4:]
        assert torch.allclose(got, whole, atol=1e-3 * float(whole.std()))
        assert torch.equal(got.argmax(-1), whole.argmax(-1))


def test_a_cut_of_unknown_tokens_is_refused() -> None:
    model, ids = model_of("Gemma 3", 20), prompt_of(99)
    with manager(model, 8) as kvc, torch.inference_mode():
        kvc.add_blocks_ids(ids)
        cache = kvc.get_cache_ids(ids)
        held = cache.begin()
        model(inputs_embeds=model.get_input_embeddings()(ids[:, held:]), past_key_values=cache)
        for layer in cache.layers:
            layer.crop(-59)
        with pytest.raises(CacheMisuse, match="windows did not hold"):
            model(ids[:, :1], past_key_values=cache)


@pytest.mark.brief("Mistral 0.1-cake", "Gemma 3-load")
@pytest.mark.parametrize("loading", ["cake", "compute", "load"])
@pytest.mark.parametrize("name", WINDOWED[:2])
def test_both_ends_at_once(name: str, loading: Any) -> None:
    model, ids, store = model_of(name, 20), prompt_of(163), MemoryStore()
    plain = answer(model, ids)
    with manager(model, 8, store, loading=loading, cake=CakeSettings(step_tokens=16)) as kvc:
        kvc.add_blocks_ids(ids)
        for gone in (0, 3, 11, 19):
            cache = kvc.get_cache_ids(ids)
            assert torch.equal(answer(model, ids, cache), plain)
            assert cache.result.computed_tokens + cache.result.cached_tokens == 163
            for chain in kvc.parts.hashes(ids[0])[-1:]:
                store.delete(chain[gone : gone + 1])


class Losing(MemoryStore):
    """Memory that loses ``lost`` between a lookup and the load."""

    lost: tuple[bytes, ...] = ()

    def prepare_load(self, keys: Any) -> Any:
        self.delete([key for key in self.lost if key in keys])
        return super().prepare_load(keys)


@pytest.mark.brief("lost2-Mistral 0.1", "lost0-Gemma 3", "lost4-Mistral 0.1")
@pytest.mark.parametrize("name", WINDOWED[:2])
@pytest.mark.parametrize("lost", [(1, 19), (1, 18), (1, 17), (0, 12), (0, 0)])
def test_a_part_that_is_lost_on_its_way_leaves_a_shorter_hit(name: str, lost: tuple[int, int]) -> None:
    model, ids, store = model_of(name, 20), prompt_of(163), Losing()
    plain = answer(model, ids)
    with manager(model, 8, store) as kvc:
        kvc.add_blocks_ids(ids)
        chain = kvc.parts.hashes(ids[0])[lost[0] % len(kvc.parts.parts)]
        store.lost = (chain[lost[1]],)
        seen = lost[1] >= 17 or kvc.parts.parts[0].window is None
        cache = kvc.get_cache_ids(ids)
        result = cache.result
        assert result.found_blocks == 20 and result.loaded_blocks == (lost[1] if seen else 20)
        assert sum(result.failed_blocks.values()) == 20 - result.loaded_blocks
        assert not seen or result.failed_blocks["absent"] == 1
        assert torch.equal(answer(model, ids, cache), plain)
        store.lost = ()
        assert kvc.add_blocks_ids(ids).prefilled_tokens == 0
        assert torch.equal(answer(model, ids, kvc.get_cache_ids(ids)), plain)
        assert kvc.last.loaded_blocks == 20


@pytest.mark.brief()
@pytest.mark.parametrize("name", WINDOWED[:3])
def test_a_lost_window_is_stored_again_from_what_is_at_hand_or_computed_for_its_end(name: str) -> None:
    model, ids, store = model_of(name, 20), prompt_of(163), MemoryStore()
    with manager(model, 8, store) as kvc:
        kvc.add_blocks_ids(ids)
        answer(model, ids, kvc.get_cache_ids(ids))
        chain = kvc.parts.hashes(ids[0])[-1]
        store.delete(chain[18:])
        added = kvc.add_blocks_ids(ids)
        assert added.prefilled_tokens == 0 and all(kvc.parts.parts[-1].blocks.stored(chain))
    with manager(model, 8, store) as kvc:
        store.delete(chain[5:])
        added = kvc.add_blocks_ids(ids)
        assert added.prefilled_tokens == 160 - 40
        assert kvc.get_cache_ids(ids).result.cached_tokens == 160


def test_a_model_without_windows_names_its_blocks_as_ever() -> None:
    model = build("Llama")
    with KVCManager(model, weights="w", block_tokens=8) as kvc:
        (part,) = kvc.parts.parts
        assert part.window is None and part.blocks.context == kvc.context and part.blocks.layout == kvc.layout
        assert kvc.context.layout == kvc.layout.describe() == "kv1[layers=2,2,kv_heads=2,tokens=8,head_dim=8]float32-le"


def test_parts_have_names_of_their_own() -> None:
    with manager(model_of("Gemma 3", 20), 8) as kvc, manager(model_of("Gemma 3", 33), 8) as other:
        contexts = [part.blocks.context for one in (kvc, other) for part in one.parts.parts]
        assert len({context.digest() for context in contexts}) == 4
        assert [part.window for part in kvc.parts.parts] == [None, 20]
        assert [part.blocks.layout.layers for part in kvc.parts.parts] == [1, 3]
        assert "layers 0,1,2, window 20" in contexts[1].layout and "window none" in contexts[0].layout


def test_lossy_codecs_go_by_the_true_layers() -> None:
    pytest.importorskip("constriction")
    model, ids = model_of("Gemma 3", 20), prompt_of(99)
    with manager(model, 8, codec="cachegen") as kvc:
        first, second = (part.blocks.codec for part in kvc.parts.parts)
        assert (first._layers, second._layers, first._of) == ((3,), (0, 1, 2), 4)  # type: ignore[attr-defined]
        kvc.add_blocks_ids(ids)
        assert kvc.get_cache_ids(ids).result.cached_tokens == 96


@pytest.mark.brief("Mistral 0.1-False")
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("name", WINDOWED[:2])
def test_by_the_way_of_a_device(name: str, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that gathers and spreads, on the processor: nothing that was placed is written late."""

    class Staged(GroupRoom):
        def __init__(self, group: Any, layout: Any, rooms: Any, memory: Any) -> None:
            super().__init__(group, layout, rooms)
            self._staging = Staging(rooms, layout)
            self.threads = 4

    monkeypatch.setattr("skymemory.engine.transformers.kv_cache.GroupRoom", Staged)
    model, ids, store = model_of(name, 20), prompt_of(99), MemoryStore()
    other = ids.clone()
    other[0, 50:] = prompt_of(49, seed=3)
    with manager(model, 8, store) as kvc:
        kvc.add_blocks_ids(ids)
        cache = kvc.get_cache_ids(ids)
        if not there:
            store.delete(kvc.parts.hashes(ids[0])[-1][4:5])
        assert cache.result.cached_tokens == 96
        third = prompt_of(99, seed=4)
        for prompt in (other, third, third[:, :40], ids) if ANNOUNCED else (other,):
            assert torch.equal(answer(model, prompt, cache), answer(model, prompt))


def test_an_engine_s_prefix_cache_forgets_all_parts() -> None:
    caches_module = pytest.importorskip("skymemory_lab.engine.caches", reason="the laboratory is not installed")
    ids = prompt_of(99)[0].numpy()
    caches = caches_module.PrefixCaches(model_of("Gemma 3", 20), None, 1 << 20, 8, "lru")
    prompt = caches.open("", ids)
    with torch.inference_mode():
        prompt.manager.model(torch.tensor(ids)[None], past_key_values=prompt.cache)
    caches.keep(prompt)
    assert caches.held_blocks == 12 and len(values_of(caches._store)) == 24
    assert caches.open("", ids).cached_tokens == 96
    caches.clear()
    assert values_of(caches._store) == {} and caches.open("", ids).cached_tokens == 0
    caches.close()


def test_an_engine_s_prefix_cache_takes_over_all_parts_from_another_s() -> None:
    caches_module = pytest.importorskip("skymemory_lab.engine.caches", reason="the laboratory is not installed")
    ids, model = prompt_of(99)[0].numpy(), model_of("Gemma 3", 20)
    one, other = (caches_module.PrefixCaches(model, None, 1 << 20, 8, "lru") for _ in range(2))
    prompt = one.open("", ids)
    with torch.inference_mode():
        prompt.manager.model(torch.tensor(ids)[None], past_key_values=prompt.cache)
    chains = one.keep(prompt)
    values = [[bytes(value) for value in one.store.get_now(chain) if value is not None] for chain in chains]
    assert other.find_cached_blocks("", ids) == (chains, 0) and one.find_cached_blocks("", ids) == (chains, 12)
    log: list[Any] = []
    other.on_events = log.extend
    assert other.admit("", ids, chains, 0, [part[:5] for part in values]) == 5
    assert other.admit("", ids, chains, 5, [part[5:] for part in values]) == 7
    assert [len(event.block_hashes) for event in log] == [5, 7] and other.held_blocks == 12
    found = other.open("", ids)
    assert found.cached_tokens == 96
    with torch.inference_mode():
        rest = torch.tensor(ids[96:])[None]
        logits = found.manager.model(rest, past_key_values=found.cache).logits[0, -1]
        assert torch.allclose(logits, model(torch.tensor(ids)[None]).logits[0, -1], atol=1e-4)
    other.clear()
    assert values_of(other._store) == {}
    one.close()
    other.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWED[:2])
def test_another_process_finds_what_one_has_stored(name: str, tmp_path: Path) -> None:
    code = f"""
import sys
from tests.engine.transformers.test_parts import manager, model_of, prompt_of
from skymemory import open_store
with open_store("disk://{tmp_path}/store?budget=1GB") as store, manager(model_of({name!r}, 20), 8, store) as kvc:
    print(kvc.add_blocks_ids(prompt_of(99)).stored_blocks)
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.split() == ["12"], done.stderr
    from skymemory import open_store

    model, ids = model_of(name, 20), prompt_of(99)
    with open_store(f"disk://{tmp_path}/store?budget=1GB") as store, manager(model, 8, store) as kvc:
        cache = kvc.get_cache_ids(ids)
        assert cache.result.hit_tokens == {"disk": 96} and cache.result.size_bytes <= most_bytes(kvc, 12)
        assert torch.equal(answer(model, ids, cache), answer(model, ids))
