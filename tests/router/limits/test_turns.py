"""Large things one at a time, holder by holder."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from skymemory.router.limits.turns import Turns

PATIENCE_S = 60.0


def test_holders_have_their_turns_one_after_the_other() -> None:
    """A holder that brings five waits for its own: the other's only one is second."""
    done: list[str] = []

    async def scenario() -> None:
        turns = Turns()
        begun = threading.Event()
        first = asyncio.create_task(turns.run("many", lambda: begun.wait(PATIENCE_S)))
        await asyncio.sleep(0)
        later = [asyncio.create_task(turns.run("many", lambda at=at: done.append(f"many{at}"))) for at in range(4)]
        await asyncio.sleep(0)
        later.append(asyncio.create_task(turns.run("one", lambda: done.append("one"))))
        await asyncio.sleep(0)
        begun.set()
        await asyncio.gather(first, *later)

    asyncio.run(scenario())
    assert done == ["many0", "one", "many1", "many2", "many3"]


def test_who_gives_up_does_not_let_others_in_before_his_work_has_ended() -> None:
    async def scenario() -> None:
        turns, running, go_on = Turns(), threading.Event(), threading.Event()

        def slowly() -> None:
            running.set()
            assert go_on.wait(PATIENCE_S)

        gives_up = asyncio.create_task(turns.run("a", slowly))
        while not running.is_set():
            await asyncio.sleep(0.001)
        waits = asyncio.create_task(turns.run("b", lambda: 1))
        leaves = asyncio.create_task(turns.run("b", lambda: 2))
        await asyncio.sleep(0)
        gives_up.cancel()
        leaves.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert gives_up.cancelled() and not waits.done()
        go_on.set()
        assert await asyncio.wait_for(waits, PATIENCE_S) == 1
        with contextlib.suppress(asyncio.CancelledError):
            await leaves
        assert await asyncio.wait_for(turns.run("c", lambda: 3), PATIENCE_S) == 3

    asyncio.run(scenario())


def test_an_error_passes_on_the_turn() -> None:
    async def scenario() -> None:
        turns = Turns()
        failed = await asyncio.gather(turns.run("a", lambda: 1 // 0), turns.run("b", lambda: 2), return_exceptions=True)
        assert isinstance(failed[0], ZeroDivisionError) and failed[1] == 2

    asyncio.run(scenario())
