"""Real engines for `disagg.py`: 1P+1D or two coupled ones as processes, what is measured on them idle, and plays."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from _disagg_workload import AFTER, line_of, token_ids
from skymemory.conductor.cost_fit import PrefillPoint, fit_decode, fit_prefill
from skymemory.conductor.cost_model import CostModel, ModelShape, shape_of
from skymemory.engine.inputs import small_model_folder
from skymemory.engine.transformers.models import TWO_SECOND_SHAPE, build_llama, train_tokenizer
from skymemory_lab.demo.engines import own_engine, router, store_daemon, vllm_server
from skymemory_lab.fitting import DecodeCell, Measurement, decode_cells
from skymemory_lab.replay.client import Client, Target
from skymemory_lab.replay.play import OpenLoopPlayer
from skymemory_lab.replay.prompts import PlannedRequest
from skymemory_lab.replay.report import ReplayOutcome, ResponseStatus
from skymemory_lab.sim.cluster.setup import PromptHandover
from skymemory_lab.sim.trace import TraceRequest

CACHE_BYTES = 512 << 20
"""Prefix cache of an engine of our own."""
BURST = 3
COMPUTED, PROMPTS = "vllm:request_prefill_kv_computed_tokens_sum", "vllm:request_prompt_tokens_sum"
COUNT = "vllm:request_prompt_tokens_count"
ALONE = "skymemory_router_alone_total"
_PATIENCE_S = 120.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Kind:
    """Which engine."""

    name: str
    model: Path
    python: Path | None
    """Of vLLM; None: the project's own engine."""
    block_tokens: int
    most_batch: int
    mixed_tokens: int
    """Tokens of a step of a coupled instance."""
    context_tokens: int

    @property
    def vocabulary(self) -> int:
        return int(json.loads((self.model / "config.json").read_text())["vocab_size"])

    def shape(self) -> ModelShape:
        shape = shape_of(self.name, json.loads((self.model / "config.json").read_text()), 4)
        # Our engine decodes one request after the other: reading the weights is in each one's own time, not in the
        # step's, and what is left to the memory's speed is the context.
        return replace(shape, parameters=1.0) if self.python is None else shape


def own() -> Kind:
    return Kind("own", small_model_folder(), None, 16, 8, 256, 4096)


def vllm(python: Path, folder: Path) -> Kind:
    """With random weights, written to ``folder``: a core computes about 4,000 tokens of a prompt in a second."""
    tokenizer = train_tokenizer(TWO_SECOND_SHAPE["vocab_size"])
    build_llama({**TWO_SECOND_SHAPE, "vocab_size": len(tokenizer)}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Kind("vllm", folder, python, 32, 256, 2048, 2048)


@dataclass(frozen=True)
class Servers:
    kind: Kind
    engines: tuple[str, ...]
    store: str
    folder: Path
    coupled: bool


@contextmanager
def _on_core(number: int) -> Iterator[None]:
    """What is started within runs on this core only."""
    before = os.sched_getaffinity(0)
    allowed = sorted(before)
    os.sched_setaffinity(0, {allowed[number % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def servers(kind: Kind, folder: Path, coupled: bool) -> Iterator[Servers]:
    """Two engines with a core each and their store; no router yet."""
    with ExitStack() as stack:
        store = stack.enter_context(store_daemon(folder, "memory://1GiB"))
        roles = ("both", "both") if coupled else ("producer", "consumer")
        started = []
        for number, role in enumerate(roles):
            name = f"{'coupled' if coupled else role}-{number}"
            with _on_core(number):
                if kind.python is None:
                    engine = own_engine(folder, name, store, role, "--cache", str(CACHE_BYTES))
                else:
                    engine = vllm_server(kind.python, kind.model, folder, name, store, role)
                started.append(stack.enter_context(engine))
        for one in started:
            one.wait()
        yield Servers(kind, tuple(one.url for one in started), store, folder, coupled)


@contextmanager
def routed(on: Servers, name: str, *options: str, split_from: int = 0, settings: str = "") -> Iterator[str]:
    """A router before them; its address."""
    first, second = on.engines
    where = ("--backend", first, "--backend", second)
    if not on.coupled:
        # The simulator's requests take two steps, however short they are.
        where = ("--prefill", first, "--decode", second)
    tokens = ("--tokenizer", str(on.kind.model))
    own = f"prompts.block_tokens = {on.kind.block_tokens}\ndisaggregation.split_from = {split_from}\n"
    with router(on.folder, name, *where, *tokens, *options, settings=own + settings) as started:
        started.wait()
        yield started.url


def counters(url: str) -> dict[str, float]:
    """Sums over labels of an engine's counters."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:
        text = page.read().decode()
    found: dict[str, float] = {}
    for name, value in re.findall(r"^([\w:]+)(?:\{[^}]*\})? ([0-9.e+-]+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


# --- on idle engines: the cost model, and the terms of the hand-over ---


@dataclass(frozen=True)
class Fitted:
    cost: CostModel
    handover: PromptHandover
    request_s: float
    prefill_at_work: float
    """How many times as long a prefill takes in a play as alone: caches are cold where work alternates, and client,
    router and store take time of both cores."""
    decode_at_work: float
    """The same for the decode engine's work."""
    points: dict[str, Any]
    """What was measured."""
    prefill_beside: float = 1.0
    """How many times as long a prefill takes while the other engine decodes all the time as while it is idle."""
    decode_beside: float = 1.0
    """The same for the decode engine's work, while the other one prefills."""


async def fitted(on: Servers, url: str, seed: int, quick: bool, say: Say) -> Fitted:
    """The model of 1P+1D behind the router at ``url``.

    Each term is measured on one part. Prefills: as the prefill engine does them one behind the other, saving for the
    store included, as it takes the same core (vLLM computes such prompts together, so there each is alone). Decoding
    steps: through the router. Taking over: prompts from the store, one behind the other, at the decode engine. Beside:
    prompts of its own there. Saving: what the answer to a lone prefill is later than its prefill. Fetching: what the
    first token through the router is later than all of that.
    """
    kind, dice = on.kind, random.Random(f"fit {seed}")
    prefill_url, decode_url = on.engines
    longest = min(2048, kind.context_tokens - 256)
    # A prompt of vLLM's model takes seconds here.
    lengths = [96, 192, 384, 768, 1280, longest]
    if quick:
        lengths = [96, 256, 640] if kind.python else [128, 512, longest]
    repeats = 2 if quick else 3

    def prompt(tokens: int) -> list[int]:
        return dice.choices(range(AFTER, kind.vocabulary), k=tokens)

    async with aiohttp.ClientSession() as session:
        for warm in (64, longest, longest):
            await _prefilled(session, prefill_url, prompt(min(warm, lengths[-1])))
        behind: dict[tuple[int, int], list[float]] = {}
        alone: dict[tuple[int, int], list[float]] = {}
        cells = [(tokens, share) for tokens in lengths for share in (0.0, 0.5)] * repeats
        dice.shuffle(cells)
        for number, (tokens, share) in enumerate(cells):
            say(f"prefills, {number / len(cells):.0%}")
            beginning = prompt(round(tokens * share) // kind.block_tokens * kind.block_tokens)
            if beginning:
                await _prefilled(session, prefill_url, [*beginning, *prompt(kind.block_tokens)])
            prompts = [[*beginning, *prompt(tokens - len(beginning))] for _ in range(BURST + 1)]
            began_s = time.perf_counter()
            cached = await _prefilled(session, prefill_url, prompts[0])
            alone.setdefault((tokens, cached), []).append(time.perf_counter() - began_s)
            if kind.python is not None:
                behind.setdefault((tokens, cached), []).append(alone[tokens, cached][-1])
                continue
            ends_s: list[float] = []

            async def one(ids: list[int], ends_s: list[float] = ends_s) -> None:
                await _prefilled(session, prefill_url, ids)
                ends_s.append(time.perf_counter())

            await asyncio.gather(*map(one, prompts[1:]))
            spacing_s = (max(ends_s) - min(ends_s)) / (BURST - 1)
            behind.setdefault((tokens, cached), []).append(spacing_s)
        points = [PrefillPoint(*cell, statistics.median(seconds)) for cell, seconds in behind.items()]
        cost = fit_prefill(points, kind.shape())
        through = Client(session, Target(url, "sky"))
        direct = Client(session, Target(decode_url, "sky"))
        # Steps are measured as users get them: the router and the client have work with every token, and the kernel
        # likes to give it to the core that has just woken them, the decode engine's.
        measuring = Measurement(through, lambda tokens, _: prompt(tokens), time.perf_counter, seed, lambda *_: None)
        say("decoding steps")
        most = 4 if quick else 8
        steps, _ = await measuring.decodes(
            decode_cells(most, (128, 512) if quick else (128, 512, 1024)), 1 if quick else 2, "median"
        )
        cost = fit_decode([point for point, held in steps if not held], cost)

        async def first_s(client: Client, tokens: int) -> float:
            taken = []
            for _ in range(repeats + 1):
                outcome = await client.probe(prompt(tokens), 2, time.perf_counter)
                if outcome.status is not ResponseStatus.COMPLETED:
                    raise SystemExit(f"a request of the fit failed: {outcome.error}")
                taken.append(outcome.ttft_s)
            return statistics.median(taken[1:])

        say("the hand-over")
        beside = [await first_s(direct, tokens) - cost.prefill_s(tokens) for tokens in lengths[:3]]
        request_s = max(0.0, statistics.median(beside))
        lone = {cell: statistics.median(seconds) for cell, seconds in alone.items()}
        save_s, save_token_s = line_of(
            [
                (tokens - cached, seconds - cost.prefill_s(tokens, cached) - request_s)
                for (tokens, cached), seconds in lone.items()
            ]
        )
        taking = []
        for tokens in lengths:
            spacings_s = [
                await _taking_s(session, on, [prompt(tokens) for _ in range(BURST + 1)]) for _ in range(repeats)
            ]
            taking.append((float(tokens), statistics.median(spacings_s)))
        take_s, take_token_s = line_of(taking)
        later = []
        for tokens in lengths:
            whole_s = await first_s(through, tokens)
            later.append((float(tokens), whole_s - lone[tokens, 0] - take_s - take_token_s * tokens))
        fetch_s, fetch_token_s = line_of(later)
        handover = PromptHandover(save_s, save_token_s, fetch_s, fetch_token_s, max(1e-4, take_s), take_token_s)
        say("both at work")
        contended = await _contended(session, on, through, measuring, prompt, 2 if quick else 4)
    measured = {
        "prefills": [(one.tokens, one.cached, one.seconds, cost.prefill_s(one.tokens, one.cached)) for one in points],
        "alone": [(*cell, seconds) for cell, seconds in lone.items()],
        "steps": [
            (one.batch, one.kv_tokens, one.seconds, cost.decode_step_s(one.batch, one.kv_tokens)) for one, _ in steps
        ],
        "taking": taking,
        "later": later,
        "beside": beside,
        "contended": contended,
    }
    factors = (max(1.0, contended[what][1] / contended[what][0]) for what in ("prefill_s", "step_s"))
    return Fitted(cost, handover, request_s, 1.0, 1.0, measured, *(round(each, 4) for each in factors))


async def _contended(
    session: aiohttp.ClientSession,
    on: Servers,
    through: Client,
    measuring: Measurement,
    prompt: Callable[[int], list[int]],
    repeats: int,
) -> dict[str, tuple[float, float]]:
    """Seconds of a prefill and of a decoding step, while the other engine is idle and while it works all the time.

    Two cores share memory and caches, and router, store and client run on them, too: on the idle engine's, if there is
    one.
    """
    prefill_url, _ = on.engines
    tokens, batch, context = 512, 4, 256
    prefills: tuple[list[float], list[float]] = ([], [])
    steps: tuple[list[float], list[float]] = ([], [])

    async def prefilling() -> None:
        while True:
            await _prefilled(session, prefill_url, prompt(tokens))

    async def decoding() -> None:
        while True:  # a prompt short enough to take next to nothing of the other engine
            await through.probe(prompt(48), 150, time.perf_counter)

    async def spacing_s() -> float:
        ends_s: list[float] = []

        async def one() -> None:
            await _prefilled(session, prefill_url, prompt(tokens))
            ends_s.append(time.perf_counter())

        if on.kind.python is not None:
            began_s = time.perf_counter()
            await one()
            return ends_s[0] - began_s
        await asyncio.gather(*(one() for _ in range(BURST + 1)))
        return (max(ends_s) - min(ends_s)) / BURST

    for _ in range(repeats):  # in turns, so that drift affects both alike
        for busy in (False, True):
            others = [asyncio.create_task(decoding()) for _ in range(batch if busy else 0)]
            if others:
                await asyncio.sleep(0.5)
            prefills[busy].append(await spacing_s())
            await _ended(others)
            others = [asyncio.create_task(prefilling()) for _ in range(2 if busy else 0)]
            measured, _ = await measuring.decodes([DecodeCell(batch, context, False)], 1, "median")
            steps[busy].append(measured[0][0].seconds)
            await _ended(others)
    pairs = {"prefill_s": prefills, "step_s": steps}
    return {what: (statistics.median(idle), statistics.median(busy)) for what, (idle, busy) in pairs.items()}


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.3)  # the engines notice


async def _taking_s(session: aiohttp.ClientSession, on: Servers, prompts: Sequence[list[int]]) -> float:
    """Seconds that the decode engine has work with one more prompt that is in the store, when several came at once."""
    prefill_url, decode_url = on.engines
    for ids in prompts:
        await _prefilled(session, prefill_url, ids)
    began_s = time.perf_counter()
    ends_s: list[float] = []

    async def one(ids: list[int]) -> None:
        await _prefilled(session, decode_url, ids, {"do_remote_prefill": True, "sky_tokens": len(ids)})
        ends_s.append(time.perf_counter())

    if on.kind.python is not None:
        # vLLM fetches beside its steps and takes several in by one: what counts is by how much later all are there.
        await one(prompts[0])
        lone_s, began_s = ends_s[0] - began_s, time.perf_counter()
        await asyncio.gather(*map(one, prompts[1:]))
        return max(0.0, max(ends_s) - began_s - lone_s) / max(1, len(prompts) - 2)
    await asyncio.gather(*map(one, prompts))
    return (max(ends_s) - min(ends_s)) / (len(prompts) - 1)


async def _prefilled(
    session: aiohttp.ClientSession, url: str, ids: list[int], params: dict[str, Any] | None = None
) -> int:
    """A request for one token, by default step 1 at the prefill engine; returns the prompt's tokens that it had."""
    params = {"do_remote_decode": True} if params is None else params
    body = {"model": "sky", "prompt": ids, "max_tokens": 1, "temperature": 0, "kv_transfer_params": params}
    async with session.post(f"{url}/v1/completions", json=body, timeout=aiohttp.ClientTimeout(_PATIENCE_S)) as answer:
        read = await answer.json()
        if answer.status != 200:
            raise SystemExit(f"the prefill engine answered {answer.status}: {read}")
    return int((read["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


# --- plays ---


@dataclass(frozen=True)
class Played:
    outcomes: list[ReplayOutcome]
    """By number."""
    spent: list[dict[str, float]]
    """What each engine's counters have grown by."""


async def played(on: Servers, url: str, requests: Sequence[TraceRequest], seed: int) -> Played:
    """All requests at their times, and their answers."""
    kind = on.kind
    planned = [
        PlannedRequest(number, one.at_s, one.ids, one.input_tokens, one.output_tokens)
        for number, one in enumerate(requests)
    ]
    before = [counters(engine) for engine in on.engines]
    outcomes: list[ReplayOutcome] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        target = Target(url, "sky", patience_s=_PATIENCE_S)
        client = Client(session, target)

        def body(request: PlannedRequest) -> bytes:
            ids = token_ids(request.ids, request.prompt_tokens, kind.vocabulary, seed)
            return target.body(ids, request.output_tokens)

        async def send(request: PlannedRequest, body: bytes, clock: Callable[[], float], held_up_s: float) -> None:
            await client.send(request, body, clock, outcomes.append, held_up_s)

        await OpenLoopPlayer(planned, body, partial(send)).play()
    await asyncio.sleep(0.5)  # engines count a request behind its answer
    after = [counters(engine) for engine in on.engines]
    spent = [{name: now[name] - was.get(name, 0.0) for name in now} for was, now in zip(before, after, strict=True)]
    return Played(sorted(outcomes, key=lambda one: one.number), spent)
