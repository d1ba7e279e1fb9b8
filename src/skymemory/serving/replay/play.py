"""The open loop: every request is sent when it is due, whatever became of those before it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.serving.replay.client import FEATURES, Client, Clock
from skymemory.serving.replay.outcome import Outcome, Status
from skymemory.serving.replay.prompts import PROBE_WORDS, Ask, Measure, Prompt, measured, probes

AHEAD = 64
"""Bodies made before they are due; making one takes some milliseconds."""
_SPARE_S = 0.03
"""Before the next request is due, nothing is made ahead any more."""
_TICK_S = 0.02

Send = Callable[[Ask, bytes, Callable[[], float], float], Awaitable[None]]
"""A request, its body, the clock, and how long it was held up (s)."""


class Player:
    """Plays ``asks``. ``under_way`` and ``begun`` may be looked at meanwhile.

    ``concurrency``: requests under way at most; others wait for them, and are told how long. ``stalls_s`` has by how
    much each look at the clock came late: while this process had no time for its own events, arrivals of pieces
    were seen as much later than they were.
    """

    def __init__(
        self, asks: Sequence[Ask], body_of: Callable[[Ask], bytes], send: Send, concurrency: int | None = None
    ) -> None:
        self._asks = asks
        self._body_of = body_of
        self._send = send
        self._concurrency = concurrency
        self._bodies: deque[bytes] = deque()
        self._made = 0
        self._full: deque[tuple[float, float]] = deque()
        self._free = asyncio.Event()
        self._began_s = time.perf_counter()
        self.under_way = 0
        self.begun = 0
        self.stalls_s: list[float] = []

    def clock(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._began_s

    async def play(self) -> None:
        """Until the last answer has ended. Cancelled, it cancels all that is under way and waits for its end."""
        self._make_one()
        self._began_s = time.perf_counter() + _SPARE_S
        watch = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                for ask in self._asks:
                    await self._until(ask.due_s)
                    body = self._next_body()
                    await self._until_free()
                    self.under_way += 1
                    self.begun += 1
                    group.create_task(self._one(ask, body, self._held_up_s(ask.due_s)))
        finally:
            watch.cancel()

    async def _one(self, ask: Ask, body: bytes, held_up_s: float) -> None:
        try:
            await self._send(ask, body, self.clock, held_up_s)
        finally:
            self.under_way -= 1
            self._free.set()

    async def _until_free(self) -> None:
        if self._concurrency is None or self.under_way < self._concurrency:
            return
        since_s = self.clock()
        while self.under_way >= self._concurrency:
            self._free.clear()
            await self._free.wait()
        self._full.append((since_s, self.clock()))

    def _held_up_s(self, due_s: float) -> float:
        """Since then, how long all places were taken: also while one that was due before waited for its own."""
        while self._full and self._full[0][1] <= due_s:
            self._full.popleft()
        return sum(until_s - max(since_s, due_s) for since_s, until_s in self._full)

    async def _until(self, due_s: float) -> None:
        """Sleep until then, making bodies ahead while there is time."""
        while len(self._bodies) < AHEAD and self._made < len(self._asks) and self.clock() < due_s - _SPARE_S:
            self._make_one()
            await asyncio.sleep(0)
        left_s = due_s - self.clock()
        # Also when it is late: answers in progress are looked at between any two requests.
        await asyncio.sleep(max(0.0, left_s))

    def _next_body(self) -> bytes:
        if not self._bodies:
            self._make_one()
        return self._bodies.popleft()

    def _make_one(self) -> None:
        self._bodies.append(self._body_of(self._asks[self._made]))
        self._made += 1

    async def _watch(self) -> None:
        while True:
            asked_s = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            self.stalls_s.append(time.perf_counter() - asked_s - _TICK_S)


# What is asked of a server before a replay: what it serves, which fields it takes, how it counts tokens.


_PROBE_ANSWER = 2


@dataclass(frozen=True, slots=True)
class Prepared:
    model: str
    context_tokens: int | None
    """What prompt and answer may have together, where the endpoint says so."""
    notes: tuple[str, ...]
    """What it does not do, in words."""


async def look(client: Client, model: str | None) -> Prepared:
    """Find the model; afterwards the client asks for it.

    Raises:
        InvalidInput: several models and none named, or one that is not there.
        SkyMemoryError: the endpoint lists none.
    """
    listed = await client.models()
    names = [name for name, _ in listed]
    if model is None and len(listed) != 1:
        raise InvalidInput(f"--model: name one of {', '.join(names) or 'those the endpoint serves (it lists none)'}")
    if model is not None and names and model not in names:
        raise InvalidInput(f"--model {model!r}: the endpoint serves {', '.join(names)}")
    chosen = names[0] if model is None else model
    client.target = replace(client.target, model=chosen)
    return Prepared(chosen, dict(listed).get(chosen), ())


async def agree(client: Client, prompt: Prompt, clock: Clock) -> tuple[Outcome, tuple[str, ...]]:
    """Ask with as many of ``FEATURES`` as the endpoint takes: the first answer, and what it does not take, in words.

    Raises:
        SkyMemoryError: it answers in no way that can be measured.
    """
    for features in FEATURES:
        client.target = replace(client.target, features=features)
        outcome = await client.probe(prompt, _PROBE_ANSWER, clock)
        if outcome.http_status not in (400, 422) or not features:
            break
    if outcome.status is not Status.COMPLETED:
        raise SkyMemoryError(f"{client.target.door}: {outcome.error}")
    notes = []
    if "ignore_eos" not in features:
        notes.append("it does not take ignore_eos: answers may be shorter than the trace's")
    if outcome.prompt_tokens is None:
        notes.append("it tells no usage: lengths of prompts and answers, and hits, are unknown")
    elif outcome.cached_tokens is None:
        notes.append("it does not tell cached_tokens: hits are unknown (vLLM: --enable-prompt-tokens-details)")
    return outcome, tuple(notes)


async def calibrate(
    client: Client, words: Sequence[str], seed: int, context_tokens: int | None, clock: Clock
) -> tuple[Measure, tuple[str, ...]]:
    """How the endpoint counts ``words``; afterwards the client asks with the fields that it takes.

    Raises:
        SkyMemoryError: it does not answer, or tells no lengths.
    """
    most = PROBE_WORDS if context_tokens is None else min(PROBE_WORDS, context_tokens // 4)
    short, long = probes(words, seed, max(8, most))
    first, notes = await agree(client, short, clock)
    if first.prompt_tokens is None:
        raise SkyMemoryError(
            "the server tells no usage.prompt_tokens, by which prompts are made as long as wanted: "
            "--prompt-unit characters does without"
        )
    second = await client.probe(long, _PROBE_ANSWER, clock)
    if second.prompt_tokens is None:
        raise SkyMemoryError(f"{client.target.door}: {second.error or 'it told no usage the second time'}")
    return measured(short, first.prompt_tokens, long, second.prompt_tokens), notes
