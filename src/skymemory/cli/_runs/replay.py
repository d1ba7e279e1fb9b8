"""One replay from its beginning to its report: looks at the endpoint, sends, shows how it goes, tells what came."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

import aiohttp

from skymemory.cli._options import token_ids
from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.serving.replay.client import Client, Target, base_url
from skymemory.serving.replay.outcome import Outcome, Status
from skymemory.serving.replay.play import Player, agree, calibrate, look
from skymemory.serving.replay.prompts import (
    Ask,
    Asks,
    MakePrompt,
    Measure,
    asks_of,
    character_prompts,
    id_prompts,
    reusable_share,
    word_prompts,
)
from skymemory.serving.replay.report import EngineCounts, Report, Slo, as_json, counts_of, lines_of, report_of
from skymemory.sim.trace import BLOCK_TOKENS, TraceRequest, at_rate, jittered, read_trace
from skymemory.sim.workload import WORDS, WORKLOADS, generate
from skymemory.stats import spread

_MARGIN = 0.03
"""Of the context, left free where lengths of prompts are only nearly what is wanted."""


@dataclass
class _Replay:
    """What is known of it so far: enough for a report whenever it ends."""

    args: argparse.Namespace
    asks: Asks
    outcomes: list[Outcome]
    player: Player | None = None
    measure: Measure | None = None
    model: str = ""
    before: EngineCounts | None = None
    after: EngineCounts | None = None
    cut_at_s: float | None = None
    """When it was interrupted."""

    def report(self) -> Report:
        args = self.args
        stalls = self.player.stalls_s if self.player is not None else ()
        told = {outcome.number for outcome in self.outcomes}
        sent = [ask for ask in self.asks.asks if ask.number in told]
        share = reusable_share(sent, BLOCK_TOKENS * args.scale_lengths)
        in_tokens = args.prompt_unit != "characters"
        slo = Slo(args.ttft_slo, args.tbt_slo)
        return report_of(self.outcomes, len(self.asks.asks), slo, stalls, share, in_tokens, self.cut_at_s)


def replay(args: argparse.Namespace, key: str | None) -> int:
    """Exit code 0 if an answer came, 1 if none did, 130 if it was interrupted; the report is told in each case."""
    requests = shapes(args)
    url = base_url(args.url)
    stream = sys.stderr if args.json else sys.stdout
    out = args.out.open("w", encoding="utf-8") if args.out is not None else None
    try:
        one, interrupted = asyncio.run(_interruptible(args, requests, url, key, stream, out))
    finally:
        if out is not None:
            out.close()
    report = one.report()
    if args.json:
        print(json.dumps(_object(one, report, url, interrupted), indent=1))
    else:
        print("\n".join([*lines_of(report), *_engine_lines(one, report)]))
        if interrupted:
            print("interrupted: this is what was done until then; nothing is under way any more")
    return 130 if interrupted else 0 if report.completed else 1


def shapes(args: argparse.Namespace) -> Sequence[TraceRequest]:
    """The requests of the trace or the generator, at the rate that is asked for."""
    if args.trace is not None:
        requests = read_trace(args.trace)
    else:
        requests = _generated(args)
    if args.jitter:
        requests = jittered(requests, args.seed, args.jitter)
    return at_rate(requests, args.rate)


def _generated(args: argparse.Namespace) -> list[TraceRequest]:
    """As much of the generator's time as has what is asked for."""
    kind = WORKLOADS[args.workload]
    if args.seconds is not None:
        return generate(kind, args.seconds * args.rate + kind.batch_s + 1.0, args.seed)
    span_s = 60.0 + 2 * args.requests / kind.conversations_per_s
    while len(requests := generate(kind, span_s, args.seed)) < args.requests:
        span_s *= 2
    return requests


async def _interruptible(
    args: argparse.Namespace,
    requests: Sequence[TraceRequest],
    url: str,
    key: str | None,
    stream: TextIO,
    out: TextIO | None,
) -> tuple[_Replay, bool]:
    """The replay, and whether SIGINT, SIGTERM or SIGHUP ended it; a second one changes nothing."""
    one = _Replay(args, Asks((), 0), [])
    task = asyncio.ensure_future(_run(one, requests, url, key, stream, out))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: None if task.cancelling() else task.cancel())
    try:
        await task
    except asyncio.CancelledError:
        if one.player is None:
            raise KeyboardInterrupt from None
        one.cut_at_s = one.player.clock()
        return one, True
    return one, False


async def _run(
    one: _Replay, requests: Sequence[TraceRequest], url: str, key: str | None, stream: TextIO, out: TextIO | None
) -> None:
    args = one.args
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(session, Target(url, args.model or "", args.api == "chat", args.patience))
        prompts = await _prepared(one, client, requests, stream)
        metrics = args.metrics
        one.before = await _counts(session, metrics)

        def heard(outcome: Outcome) -> None:
            one.outcomes.append(outcome)
            if out is not None:
                out.write(json.dumps(outcome.as_json()) + "\n")

        asks, target = one.asks.asks, client.target
        player = Player(
            asks,
            lambda ask: target.body(prompts(ask), ask.output_tokens),
            lambda ask, body, clock, held_up_s: client.ask(ask, body, clock, heard, held_up_s),
            args.concurrency,
        )
        one.player = player
        progress = asyncio.create_task(Progress(stream, player, one.outcomes, asks).follow())
        try:
            await player.play()
        finally:
            progress.cancel()
            with suppress(asyncio.CancelledError):
                await progress
        one.after = await _counts(session, metrics)


async def _prepared(one: _Replay, client: Client, requests: Sequence[TraceRequest], stream: TextIO) -> MakePrompt:
    """Ask the endpoint what it is, and settle what is sent."""
    args = one.args
    known = await _known(client, args)
    one.model, context = client.target.model, args.context or known
    block = BLOCK_TOKENS * args.scale_lengths
    began_s = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - began_s

    prompts: MakePrompt
    room = context
    if args.prompt_unit == "ids":
        first, last = token_ids(args.ids)
        prompts = id_prompts(first, last, block, args.seed)
        notes = (await agree(client, [first] * 8, clock))[1]
    elif args.prompt_unit == "characters":
        prompts = character_prompts(WORDS, block, args.seed)
        notes = (await agree(client, WORDS[args.seed % len(WORDS)], clock))[1]
        room = None
    else:
        one.measure, notes = await calibrate(client, WORDS, args.seed, context, clock)
        prompts = word_prompts(WORDS, block, one.measure, args.seed)
        room = None if context is None else int(context * (1 - _MARGIN))
    one.asks = asks_of(
        requests,
        scale=args.scale_lengths,
        most_output=args.max_tokens,
        context_tokens=room,
        span_s=args.seconds,
        most=args.requests,
    )
    asks = one.asks.asks
    unit = "characters" if args.prompt_unit == "characters" else "tokens"
    prompt, output = (total / len(asks) for total in (one.asks.prompt_tokens, sum(ask.output_tokens for ask in asks)))
    words = (
        f"{len(asks):,} requests due within {asks[-1].due_s:.1f} s, prompts of {prompt:,.0f} {unit} and answers of "
        f"{output:,.0f} tokens on average, to {one.model}"
    )
    if one.measure is not None:
        words += (
            f"; {one.measure.tokens_per_word:.3f} tokens a word, {one.measure.added_tokens:.0f} added to each prompt"
        )
    print(words, file=stream)
    if one.asks.too_long:
        print(f"left out: {one.asks.too_long:,} that do not fit {context:,} tokens (--scale-lengths)", file=stream)
    for note in notes:
        print(f"note: {note}", file=stream)
    stream.flush()
    return prompts


async def _known(client: Client, args: argparse.Namespace) -> int | None:
    """The context's size where it is told; with a model named, an endpoint need not list any."""
    try:
        return (await look(client, args.model)).context_tokens
    except InvalidInput:
        raise
    except SkyMemoryError:
        if args.model is None:
            raise
        client.target = replace(client.target, model=args.model)
        return None


async def _counts(session: aiohttp.ClientSession, urls: Sequence[str]) -> EngineCounts | None:
    """Of all ``urls`` together; None where there are none.

    Raises:
        SkyMemoryError: one does not tell.
    """
    total: EngineCounts | None = None
    for url in urls:
        where = url if url.rstrip("/").endswith("/metrics") else f"{base_url(url)}/metrics"
        try:
            async with session.get(where, timeout=aiohttp.ClientTimeout(total=10)) as answer:
                answer.raise_for_status()
                counted = counts_of(await answer.text())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise SkyMemoryError(f"--metrics {where}: {error}") from error
        total = counted if total is None else total.plus(counted)
    return total


def _engine_lines(one: _Replay, report: Report) -> list[str]:
    """What the engines counted meanwhile, beside what the answers said."""
    if one.before is None or one.after is None:
        return []
    counted, lines = one.after.since(one.before), ["  by the engines' own /metrics, beside what the answers said:"]
    said = (report.completed, report.prompt_tokens, report.cached_tokens, report.output_tokens)
    names = ("requests", "prompt tokens", "of them cached", "tokens answered")
    for name, theirs, ours in zip(names, counted.all(), said, strict=True):
        lines.append(f"    {name:<18}{'not counted' if theirs is None else f'{theirs:,.0f}':>14}{ours:>14,}")
    return lines


def _object(one: _Replay, report: Report, url: str, interrupted: bool) -> dict[str, Any]:
    args, told = one.args, as_json(report)
    counted = None if one.before is None or one.after is None else one.after.since(one.before)
    return {
        "url": url,
        "model": one.model,
        "source": str(args.trace) if args.trace is not None else args.workload,
        "seed": args.seed,
        "rate": args.rate,
        "scale_lengths": args.scale_lengths,
        "prompt_unit": args.prompt_unit,
        "api": args.api,
        "ended_early": interrupted,
        "left_out": one.asks.too_long,
        "tokens_per_word": None if one.measure is None else round(one.measure.tokens_per_word, 4),
        **told,
        "engines": None if counted is None else asdict(counted),
    }


# How a replay goes, in one line that is drawn over: on a terminal only.


_EVERY_S = 0.5
_LATEST = 500
"""Answers whose times are shown: the latest."""


class Progress:
    def __init__(self, stream: TextIO, player: Player, outcomes: Sequence[Outcome], asks: Sequence[Ask]) -> None:
        self._stream = stream
        self._player = player
        self._outcomes = outcomes
        self._asks = asks

    async def follow(self) -> None:
        """Until cancelled; the line is gone then."""
        if not self._stream.isatty():
            return
        try:
            while True:
                width = shutil.get_terminal_size().columns
                self._stream.write(f"\r\x1b[K{self.line()[: width - 1]}")
                self._stream.flush()
                await asyncio.sleep(_EVERY_S)
        finally:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def line(self) -> str:
        latest = self._outcomes[-_LATEST:]
        ttft = spread(one.ttft_s for one in latest if one.status is Status.COMPLETED)
        late = spread(one.late_s for one in latest)
        bad = sum(one.status is not Status.COMPLETED for one in self._outcomes)
        words = (
            f"{max(0.0, self._player.clock()):6.1f} of {self._asks[-1].due_s:.1f} s: {self._player.begun:,} of "
            f"{len(self._asks):,} sent, {self._player.under_way:,} under way, {len(self._outcomes) - bad:,} completed, "
            f"{bad:,} not"
        )
        if ttft.count:
            words += f"; TTFT p50 {ttft.p50:.3f} s, p90 {ttft.p90:.3f} s; late by {late.p90 * 1000:.1f} ms (p90)"
        return words
