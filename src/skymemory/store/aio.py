"""A store in asyncio: ``async with AsyncStore(open_store(address)) as store: await store.get_many(keys)``.

Tiers block, and serve many threads at the same time: those of one process wait for satellites side by side. So each
call runs in a thread of its own, out of a pool; what waits here is not the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Self, TypeVar

from skymemory.store.base import Buffer, Places, Presence, Store

THREADS = 32
"""Calls at the same time; more wait their turn."""
_How = ParamSpec("_How")
_Answer = TypeVar("_Answer")


class AsyncStore:
    """The calls of ``store`` that need no ticket, awaited, with its results and errors. It closes ``store``.

    A call that is cancelled before its thread has begun does nothing; after that it goes on, and its result is dropped.
    """

    def __init__(self, store: Store, threads: int = THREADS) -> None:
        self.store = store
        self._pool = ThreadPoolExecutor(threads, f"skymemory-{store.name}")

    async def get_many(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        return await self._call(self.store.get_many, keys)

    async def put_many(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> list[bool]:
        """The values must not change until it returns."""
        return await self._call(self.store.put_many, items, places)

    async def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        return await self._call(self.store.lookup, keys)

    async def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        return await self._call(self.store.sizes, keys)

    async def prefix(self, keys: Sequence[bytes]) -> int:
        return await self._call(self.store.prefix, keys)

    async def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        return await self._call(self.store.delete, keys)

    async def touch(self, keys: Sequence[bytes]) -> None:
        await self._call(self.store.touch, keys)

    async def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        return await self._call(self.store.pin, keys, ttl_s)

    async def _call(self, call: Callable[_How, _Answer], *how: _How.args, **named: _How.kwargs) -> _Answer:
        return await asyncio.wrap_future(self._pool.submit(call, *how, **named))

    async def close(self) -> None:
        """Wait for calls that are under way, then close the store. May be repeated."""
        await asyncio.to_thread(self._pool.shutdown)
        self.store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()
