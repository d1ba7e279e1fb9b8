"""Models with several groups of layers, some of which see a window only: what one engine saves another loads."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.vllm.engine import BLOCK, LAYER_BYTES, LAYERS, SHAPE, SIZE, Request

from skymemory.cache.blocks import BlockCache, Part, Parts
from skymemory.engine.vllm.copier import CpuCopier, PartCopier
from skymemory.engine.vllm.identity import Seeds
from skymemory.engine.vllm.plan import part_key
from skymemory.engine.vllm.scheduler import SchedulerSide
from skymemory.engine.vllm.settings import parts_of
from skymemory.engine.vllm.worker import WorkerSide
from skymemory.kv.block import OpaqueLayout, hash_blocks
from skymemory.kv.context import CacheContext
from skymemory.store.base import Presence, Store
from skymemory.store.memory import MemoryStore

VALUE = BLOCK * SIZE
CONTEXT = CacheContext("m", "w", "token ids", "float32", "parts", block_tokens=VALUE)
pytestmark = pytest.mark.usefixtures("place")


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's, since the connector asks for the name."""


class SlidingWindowSpec(SimpleNamespace):
    pass


def kv_of(tokens: list[int], block: int, group: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What the model would write into one block of a group: it depends on all tokens up to the block's end."""
    seed = hash((group, *tokens[: (block + 1) * BLOCK])) & 0xFFFFFFFF
    return np.random.default_rng(seed).integers(1, 256, (LAYERS, LAYER_BYTES), np.uint8)


def in_sight(window: int | None, tokens: int) -> int:
    """The first block that the token behind ``tokens`` sees."""
    return 0 if window is None else max(0, tokens - window + 1) // BLOCK


class Engine:
    """An engine with a group of layers for each of ``windows`` (None: all tokens), as vLLM keeps them: blocks out of
    sight are given back, and stand as block 0 in the tables.
    """

    def __init__(self, store: Store, windows: list[int | None], blocks: int = 256, **options: Any) -> None:
        self.windows = windows
        specs = [
            FullAttentionSpec() if window is None else SlidingWindowSpec(sliding_window=window) for window in windows
        ]
        self.parts = parts_of([SimpleNamespace(kv_cache_spec=spec) for spec in specs])
        self.memory = np.zeros((len(windows), LAYERS, blocks, LAYER_BYTES), np.uint8)
        self.tables: dict[str, list[list[int]]] = {}
        self.free = list(range(1, blocks))
        self.scheduler = SchedulerSide(self._parts(store), SHAPE, Seeds(CONTEXT), self._block_ids, **options)
        self.worker = WorkerSide(self._parts(store), SHAPE, by_request=True)
        self.worker.register(
            [PartCopier([CpuCopier(list(self.memory[group])) for group in part.groups]) for part in self.parts]
        )
        self.finished: set[str] = set()
        self.failed: set[str] = set()

    def _parts(self, store: Store) -> Parts:
        return Parts(
            [Part(BlockCache(CONTEXT, layout_of(len(part.groups)), store), part.window) for part in self.parts]
        )

    def _block_ids(self, name: str) -> list[list[list[int]]]:
        return [[self.tables[name][group] for group in part.groups] for part in self.parts]

    def matched(self, request: Request, computed: int = 0) -> int:
        while True:
            tokens, _ = self.scheduler.matched(request, computed)
            if tokens is not None:
                return tokens

    def admit(self, request: Request, external: int = 0, local: int = 0) -> None:
        """Its blocks are allocated; of its first ``local`` tokens this engine has what is in sight."""
        count = -(-(request.num_tokens + BLOCK) // BLOCK)
        tables = self.tables[request.request_id] = []
        for group, window in enumerate(self.windows):
            first = in_sight(window, local + external)
            table = [0] * first + [self.free.pop(0) for _ in range(count - first)]
            for block in range(first, local // BLOCK):
                self.memory[group, :, table[block]] = kv_of(request.all_token_ids, block, group)
            tables.append(table)
        self.scheduler.allocated(request, external)
        request.num_computed_tokens = local + external

    def step(self, *scheduled: tuple[Request, int]) -> None:
        for request, _ in scheduled:
            for group, window in enumerate(self.windows):
                table = self.tables[request.request_id][group]
                for block in range(in_sight(window, request.num_computed_tokens)):
                    if table[block]:
                        self.free.append(table[block])
                        table[block] = 0
        output = SimpleNamespace(
            num_scheduled_tokens={request.request_id: tokens for request, tokens in scheduled},
            total_num_scheduled_tokens=sum(tokens for _, tokens in scheduled),
            preempted_req_ids=set(),
        )
        self.worker.begin(self.scheduler.plan(output))
        for request, tokens in scheduled:
            start, request.num_computed_tokens = request.num_computed_tokens, request.num_computed_tokens + tokens
            for block in range(start // BLOCK, request.num_computed_tokens // BLOCK):
                is_right = self.sees(request, max(start, block * BLOCK))
                for group in range(len(self.windows)):
                    kv = kv_of(request.all_token_ids, block, group)
                    self.memory[group, :, self.tables[request.request_id][group][block]] = kv if is_right else kv ^ 255
        self.worker.end()
        self.finished |= self.worker.finished()
        self.failed |= self.worker.failed()
        assert not self.worker.invalid_blocks(), "vLLM ends with an error where there are several groups"
        if (outcome := self.worker.outcome()) is not None:
            self.scheduler.update(outcome)

    def sees(self, request: Request, tokens: int) -> bool:
        """Whether what the token behind ``tokens`` sees is what the model would have written."""
        return all(
            bool((self.memory[group, :, table[block]] == kv_of(request.all_token_ids, block, group)).all())
            for group, table in enumerate(self.tables[request.request_id])
            for block in range(in_sight(self.windows[group], tokens), tokens // BLOCK)
        )

    def until_loaded(self, request: Request) -> None:
        for _ in range(2000):
            if request.request_id in self.finished:
                return
            self.step()
        raise AssertionError("the load has not ended")

    def fail(self, request: Request) -> None:
        """As vLLM does for a request of which nothing counts as loaded."""
        self.free += [block for table in self.tables.pop(request.request_id) for block in table if block]
        request.num_computed_tokens = 0

    def release(self, request: Request) -> None:
        self.scheduler.finished(request)
        self.fail(request)

    def close(self) -> None:
        self.worker.close(10.0)
        self.scheduler.close()


def layout_of(groups: int) -> OpaqueLayout:
    return OpaqueLayout(f"{groups} groups", VALUE, groups * SIZE * LAYERS * LAYER_BYTES)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(0, 1000, tokens)]


def computed(store: Store, windows: list[int | None], tokens: list[int], step: int) -> None:
    """By an engine of its own, this many tokens a step."""
    engine, request = Engine(store, windows), Request("first", tokens)
    engine.scheduler._loads = False
    engine.matched(request)
    engine.admit(request)
    while (left := request.num_tokens - request.num_computed_tokens) > 0:
        engine.step((request, min(step, left)))
    engine.close()


def longest(store: Store, windows: list[int | None], tokens: list[int], local: int) -> int:
    """Brute force: the most tokens that can be gone on behind."""
    keys, limit = hash_blocks(CONTEXT.digest(), tokens, VALUE), (len(tokens) - 1) // BLOCK * BLOCK
    parts = parts_of(
        [
            SimpleNamespace(kv_cache_spec=FullAttentionSpec() if one is None else SlidingWindowSpec(sliding_window=one))
            for one in windows
        ]
    )
    for values in range(len(keys), local // VALUE, -1):
        end = min(values * VALUE, limit)
        needed = [
            part_key(keys[block // SIZE], number)
            for number, part in enumerate(parts)
            for block in range(max(local // BLOCK, in_sight(part.window, end)), end // BLOCK)
        ]
        if end > local and all(presence is Presence.HIT for presence in store.lookup(needed)):
            return end
    return local


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore(1 << 22) as store:
        yield store


MIXED: list[int | None] = [None, 12, 12, 12]


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("windows", [MIXED, [12, None], [10], [None, 30, 5], [None, None], [1, None]])
@pytest.mark.parametrize("local", [0, VALUE, 5 * BLOCK])
def test_what_one_engine_saved_another_loads(store: MemoryStore, windows: list[int | None], local: int) -> None:
    words = prompt(8 * VALUE + 3)
    computed(store, windows, words, 3 * VALUE)
    engine, request = Engine(store, windows), Request("second", words)
    found = engine.matched(request, local)
    assert found == 8 * VALUE - local
    engine.admit(request, found, local)
    engine.until_loaded(request)
    assert not engine.failed and engine.sees(request, 8 * VALUE)
    counts = engine.scheduler.counts()
    assert counts["requested_tokens"] == found and "recomputed_tokens" not in counts
    engine.close()


def test_of_a_window_only_blocks_in_sight_are_loaded(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    words = prompt(16 * VALUE + 1)
    computed(store, MIXED, words, 16 * VALUE + 1)
    full, window = layout_of(1).block_bytes, layout_of(3).block_bytes
    engine, request = Engine(store, MIXED), Request("second", words)
    engine.admit(request, engine.matched(request))
    assert engine.scheduler._under_way == {"second": 16 * full + 2 * window}
    asked: list[bytes] = []
    leases = store.prepare_load
    monkeypatch.setattr(store, "prepare_load", lambda keys: asked.extend(keys) or leases(keys))
    engine.until_loaded(request)
    assert len(asked) == 16 + 2
    engine.close()


def test_what_the_engine_has_the_store_need_not_have(store: MemoryStore) -> None:
    words = prompt(6 * VALUE + 1)
    computed(store, [None, 40], words, 6 * VALUE + 1)
    keys = hash_blocks(CONTEXT.digest(), words, VALUE)
    store.delete([*keys[:4], *(part_key(key, 1) for key in keys[:4])])
    engine, request = Engine(store, [None, 40]), Request("second", words)
    found = engine.matched(request, 4 * VALUE)
    assert found == 2 * VALUE
    engine.admit(request, found, 4 * VALUE)
    engine.until_loaded(request)
    assert not engine.failed and engine.sees(request, 6 * VALUE)
    engine.close()


def test_a_value_that_is_lost_ends_the_whole_load_and_is_saved_again(store: MemoryStore) -> None:
    words = prompt(6 * VALUE + 1)
    computed(store, MIXED, words, 6 * VALUE + 1)
    keys = hash_blocks(CONTEXT.digest(), words, VALUE)
    engine, request = Engine(store, MIXED), Request("second", words)
    found = engine.matched(request)
    store.delete([part_key(keys[5], 1)])
    engine.admit(request, found)
    engine.until_loaded(request)
    assert engine.failed == {"second"}
    counts = engine.scheduler.counts()
    assert counts["failed_loads absent"] == 1 and counts["recomputed_tokens"] == found
    engine.fail(request)
    assert engine.matched(request) == 0, "not loaded again"
    engine.admit(request)
    engine.step((request, request.num_tokens))
    engine.release(request)
    engine.close()
    assert longest(store, MIXED, words, 0) == found


@pytest.mark.brief()
@given(
    windows=st.lists(st.sampled_from([None, 2, 3, 8, 9, 13, 40]), min_size=1, max_size=4),
    tokens=st.integers(1, 9 * VALUE),
    step=st.integers(1, 5 * VALUE),
    local_blocks=st.integers(0, 6),
    lost=st.sets(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=5),
    lost_later=st.sets(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=1),
)
def test_whatever_the_store_has_lost_no_wrong_block_is_seen(
    windows: list[int | None],
    tokens: int,
    step: int,
    local_blocks: int,
    lost: set[tuple[int, int]],
    lost_later: set[tuple[int, int]],
) -> None:
    """The longest prefix is found, as brute force finds it; what is loaded is right, or the request is computed."""
    words = prompt(tokens)
    keys = hash_blocks(CONTEXT.digest(), words, VALUE)
    local = min(local_blocks * BLOCK, (tokens - 1) // BLOCK * BLOCK)

    def lose(which: set[tuple[int, int]]) -> None:
        store.delete([part_key(keys[depth], number) for depth, number in which if depth < len(keys)])

    with MemoryStore(1 << 22) as store:
        computed(store, windows, words, step)
        lose(lost)
        engine, request = Engine(store, windows), Request("second", words)
        found = engine.matched(request, local)
        assert found == longest(store, windows, words, local) - local
        lose(lost_later)
        engine.admit(request, found, local)
        if found:
            engine.until_loaded(request)
        if request.request_id in engine.failed:
            engine.fail(request)
            assert engine.matched(request) == 0
            engine.admit(request)
        assert engine.sees(request, request.num_computed_tokens)
        while (left := request.num_tokens - request.num_computed_tokens) > 0:
            engine.step((request, min(step, left)))
        assert engine.sees(request, request.num_tokens)
        engine.release(request)
        engine.close()
        # What was computed is saved again, so far as it was still in sight when its value was complete.
        third, again = Engine(store, windows), Request("third", words)
        third.admit(again, found := third.matched(again))
        if found:
            third.until_loaded(again)
        assert not third.failed and third.sees(again, found)
        third.close()
