"""KVCManager as the disclosure uses it: same tokens with and without, whatever the store does."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.contract.forked import in_child  # noqa: E402
from tests.engine.transformers.generation import BLOCK, generate, manager  # noqa: E402
from transformers.cache_utils import DynamicCache  # noqa: E402

from skymemory import KVCManager, open_store  # noqa: E402
from skymemory.cache.tiers.store import TieredStore  # noqa: E402
from skymemory.cache.tiers.tier import TierSettings  # noqa: E402
from skymemory.engine.transformers.models import (  # noqa: E402
    build_small,
    train_tokenizer,
)
from skymemory.errors import InvalidInput, WrongProcess  # noqa: E402
from skymemory.store.disk import DiskStore  # noqa: E402
from skymemory.store.host.server import ServedArena  # noqa: E402
from skymemory.store.memory import MemoryStore  # noqa: E402

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[3]


@pytest.fixture
def kvc(model: Any, tokenizer: Any) -> Any:
    with manager(model, tokenizer) as kvc:
        yield kvc


def test_the_example_of_the_disclosure(model: Any, tokenizer: Any, document: str, kvc: KVCManager) -> None:
    prompt = document[:900]
    without = generate(model, tokenizer, prompt)
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**inputs, past_key_values=kvc.get_cache(prompt), max_new_tokens=12, do_sample=False)
    added = kvc.add_blocks(prompt)
    assert out[0].tolist() == without
    assert kvc.last.cached_tokens == 0 and added.stored_blocks == added.blocks > 10
    assert added.prefilled_tokens == 0, "what generate computed must not be computed again"
    assert generate(model, tokenizer, prompt, kvc.get_cache(prompt)) == without
    assert added.blocks == (len(without) - 1) // BLOCK, "the answer is stored, too, but for its last token"
    assert kvc.last.loaded_blocks == kvc.last.blocks > 10 and kvc.last.computed_tokens < BLOCK
    assert list(kvc.last.seconds) == ["tokenize", "hash", "lookup", "fetch", "decode"]
    assert kvc.add_blocks(prompt).present_blocks == added.blocks


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 1])
def test_every_length_leaves_a_token_and_keeps_the_output(model: Any, kvc: KVCManager, length: int) -> None:
    ids = torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(length))
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    without = model.generate(ids, **options)
    added = kvc.add_blocks_ids(ids)
    assert added.stored_blocks == length // BLOCK
    assert added.prefilled_tokens == length // BLOCK * BLOCK
    cache = kvc.get_cache_ids(ids)
    assert cache.result.cached_tokens == min(length // BLOCK * BLOCK, length - 1)
    assert cache.result.computed_tokens == length - cache.result.cached_tokens >= 1
    assert model.generate(ids, past_key_values=cache, **options).tolist() == without.tolist()


def test_prompts_that_share_a_beginning(model: Any, tokenizer: Any, document: str, kvc: KVCManager) -> None:
    first, second = document[:800] + " And what is a box?", document[:800] + " Who moves the chunks?"
    without = generate(model, tokenizer, second)
    generate(model, tokenizer, first, kvc.get_cache(first))
    kvc.add_blocks(first)
    assert generate(model, tokenizer, second, kvc.get_cache(second)) == without
    assert kvc.last.cached_tokens > 100
    added = kvc.add_blocks(second)
    assert added.prefilled_tokens == 0 and added.present_blocks > 0
    found = kvc.get_cache(second).result
    assert found.loaded_blocks == found.blocks


def test_a_prompt_never_generated_is_computed_only_where_it_is_missing(kvc: KVCManager, document: str) -> None:
    kvc.add_blocks(document[:600])
    before = kvc.last_stored.blocks
    added = kvc.add_blocks(document[:1200])
    assert added.present_blocks == before and added.stored_blocks == added.blocks - before
    assert added.prefilled_tokens == added.stored_blocks * BLOCK
    counters = kvc.counters
    assert counters.total("lookup_tokens_total") == 0, "storing is not looking up"


def test_a_hole_is_filled(model: Any, tokenizer: Any, document: str, kvc: KVCManager) -> None:
    prompt = document[:900]
    blocks = kvc.add_blocks(prompt).blocks
    hashes = kvc.blocks.hashes(tokenizer(prompt)["input_ids"])
    kvc.store.delete([hashes[5], hashes[9]])
    without = generate(model, tokenizer, prompt)
    assert generate(model, tokenizer, prompt, kvc.get_cache(prompt)) == without
    assert kvc.last.loaded_blocks == 5
    added = kvc.add_blocks(prompt)
    assert added.stored_blocks == 2 + added.blocks - blocks and added.prefilled_tokens == 0
    assert kvc.get_cache(prompt).result.loaded_blocks == blocks


def test_generated_tokens_can_be_stored_too(model: Any, tokenizer: Any, document: str, kvc: KVCManager) -> None:
    prompt = document[:500]
    answer = generate(model, tokenizer, prompt, kvc.get_cache(prompt), new=3 * BLOCK)
    added = kvc.add_blocks_ids(answer)
    assert added.prefilled_tokens == 0 and added.stored_blocks == (len(answer) - 1) // BLOCK
    follow = answer + [7, 8, 9]
    with_cache = model.generate(torch.tensor([follow]), past_key_values=kvc.get_cache_ids(follow), max_new_tokens=8)
    assert kvc.last.cached_tokens == (len(answer) - 1) // BLOCK * BLOCK
    assert with_cache.tolist() == model.generate(torch.tensor([follow]), max_new_tokens=8).tolist()


STORING = """
import sys
import torch
from tests.engine.transformers.generation import manager
from skymemory import open_store
from skymemory.engine.transformers.models import build_small
ids = torch.arange(3, 3 + 5 * 16)[None]
with open_store(sys.argv[1]) as store, manager(build_small(), None, store) as kvc:
    print(kvc.add_blocks_ids(ids).stored_blocks)
"""


def test_another_process_finds_blocks_in_shared_memory_and_then_on_disk(model: Any, tmp_path: Path) -> None:
    ids = torch.arange(3, 3 + 5 * BLOCK)[None]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    without = model.generate(ids, **options).tolist()
    arena, disk = ServedArena(tmp_path / "arena", 8 << 20), DiskStore(tmp_path / "disk", 64 << 20)
    with TieredStore([(arena, TierSettings(local=True)), (disk, TierSettings())]) as tiers:
        command = [sys.executable, "-c", STORING, f"host://{tmp_path / 'arena'}"]
        assert subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120).stdout == b"5\n"
        until_s = time.monotonic() + 20
        while disk.stats()["entries"] < 5:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        for has_left in (False, True):
            if has_left:
                arena.delete(arena.stored_keys())
            with open_store(f"host://{tmp_path / 'arena'}") as store, manager(model, None, store) as kvc:
                assert model.generate(ids, past_key_values=kvc.get_cache_ids(ids), **options).tolist() == without
                assert kvc.last.hit_tokens == {"host": 5 * BLOCK - 1} and kvc.last.used_tokens == 5 * BLOCK - 1
                assert store.stats()["held_values"] == 0, "they were copied into the cache"
        assert tiers.stats()["disk_entries"] == arena.stats()["entries"] == 5


def test_a_prompt_that_differs_in_its_last_token_is_another(model: Any, kvc: KVCManager) -> None:
    one = torch.arange(3, 3 + 4 * BLOCK)[None]
    other = one.clone()
    other[0, -1] = 2
    options = {"attention_mask": torch.ones_like(one), "max_new_tokens": 2 * BLOCK, "do_sample": False}
    model.generate(one, past_key_values=kvc.get_cache_ids(one), **options)
    assert kvc.add_blocks_ids(other).blocks == 4
    assert kvc.get_cache_ids(other).result.loaded_blocks == 4


@pytest.mark.slow
def test_past_the_room_the_output_is_the_same(model: Any, tokenizer: Any, document: str, kvc: KVCManager) -> None:
    prompt = document[:300]
    kvc.add_blocks(prompt)
    without = generate(model, tokenizer, prompt, new=400)
    assert generate(model, tokenizer, prompt, kvc.get_cache(prompt), new=400) == without
    assert kvc.add_blocks_ids(without).prefilled_tokens == 0


def test_what_generate_changes_is_not_what_is_stored(
    model: Any, tokenizer: Any, document: str, kvc: KVCManager
) -> None:
    prompt = document[:700]
    kvc.add_blocks(prompt)
    first = kvc.get_cache(prompt)
    first.begin()
    before = first.layers[0].keys.clone()
    other = kvc.get_cache(prompt)
    other.begin()
    for layer in other.layers:
        layer.keys.fill_(9.0)
        layer.values.fill_(9.0)
    generate(model, tokenizer, prompt, first)
    again = kvc.get_cache(prompt)
    again.begin()
    assert torch.equal(again.layers[0].keys, before)


@pytest.mark.brief()
def test_memory_is_reused_only_without_views(model: Any, tokenizer: Any, document: str, kvc: KVCManager) -> None:
    prompt = document[:700]
    kvc.add_blocks(prompt)
    cache = kvc.get_cache(prompt)
    cache.begin()
    kept = cache.layers[1].values
    del cache
    truth = kept.clone()
    for _ in range(6):
        generate(model, tokenizer, document[100:900], kvc.get_cache(document[100:900]))
        gc.collect()
    assert torch.equal(kept, truth)


def test_a_copied_cache_is_a_cache(model: Any, tokenizer: Any, document: str, kvc: KVCManager) -> None:
    prompt = document[:700]
    without = generate(model, tokenizer, prompt)
    kvc.add_blocks(prompt)
    cache = kvc.get_cache(prompt)
    assert generate(model, tokenizer, prompt, copy.deepcopy(cache)) == without
    assert generate(model, tokenizer, prompt, cache) == without


def test_a_wrong_prompt_is_never_stored(model: Any, tokenizer: Any, document: str, kvc: KVCManager) -> None:
    asked, other = document[:600], document[1000:1600]
    generate(model, tokenizer, other, kvc.get_cache(asked))
    added = kvc.add_blocks(asked)
    assert added.prefilled_tokens > 0, "what was computed was for another text"
    assert generate(model, tokenizer, asked, kvc.get_cache(asked)) == generate(model, tokenizer, asked)


def test_a_masked_generate_is_never_stored(model: Any, tokenizer: Any, document: str, kvc: KVCManager) -> None:
    inputs = tokenizer(document[:400], return_tensors="pt", return_token_type_ids=False)
    inputs["attention_mask"][0, :7] = 0
    model.generate(**inputs, past_key_values=kvc.get_cache(document[:400]), max_new_tokens=4)
    assert kvc.add_blocks(document[:400]).prefilled_tokens > 0


def test_a_hidden_token_is_seen_even_where_positions_are_not(model: Any, tokenizer: Any, kvc: KVCManager) -> None:
    ids = torch.arange(3, 3 + 4 * BLOCK)[None]
    mask = torch.ones_like(ids)
    mask[0, 5] = 0
    with torch.inference_mode():
        model(input_ids=ids, attention_mask=mask, past_key_values=kvc.get_cache_ids(ids), use_cache=True)
        assert kvc.add_blocks_ids(ids).prefilled_tokens == 4 * BLOCK
        model(
            input_ids=ids + 1,
            position_ids=torch.arange(4 * BLOCK)[None] + 3,
            past_key_values=kvc.get_cache_ids(ids + 1),
        )
    assert kvc.add_blocks_ids(ids + 1).prefilled_tokens == 4 * BLOCK


def test_beams_work_and_the_prompt_is_stored_from_them(
    model: Any, tokenizer: Any, document: str, kvc: KVCManager
) -> None:
    prompt = document[:400]
    without = generate(model, tokenizer, prompt, num_beams=2)
    assert generate(model, tokenizer, prompt, kvc.get_cache(prompt), num_beams=2) == without
    added = kvc.add_blocks(prompt)
    assert added.prefilled_tokens == 0 and added.stored_blocks == added.blocks > 5
    assert generate(model, tokenizer, prompt, kvc.get_cache(prompt), num_beams=2) == without
    assert kvc.last.loaded_blocks == added.blocks


def test_a_cache_that_the_user_filled(model: Any, tokenizer: Any, document: str, kvc: KVCManager) -> None:
    ids = torch.tensor([tokenizer(document[:600])["input_ids"]])
    own = DynamicCache()
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=own, use_cache=True)
    added = kvc.add_blocks_ids(ids, own)
    assert added.prefilled_tokens == 0 and added.stored_blocks == ids.shape[1] // BLOCK
    cache = kvc.get_cache_ids(ids)
    cache.begin()
    theirs, ours = own.layers[2].keys, cache.layers[2].keys
    assert torch.equal(theirs[:, :, : ours.shape[2]], ours)
    short = DynamicCache()
    with torch.inference_mode():
        model(input_ids=ids[:, : 2 * BLOCK] + 1, past_key_values=short, use_cache=True)
    added = kvc.add_blocks_ids(ids + 1, short)
    assert added.prefilled_tokens == (added.blocks - 2) * BLOCK
    with pytest.raises(InvalidInput, match="cache"):
        kvc.add_blocks_ids(ids + 2, DynamicCache())
    with pytest.raises(InvalidInput, match="shape"):
        kvc.add_blocks_ids(ids + 2, DynamicCache([(torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 5, 16))] * 3))


@pytest.mark.brief()
def test_another_model_or_tokenizer_is_a_miss(model: Any, tokenizer: Any, document: str) -> None:
    store, prompt = MemoryStore(), document[:500]
    with manager(model, tokenizer, store) as kvc:
        blocks = kvc.add_blocks(prompt).blocks
    same = build_small()
    others = [
        (build_small(seed=1), tokenizer, {}),
        (build_small(vocab_size=1100), tokenizer, {}),
        (build_small(dtype="bfloat16"), tokenizer, {}),
        (same, train_tokenizer(900), {}),
        (same, tokenizer, {"weights": "v2"}),
        (same, tokenizer, {"adapter": "lora@3"}),
        (same, tokenizer, {"tenant_salt": b"another tenant"}),
        (same, tokenizer, {"codec": "quanto8"}),
    ]
    for other, its_tokenizer, options in others:
        with manager(other, its_tokenizer, store, **options) as kvc:
            assert kvc.get_cache(prompt).begin() == 0, options
    with KVCManager(same, tokenizer, store, block_tokens=BLOCK * 2) as kvc:
        assert kvc.get_cache(prompt).begin() == 0
    with manager(same, tokenizer, store) as kvc:
        assert kvc.get_cache(prompt).result.loaded_blocks == blocks, "the same weights, loaded again, are the same"


def test_two_managers_on_one_model(model: Any, tokenizer: Any, document: str) -> None:
    prompt = document[:500]
    with manager(model, tokenizer) as one, manager(model, tokenizer) as two:
        generate(model, tokenizer, prompt, one.get_cache(prompt))
        assert one.add_blocks(prompt).prefilled_tokens == 0
        assert two.add_blocks(prompt).prefilled_tokens > 0


def test_unclaimed_caches_are_released(model: Any, tokenizer: Any, document: str, kvc: KVCManager) -> None:
    prompts = [document[start : start + 400] for start in range(0, 2400, 400)]
    for prompt in prompts:
        generate(model, tokenizer, prompt, kvc.get_cache(prompt), new=2)
    gc.collect()
    assert len(kvc._handed) <= 2
    assert kvc.add_blocks(prompts[-1]).prefilled_tokens == 0
    assert kvc.add_blocks(prompts[0]).prefilled_tokens > 0
    gc.collect()
    assert len(kvc._handed) <= 1, "the one that has served is let go at once"


def test_bad_input_is_refused_with_what_to_do(model: Any, tokenizer: Any) -> None:
    with manager(model, None) as kvc:
        with pytest.raises(InvalidInput, match="pass one to KVCManager"):
            kvc.get_cache("text")
        for wrong in ([[1, 2], [3, 4]], [1.5, 2.5], torch.zeros(2, 3, dtype=torch.long)):
            with pytest.raises(InvalidInput, match="one sequence"):
                kvc.get_cache_ids(wrong)
        with pytest.raises(InvalidInput, match="tokens must be in"):
            kvc.add_blocks_ids(np.full(BLOCK, -1))
        assert kvc.get_cache_ids([]).begin() == 0
        assert kvc.add_blocks_ids([1, 2]).blocks == 0
    with pytest.raises(InvalidInput, match="closed"):
        kvc.get_cache_ids([1])
    kvc.close()
    with manager(model, tokenizer) as kvc, pytest.raises(InvalidInput, match="one prompt"):
        kvc.get_cache(["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="choose one of"):
        manager(model, tokenizer, codec="zip")


def test_close_leaves_the_users_store_open_and_the_model_as_it_was(tokenizer: Any, document: str) -> None:
    model, store = build_small(), MemoryStore()
    with manager(model, tokenizer, store) as kvc:
        kvc.add_blocks(document[:300])
    assert store.stats()["entries"] > 0
    assert not model._forward_pre_hooks


def test_a_forked_child_must_make_a_manager_of_its_own(model: Any, document: str, kvc: KVCManager) -> None:
    prompt = document[:900]
    kvc.add_blocks(prompt)
    cache = kvc.get_cache(prompt)
    cache.begin()
    before = [layer.keys.clone() for layer in cache.layers]

    def child() -> list[str]:
        reported = []
        for call in (lambda: kvc.get_cache(document[300:900]), lambda: kvc.add_blocks(document[:500])):
            with pytest.raises(WrongProcess, match="this KVCManager"):
                call()
            reported.append("refused")
        kvc.close()
        return reported

    assert in_child(child) == ["refused"] * 2
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))
    assert kvc.get_cache(prompt).result.loaded_blocks == cache.result.loaded_blocks > 10
