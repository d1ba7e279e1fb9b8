"""Values go from the model's cache straight into a host arena's rooms, and from where they lie straight back."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.vllm.engine import BLOCK, CONTEXT, LAYER_BYTES, LAYERS, LAYOUT, SIZE, Engine, Request
from tests.engine.vllm.queued import QueuedDevice
from tests.store.host.conftest import folder  # noqa: F401
from tests.store.host.test_host_processes import in_time

from skymemory.cache.blocks import BlockCache
from skymemory.engine.page_locked import LockedMemory
from skymemory.engine.vllm.copier import Cuda, Host, PartCopier, TorchCopier
from skymemory.engine.vllm.plan import LoadRequest, Piece
from skymemory.engine.vllm.worker import _Job, _log
from skymemory.kv.block import hash_blocks
from skymemory.store.base import Places, StoreTicket
from skymemory.store.host.client import HostStore
from skymemory.store.host.server import ServedArena

VALUE = BLOCK * SIZE
DEVICES: dict[str, Callable[[], QueuedDevice | Cuda | None]] = {"cpu": lambda: None}
DEVICES["queued device"] = lambda: QueuedDevice(3)
if torch.cuda.is_available():
    DEVICES["cuda"] = lambda: Cuda(torch.device("cuda", 0))


def unused_bytes(owner: ServedArena) -> float:
    stats = owner.stats()
    return stats["free_bytes"] + stats["slot_bytes"]


@pytest.fixture
def owner(folder: Path) -> Iterator[ServedArena]:  # noqa: F811
    with ServedArena(folder, 4 << 20) as store:
        yield store


@pytest.fixture
def store(owner: ServedArena) -> Iterator[HostStore]:
    with HostStore(owner.folder) as store:
        yield store


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy computer takes longer than a step waits for room."""
    monkeypatch.setattr("skymemory.engine.vllm.rooms._WAIT_S", 20.0)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "new_device", DEVICES[request.param])


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(0, 1000, tokens)]


def computed(engine: Engine, name: str, words: list[int]) -> None:
    """One step that computes all of a prompt, and others until it is saved."""
    request = Request(name, words)
    engine.matched(request)
    engine.admit(request)
    engine.step((request, len(words)))
    for _ in range(2000):
        if not engine.scheduler.saving:
            break
        engine.step()
    engine.release(request)


@pytest.mark.usefixtures("patient", "device")
def test_what_one_engine_saves_in_place_another_loads(owner: ServedArena, store: HostStore) -> None:
    words = prompt(40 * VALUE)
    engine = Engine(store, blocks=256)
    computed(engine, "first", words[: 3 * VALUE])
    computed(engine, "second", words)
    counts = engine.scheduler.counts()
    assert counts["saved_values"] == 40 and counts["saved_in_place"] == 40
    engine.close()
    hashes = hash_blocks(CONTEXT.digest(), words, VALUE)
    with HostStore(owner.folder) as far:
        assert far.prefix(hashes) == 40
        cache = BlockCache(CONTEXT, LAYOUT, far)
        for key, value in zip(hashes, far.get_many(hashes), strict=True):
            assert cache.place(_Nothing(), 0, key, value) is None
        del value
        engine, request = Engine(far, blocks=256), Request("third", words)
        found, _ = engine.matched(request)
        engine.admit(request, found)
        engine.until_loaded(request)
        assert found == 40 * VALUE - BLOCK and engine.sound(request, found) and not engine.invalid
        engine.close()
    gc.collect()
    assert owner.stats()["quarantined_bytes"] == 0


class _Nothing:
    def place(self, index: int, block: memoryview) -> None: ...


class Slow(HostStore):
    """Gives room only when it may."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go = threading.Event()

    def prepare_rooms(self, sizes: Sequence[tuple[bytes, int]], places: Places = ()) -> StoreTicket:
        assert self.go.wait(20)
        return super().prepare_rooms(sizes, places)


def test_no_step_waits_for_an_owner_that_gives_no_room(owner: ServedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    before = unused_bytes(owner)
    with Slow(owner.folder) as store:
        engine = Engine(store, blocks=256)
        began_s = time.monotonic()
        for number in range(5):
            computed(engine, str(number), prompt(VALUE, number))
        assert time.monotonic() - began_s < 10.0
        counts = engine.scheduler.counts()
        assert counts["saved_values"] == 5 and not counts.get("saved_in_place")
        store.go.set()
        monkeypatch.setattr("skymemory.engine.vllm.rooms._WAIT_S", 20.0)
        while engine.worker._saver._rooms._asking:
            time.sleep(0.001)
        computed(engine, "last", prompt(VALUE, 9))
        assert engine.scheduler.counts()["saved_in_place"] == 1
        engine.close()
        store.delete(owner.stored_keys())
    gc.collect()
    assert unused_bytes(owner) == before, "what came late is given back"


@pytest.mark.usefixtures("patient")
def test_room_of_values_that_are_dropped_is_given_back(owner: ServedArena, store: HostStore) -> None:
    before = unused_bytes(owner)
    engine = Engine(store)
    engine.worker._saver._held_bytes.change(1 << 40)
    computed(engine, "one", prompt(4 * VALUE))
    assert engine.scheduler.counts()["dropped_values"] == 4
    engine.worker._saver._held_bytes.change(-(1 << 40))
    engine.close()
    gc.collect()
    in_time(lambda: unused_bytes(owner) == before)


@pytest.mark.usefixtures("patient")
def test_room_into_which_a_copy_failed_is_given_to_no_other(
    owner: ServedArena, store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(store)
    (copier,) = engine.worker._copiers
    monkeypatch.setattr(copier, "read", lambda blocks, out: 1 / 0)
    monkeypatch.setattr(_log, "disabled", True)  # pytest keeps tracebacks, which hold the rooms, too
    computed(engine, "one", prompt(2 * VALUE))
    assert engine.scheduler.counts()["refused_values"] == 2 and not engine.scheduler.saving
    engine.close()
    gc.collect()
    assert store.stats()["held_values"] == 2 and not owner.stats()["entries"]
    in_time(lambda: owner.stats()["quarantined_bytes"] > 0)  # the device may still write there
    del engine


def test_a_view_is_kept_until_the_device_has_read_it(owner: ServedArena, store: HostStore) -> None:
    """The value is deleted, and its room written over, while its copy is queued."""
    late = QueuedDevice(1)
    locked = LockedMemory(store, late, 4096)
    assert locked.wait(10)
    memory = np.zeros((LAYERS, 8, LAYER_BYTES), np.uint8)
    copier = PartCopier([TorchCopier([torch.from_numpy(memory).view(torch.int64)], SIZE, late, 1 << 16, locked)])
    load = LoadRequest("one", (Piece(0, (b"a", b"b", b"c"), 0, 0, ((1, 2, 3, 4, 5, 6),)),), 6 * BLOCK)
    job = _Job(load, [copier], copier.mark(), SIZE, 0.0, 1.0)
    key = bytes(32)
    store.put_many([(key, bytes([7]) * LAYOUT.block_bytes)])
    (view,) = store.get_many([key])
    assert view is not None
    job.place(0, view)
    del view
    gc.collect()
    assert store.delete([key]) == [True] and owner.stats()["quarantined_bytes"] > 0
    for number in range(64):
        owner.put_many([(number.to_bytes(32, "big"), bytes([9]) * 150_000)])
    assert not memory.any(), "only queued"
    job.close()
    assert (memory[:, 1:3] == 7).all() and not memory[:, 3:].any()
    locked.close()
    del job
    gc.collect()
    assert store.stats()["held_values"] == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_value_in_any_place_of_the_memory_is_copied_there_and_back(seed: int, store: HostStore) -> None:
    dice = np.random.default_rng(seed)
    device = QueuedDevice(seed) if seed % 2 else Host()
    locked = LockedMemory(store, device, int(dice.integers(50, 400)))
    assert locked.wait(60)
    blocks = torch.from_numpy(dice.integers(0, 256, (LAYERS, 12, LAYER_BYTES), np.uint8))
    before = blocks.clone()
    copier = TorchCopier([blocks.view(torch.int64)], 3, device, 1 << 16, locked)
    at, where = int(dice.integers(0, 5_000)), [int(one) for one in dice.permutation(12)]
    value = store.memory[at : at + 3 * LAYERS * LAYER_BYTES]
    copier.read(where[:3], value).wait()
    assert bytes(value) == before[:, where[:3]].numpy().tobytes()
    skipped = seed % 3
    copier.write(where[3 : 6 - skipped], value, skipped, 3, copier.mark()).wait()
    for number, block in enumerate(where[3 : 6 - skipped]):
        before[:, block] = before[:, where[skipped + number]]
    assert torch.equal(blocks, before)
    locked.close()
