"""Models with recurrent states beside attention: one block a value, and a state only where a step has ended.

The stand-in keeps states as vLLM does by ``mamba_cache_mode: align``: a step of a prompt ends at a block's end, unless
the prompt does; the slot of its last block then holds the state after it, and the slots of its other blocks are null.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.vllm.engine import BLOCK, LAYER_BYTES, LAYERS, Request
from tests.engine.vllm.test_windows import FullAttentionSpec, kv_of, prompt

from skymemory.cache.blocks import BlockCache, Part, Parts
from skymemory.engine.vllm.copier import CpuCopier, PartCopier
from skymemory.engine.vllm.identity import Seeds
from skymemory.engine.vllm.plan import Shape, part_key
from skymemory.engine.vllm.scheduler import SchedulerSide
from skymemory.engine.vllm.settings import parts_of
from skymemory.engine.vllm.worker import WorkerSide
from skymemory.kv.block import OpaqueLayout, hash_blocks
from skymemory.kv.context import CacheContext
from skymemory.store.base import Presence, Store
from skymemory.store.memory import MemoryStore

CONTEXT = CacheContext("m", "w", "token ids", "float32", "states", block_tokens=BLOCK)
SHAPE = Shape(BLOCK, 1)
ATTENTION, STATES = 0, 1
"""The parts, by number; the group of attention is the first, too, and two groups have states."""
GROUPS = 3


class MambaSpec(SimpleNamespace):
    """Named as vLLM's, since the connector asks for the name."""


class Engine:
    def __init__(self, store: Store, blocks: int = 256, **options: bool) -> None:
        specs = [FullAttentionSpec(), MambaSpec(), MambaSpec()]
        self.parts = parts_of([SimpleNamespace(kv_cache_spec=spec) for spec in specs])
        has_states = any(part.has_states for part in self.parts)
        self.memory = np.zeros((GROUPS, LAYERS, blocks, LAYER_BYTES), np.uint8)
        self.tables: dict[str, list[list[int]]] = {}
        self.free = list(range(1, blocks))
        self.scheduler = SchedulerSide(
            self._parts(store), SHAPE, Seeds(CONTEXT), self._block_ids, has_states=has_states, **options
        )
        self.worker = WorkerSide(self._parts(store), SHAPE, by_request=True)
        self.worker.register(
            [PartCopier([CpuCopier(list(self.memory[group])) for group in part.groups]) for part in self.parts]
        )
        self.finished: set[str] = set()
        self.failed: set[str] = set()

    def _parts(self, store: Store) -> Parts:
        return Parts(
            [
                Part(BlockCache(CONTEXT, OpaqueLayout(f"part {at}", BLOCK, size), store), part.window)
                for at, part in enumerate(self.parts)
                for size in [len(part.groups) * LAYERS * LAYER_BYTES]
            ]
        )

    def _block_ids(self, name: str) -> list[list[list[int]]]:
        return [[self.tables[name][group] for group in part.groups] for part in self.parts]

    def matched(self, request: Request, computed: int = 0) -> int:
        while True:
            tokens, _ = self.scheduler.matched(request, computed)
            if tokens is not None:
                return tokens

    def admit(self, request: Request, external: int = 0, local: int = 0) -> None:
        """Its blocks are allocated; its first ``local`` tokens, of whole blocks, are here."""
        count, end = -(-request.num_tokens // BLOCK), (local + external) // BLOCK
        tables = self.tables[request.request_id] = [[self.free.pop(0) for _ in range(count)], [0] * count, [0] * count]
        for group, table in enumerate(tables):
            if group and end:
                table[end - 1] = self.free.pop(0)
            for block in range(local // BLOCK):
                if table[block]:
                    self.memory[group, :, table[block]] = kv_of(request.all_token_ids, block, group)
        self.scheduler.allocated(request, external)
        request.num_computed_tokens = local + external

    def step(self, request: Request | None = None, blocks: int = 1) -> None:
        """Compute up to a block's end, or the prompt's."""
        start = request.num_computed_tokens if request is not None else 0
        end = min((start // BLOCK + blocks) * BLOCK, request.num_tokens) if request is not None else 0
        last = (end - 1) // BLOCK
        if request is not None:
            for table in self.tables[request.request_id][1:]:
                table[last] = table[last] or self.free.pop(0)
        output = SimpleNamespace(
            num_scheduled_tokens={} if request is None else {request.request_id: end - start},
            total_num_scheduled_tokens=end - start,
            preempted_req_ids=set(),
        )
        self.worker.begin(self.scheduler.plan(output))
        if request is not None:
            is_right = self.sees(request, start)
            request.num_computed_tokens = end
            for group, table in enumerate(self.tables[request.request_id]):
                for block in range(start // BLOCK, end // BLOCK) if not group else [last]:
                    kv = kv_of(request.all_token_ids, block, group)
                    self.memory[group, :, table[block]] = kv if is_right else kv ^ 255
        self.worker.end()
        self.finished |= self.worker.finished()
        self.failed |= self.worker.failed()
        if (outcome := self.worker.outcome()) is not None:
            self.scheduler.update(outcome)
        if request is not None:
            for table in self.tables[request.request_id][1:]:  # the state before is not needed any more
                for block in range(last):
                    self.free += [table[block]] if table[block] else []
                    table[block] = 0

    def compute(self, request: Request, blocks: int) -> None:
        while request.num_computed_tokens < request.num_tokens:
            self.step(request, blocks)

    def sees(self, request: Request, tokens: int) -> bool:
        """Whether what the token behind ``tokens``, of whole blocks or all, sees is what the model would have
        written.
        """
        whole, last = tokens // BLOCK, -(-tokens // BLOCK)
        return all(
            bool((self.memory[group, :, table[block]] == kv_of(request.all_token_ids, block, group)).all())
            for group, table in enumerate(self.tables[request.request_id])
            for block in (range(max(0, last - 1), last) if group else range(whole))
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

    def close(self) -> None:
        self.worker.close(10.0)
        self.scheduler.close()


def keys_of(tokens: list[int], part: int) -> list[bytes]:
    return [part_key(key, part) for key in hash_blocks(CONTEXT.digest(), tokens, BLOCK)]


def cold(store: Store, tokens: list[int], blocks: int) -> None:
    """Computed by an engine of its own, this many blocks a step."""
    engine, request = Engine(store), Request("first", tokens)
    assert engine.matched(request) == 0
    engine.admit(request)
    engine.compute(request, blocks)
    assert engine.sees(request, len(tokens))
    engine.scheduler.finished(request)
    engine.close()


def longest(store: Store, tokens: list[int], local: int = 0) -> int:
    """Brute force: the most tokens behind which a request can go on."""
    attention, states = keys_of(tokens, ATTENTION), keys_of(tokens, STATES)
    for block in range((len(tokens) - 1) // BLOCK, local // BLOCK, -1):
        needed = [*attention[local // BLOCK : block], states[block - 1]]
        if all(presence is Presence.HIT for presence in store.lookup(needed)):
            return block * BLOCK
    return local


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore(1 << 22) as store:
        yield store


@pytest.mark.parametrize("blocks", [1, 3, 100])
def test_a_cold_engine_saves_states_where_steps_end_and_a_warm_one_goes_on_there(
    store: MemoryStore, blocks: int
) -> None:
    words = prompt(10 * BLOCK + 1)
    cold(store, words, blocks)
    ends = [end for end in range(1, 11) if end % blocks == 0]
    assert store.lookup(keys_of(words, ATTENTION)) == [Presence.HIT] * 10
    stored = store.lookup(keys_of(words, STATES))
    assert [at for at, presence in enumerate(stored, 1) if presence is Presence.HIT] == ends
    engine, request = Engine(store), Request("second", words)
    found = engine.matched(request)
    assert found == longest(store, words) == max(ends, default=0) * BLOCK
    engine.admit(request, found)
    if found:
        engine.until_loaded(request)
    assert not engine.failed and engine.sees(request, found)
    engine.compute(request, blocks)
    assert engine.sees(request, len(words)) and engine.scheduler.counts().get("used_tokens", 0) == found
    engine.close()


def test_a_lost_state_is_gone_without_and_one_that_is_lost_meanwhile_is_computed(store: MemoryStore) -> None:
    words = prompt(10 * BLOCK + 1)
    cold(store, words, 3)
    states = keys_of(words, STATES)
    store.delete([states[8]])
    engine, request = Engine(store), Request("second", words)
    found = engine.matched(request)
    assert found == 6 * BLOCK
    store.delete([states[5]])
    engine.admit(request, found)
    engine.until_loaded(request)
    assert engine.failed == {"second"} and engine.scheduler.counts()["failed_loads absent"] == 1
    engine.fail(request)
    assert engine.matched(request) == 0, "not loaded again"
    engine.admit(request)
    engine.compute(request, 3)
    assert engine.sees(request, len(words))
    engine.close()
    assert longest(store, words) == 9 * BLOCK, "both are saved again"


def test_within_a_block_nothing_is_loaded(store: MemoryStore) -> None:
    """vLLM goes on in the slot that has the state so far, and would not look at another."""
    words = prompt(10 * BLOCK + 1)
    cold(store, words, 1)
    engine = Engine(store)
    for local in range(10 * BLOCK):
        found = engine.matched(Request(f"from {local}", words), local)
        assert found == (0 if local % BLOCK else 10 * BLOCK - local)
    engine.close()


def test_states_of_another_engines_prompt_are_looked_up_and_not_waited_for(store: MemoryStore) -> None:
    """It stores none after the prompt's last block."""
    words = prompt(10 * BLOCK + 1)
    taken_over = {"do_remote_prefill": True}
    for number, found in enumerate((0, 9 * BLOCK)):
        engine, request = Engine(store, saves=False), Request(f"decode {number}", words, kv_transfer_params=taken_over)
        assert engine.matched(request) == found
        engine.admit(request, found)
        assert "waited_loads" not in engine.scheduler.counts()
        engine.close()
        if not number:
            cold(store, words, 9)


@pytest.mark.brief()
@given(
    tokens=st.integers(1, 12 * BLOCK),
    blocks=st.integers(1, 5),
    local_blocks=st.integers(0, 4),
    lost=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 1)), max_size=5),
    lost_later=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 1)), max_size=1),
)
def test_whatever_the_store_has_lost_no_wrong_state_is_seen(
    tokens: int,
    blocks: int,
    local_blocks: int,
    lost: set[tuple[int, int]],
    lost_later: set[tuple[int, int]],
) -> None:
    words = prompt(tokens)
    local = min(local_blocks, (tokens - 1) // BLOCK) * BLOCK

    def lose(which: set[tuple[int, int]]) -> None:
        store.delete([keys_of(words, part)[depth] for depth, part in which if depth < tokens // BLOCK])

    with MemoryStore(1 << 22) as store:
        cold(store, words, blocks)
        lose(lost)
        engine, request = Engine(store), Request("second", words)
        found = engine.matched(request, local)
        assert found == longest(store, words, local) - local
        lose(lost_later)
        engine.admit(request, found, local)
        if found:
            engine.until_loaded(request)
        if request.request_id in engine.failed:
            engine.fail(request)
            assert engine.matched(request) == 0
            engine.admit(request)
        assert engine.sees(request, request.num_computed_tokens)
        engine.compute(request, blocks)
        assert engine.sees(request, tokens)
        engine.close()
