"""LMCache's remote connector: its chunks in any store (docs/guide/lmcache.md).

LMCache creates one in each worker, and calls it from an event loop: threads do the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import lmcache
from lmcache.logging import init_logger
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from skymemory.engine.plugin import PluginSettings, PluginStore, warn_untested
from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.kv.context import CacheContext

_PREFIX = "skymemory."
Result = TypeVar("Result")


class SkyMemoryConnector(RemoteConnector):  # type: ignore[misc]
    """LMCache connector. Raises IrrecoverableException for a wrong option; LMCache then runs without it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any, config: Any) -> None:
        metadata = local_cpu_backend.metadata
        super().__init__(config, metadata)
        self._loop, self._local = loop, local_cpu_backend
        options = {
            name.removeprefix(_PREFIX): value
            for name, value in (config.extra_config or {}).items()
            if name.startswith(_PREFIX)
        }
        try:
            settings = PluginSettings.read(options, "extra_config, skymemory.*", metadata.world_size)
            dtype = settings.type_of(metadata.kv_dtype, "extra_config, skymemory.*")
            context = _context(settings.weights, dtype, config, metadata, (self.meta_shapes, self.meta_dtypes))
            value_bytes = self.full_chunk_size_bytes + self.remote_metadata_bytes
            self.values = PluginStore(settings, context, value_bytes, log=init_logger(__name__))
        except SkyMemoryError as error:
            raise IrrecoverableException(f"SkyMemory: {error}") from error
        warn_untested("LMCache", lmcache.__version__, "0.5.6")
        # A slow save must not delay a load that a prompt waits for.
        self._asking = ThreadPoolExecutor(4, "lmcache ask")
        self._saving = ThreadPoolExecutor(2, "lmcache save")

    # --- lookups ---

    def exists_sync(self, key: Any) -> bool:
        return self.values.present([key.to_string()]) == [True]

    async def exists(self, key: Any) -> bool:
        return await self._ask(lambda: self.exists_sync(key))

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        return self.values.prefix([key.to_string() for key in keys])

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[Any], pin: bool = False) -> int:
        return await self._ask(lambda: self.batched_contains(keys))

    # --- loads ---

    def support_batched_get(self) -> bool:
        return True

    async def get(self, key: Any) -> MemoryObj | None:
        return (await self.batched_get([key]))[0]

    async def batched_get(self, keys: Sequence[Any]) -> list[MemoryObj | None]:
        return await self._ask(lambda: self._load(keys), late=_free)

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> list[MemoryObj]:
        """Return the objects before the first miss."""
        loaded = await self.batched_get(keys)
        end = next((at for at, memory in enumerate(loaded) if memory is None), len(loaded))
        _free(loaded[end:])
        return loaded[:end]

    def _load(self, keys: Sequence[Any]) -> list[MemoryObj | None]:
        # Load objects into memory of LMCache's CPU pool; None: a miss.
        loaded: list[MemoryObj | None] = [None] * len(keys)

        def place(at: int, value: memoryview) -> bool:
            about = RemoteMetadata.deserialize(bytes(value[: self.remote_metadata_bytes]))
            data = value[self.remote_metadata_bytes :]
            # No busy loop: an unlimited wait for room would hang the request.
            memory = self._local.allocate(about.shapes, about.dtypes, about.fmt, busy_loop=False)
            if memory is None:
                return False
            room = memoryview(memory.byte_array).cast("B")
            if about.length != data.nbytes or room.nbytes < data.nbytes:
                memory.ref_count_down()
                return False
            room[: data.nbytes] = data
            loaded[at] = memory
            return True

        self.values.load([key.to_string() for key in keys], place)
        return loaded

    # --- saves ---

    def support_batched_put(self) -> bool:
        return True

    async def put(self, key: Any, memory_obj: MemoryObj) -> None:
        await self.batched_put([key], [memory_obj])

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[MemoryObj]) -> None:
        size_bytes = sum(memory.get_size() for memory in memory_objs)
        # A full queue refuses the objects: saves must not fill the memory.
        if not self.values.queue(size_bytes):
            return
        for memory in memory_objs:
            memory.ref_count_up()  # LMCache frees them when this returns, also if it is cancelled
        try:
            saving = self._saving.submit(self._save, keys, memory_objs, size_bytes)
        except RuntimeError:  # it is closed
            self.values.dequeue(size_bytes)
            _free(memory_objs)
            return
        await self._result_of(saving)

    def _save(self, keys: Sequence[Any], memory_objs: Sequence[MemoryObj], size_bytes: int) -> None:
        def read(at: int) -> tuple[bytes, memoryview]:
            memory = memory_objs[at]
            data = memoryview(memory.byte_array).cast("B")
            about = RemoteMetadata(data.nbytes, memory.get_shapes(), memory.get_dtypes(), memory.get_memory_format())
            return about.serialize(), data

        try:
            self.values.save([key.to_string() for key in keys], read)
        finally:
            self.values.dequeue(size_bytes)
            _free(memory_objs)

    # --- removal, closing ---

    def remove_sync(self, key: Any) -> bool:
        return self.values.delete([self.values.key(key.to_string())]) == [True]

    async def list(self) -> list[str]:
        raise InvalidInput("a store of SkyMemory lists no keys of LMCache")

    async def close(self) -> None:
        await self._loop.run_in_executor(None, self._close)

    def _close(self) -> None:
        self._saving.shutdown()
        self._asking.shutdown()
        self.values.close()

    async def _ask(self, work: Callable[[], Result], late: Callable[[Result], object] = lambda result: None) -> Result:
        return await self._result_of(self._asking.submit(work), late)

    async def _result_of(
        self, future: Future[Result], late: Callable[[Result], object] = lambda result: None
    ) -> Result:
        # Wait for a thread's result. If the wait is cancelled, ``late`` gets the result later, to free its memory.
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: None if done.cancelled() or done.exception() else late(done.result()))
            raise


def _free(objects: Sequence[MemoryObj | None]) -> None:
    for memory in objects:
        if memory is not None:
            memory.ref_count_down()


def _context(weights: str, dtype: str, config: Any, metadata: Any, chunk: object) -> CacheContext:
    """Return the context: all that LMCache's keys leave out. (They name model, rank and ranks.)"""
    packing = (
        lmcache.__version__,
        list(metadata.kv_shape),
        chunk,
        metadata.use_mla,
        config.remote_serde,
        config.use_layerwise,
        config.enable_blending,
        config.pre_caching_hash_algorithm,
    )
    return CacheContext(
        model=f"lmcache:{metadata.model_name}",
        weights=weights,
        tokenizer="token ids",
        kv_dtype=dtype,
        layout=f"lmcache{packing}",
        block_tokens=metadata.chunk_size,
    )
