"""A stand-in for vLLM's scheduler and block tables around both sides of the connector: what they see of it, no more.

The real one is in tests/vllm; here its order of calls is driven by hand, so that failures fall where a test wants them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.engine.vllm.queued import QueuedDevice

from skymemory.cache.blocks import BlockCache, Part, Parts
from skymemory.engine.page_locked import LockedMemory
from skymemory.engine.vllm.copier import CpuCopier, Cuda, Host, PartCopier, TorchCopier
from skymemory.engine.vllm.identity import Seeds
from skymemory.engine.vllm.plan import Shape
from skymemory.engine.vllm.scheduler import SchedulerSide
from skymemory.engine.vllm.worker import WorkerSide
from skymemory.kv.block import OpaqueLayout
from skymemory.kv.context import CacheContext
from skymemory.store.base import InPlace, Store

BLOCK, SIZE, LAYERS, LAYER_BYTES = 4, 2, 3, 40
SHAPE = Shape(BLOCK, SIZE)
LAYOUT = OpaqueLayout("for tests", BLOCK * SIZE, SIZE * LAYERS * LAYER_BYTES)
CONTEXT = CacheContext("m", "w", "token ids", "float32", LAYOUT.describe(), block_tokens=BLOCK * SIZE)


class Request(SimpleNamespace):
    """The fields of vLLM's that are read."""

    def __init__(self, name: str, tokens: list[int], **more: Any) -> None:
        fields: dict[str, Any] = {"prompt_embeds": None, "resumable": False, "lora_request": None, "cache_salt": None}
        fields["skip_reading_prefix_cache"] = False
        super().__init__(
            request_id=name, all_token_ids=list(tokens), prompt_token_ids=list(tokens), mm_features=[], **fields | more
        )
        self.num_computed_tokens = 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        """vLLM's names of its whole blocks."""
        return [name_of(self.all_token_ids[: (block + 1) * BLOCK]) for block in range(self.num_tokens // BLOCK)]


def name_of(tokens: list[int]) -> bytes:
    return hashlib.sha256(repr(tokens).encode()).digest()


def kv_of(tokens: list[int], block: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What the model would write into one block: it depends on all tokens up to the block's end."""
    seed = hash(tuple(tokens[: (block + 1) * BLOCK])) & 0xFFFFFFFF
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, LAYER_BYTES), np.uint8)


class OnDevice:
    """Memory of a CUDA device, used like an array. What is written comes a millisecond late, as if behind a forward."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        import torch

        self.tensor = torch.zeros(shape, dtype=torch.uint8, device="cuda")

    def __getitem__(self, at: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.tensor[at].cpu().numpy()  # type: ignore[no-any-return]

    def __setitem__(self, at: Any, value: Any) -> None:
        import torch

        torch.cuda._sleep(1_500_000)
        self.tensor[at] = torch.as_tensor(value, dtype=torch.uint8).pin_memory().to("cuda", non_blocking=True)


class Door:
    """Of a scheduler that has blocks for all."""

    def __init__(self, step_tokens: int = 2 * BLOCK * SIZE) -> None:
        self.step_tokens = step_tokens
        self.has_room = True
        self.jumps: list[tuple[int, int]] = []

    def reserve(self, request: Request, computed_tokens: int) -> bool:
        return self.has_room

    def go_on_from(self, request: Request, tokens: int) -> None:
        self.jumps.append((request.num_computed_tokens, tokens))
        request.num_computed_tokens = tokens


def one_part(store: Store) -> Parts:
    return Parts([Part(BlockCache(CONTEXT, LAYOUT, store))])


class Engine:
    """One engine over ``store``: both sides, block tables and the memory of the blocks, here or on a ``device``."""

    new_device: Callable[[], QueuedDevice | Cuda | None] = lambda: None

    def __init__(self, store: Store, blocks: int = 64, **options: Any) -> None:
        self.device = device = type(self).new_device()
        shape = (LAYERS, blocks, LAYER_BYTES)
        self.memory: Any = OnDevice(shape) if isinstance(device, Cuda) else np.zeros(shape, np.uint8)
        self.tables: dict[str, list[int]] = {}
        self.free = list(range(1, blocks))
        self.seeds = Seeds(CONTEXT)
        self.weights = 0
        """What the model would write is changed by them."""
        self.scheduler = SchedulerSide(
            one_part(store), SHAPE, self.seeds, lambda name: [[self.tables[name]]], **options
        )
        self.worker = WorkerSide(one_part(store), SHAPE)
        # Pieces of which a value may touch two.
        locked = LockedMemory(store, device or Host(), 4096) if isinstance(store, InPlace) else None
        assert locked is None or locked.wait(20)
        if device is None:
            self.worker.register([PartCopier([CpuCopier(list(self.memory))])], locked)
        else:
            import torch

            memory = self.memory.tensor if isinstance(device, Cuda) else torch.from_numpy(self.memory)
            view = memory.view(torch.int64)
            copier = TorchCopier([view], SIZE, device, 3 * SIZE * LAYERS * LAYER_BYTES, locked)
            self.worker.register([PartCopier([copier])], locked)
        self.finished: set[str] = set()
        self.invalid: set[int] = set()

    def matched(self, request: Request, computed: int = 0) -> tuple[int, bool]:
        while True:
            tokens, beside = self.scheduler.matched(request, computed)
            if tokens is not None:
                return tokens, beside

    def admit(self, request: Request, external: int = 0, local: int = 0) -> None:
        """Its blocks are allocated."""
        count = -(-(request.num_tokens + BLOCK) // BLOCK)
        self.tables[request.request_id] = [self.free.pop(0) for _ in range(count)]
        self.scheduler.allocated(request, external)
        request.num_computed_tokens = local + external

    def step(self, *scheduled: tuple[Request, int], preempted: Request | None = None) -> None:
        """One step that computes these numbers of tokens."""
        total = sum(tokens for _, tokens in scheduled)
        output = SimpleNamespace(
            num_scheduled_tokens={request.request_id: tokens for request, tokens in scheduled},
            total_num_scheduled_tokens=total,
            preempted_req_ids={preempted.request_id} if preempted is not None else set(),
        )
        plan = self.scheduler.plan(output)
        self.worker.begin(plan)
        for request, tokens in scheduled:
            self._give(request, tokens)
        self.worker.end()
        self.finished |= self.worker.finished()
        self.invalid |= self.worker.invalid_blocks()
        outcome = self.worker.outcome()
        if self.device is not None:
            if isinstance(self.device, QueuedDevice):
                self.device.go_on(2)
            if self.scheduler._cake is not None:  # without asynchronous scheduling
                self.device.give("compute", lambda: None).wait()
        if outcome is not None:
            self.scheduler.update(outcome)

    def _give(self, request: Request, tokens: int) -> None:
        """Its part of the forward."""
        start, request.num_computed_tokens = request.num_computed_tokens, request.num_computed_tokens + tokens
        table, known = list(self.tables[request.request_id]), list(request.all_token_ids)
        work = partial(self._compute, table, known, start, request.num_computed_tokens)
        if self.device is None:
            work()
        else:
            self.device.give("compute", work)

    def _compute(self, table: list[int], tokens: list[int], start: int, end: int) -> None:
        for block in range(start // BLOCK, end // BLOCK):
            before = [kv_of(tokens, at) ^ self.weights for at in range(block)]
            wrong = any(not (self.memory[:, at] == kv).all() for at, kv in zip(table, before, strict=False))
            kv = kv_of(tokens, block) ^ self.weights
            self.memory[:, table[block]] = kv ^ 255 if wrong else kv

    def until_loaded(self, request: Request) -> None:
        for _ in range(2000):
            if request.request_id in self.finished:
                return
            self.step()
        raise AssertionError("the load has not ended")

    def sound(self, request: Request, tokens: int) -> bool:
        """Whether its blocks up to ``tokens`` hold what the model would have written."""
        if self.device is not None:
            self.device.give("compute", lambda: None).wait()
        table = self.tables[request.request_id]
        return all(
            bool((self.memory[:, table[at]] == kv_of(request.all_token_ids, at) ^ self.weights).all())
            for at in range(tokens // BLOCK)
        )

    def release(self, request: Request) -> None:
        self.scheduler.finished(request)
        self.free += self.tables.pop(request.request_id)

    def close(self) -> None:
        self.worker.close(10.0)
        self.scheduler.close()
