"""SkyCache and its memory: in place while it can, a DynamicCache when it cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.contract.forked import in_child  # noqa: E402
from tests.contract.rows import rows_of  # noqa: E402
from transformers.cache_utils import DynamicCache  # noqa: E402

from skymemory.engine.transformers.kv_cache import CacheSource, LayerKind, RoomPool, SkyCache  # noqa: E402
from skymemory.kv.block import KVLayout  # noqa: E402

pytestmark = pytest.mark.engine
LAYOUT = KVLayout(layers=2, kv_heads=3, head_dim=4, block_tokens=8, dtype="float32")
CPU = torch.device("cpu")


def fresh(room_tokens: int = 32, pool: RoomPool | None = None) -> SkyCache:
    return SkyCache(LAYOUT, room_tokens, CPU, pool or RoomPool())


def step(cache: Any, tokens: int, seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(1, 3, tokens, 4, generator=generator) for _ in range(4)]
    cache.update(made[0], made[1], 0)
    return cache.update(made[2], made[3], 1)


@pytest.mark.parametrize("steps", [[5], [8, 1, 1, 1], [20, 12], [20, 13, 4], [40, 3]])
def test_it_holds_what_a_dynamic_cache_holds(steps: list[int]) -> None:
    ours, theirs = fresh(), DynamicCache()
    for number, tokens in enumerate(steps):
        assert all(map(torch.equal, step(ours, tokens, number), step(theirs, tokens, number)))
    assert ours.get_seq_length() == theirs.get_seq_length() == sum(steps)
    in_place = ours.layers[0].keys.untyped_storage().data_ptr() == ours._room.untyped_storage().data_ptr()
    assert in_place == (sum(steps) <= 32)


def test_crop_and_beams_are_as_transformers_has_them() -> None:
    ours, theirs = fresh(), DynamicCache()
    for cache in (ours, theirs):
        step(cache, 9, 0)
        cache.crop(-4)
        step(cache, 2, 1)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([1, 0]))
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)
    assert len(ours.tokens()) == 0
    ours.reset()
    assert ours.get_seq_length() == 0 and step(ours, 3, 2)[0].shape[2] == 3


def test_keys_that_someone_else_put_there_are_kept() -> None:
    ours, theirs = fresh(), DynamicCache()
    for cache in (ours, theirs):
        step(cache, 4, 0)
        cache.layers[0].keys = cache.layers[0].keys * 2
        step(cache, 1, 1)
    assert torch.equal(ours.layers[0].keys, theirs.layers[0].keys)


def test_it_knows_its_tokens_only_when_it_saw_them() -> None:
    cache = fresh()
    assert len(cache.tokens()) == 0
    cache.record_input(torch.tensor([[4, 5, 6]]), is_plain=True)
    assert len(cache.tokens()) == 0, "announced, not there"
    cache = fresh()
    cache.record_input(torch.tensor([[4, 5, 6]]), is_plain=True)
    step(cache, 3, 0)
    assert cache.tokens().tolist() == [4, 5, 6]
    cache.crop(-2)
    cache.record_input(torch.tensor([[9]]), is_plain=True)
    step(cache, 1, 1)
    assert cache.tokens().tolist() == [4, 9]
    step(cache, 1, 2)
    assert len(cache.tokens()) == 0, "something came that was not announced"


@pytest.mark.parametrize(("ids", "plain"), [(None, True), (torch.zeros(2, 3, dtype=torch.long), False)])
def test_what_is_behind_something_that_is_not_known_is_not_known(ids: Any, plain: bool) -> None:
    cache = fresh()
    cache.record_input(torch.tensor([[4, 5]]), is_plain=True)
    step(cache, 2, 0)
    cache.record_input(ids, is_plain=plain)
    step(cache, 3, 1)
    cache.record_input(torch.tensor([[6]]), is_plain=True)
    step(cache, 1, 2)
    assert cache.tokens().tolist() == [4, 5]
    cache.crop(-3)
    assert cache.tokens().tolist() == [4, 5]
    cache.crop(-1)
    cache.record_input(torch.tensor([[7]]), is_plain=True)
    step(cache, 1, 3)
    assert cache.tokens().tolist() == [4, 5, 7], "what was not known is gone"


def test_blocks_go_in_and_come_out() -> None:
    cache = fresh()
    blocks = [np.random.default_rng(i).standard_normal(LAYOUT.shape).astype(np.float32).tobytes() for i in range(3)]
    for index, block in enumerate(blocks):
        cache.groups[0].place(index, memoryview(block))
    cache.fill(np.arange(23))
    assert cache.get_seq_length() == 23 and cache.tokens().tolist() == list(range(23))
    step(cache, 1, 0)
    out = bytearray(LAYOUT.block_bytes)
    for index, block in enumerate(blocks[:2]):
        CacheSource(cache, LAYOUT).read(index, memoryview(out))
        assert out == block


def test_its_length_can_be_asked_while_another_thread_empties_it() -> None:
    cache = fresh()
    step(cache, 4, 0)
    layer = cache.layers[0]

    class Emptied(type(layer)):  # type: ignore[misc]
        @property
        def is_initialized(self) -> bool:
            self.keys = self.values = None
            return True

    del layer.is_initialized
    layer.__class__ = Emptied
    assert layer.get_seq_length() == 0


def test_gradients_leave_the_room_alone() -> None:
    cache = fresh()
    keys = torch.ones(1, 3, 2, 4, requires_grad=True)
    got, _ = cache.update(keys, keys, 0)
    got.sum().backward()
    assert keys.grad is not None and not cache._room.requires_grad


def test_memory_is_lent_to_one_at_a_time() -> None:
    pool = RoomPool(keep=2)
    first = pool.take(100)
    address = first.data_ptr()
    view = first[10:20].view(2, 5)
    assert pool.take(100).data_ptr() != address
    del first
    assert pool.take(100).data_ptr() != address, "a view is still out"
    del view
    assert pool.take(100).data_ptr() in {address} | {array.ctypes.data for array in pool._arrays}
    small = pool.take(100)
    assert len(pool.take(200 << 20)) >= 200 << 20
    assert small.numel() >= 100


def test_a_large_room_is_not_spent_on_a_small_prompt() -> None:
    pool = RoomPool(keep=2)
    large = pool.take(100 << 20)
    address = large.data_ptr()
    del large
    assert pool.take(1000).data_ptr() != address
    pool.warm(1000)


def test_a_forked_child_has_memory_of_its_own() -> None:
    """What it puts into the pool's memory is not in its parent's cache of the same place."""
    pool = RoomPool()
    lent = [pool.take(1000)]
    lent[0].fill_(1)

    def child() -> list[int]:
        address = lent.pop().data_ptr()
        again = pool.take(1000)
        again.fill_(2)
        return [int(again.data_ptr() == address), int(again.sum()), len(again)]

    same, total, size = in_child(child)
    assert same and total == 2 * size
    assert int(lent[0].sum()) == size


HEAD = memoryview(bytearray(128))


@pytest.mark.parametrize("windows", [(None, None), (4, 4), (None, 4)])
def test_rows_are_where_a_block_is_placed(windows: tuple[int | None, ...]) -> None:
    kinds = [LayerKind(window=window) for window in windows]
    placed, received = (SkyCache(LAYOUT, 32, CPU, RoomPool(), kinds) for _ in range(2))
    for index in (0, 2):
        for here, there in zip(placed.groups, received.groups, strict=True):
            block = np.random.default_rng(index).bytes(here._layout.block_bytes)
            here.place(index, memoryview(block))
            rows = there.rows(index, HEAD)
            assert rows is not None and rows.size_bytes == len(HEAD) + len(block)
            rows_of(rows)[:] = np.frombuffer(block, np.uint8).reshape(rows.row_count, rows.row_bytes)
            there.on_block(index)
    for one, other in zip(placed.layers, received.layers, strict=True):
        for tokens in (slice(0, 8), slice(16, 24)):
            for mine, theirs in zip(one._room, other._room, strict=True):
                assert mine[:, tokens].view(torch.uint8).equal(theirs[:, tokens].view(torch.uint8))
    assert [group.has_block(2) for group in received.groups] == [True] * len(received.groups)


def test_no_rows_over_tokens_that_are_present_or_where_the_room_is_unlike_a_block() -> None:
    (group,) = SkyCache(LAYOUT, 32, CPU, RoomPool(), [LayerKind(window=4)] * 2).groups
    assert group.presence is not None and group.rows(1, HEAD) is not None
    group.presence.mark_present(15, 16)  # computed: a block that fails must not spoil it
    assert group.rows(1, HEAD) is None and group.rows(0, HEAD) is not None
    unlike = KVLayout(layers=2, kv_heads=3, head_dim=4, block_tokens=8, dtype="float32", value_dim=2)
    assert SkyCache(unlike, 32, CPU, RoomPool()).groups[0].rows(0, HEAD) is None
