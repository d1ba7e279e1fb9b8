"""``skymemory demo route``: four real engines behind the router, the same requests for each strategy."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from skymemory.engine.inputs import small_model_folder
from skymemory.kv.block import hash_blocks
from skymemory.metrics import percentile
from skymemory.progress import Progress
from skymemory.text import Table, write, write_line
from skymemory_lab.demo.estimate import format_took, say_estimate
from skymemory_lab.demo.processes import service
from skymemory_lab.demo.resources import slowdown
from skymemory_lab.demo.screen import Screen
from skymemory_lab.replay.client import Client, Target
from skymemory_lab.replay.play import OpenLoopPlayer
from skymemory_lab.replay.prompts import PlannedRequest
from skymemory_lab.replay.report import ReplayOutcome, ResponseStatus, samples_of
from skymemory_lab.sim.prompt_text import render_text
from skymemory_lab.sim.workload import WORKLOADS, generate

# 1. Generate prompts of the workload, scaled to the small model.
# 2. Start four engines and measure their joint speed with nothing cached.
# 3. Offer 85 % of that, so that queues form but do not grow without end.
# 4. For each strategy, clear the caches, start a router, send the same requests at the same times, and watch the
#    engines' own counters.
ENGINES = 4
ROUNDS, REQUESTS, QUICK_REQUESTS = 2, 50, 32
"""Rounds, and requests per round. The second reverses the strategies, so a drift affects all equally."""
CACHE_SHARE = 1 / 3
BLOCK_TOKENS = 16
CHARACTERS_PER_BLOCK = 96
"""Characters per 512 generator tokens: 12,000 become about 600 of the small model."""
MOST_TOKENS = 100_000
NEW_TOKENS = (4, 12)
TRACE_S_PER_REQUEST = 25.0
"""Generator time per request; a short run contains later turns."""
PATIENCE_S = 120.0
_CONTEXT = bytes(32)
BLOCK_BYTES = 128 + BLOCK_TOKENS * 2 * 6 * 2 * 64 * 4
"""Bytes of header, tokens, keys and values, layers, heads, numbers, float32."""
OFFERED = 0.85
"""Offered share of what the engines can answer with nothing cached."""
PROBE_TOKENS = 600
_PROBES = 2
_PROMISED_S, _QUICK_PROMISED_S = 80.0, 36.0  # limits below the time that the README promises
# Parts of the requests, and characters per 512 generator tokens.
_SHORTER = ((1, CHARACTERS_PER_BLOCK), (1, 64), (1, 48), (1, 32), (1, 24), (2, 24))
_LEFT_OUT_FIRST = ("random", "least-load", "precise", "round-robin")
_START_S, _ROUTER_S = 8.0, 1.2  # seconds of the engines' start and of a router
_TAIL = 1.4
WATCH_S = 0.4
EVENT_KEYS = {"events": "endpoint", "replay": "replay_endpoint", "topic": "topic"}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, with its time as a part of the whole run."""

    at: float
    prompt: str
    tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    asked: tuple[Asked, ...]
    tokens: int
    distinct_blocks: int
    """Blocks of 16 tokens in a single cache of everything."""
    best_hits: float
    """Share of tokens that such a cache would supply."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Joint speed of the engines, with nothing cached."""

    tokens_per_s: float  # of prompts
    request_s: float  # for each answer

    def span_s(self, load: OfferedLoad) -> float:
        """Return the time in which to send ``load``, so that queues form but do not grow forever."""
        return (load.tokens / self.tokens_per_s + len(load.asked) * self.request_s) / OFFERED


def make_load(workload: str, requests: int, seed: int, characters_per_block: int = CHARACTERS_PER_BLOCK) -> OfferedLoad:
    """Return requests with ``workload``'s statistics, equal for equal arguments."""
    kind = WORKLOADS[workload]
    span_s = requests * TRACE_S_PER_REQUEST
    rate = kind.conversations_per_s
    drawn: list[Any] = []
    kind = replace(kind, batch_s=0.0, most_tokens=MOST_TOKENS)
    for _ in range(8):  # the number of requests is random too: ask for more conversations until there are enough
        drawn = generate(replace(kind, conversations_per_s=rate), span_s, seed)
        if requests <= len(drawn) <= 1.3 * requests:
            break
        rate *= 1.12 * requests / max(1, len(drawn))
    drawn = drawn[:requests]
    tokenizer = Tokenizer.from_file(str(small_model_folder() / "tokenizer.json"))
    dice = random.Random(seed)
    known: set[bytes] = set()
    requests_made, supplied = [], 0
    for request in drawn:
        prompt = render_text(request, characters_per_block)
        ids = tokenizer.encode(prompt).ids
        blocks = hash_blocks(_CONTEXT, ids, BLOCK_TOKENS)
        held_blocks = sum(block in known for block in blocks)
        # Hits of a single cache with room for everything. At least the last token is computed, as engines do.
        supplied += min(held_blocks * BLOCK_TOKENS, len(ids) - 1)
        known.update(blocks)
        at = (request.at_s - drawn[0].at_s) / max(1e-9, drawn[-1].at_s - drawn[0].at_s)
        requests_made.append(Asked(at, prompt, len(ids), dice.randint(*NEW_TOKENS)))
    tokens = sum(request.tokens for request in requests_made)
    return OfferedLoad(tuple(requests_made), tokens, len(known), supplied / tokens)


async def replay(
    client: aiohttp.ClientSession,
    url: str,
    load: OfferedLoad,
    span_s: float,
    on_answer: Callable[[ReplayOutcome], object],
) -> None:
    """Send every request at its time within ``span_s``, and wait for all answers."""
    planned = [
        PlannedRequest(at, request.at * span_s, (), request.tokens, request.new_tokens)
        for at, request in enumerate(load.asked)
    ]
    sender = Client(client, Target(url, "small", patience_s=PATIENCE_S))
    await OpenLoopPlayer(
        planned,
        lambda request: sender.target.body(load.asked[request.number].prompt, request.output_tokens),
        lambda request, body, clock, held_up_s: sender.send(request, body, clock, on_answer, held_up_s),
    ).play()


def error_of(answer: ReplayOutcome) -> str:
    if answer.status is not ResponseStatus.COMPLETED:
        return answer.error or str(answer.status)
    is_complete = (
        answer.whole and answer.output_tokens == answer.wanted_output_tokens and answer.prompt_tokens is not None
    )
    return "" if is_complete else "the answer is incomplete"


async def clear_caches(client: aiohttp.ClientSession, urls: Sequence[str]) -> None:
    for url in urls:
        async with client.post(f"{url}/reset_prefix_cache") as answer:
            answer.raise_for_status()


async def metrics(client: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with client.get(f"{url}/metrics") as answer:
        return samples_of(await answer.text())


class Stage:
    """Running engines, and the results of each strategy."""

    def __init__(
        self, client: aiohttp.ClientSession, urls: Sequence[str], screen: Screen, strategies: Sequence[str]
    ) -> None:
        self.client = client
        self.urls = urls
        self.screen = screen
        nothing = [0] * len(urls)
        self.rows = [RouteRow(strategy, 0, served=list(nothing), loads=list(nothing)) for strategy in strategies]

    def keep(self, strategies: Sequence[str]) -> None:
        self.rows = [row for row in self.rows if row.strategy in strategies]

    def expect(self, requests: int) -> None:
        for row in self.rows:
            row.requests = requests

    async def measure(self, seed: int) -> Speed:
        # Measure the engines with concurrent prompts: long with a token of answer, short with a whole answer.
        dice = random.Random(seed)

        async def send_probe(url: str, prompt_tokens: int, new_tokens: int) -> int:
            text = " ".join(str(dice.randrange(10**6)) for _ in range(prompt_tokens // 4))
            answer = await Client(self.client, Target(url, "small", patience_s=PATIENCE_S)).probe(
                text, new_tokens, time.perf_counter
            )
            return answer.prompt_tokens or 0

        async def all_of(prompt_tokens: int, new_tokens: int) -> tuple[int, float]:
            started_s = time.perf_counter()
            probes = (send_probe(url, prompt_tokens, new_tokens) for url in self.urls for _ in range(_PROBES))
            return sum(await asyncio.gather(*probes)), time.perf_counter() - started_s

        tokens, seconds = await all_of(PROBE_TOKENS, 1)
        _, short_s = await all_of(4, sum(NEW_TOKENS) // 2)
        return Speed(tokens / seconds, short_s / (_PROBES * len(self.urls)))

    async def run(self, row: RouteRow, words: Sequence[str], load: OfferedLoad, span_s: float) -> None:
        """Send a round's requests, with empty caches."""
        await clear_caches(self.client, self.urls)
        before = [now - served for now, served in zip(await self._counts(), row.served, strict=True)]
        async with service("the router", 1, *words) as (router,):
            watching = asyncio.create_task(self._watch(row, before))
            try:
                started_s = time.perf_counter()
                await replay(self.client, router, load, span_s, row.answers.append)
                row.seconds += time.perf_counter() - started_s
            finally:
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching
        row.served = [now - then for now, then in zip(await self._counts(), before, strict=True)]

    async def _counts(self) -> list[int]:
        counters = [await metrics(self.client, url) for url in self.urls]
        return [int(counter_values.get("vllm:time_to_first_token_seconds_count", 0)) for counter_values in counters]

    async def _watch(self, row: RouteRow, before: Sequence[int]) -> None:
        # Show the engines' counters; ``before``: requests that each had answered earlier.
        while True:
            for at, url in enumerate(self.urls):
                counters = await metrics(self.client, url)
                row.served[at] = int(counters.get("vllm:time_to_first_token_seconds_count", 0)) - before[at]
                row.loads[at] = int(counters["vllm:num_requests_waiting"] + counters["vllm:num_requests_running"])
            self.screen.show(frame(self.rows, row).lines, () if self.screen.live else figures(row))
            await asyncio.sleep(WATCH_S)


def router_words(strategy: str, folder: Path) -> list[str]:
    """Return ``skymemory route`` arguments. ``precise`` needs the engines' tokenizer."""
    file = folder / ("precise.toml" if strategy == "precise" else "route.toml")
    return ["route", "--listen", "127.0.0.1:0", "--strategy", strategy, "--settings", str(file)]


async def write_settings(client: aiohttp.ClientSession, urls: Sequence[str], seed: int, folder: Path) -> None:
    common = [f"seed = {seed}", 'drain = "1s"']
    tokens = ["[prompts]", f"tokenizer = {json.dumps(str(small_model_folder()))}", f"block_tokens = {BLOCK_TOKENS}"]
    backends, followed = list[str](), list[str]()
    for url in urls:
        async with client.get(f"{url}/kv_event_sources") as answer:
            source = (await answer.json())[0]
        table = ["[[backends]]", f"url = {json.dumps(url)}"]
        backends += table
        followed += [*table, *(f"{key} = {json.dumps(source[name])}" for key, name in EVENT_KEYS.items())]
    (folder / "route.toml").write_text("\n".join([*common, *backends]), "utf-8")
    (folder / "precise.toml").write_text("\n".join([*common, *tokens, *followed]), "utf-8")


def run_route(args: argparse.Namespace) -> int:
    """Return 0 if every request got one complete answer under every strategy."""
    progress = Progress(sys.stderr if args.json else sys.stdout)
    screen = Screen(progress.stream, progress.began_s)
    progress.say("four engines are started, and their speed is measured, which decides how long the prompts are")
    try:
        stage, loads, estimate_s = asyncio.run(_until_interrupted(_demonstrate(args, screen, progress)))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        screen.close()
    is_correct = all(not row.failed and len(row.answers) == row.requests == sum(row.served) for row in stage.rows)
    if args.json:
        print(json.dumps(_report(args, stage, loads, is_correct), indent=1))
    else:
        if not screen.live:  # a live screen shows it already
            print()
            final(stage.rows).print()
        words = "every request was answered" if is_correct else "FAILED: requests were not answered"
        print()
        write(f"{words}; the engines are down again")
    write(format_took(progress.seconds, estimate_s), progress.stream)
    for row in stage.rows:
        for error in sorted({error for answer in row.answers if (error := error_of(answer))}):
            write_line(f"{row.strategy}: {error}", sys.stderr)
    return 0 if is_correct else 1


async def _demonstrate(
    args: argparse.Namespace, screen: Screen, progress: Progress
) -> tuple[Stage, list[OfferedLoad], float]:
    count = args.requests or (QUICK_REQUESTS if args.quick else REQUESTS)
    with progress.wait("making the prompts", 1.0):
        loads = _loads(args, count, 1 if args.quick else ROUNDS)
    distinct = _distinct(loads)
    cache_blocks = max(1, int(distinct * CACHE_SHARE))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skymemory-demo-route-")))
        words = ("serve", "--model", "small", "--engines", str(ENGINES), "--listen", "127.0.0.1:0", "--threads", "1")
        cache = ("--cache", str(cache_blocks * BLOCK_BYTES), "--kv-events", "tcp://127.0.0.1:*")
        with progress.wait(f"starting {ENGINES} engines", _START_S * slowdown()):
            urls = await stack.enter_async_context(service("the engines", ENGINES, *words, *cache))
        connector = aiohttp.TCPConnector(limit=0)
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        await write_settings(client, urls, args.seed, folder)
        order = list(args.strategies)
        random.Random(args.seed).shuffle(order)
        # A shuffled order: no strategy always runs first, on a cold machine.
        stage = Stage(client, urls, screen, order)
        with progress.wait("measuring the engines' speed", 4.0):
            await stage.measure(args.seed)  # warms up what is slow only the first time
            speed = await stage.measure(args.seed + 1)
        router_s = _ROUTER_S * slowdown()
        left_s = (_QUICK_PROMISED_S if args.quick else _PROMISED_S) - progress.seconds
        # A slow computer sends shorter and fewer prompts, in one round instead of two, under fewer strategies. What
        # --requests and --strategies say is obeyed.
        if args.requests is None:
            for part, characters in _SHORTER:
                if _seconds_of(loads, speed, order, router_s) <= left_s:
                    break
                loads = _loads(args, count // part, 1, characters)
            distinct = _distinct(loads)
        left_out = [] if args.are_strategies_chosen else [name for name in _LEFT_OUT_FIRST if name in order]
        for at, name in enumerate(left_out):
            if _seconds_of(loads, speed, order, router_s) <= left_s:
                del left_out[at:]
                break
            order.remove(name)
        if left_out:
            stage.keep(order)
            screen.say(f"left out, since this computer is too slow or too busy: {', '.join(left_out)}")
        requests = sum(len(load.asked) for load in loads)
        stage.expect(requests)
        estimate_s = progress.seconds + _seconds_of(loads, speed, order, router_s)
        screen.say(
            f"{requests} prompts, {_tokens(loads) / requests:,.0f} tokens each on average; one cache with room for "
            f"everything would supply {_best_hits(loads):.0%} of them"
        )
        screen.say(
            f"{ENGINES} engines, one thread and {cache_blocks:,} blocks of cache each "
            f"({min(1.0, cache_blocks / distinct):.0%} of what is asked); together {speed.tokens_per_s:,.0f} tokens/s "
            f"uncached; {OFFERED:.0%} of what they can answer is sent: {sum(map(speed.span_s, loads)):.0f} s of "
            "requests for each strategy"
        )
        say_estimate(progress, estimate_s)
        for at, load in enumerate(loads):
            for row in reversed(stage.rows) if at % 2 else stage.rows:
                words_of = router_words(row.strategy, folder)
                await stage.run(row, words_of, load, speed.span_s(load))
                if not screen.live:
                    screen.say("; ".join(figures(row)))
        if screen.live:
            screen.show(final(stage.rows).lines)
        with progress.wait("ending the engines") if not screen.live else contextlib.nullcontext():
            await stack.aclose()
        return stage, loads, estimate_s


def _loads(
    args: argparse.Namespace, count: int, rounds: int, characters_per_block: int = CHARACTERS_PER_BLOCK
) -> list[OfferedLoad]:
    seeds = (args.seed + 7919 * at for at in range(rounds))
    return [make_load(args.workload, count, seed, characters_per_block) for seed in seeds]


def _tokens(loads: Sequence[OfferedLoad]) -> int:
    return sum(load.tokens for load in loads)


def _distinct(loads: Sequence[OfferedLoad]) -> float:
    return sum(load.distinct_blocks for load in loads) / len(loads)


def _seconds_of(loads: Sequence[OfferedLoad], speed: Speed, strategies: Sequence[str], router_s: float) -> float:
    return len(strategies) * (sum(map(speed.span_s, loads)) * _TAIL + len(loads) * router_s)


def _best_hits(loads: Sequence[OfferedLoad]) -> float:
    return sum(load.best_hits * load.tokens for load in loads) / _tokens(loads)


def _report(args: argparse.Namespace, stage: Stage, loads: Sequence[OfferedLoad], is_correct: bool) -> dict[str, Any]:
    return {
        "sound": is_correct,
        "engines": ENGINES,
        "workload": args.workload,
        "seed": args.seed,
        "rounds": len(loads),
        "requests": sum(len(load.asked) for load in loads),
        "prompt_tokens": sum(load.tokens for load in loads),
        "distinct_blocks": [load.distinct_blocks for load in loads],
        "best_hit_ratio": _best_hits(loads),
        "rows": [row.as_object() for row in stage.rows],
    }


async def _until_interrupted(work: Any) -> Any:
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: None if task.cancelling() else task.cancel())
    return await task


_HEAD = ("strategy", "answered", "TTFT mean", "p90", "p99", "hits", "by server")
_WORDS = (0, 6, 7)


@dataclass(slots=True)
class RouteRow:
    strategy: str
    requests: int
    answers: list[ReplayOutcome] = field(default_factory=list)
    served: list[int] = field(default_factory=list)  # requests of each engine so far
    loads: list[int] = field(default_factory=list)  # requests at each engine now
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        return sum(bool(error_of(answer)) for answer in self.answers)

    @property
    def hits(self) -> float:
        return self.total("cached_tokens") / max(1, self.total("prompt_tokens"))

    def total(self, name: str) -> int:
        return sum(getattr(answer, name) or 0 for answer in self.answers)

    @property
    def mean_s(self) -> float:
        times = self._times()
        return sum(times) / len(times) if times else math.nan

    def percentile_s(self, percent: float) -> float:
        return percentile(self._times(), percent)

    def cells(self) -> list[str]:
        times = (self.mean_s, self.percentile_s(90), self.percentile_s(99))
        hits = f"{self.hits:.0%}" if self.answers else "-"
        answered = f"{len(self.answers)}/{self.requests}"
        return [self.strategy, answered, *map(_seconds, times), hits, _each(self.served)]

    def as_object(self) -> dict[str, object]:
        return {
            "strategy": self.strategy,
            "answered": len(self.answers) - self.failed,
            "failed": self.failed,
            "ttft_mean_s": self.mean_s,
            "ttft_p90_s": self.percentile_s(90),
            "ttft_p99_s": self.percentile_s(99),
            "hit_ratio": self.hits,
            "prompt_tokens": self.total("prompt_tokens"),
            "cached_tokens": self.total("cached_tokens"),
            "requests_by_server": self.served,
            "seconds": self.seconds,
        }

    def _times(self) -> list[float]:
        return sorted(answer.ttft_s for answer in self.answers if not error_of(answer))


def frame(rows: Sequence[RouteRow], current: RouteRow | None) -> Table:
    cells = []
    for row in rows:
        has_started = bool(row.answers) or row is current
        cells.append(
            [*(row.cells() if has_started else [row.strategy, *[""] * 6]), _bars(row.loads) if row is current else ""]
        )
    return Table((*_HEAD, "now    "), cells, _WORDS)


def figures(row: RouteRow) -> list[str]:
    return [
        f"{row.strategy}: {len(row.answers)} of {row.requests} answered",
        f"TTFT {_seconds(row.mean_s)}",
        f"hits {row.hits:.0%}",
        f"at the engines now {_each(row.loads)}",
    ]


def final(rows: Sequence[RouteRow]) -> Table:
    return Table(_HEAD, [row.cells() for row in sorted(rows, key=lambda row: row.mean_s)], _WORDS)


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f} s" if value < 10 else f"{value:.1f} s"


def _each(counts: Sequence[int]) -> str:
    return " ".join(f"{count:>2}" for count in counts)


def _bars(loads: Sequence[int]) -> str:
    return " ".join(" ▁▂▃▄▅▆▇█"[min(8, load)] for load in loads)
