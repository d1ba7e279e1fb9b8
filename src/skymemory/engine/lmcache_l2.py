"""LMCache's multi-process server: an L2 adapter that keeps its objects in any store (docs/guide/lmcache.md).

The server submits tasks, which threads execute, and waits at three event descriptors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, islice
from threading import Lock, RLock
from typing import Any, Generic, TypeVar

import lmcache
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from skymemory.engine.plugin import GONE, PluginSettings, PluginStore, warn_untested
from skymemory.kv.context import CacheContext
from skymemory.metrics import SharedCounters
from skymemory.reasons import Miss

_OBJECT_BYTES = 32 << 20  # assumed size for batches, as of an 8B model; the true size is known later
_KEPT_SIZES = 1 << 20
_WHERE = "--l2-adapter, adapter_params"
_LENGTH_BYTES = 4
Result = TypeVar("Result")
_log = init_logger(__name__)


class _Tasks(Generic[Result]):
    """Numbered tasks in threads. LMCache waits at the event descriptor ``fileno`` and then takes their results."""

    def __init__(self, threads: int, name: str, counters: SharedCounters) -> None:
        self._counters = counters
        self._pool = ThreadPoolExecutor(threads, f"lmcache l2 {name}")
        self._event = create_event_notifier()
        self._lock = Lock()
        self._done: dict[int, Result] = {}

    def fileno(self) -> int:
        return int(self._event.fileno())

    def submit(self, task: int, work: Callable[[], Result], failed: Result) -> int:
        """Run ``work`` in a thread; its result is ``failed`` if it raises, since LMCache waits for a result."""

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # LMCache waits for a result
                self._counters.add("failures_total", 1, type(error).__name__)
                _log.exception("a task failed by a fault of the plug-in")
                result = failed
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
        self._pool.shutdown(cancel_futures=True)
        self._event.close()


class SkyMemoryL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Adapter that keeps LMCache's L2 objects in any store."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        self._settings = settings = PluginSettings.read(params, _WHERE, 1)
        warn_untested("LMCache", lmcache.__version__, "0.5.6")
        self.values = PluginStore(settings, _context(settings), _OBJECT_BYTES, log=_log)
        self._numbers = count()
        # A slow save must not delay a load that a prompt waits for.
        self._stores = _Tasks[L2StoreResult](2, "store", self.values.counters)
        self._lookups = _Tasks[Bitmap](2, "look up", self.values.counters)
        self._loads = _Tasks[Bitmap](4, "load", self.values.counters)
        self._sizing = RLock()
        # Sizes of objects stored here: LMCache sums them by tenant. ``_sizing`` keeps notifications in order.
        self._sizes: OrderedDict[Any, int] = OrderedDict()
        self._has_warned = False

    def get_store_event_fd(self) -> int:
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.fileno()

    # --- store ---

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        size_bytes = sum(stored_object.get_size() for stored_object in objects)
        fits = self.values.queue(size_bytes)
        work = partial(self._store, keys, objects, size_bytes, fits)
        return self._stores.submit(next(self._numbers), work, L2StoreResult(False, 0))

    def _store(self, keys: list[Any], objects: list[Any], size_bytes: int, fits: bool) -> L2StoreResult:
        # Store objects, and report new keys to LMCache, which sums sizes by tenant.
        if not fits:
            return L2StoreResult(False, 0)
        try:
            if not self._says_what_they_are(objects):
                self.values.counters.add("refused_total", len(keys), Miss.UNKNOWN_TYPE)
                return L2StoreResult(False, 0)
            saved = self.values.save(
                [_name(key) for key in keys], lambda at: [_about(objects[at]), _bytes_of(objects[at])]
            )
        finally:
            self.values.dequeue(size_bytes)
        sizes = [stored_object.get_size() for stored_object in objects]
        with self._sizing:
            stored = zip(keys, sizes, saved.done, strict=True)
            new = {key: size for key, size, is_there in stored if is_there and key not in self._sizes}
            self._sizes.update(new)
            if new:
                self._notify_keys_stored(list(new), list(new.values()))
            self._drop(list(islice(self._sizes, max(0, len(self._sizes) - _KEPT_SIZES))))
        written = zip(sizes, saved.written, strict=True)
        return L2StoreResult(all(saved.done), sum(size for size, is_written in written if is_written))

    def _says_what_they_are(self, objects: list[Any]) -> bool:
        """Return True if the bytes' meaning is known: kinds of 8-bit floats, or of serializers, must not mix."""
        if self._settings.kv_dtype or all(
            str(dtype) != "torch.uint8" for stored_object in objects for dtype in stored_object.get_dtypes()
        ):
            return True
        if not self._has_warned:
            self._has_warned = True
            _log.error(
                "objects of bytes (uint8) are neither stored nor loaded: %s: kv_dtype is missing, expected what they "
                "are, such as fp8_e4m3, with the serializer if there is one",
                _WHERE,
            )
        return False

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    # --- look up ---

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        def work() -> Bitmap:
            return _bitmap(self.values.present([_name(key) for key in keys]))

        return self._lookups.submit(next(self._numbers), work, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing: nothing was locked."""

    # --- load ---

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._loads.submit(next(self._numbers), partial(self._load, keys, objects), Bitmap(len(keys)))

    def _load(self, keys: list[Any], objects: list[Any]) -> Bitmap:
        # Load values into ``objects``; return a bit for each. Keys found evicted are reported to LMCache.

        def place(at: int, value: memoryview) -> bool:
            about, room = _about(objects[at]), _bytes_of(objects[at])
            if value[: len(about)] != about or value.nbytes - len(about) != room.nbytes:
                return False  # another layout or data type
            room[:] = value[len(about) :]
            return True

        if not self._says_what_they_are(objects):
            return Bitmap(len(keys))
        with self._sizing:
            sized_keys = {key for key in keys if key in self._sizes}
        # Keys are of several ranks and groups, each with its own prefix or window.
        reasons = self.values.load_or_say_why([_name(key) for key in keys], place, is_prefix=False)
        if loaded := [key for key, reason in zip(keys, reasons, strict=True) if not reason]:
            self._notify_keys_accessed(loaded)
        # An object that is stored meanwhile is not gone.
        self._drop([key for key, reason in zip(keys, reasons, strict=True) if reason in GONE and key in sized_keys])
        return _bitmap([not reason for reason in reasons])

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    # --- removal, status, closing ---

    def delete(self, keys: list[Any]) -> None:
        done = self.values.delete([self.values.key(_name(key)) for key in keys])
        self._drop([key for key, is_gone in zip(keys, done, strict=True) if is_gone is not None])

    def _drop(self, keys: Sequence[Any]) -> None:
        with self._sizing:
            dropped = {key: self._sizes.pop(key) for key in keys if key in self._sizes}
            if dropped:
                self._notify_keys_deleted(list(dropped), list(dropped.values()))

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": True, "type": type(self).__name__, "counters": self.values.counters.as_dict()}

    def close(self) -> None:
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()
        self.values.close()


def _name(key: Any) -> str:
    return f"object {key.model_name}@{key.kv_rank:x}@{key.object_group_id}@{key.cache_salt}@{key.chunk_hash.hex()}"


def _about(memory: Any) -> bytes:
    """Return the meaning of an object's bytes, which its key leaves out."""
    shapes, dtypes = [tuple(shape) for shape in memory.get_shapes()], [str(dtype) for dtype in memory.get_dtypes()]
    words = f"{shapes} {dtypes} {memory.get_memory_format()}".encode()
    return len(words).to_bytes(_LENGTH_BYTES, "big") + words


def _bytes_of(memory: Any) -> memoryview:
    return memoryview(memory.byte_array).cast("B")


def _bitmap(done: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(done))
    for at, ok in enumerate(done):
        if ok:
            bitmap.set(at)
    return bitmap


def _context(settings: PluginSettings) -> CacheContext:
    return CacheContext(
        model="lmcache objects",
        weights=settings.weights,
        tokenizer="token ids",
        kv_dtype=f"of each object {settings.kv_dtype}".rstrip(),
        layout=f"lmcache {lmcache.__version__}, of each object",
    )
