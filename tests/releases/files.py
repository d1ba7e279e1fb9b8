"""Every kind of file, written and read back by whichever release runs this: ``write DIR`` or ``check DIR``.

Only what both releases have is used. ``check`` prints what it found, and adds to what it can add to.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from skymemory.index.radix import BlockInfo
from skymemory.keys import first_ring
from skymemory.kv.codec.cachegen import CacheGen
from skymemory.kv.context import CacheContext
from skymemory.store.sealed import SealedStore
from skymemory.testbed.plan import make_plan
from skymemory.testbed.plan_file import load_plan, save_plan

try:
    from skymemory.cache.blocks import BlockCache, LoadResult, Part, Parts
    from skymemory.cache.predictor import Habit, Predictor
    from skymemory.cache.prefetching import read_habits, save_habits
    from skymemory.conductor.prefix_index.replicated import Held, Snapshot, pack_snapshot, unpack_snapshot
    from skymemory.kv.block import KVLayout
    from skymemory.kv.codec.codec_base import RAW
    from skymemory.store.disk import DiskStore
    from skymemory.store.named_values import get_named, put_named
    from skymemory.store.sky.shared_index import SharedIndex

    def _load(cache: BlockCache, tokens: Any, engine: Any) -> LoadResult:
        return Parts([Part(cache)]).load(tokens, [engine])

except ImportError:  # the older release, where they stood elsewhere
    from importlib import import_module

    def _from(module: str, *names: str) -> list[Any]:
        return [getattr(import_module(f"skymemory.{module}"), name) for name in names]

    (BlockCache,) = _from("cache.manager", "BlockCache")
    Habit, Predictor = *_from("cache.habit", "Habit"), *_from("cache.predictor", "Predictor")
    read_habits, save_habits = _from("cache.habits_file", "read_habits", "save_habits")
    Held, Snapshot, pack_snapshot, unpack_snapshot = _from(
        "conductor.prefix_index.snapshot", "Held", "Snapshot", "pack_snapshot", "unpack_snapshot"
    )
    (KVLayout,) = _from("kv.layout", "KVLayout")
    (RAW,) = _from("kv.codec.raw", "RAW")
    (DiskStore,) = _from("store.disk.store", "DiskStore")
    (SharedIndex,) = _from("store.shared_index", "SharedIndex")
    get_named, put_named = _from("store.named", "get_named", "put_named")

    def _load(cache: Any, tokens: Any, engine: Any) -> Any:
        return cache.load(tokens, lambda found: engine)


LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype="float32")
CONTEXT = CacheContext("m", "w", "t", LAYOUT.dtype, LAYOUT.describe(), lossless=False, block_tokens=4, tenant_salt=b"")
TOKENS = np.arange(64)
INFO = BlockInfo(3000, 10, 5, 1.5, 3, -2, "rotation_hop", 300)
HABIT = Habit((bytes(32), bytes(range(32))), 3600.0, 20_000, 19_990, 5)
DUMP = np.array([(7, 0xFFFFFFFF, 0), (9, 0, 0)], dtype=[("hash", "=u8"), ("parent", "=u4"), ("zero", "=u4")]).tobytes()


def block(index: int) -> np.ndarray:
    return np.linspace(-1, index + 1, LAYOUT.block_bytes // 4, dtype=np.float32)


class Engine:
    def __init__(self) -> None:
        self.worst = 0.0

    def read(self, index: int, out: memoryview) -> None:
        out[:] = block(index).tobytes()

    def place(self, index: int, given: memoryview) -> None:
        self.worst = max(self.worst, float(np.abs(np.frombuffer(given, np.float32) - block(index)).max()))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def sealed(store: DiskStore) -> SealedStore:
    return SealedStore(store, lambda: first_ring(bytes(range(32))), lambda: 1000.0)


def fields(habit: Habit) -> tuple[object, ...]:
    return habit.keys, habit.time_s, habit.day, habit.first_day, habit.seen


def write(folder: Path) -> None:
    disk = DiskStore(folder / "disk", 10 << 20)
    for codec in (RAW, CacheGen()):
        cache = BlockCache(CONTEXT, LAYOUT, disk, codec)
        tokens = TOKENS if codec is RAW else TOKENS + 1000
        assert cache.save(cache.hashes(tokens), range(16), Engine())[0] == 16
    assert put_named(disk, "greeting", b"hello").ok
    disk.close()
    hidden = DiskStore(folder / "sealed", 1 << 20)
    assert put_named(sealed(hidden), "secret", b"whisper").ok
    hidden.close()
    index = SharedIndex(folder / "index", born=True)
    index.add([key(1), key(2), key(3)], [INFO] * 3, 0, None)
    index.remove([key(3)])
    index.close()
    predictor = Predictor(zone="Europe/Berlin")
    predictor.restore([HABIT])
    save_habits(predictor, folder / "habits.json")
    (folder / "prefixes").write_bytes(pack_snapshot(Snapshot("text of 64", {"a": Held(100, DUMP)})))
    save_plan(make_plan("paper-15x15", servers=16, strategy="cost", replicas=2, epoch_s=5.0), folder / "plan.json")


def check(folder: Path) -> None:
    disk = DiskStore(folder / "disk", 10 << 20)
    for first in (0, 1000):
        cache = BlockCache(CONTEXT, LAYOUT, disk, readable=[CacheGen()])
        engine = Engine()
        result = _load(cache, np.append(TOKENS + first, 7), engine)
        assert (result.loaded_blocks, result.failed_blocks) == (16, {}), result
        assert engine.worst == 0 if first == 0 else 0 < engine.worst < 2
    assert bytes(get_named(disk, "greeting").value or b"") == b"hello"
    disk.close()
    hidden = DiskStore(folder / "sealed", 1 << 20)
    assert bytes(get_named(sealed(hidden), "secret").value or b"") == b"whisper"
    hidden.close()
    index = SharedIndex(folder / "index")
    assert index.infos([key(1), key(2), key(3)]) == [INFO, INFO, None] and is_complete(index)
    assert index.longest_prefix([key(1), key(2), key(3)]) == 2
    index.add([key(3)], [INFO], 2, key(2))
    index.close()
    zone, habits = read_habits(folder / "habits.json")
    (habit,) = habits
    assert zone == "Europe/Berlin" and fields(habit) == fields(HABIT)
    found = unpack_snapshot((folder / "prefixes").read_bytes())
    assert found.kind == "text of 64" and found.servers["a"] == Held(100, DUMP)
    plan = load_plan(folder / "plan.json")
    assert plan == make_plan("paper-15x15", servers=16, strategy="cost", replicas=2, epoch_s=5.0)


def is_complete(index: Any) -> bool:
    """In releases before and after the attribute's name changed."""
    return bool((getattr(index, "journal_state", None) or index.standing).complete)


def check_again(folder: Path) -> None:
    """After the other release has added to the journal."""
    index = SharedIndex(folder / "index")
    assert index.infos([key(1), key(2), key(3)]) == [INFO] * 3 and is_complete(index)
    assert index.longest_prefix([key(1), key(2), key(3)]) == 3


if __name__ == "__main__":
    {"write": write, "check": check, "check-again": check_again}[sys.argv[1]](Path(sys.argv[2]))
    print("done")
