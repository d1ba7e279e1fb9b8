"""Open-loop load: every request is sent at its due time.

Call ``find_model``, ``negotiate_features`` and ``calibrate``, then ``OpenLoopPlayer.play``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory_lab.replay.client import FEATURES, Client, Clock
from skymemory_lab.replay.prompts import PROBE_WORDS, PlannedRequest, Prompt, TokensPerWord, measured, probes
from skymemory_lab.replay.report import ReplayOutcome, ResponseStatus

AHEAD = 64
_SPARE_S = 0.03  # time before a due request in which no body is built
_TICK_S = 0.02
_PROBE_ANSWER = 2

Send = Callable[[PlannedRequest, bytes, Callable[[], float], float], Awaitable[None]]
"""Sender of a request: its body, the clock, and its seconds of wait for the concurrency limit."""


class OpenLoopPlayer:
    """Player of ``requests``.

    ``stalls_s``: lateness of the event loop, sampled every 20 ms; chunks were read this much later than they arrived.
    """

    def __init__(
        self,
        requests: Sequence[PlannedRequest],
        body_of: Callable[[PlannedRequest], bytes],
        send: Send,
        concurrency: int | None = None,
    ) -> None:
        self._requests = requests
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
        return time.perf_counter() - self._began_s

    async def play(self) -> None:
        """Send all requests; wait for their answers or, if cancelled, their end."""
        self._make_one()
        self._began_s = time.perf_counter() + _SPARE_S
        watch = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                for request in self._requests:
                    await self._until(request.due_s)
                    body = self._next_body()
                    await self._until_free()
                    self.under_way += 1
                    self.begun += 1
                    group.create_task(self._send_request(request, body, self._held_up_s(request.due_s)))
        finally:
            watch.cancel()

    async def _send_request(self, request: PlannedRequest, body: bytes, held_up_s: float) -> None:
        try:
            await self._send(request, body, self.clock, held_up_s)
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
        # Kept as spans: a request due within a span was delayed by the limit, not by this client.
        self._full.append((since_s, self.clock()))

    def _held_up_s(self, due_s: float) -> float:
        """Return the seconds since ``due_s`` with the limit reached."""
        while self._full and self._full[0][1] <= due_s:
            self._full.popleft()
        return sum(until_s - max(since_s, due_s) for since_s, until_s in self._full)

    async def _until(self, due_s: float) -> None:
        # Wait until ``due_s``; meanwhile make bodies of later requests.
        while len(self._bodies) < AHEAD and self._made < len(self._requests) and self.clock() < due_s - _SPARE_S:
            self._make_one()
            await asyncio.sleep(0)  # chunks are read between any two bodies; otherwise they would appear late
        remaining_s = due_s - self.clock()
        # Also sleep when late, so that chunks are read between any two requests.
        await asyncio.sleep(max(0.0, remaining_s))

    def _next_body(self) -> bytes:
        if not self._bodies:
            self._make_one()
        return self._bodies.popleft()

    def _make_one(self) -> None:
        self._bodies.append(self._body_of(self._requests[self._made]))
        self._made += 1

    async def _watch(self) -> None:
        # Sample how late the event loop wakes.
        while True:
            started_s = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            self.stalls_s.append(time.perf_counter() - started_s - _TICK_S)


@dataclass(frozen=True, slots=True)
class Endpoint:
    model: str
    context_tokens: int | None


async def find_model(client: Client, model: str | None) -> Endpoint:
    """Choose the model and set it in the client."""
    listed = await client.models()
    names = [name for name, _ in listed]
    if model is None and len(listed) != 1:
        raise InvalidInput(f"model: name one of {', '.join(names) or 'those the endpoint serves (it lists none)'}")
    if model is not None and names and model not in names:
        raise InvalidInput(f"model {model!r}: the endpoint serves {', '.join(names)}")
    chosen = names[0] if model is None else model
    client.target = replace(client.target, model=chosen)
    return Endpoint(chosen, dict(listed).get(chosen))


async def negotiate_features(client: Client, prompt: Prompt, clock: Clock) -> tuple[ReplayOutcome, tuple[str, ...]]:
    """Send a probe with the most ``FEATURES`` that the endpoint accepts; return the answer, and notes."""
    for features in FEATURES:
        client.target = replace(client.target, features=features)
        outcome = await client.probe(prompt, _PROBE_ANSWER, clock)
        if outcome.http_status not in (400, 422) or not features:
            break
    if outcome.status is not ResponseStatus.COMPLETED:
        raise SkyMemoryError(f"{client.target.endpoint}: {outcome.error}")
    notes = []
    if "ignore_eos" not in features:
        notes.append("it does not accept ignore_eos: answers may be shorter than the trace's")
    if outcome.prompt_tokens is None:
        notes.append("it reports no usage: lengths of prompts and answers, and hits, are unknown")
    elif outcome.cached_tokens is None:
        notes.append("it does not report cached_tokens: hits are unknown (vLLM: --enable-prompt-tokens-details)")
    return outcome, tuple(notes)


async def calibrate(
    client: Client, words: Sequence[str], seed: int, context_tokens: int | None, clock: Clock
) -> tuple[TokensPerWord, tuple[str, ...]]:
    """Measure the endpoint's tokens per word."""
    most = PROBE_WORDS if context_tokens is None else min(PROBE_WORDS, context_tokens // 4)
    short, long = probes(words, seed, max(8, most))
    first, notes = await negotiate_features(client, short, clock)
    if first.prompt_tokens is None:
        raise SkyMemoryError(
            "the server reports no usage.prompt_tokens, which is needed to build prompts of a given length: "
            "use --prompt-unit characters"
        )
    second = await client.probe(long, _PROBE_ANSWER, clock)
    if second.prompt_tokens is None:
        raise SkyMemoryError(f"{client.target.endpoint}: {second.error or 'no usage in its second answer'}")
    return measured(short, first.prompt_tokens, long, second.prompt_tokens), notes
