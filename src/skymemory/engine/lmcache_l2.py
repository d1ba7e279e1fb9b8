"""LMCache's multi-process server: an L2 adapter that keeps its objects in any store (docs/guide/lmcache.md).

The server makes one for ``--l2-adapter '{"type": "plugin", ...}'``. Its controllers submit tasks, which threads do
here, and wait at three event descriptors for what has ended. Nothing is locked between a lookup and its load: an object
that is gone by then is a miss.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Lock
from typing import Any, Generic, TypeVar

import lmcache
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from skymemory.engine.plugin import PluginSettings, PluginStore, warn_untested
from skymemory.kv.context import CacheContext

_OBJECT_BYTES = 32 << 20
"""Loads and stores go in batches, and how large objects are is known only when one comes: as of an 8B model."""
_KEPT_SIZES = 1 << 20
_LENGTH_BYTES = 4
Result = TypeVar("Result")


class _Tasks(Generic[Result]):
    """Tasks of one kind: their threads, results, and the descriptor that says that there are some."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, f"lmcache l2 {name}")
        self._event = create_event_notifier()
        self._lock = Lock()
        self._done: dict[int, Result] = {}

    def fileno(self) -> int:
        return int(self._event.fileno())

    def submit(self, task: int, work: Callable[[], Result]) -> int:
        def run() -> None:
            result = work()
            with self._lock:
                self._done[task] = result
            self._event.notify()

        self._pool.submit(run)
        return task

    def take(self, task: int) -> Result | None:
        with self._lock:
            return self._done.pop(task, None)

    def take_all(self) -> dict[int, Result]:
        with self._lock:
            done, self._done = self._done, {}
        return done

    def close(self) -> None:
        self._pool.shutdown()
        self._event.close()


class SkyMemoryL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Raises InvalidInput for a wrong option."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        settings = PluginSettings.read(params, "--l2-adapter, adapter_params", 1)
        warn_untested("LMCache", lmcache.__version__, "0.5.6")
        self.values = PluginStore(settings, _context(settings.weights), _OBJECT_BYTES, log=init_logger(__name__))
        self._numbers = count()
        # A slow save must not delay what a prompt waits for.
        self._stores = _Tasks[L2StoreResult](2, "store")
        self._lookups = _Tasks[Bitmap](2, "look up")
        self._loads = _Tasks[Bitmap](4, "load")
        self._sizing = Lock()
        self._sizes: OrderedDict[Any, int] = OrderedDict()
        """Of objects that were stored here and not missed since: LMCache sums them by tenant."""

    def get_store_event_fd(self) -> int:
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.fileno()

    # --- store ---

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        size_bytes = sum(one.get_size() for one in objects)
        fits = self.values.queue(size_bytes)
        return self._stores.submit(next(self._numbers), lambda: self._store(keys, objects, size_bytes, fits))

    def _store(self, keys: list[Any], objects: list[Any], size_bytes: int, fits: bool) -> L2StoreResult:
        """In a thread."""
        if not fits:
            return L2StoreResult(False, 0)
        try:
            done = self.values.save(
                [_name(key) for key in keys], lambda at: [_about(objects[at]), _bytes_of(objects[at])]
            )
        finally:
            self.values.dequeue(size_bytes)
        stored = {key: one.get_size() for key, one, ok in zip(keys, objects, done, strict=True) if ok}
        with self._sizing:
            new = {key: size for key, size in stored.items() if key not in self._sizes}
            self._sizes.update(new)
            while len(self._sizes) > _KEPT_SIZES:
                self._sizes.popitem(last=False)
        if new:
            self._notify_keys_stored(list(new), list(new.values()))
        return L2StoreResult(all(done), sum(stored.values()))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    # --- look up ---

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        return self._lookups.submit(next(self._numbers), lambda: self._look_up(keys))

    def _look_up(self, keys: list[Any]) -> Bitmap:
        """In a thread."""
        present = self.values.present([_name(key) for key in keys])
        self._missed([key for key, there in zip(keys, present, strict=True) if not there])
        return _bitmap(present)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing was locked."""

    # --- load ---

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._loads.submit(next(self._numbers), lambda: self._load(keys, objects))

    def _load(self, keys: list[Any], objects: list[Any]) -> Bitmap:
        """In a thread."""

        def place(at: int, value: memoryview) -> bool:
            about, room = _about(objects[at]), _bytes_of(objects[at])
            if value[: len(about)] != about or value.nbytes - len(about) != room.nbytes:
                return False  # of another layout or data type
            room[:] = value[len(about) :]
            return True

        done = self.values.load([_name(key) for key in keys], place)
        if found := [key for key, ok in zip(keys, done, strict=True) if ok]:
            self._notify_keys_accessed(found)
        return _bitmap(done)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    # --- the rest ---

    def delete(self, keys: list[Any]) -> None:
        self.values.delete([self.values.key(_name(key)) for key in keys])
        self._missed(keys)

    def _missed(self, keys: Sequence[Any]) -> None:
        """They are not in the store (any more)."""
        with self._sizing:
            gone = {key: self._sizes.pop(key) for key in keys if key in self._sizes}
        if gone:
            self._notify_keys_deleted(list(gone), list(gone.values()))

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": True, "type": type(self).__name__, "counters": self.values.counters.as_dict()}

    def close(self) -> None:
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()
        self.values.close()


def _name(key: Any) -> str:
    """All that an ``ObjectKey`` has; its fields hold no "@"."""
    return f"object {key.model_name}@{key.kv_rank:x}@{key.object_group_id}@{key.cache_salt}@{key.chunk_hash.hex()}"


def _about(one: Any) -> bytes:
    """What an object's bytes mean, which its key leaves out; stored before them."""
    shapes, dtypes = [tuple(shape) for shape in one.get_shapes()], [str(dtype) for dtype in one.get_dtypes()]
    words = f"{shapes} {dtypes} {one.get_memory_format()}".encode()
    return len(words).to_bytes(_LENGTH_BYTES, "big") + words


def _bytes_of(one: Any) -> memoryview:
    return memoryview(one.byte_array).cast("B")


def _bitmap(done: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(done))
    for at, ok in enumerate(done):
        if ok:
            bitmap.set(at)
    return bitmap


def _context(weights: str) -> CacheContext:
    """The rest is in each object's name and before its bytes."""
    return CacheContext(
        model="lmcache objects",
        weights=weights,
        tokenizer="token ids",
        kv_dtype="of each object",
        layout=f"lmcache {lmcache.__version__}, of each object",
    )
