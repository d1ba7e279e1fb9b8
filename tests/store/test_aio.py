"""A store in asyncio: the answers of its calls, side by side, whatever becomes of the one that waits."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tests.contract.store_contract import key, value
from tests.store.conftest import reads_under_way, standing, store_on, udp_sky_and_loop

from skymemory.errors import InvalidInput
from skymemory.store.base import Presence
from skymemory.store.disk import DiskStore
from skymemory.store.memory import MemoryStore
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore
from skymemory.store.wrappers import AsyncStore


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_its_calls_are_those_of_the_store(kind: str, tmp_path: Path) -> None:
    plain = MemoryStore(1 << 20) if kind == "memory" else DiskStore(tmp_path, 1 << 20)

    async def use() -> None:
        async with AsyncStore(plain) as store:
            keys = [key(number) for number in range(4)]
            assert await store.put_many([(one, value(at, 1000 + at)) for at, one in enumerate(keys)]) == [True] * 4
            got = await store.get_many([*keys, key(9)])
            assert [None if one is None else bytes(one) for one in got] == [value(at, 1000 + at) for at in range(4)] + [
                None
            ]
            assert await store.prefix([*keys, key(9)]) == 4
            assert await store.sizes(keys[1:2]) == [1001]
            assert await store.lookup([key(2), key(9)]) == [Presence.HIT, Presence.MISS]
            assert await store.pin(keys[:1], 5.0) == [True]
            await store.touch(keys)
            assert await store.delete(keys[3:]) == [True]
            with pytest.raises(InvalidInput, match="key"):
                await store.get_many(["no key"])  # type: ignore[list-item]
        with pytest.raises(InvalidInput, match="closed"):
            plain.lookup([key(1)])

    asyncio.run(use())


def test_many_reads_from_orbit_wait_beside_each_other() -> None:
    """All of them are asked for before the first is answered: they take about as long as one."""

    async def use(sky: ConstellationStore, loop: asyncio.AbstractEventLoop) -> None:
        values = {key(number): value(number, 3000) for number in range(16)}
        async with AsyncStore(sky) as store:
            assert all(await store.put_many(list(values.items())))
            with standing(loop):
                reads = [asyncio.ensure_future(store.get_many([one])) for one in values]
                async with asyncio.timeout(60):
                    while reads_under_way(sky) < 16:
                        await asyncio.sleep(0.005)
            assert [await read for read in reads] == [[one] for one in values.values()]

    with udp_sky_and_loop() as (plan, loop):
        asyncio.run(use(store_on(plan, SharedIndex(), give_up_s=60.0), loop))


def test_a_call_that_is_cancelled_goes_on_and_closing_waits_for_it() -> None:
    class Slow(MemoryStore):
        began, may_end, ended = threading.Event(), threading.Event(), False

        def put_many(self, items, places=()):  # type: ignore[no-untyped-def]
            self.began.set()
            self.may_end.wait(60)
            self.ended = True
            return super().put_many(items, places)

    async def use() -> None:
        plain = Slow(1 << 20)
        store = AsyncStore(plain, threads=1)
        under_way = asyncio.create_task(store.put_many([(key(1), b"one")]))
        waiting = asyncio.create_task(store.put_many([(key(2), b"two")]))
        await asyncio.to_thread(plain.began.wait, 10)
        for task in (under_way, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        plain.may_end.set()
        await closing
        assert plain.ended
        assert plain.stats()["stored_total" if "stored_total" in plain.stats() else "stored"] == 1
        await store.close()

    asyncio.run(use())
