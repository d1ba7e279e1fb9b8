"""A thread for large jobs, one at a time, in turns between holders."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Turns:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="turns")
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_busy = False

    async def run(self, holder: Hashable, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread at the holder's turn. The next job waits for its end even if it is cancelled,
        since it holds memory.
        """
        loop = asyncio.get_running_loop()
        await self._wait_for_turn(holder, loop)
        try:
            job = self._thread.submit(work)
        except BaseException:
            self._start_next_turn()
            raise

        def on_done(_: Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._start_next_turn)

        job.add_done_callback(on_done)
        try:
            return await asyncio.wrap_future(job)
        finally:
            del job  # its exception holds this frame: the cycle would keep the job's memory

    async def _wait_for_turn(self, holder: Hashable, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the holder's turn; if cancelled then, pass it on."""
        if not self._is_busy:
            self._is_busy = True
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(holder, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._start_next_turn()
            else:
                self._leave_queue(holder, turn)
            raise

    def _leave_queue(self, holder: Hashable, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(holder)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[holder]

    def _start_next_turn(self) -> None:
        while self._waiting:
            holder, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[holder] = queue  # after the others
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._is_busy = False
