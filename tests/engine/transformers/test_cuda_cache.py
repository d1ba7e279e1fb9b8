"""The transformers manager on a CUDA device gives the model's own tokens: loaded, computed or both, busy or idle.

Needs a GPU, torch, transformers and pytest::

    python -m pytest -p tests.conftest --confcutdir tests/engine tests/engine/transformers/test_cuda_cache.py
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from skymemory.engine.transformers.huggingface import KVCManager  # noqa: E402
from skymemory.engine.transformers.kv_cache import GroupRoom, LayerKind, _rooms, groups_of  # noqa: E402
from skymemory.engine.transformers.models import SMALL_SHAPE, build_llama  # noqa: E402
from skymemory.kv.block import KVLayout  # noqa: E402
from skymemory.store.base import LoadTicket  # noqa: E402
from skymemory.store.memory import MemoryStore  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: the manager is not tested on one", allow_module_level=True)

pytestmark = pytest.mark.engine
DEVICE = torch.device("cuda", 0)
BLOCK, TAIL = 32, 9


class Slow(MemoryStore):
    """A load takes a few milliseconds, so that Cake computes meanwhile."""

    pause_s = 0.0

    def complete_load(self, ticket: LoadTicket) -> Sequence[memoryview | None]:
        time.sleep(self.pause_s)
        return super().complete_load(ticket)


@pytest.fixture(scope="module")
def model() -> Any:
    shape = {**SMALL_SHAPE, "hidden_size": 256, "num_hidden_layers": 8, "max_position_embeddings": 8192}
    return build_llama(shape, 3, dtype="float32", weight_std=0.1).to(DEVICE)


def prompt_of(tokens: int, seed: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(3, SMALL_SHAPE["vocab_size"], (1, tokens), generator=drawn).to(DEVICE)


def answer(model: Any, ids: torch.Tensor, cache: Any, tokens: int = 8) -> list[int]:
    with torch.inference_mode():
        out = model.generate(ids, past_key_values=cache, max_new_tokens=tokens, do_sample=False, pad_token_id=2)
    return [int(token) for token in out[0, ids.shape[1] :]]


def alone(model: Any, ids: torch.Tensor) -> list[int]:
    return answer(model, ids, DynamicCache(config=model.config))


@pytest.mark.parametrize("pause_s", [0.0, 0.002, 0.02])
@pytest.mark.parametrize("loading", ["prefix", "cake"])
def test_tokens_are_the_model_s(model: Any, loading: str, pause_s: float) -> None:
    store = Slow(1 << 30)
    with KVCManager(model, store=store, block_tokens=BLOCK, weights="w", loading=loading) as kvc:  # type: ignore[arg-type]
        for seed, tokens in enumerate([BLOCK, 5 * BLOCK, 40 * BLOCK, 100 * BLOCK, 100 * BLOCK, 100 * BLOCK]):
            ids = prompt_of(tokens + TAIL, seed)
            kvc.add_blocks_ids(ids)
            store.pause_s = pause_s
            for _ in range(3):
                torch.cuda._sleep(20_000_000)  # the device is busy with something else
                assert answer(model, ids, kvc.get_cache_ids(ids)) == alone(model, ids), (seed, tokens)
            store.pause_s = 0.0


def test_an_answer_is_stored_and_another_manager_goes_on_from_it(model: Any) -> None:
    store = MemoryStore(1 << 28)
    ids = prompt_of(6 * BLOCK + TAIL, 9)
    with KVCManager(model, store=store, block_tokens=BLOCK, weights="w") as kvc:
        cache = kvc.get_cache_ids(ids)
        words = answer(model, ids, cache, 2 * BLOCK)
        whole = torch.cat([ids, torch.tensor([words], device=DEVICE)], dim=1)
        assert kvc.add_blocks_ids(whole).prefilled_tokens == 0
    with KVCManager(model, store=store, block_tokens=BLOCK, weights="w") as other:
        again = other.get_cache_ids(whole)
        assert again.result.cached_tokens == 8 * BLOCK
        assert answer(model, whole, again) == alone(model, whole)


def test_on_a_stream_of_the_user_s_own(model: Any) -> None:
    store = MemoryStore(1 << 30)
    for loading in ("prefix", "cake"):
        ids = prompt_of(80 * BLOCK + TAIL, 11)
        with (
            torch.cuda.stream(torch.cuda.Stream(DEVICE)),
            KVCManager(model, store=store, block_tokens=BLOCK, weights="w", loading=loading) as kvc,  # type: ignore[arg-type]
        ):
            kvc.add_blocks_ids(ids)
            assert answer(model, ids, kvc.get_cache_ids(ids)) == alone(model, ids)


LAYOUT = KVLayout(8, 4, 64, 32, "float32")


def room_of(blocks: int) -> tuple[torch.Tensor, GroupRoom]:
    room = torch.empty(LAYOUT.token_bytes * LAYOUT.block_tokens * blocks // 4, dtype=torch.float32, device=DEVICE)
    group = groups_of([LayerKind()] * LAYOUT.layers)[0]
    return room, GroupRoom(group, LAYOUT, _rooms(room, LAYOUT, LAYOUT.block_tokens * blocks))


def block_of(value: float) -> memoryview:
    return memoryview(np.full(LAYOUT.block_bytes // 4, value, np.float32)).cast("B")


def test_a_room_is_not_written_before_what_its_memory_was_has_ended() -> None:
    torch.cuda.empty_cache()
    size = LAYOUT.token_bytes * LAYOUT.block_tokens * 64 // 4
    before = torch.empty(size, dtype=torch.float32, device=DEVICE)
    where = before.data_ptr()
    torch.cuda._sleep(500_000_000)
    before.fill_(7.0)
    del before
    room, group = room_of(64)
    assert room.data_ptr() == where, "the allocator gave other memory: this proves nothing"
    for index in range(64):
        group.place(index, block_of(1.0))
    group.flush()
    torch.cuda.synchronize()
    assert bool((room == 1.0).all())


def test_a_load_given_up_writes_nothing_into_what_its_memory_is_next() -> None:
    torch.cuda.empty_cache()
    room, group = room_of(512)
    where, size = room.data_ptr(), room.numel()
    torch.cuda.current_stream().synchronize()
    for index in range(512):  # many are sent, none is waited for
        group.place(index, block_of(1.0))
    del room, group
    gc.collect()
    after = torch.empty(size, dtype=torch.float32, device=DEVICE)
    after.fill_(3.0)
    torch.cuda.synchronize()
    assert bool((after == 3.0).all()), after.data_ptr() == where


def test_many_caches_at_a_time_do_not_keep_the_device_s_memory(model: Any) -> None:
    store, ids = MemoryStore(1 << 28), prompt_of(40 * BLOCK + TAIL, 4)
    with KVCManager(model, store=store, block_tokens=BLOCK, weights="w") as kvc:
        kvc.add_blocks_ids(ids)
        answer(model, ids, kvc.get_cache_ids(ids))
        held = torch.cuda.memory_reserved()
        for _ in range(50):
            answer(model, ids, kvc.get_cache_ids(ids), 1)
        assert torch.cuda.memory_reserved() < held + (256 << 20)
