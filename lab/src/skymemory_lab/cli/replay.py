"""``skymemory replay``: sends the requests of a trace to an OpenAI endpoint at their times and reports latencies."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from skymemory.cli._options import add_json, add_rare_settings, check_router_installed, duration
from skymemory.config import duration as duration_of
from skymemory.config import one_of, setting, text, whole_number
from skymemory.errors import InvalidInput, SkyMemoryError, cannot_read, connection_reason
from skymemory.text import write_line
from skymemory_lab.cli._settings import token_ids

if TYPE_CHECKING:
    import aiohttp

    from skymemory.cli.main import Subparsers
    from skymemory_lab.replay.client import Client
    from skymemory_lab.replay.play import OpenLoopPlayer
    from skymemory_lab.replay.prompts import LoadPlan, MakePrompt, PlannedRequest, TokensPerWord
    from skymemory_lab.replay.report import EngineCounts, ReplayOutcome, ReplayReport
    from skymemory_lab.sim.trace import TraceRequest


UNITS = ("tokens", "characters", "ids")
_MARGIN = 0.03
_EVERY_S = 0.5
_LATEST = 500


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    ids: tuple[int, int] = setting("ids", token_ids, (300, 1000), "range of token ids to draw from")
    jitter_s: float = setting("jitter", duration_of, 0.0, "move each arrival by up to this much of the trace's time")
    most_at_once: int = setting(
        "concurrency", whole_number, 0, "limit of requests in flight; others wait and count as held up. 0: none"
    )
    api: str = setting("api", one_of("completions", "chat"), "completions", "which API: `completions` or `chat`")
    context: int = setting(
        "context", whole_number, 0, "leave out requests of more tokens; 0: of more than the endpoint's context"
    )
    api_key_env: str = setting("api_key_env", text, "OPENAI_API_KEY", "environment variable with the API key")
    patience_s: float = setting("patience", duration_of, 300.0, "timeout of a whole answer")
    ttft_slo_s: float | None = setting(
        "ttft_slo", duration_of, None, "objective for the time from due to the first token"
    )
    tbt_slo_s: float | None = setting(
        "tbt_slo", duration_of, None, "objective for a request's mean time between tokens"
    )

    def __post_init__(self) -> None:
        if self.patience_s <= 0:
            raise InvalidInput("patience: expected more than 0")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="send a trace's requests to an OpenAI endpoint",
        description="Send the requests of a trace (Mooncake's format) or of the generator to any OpenAI endpoint, each "
        "when it is due, and report times to the first token and between tokens, cache hits, refusals and how late "
        "the client itself was. Prompts are synthetic: equal block ids give equal prefixes, lengths are the trace's.",
        epilog="What each figure means: docs/guide/replay.md",
    )
    parser.add_argument(
        "trace", nargs="?", type=Path, help="JSON lines with timestamp, input_length, output_length, hash_ids"
    )
    parser.add_argument("--url", required=True, help="the endpoint, such as http://127.0.0.1:8000")
    add = parser.add_argument_group("requests").add_argument
    add("--workload", metavar="NAME", help="generate requests, without a trace: conversations or tenants")
    add("--seed", type=int, default=0, metavar="N", help="seed of prompts and generator (default: 0)")
    add("--requests", type=int, metavar="N", help="only the first N")
    add("--seconds", type=duration, metavar="TIME", help="only requests due within this time of the replay")
    add("--scale-lengths", type=float, default=1.0, metavar="X", help="prompts and answers X times as long")
    add("--max-tokens", type=int, metavar="N", help="limit of an answer")
    add(
        "--prompt-unit",
        choices=UNITS,
        default="tokens",
        help="what a token of the trace becomes: a token by the server's count, a character, or a token id, where "
        "the server accepts lists of ids (default: tokens)",
    )
    add = parser.add_argument_group("arrivals").add_argument
    add("--rate", type=float, default=1.0, metavar="X", help="send requests X times as fast (default: 1)")
    parser.add_argument("--model", metavar="NAME", help="model name (default: the one that the endpoint serves)")
    add_rare_settings(parser, ReplaySettings)
    add = parser.add_argument_group("report").add_argument
    add(
        "--metrics",
        action="append",
        default=[],
        metavar="URL",
        help="an engine whose own counters are shown beside; may be repeated",
    )
    add("--out", type=Path, metavar="FILE", help="write one JSON line per request")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    check(args)
    check_router_installed()
    return _replay(args, os.environ.get(args.settings.api_key_env) or None)


def check(args: argparse.Namespace) -> None:
    if (args.trace is None) == (args.workload is None):
        raise InvalidInput("replay: expected either a trace or --workload")
    if args.workload is not None and args.workload not in ("conversations", "tenants"):
        raise InvalidInput(f"--workload {args.workload!r}: expected conversations or tenants")
    if args.workload is not None and args.seconds is None and args.requests is None:
        raise InvalidInput("--workload is endless: add --seconds or --requests")
    for name in ("requests", "max_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InvalidInput(f"--{name.replace('_', '-')} {getattr(args, name)}: expected 1 or more")
    if not args.rate > 0:
        raise InvalidInput(f"--rate {args.rate:g}: expected a factor above 0")
    if args.prompt_unit == "ids" and args.settings.api == "chat":
        raise InvalidInput("--prompt-unit ids: the chat API accepts no token ids; set api = 'completions'")


@dataclass
class _RunningReplay:
    """Replay in progress, which can be reported even if interrupted."""

    args: argparse.Namespace
    plan: LoadPlan
    outcomes: list[ReplayOutcome]
    player: OpenLoopPlayer | None = None
    measure: TokensPerWord | None = None
    model: str = ""
    before: EngineCounts | None = None  # the engines' own counters
    after: EngineCounts | None = None
    cut_at_s: float | None = None  # time of the interruption

    def report(self) -> ReplayReport:
        from skymemory_lab.replay.prompts import reusable_share
        from skymemory_lab.replay.report import SloLimits, report_of
        from skymemory_lab.sim.trace import BLOCK_TOKENS

        args = self.args
        stalls = self.player.stalls_s if self.player is not None else ()
        answered = {outcome.number for outcome in self.outcomes}
        sent = [request for request in self.plan.requests if request.number in answered]
        # Over the requests sent, not planned: an interrupted replay has reused less.
        share = reusable_share(sent, BLOCK_TOKENS * args.scale_lengths)
        in_tokens = args.prompt_unit != "characters"
        slo = SloLimits(args.settings.ttft_slo_s, args.settings.tbt_slo_s)
        return report_of(self.outcomes, len(self.plan.requests), slo, stalls, share, in_tokens, self.cut_at_s)


def _replay(args: argparse.Namespace, key: str | None) -> int:
    """Run the replay. Exit code: 0 with an answer, 1 without, 130 if interrupted."""
    import asyncio

    from skymemory_lab.replay.client import base_url
    from skymemory_lab.replay.report import lines_of

    requests = shapes(args)
    url = base_url(args.url)
    # Opened before the replay: an hour of requests must not fail because of a missing folder.
    stream = sys.stderr if args.json else sys.stdout
    out = args.out.open("w", encoding="utf-8") if args.out is not None else None
    try:
        replay, interrupted = asyncio.run(_interruptible(args, requests, url, key, stream, out))
    finally:
        if out is not None:
            out.close()
    report = replay.report()
    if args.json:
        print(json.dumps(_object(replay, report, url, interrupted), indent=1))
    else:
        write_line("\n".join([*lines_of(report), *_engine_lines(replay, report)]))
        if interrupted:
            write_line("interrupted: the report covers what was done until then")
    return 130 if interrupted else 0 if report.completed else 1


def shapes(args: argparse.Namespace) -> Sequence[TraceRequest]:
    from skymemory_lab.sim.trace import at_rate, jittered, read_trace

    if args.trace is not None:
        try:
            requests = read_trace(args.trace)
        except OSError as error:
            raise InvalidInput(cannot_read(args.trace, error)) from error
    else:
        requests = _generated(args)
    if args.settings.jitter_s:
        requests = jittered(requests, args.seed, args.settings.jitter_s)
    return at_rate(requests, args.rate)


def _generated(args: argparse.Namespace) -> list[TraceRequest]:
    from skymemory_lab.sim.workload import WORKLOADS, generate

    kind = WORKLOADS[args.workload]
    # One batch and one second more than needed: batches are spread over time, and the excess is cut off later.
    if args.seconds is not None:
        return generate(kind, args.seconds * args.rate + kind.batch_s + 1.0, args.seed)
    # A conversation has several turns, so this is nearly always enough; doubled until it is.
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
) -> tuple[_RunningReplay, bool]:
    """Run the replay; return True with it if a signal ended it."""
    import asyncio

    from skymemory_lab.replay.prompts import LoadPlan

    replay = _RunningReplay(args, LoadPlan((), 0), [])
    task = asyncio.ensure_future(_run(replay, requests, url, key, stream, out))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: None if task.cancelling() else task.cancel())
    try:
        await task
    # Cancelled before the first request: there is nothing to report, so it ends as any interrupted command.
    except asyncio.CancelledError:
        if replay.player is None:
            raise KeyboardInterrupt from None
        replay.cut_at_s = replay.player.clock()
        return replay, True
    return replay, False


async def _run(
    replay: _RunningReplay,
    requests: Sequence[TraceRequest],
    url: str,
    key: str | None,
    stream: TextIO,
    out: TextIO | None,
) -> None:
    import asyncio

    import aiohttp

    from skymemory_lab.replay.client import Client, Target
    from skymemory_lab.replay.play import OpenLoopPlayer

    args, settings = replay.args, replay.args.settings
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(session, Target(url, args.model or "", settings.api == "chat", settings.patience_s))
        prompts = await _prepared(replay, client, requests, stream)
        metrics = args.metrics
        replay.before = await _counts(session, metrics)

        def record(outcome: ReplayOutcome) -> None:
            replay.outcomes.append(outcome)
            if out is not None:
                out.write(json.dumps(outcome.as_json()) + "\n")

        planned, target = replay.plan.requests, client.target
        player = OpenLoopPlayer(
            planned,
            lambda request: target.body(prompts(request), request.output_tokens),
            lambda request, body, clock, held_up_s: client.send(request, body, clock, record, held_up_s),
            settings.most_at_once or None,
        )
        replay.player = player
        progress = asyncio.create_task(ReplayProgress(stream, player, replay.outcomes, planned).follow())
        try:
            await player.play()
        finally:
            progress.cancel()
            with suppress(asyncio.CancelledError):
                await progress
        replay.after = await _counts(session, metrics)


async def _prepared(
    replay: _RunningReplay, client: Client, requests: Sequence[TraceRequest], stream: TextIO
) -> MakePrompt:
    from skymemory_lab.replay.play import calibrate, negotiate_features
    from skymemory_lab.replay.prompts import character_prompts, id_prompts, plan_requests, word_prompts
    from skymemory_lab.sim.prompt_text import WORDS
    from skymemory_lab.sim.trace import BLOCK_TOKENS

    args = replay.args
    context_tokens = await _known(client, args)
    replay.model, context = client.target.model, args.settings.context or context_tokens
    block = BLOCK_TOKENS * args.scale_lengths
    started_s = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - started_s

    prompts: MakePrompt
    room = context
    if args.prompt_unit == "ids":
        first, last = args.settings.ids
        prompts = id_prompts(first, last, block, args.seed)
        notes = (await negotiate_features(client, [first] * 8, clock))[1]
    elif args.prompt_unit == "characters":
        prompts = character_prompts(WORDS, block, args.seed)
        notes = (await negotiate_features(client, WORDS[args.seed % len(WORDS)], clock))[1]
        room = None
    else:
        replay.measure, notes = await calibrate(client, WORDS, args.seed, context, clock)
        prompts = word_prompts(WORDS, block, replay.measure, args.seed)
        # Words become tokens at a measured average rate: single prompts differ by a few percent.
        room = None if context is None else int(context * (1 - _MARGIN))
    replay.plan = plan_requests(
        requests,
        scale=args.scale_lengths,
        most_output=args.max_tokens,
        context_tokens=room,
        span_s=args.seconds,
        most=args.requests,
    )
    planned = replay.plan.requests
    unit = "characters" if args.prompt_unit == "characters" else "tokens"
    prompt, output = (
        total / len(planned) for total in (replay.plan.prompt_tokens, sum(request.output_tokens for request in planned))
    )
    words = (
        f"{len(planned):,} requests due within {planned[-1].due_s:.1f} s, prompts of {prompt:,.0f} {unit} and "
        f"answers of {output:,.0f} tokens on average, to {replay.model}"
    )
    if replay.measure is not None:
        words += (
            f"; {replay.measure.tokens_per_word:.3f} tokens a word, "
            f"{replay.measure.added_tokens:.0f} added to each prompt"
        )
    print(words, file=stream)
    if replay.plan.too_long:
        write_line(f"left out: {replay.plan.too_long:,} that do not fit {context:,} tokens (--scale-lengths)", stream)
    for remark in notes:
        write_line(f"note: {remark}", stream)
    stream.flush()
    return prompts


async def _known(client: Client, args: argparse.Namespace) -> int | None:
    """Return the context length; with ``--model`` the endpoint need not list its models."""
    from skymemory_lab.replay.play import find_model

    try:
        return (await find_model(client, args.model)).context_tokens
    except InvalidInput:
        raise
    except SkyMemoryError:
        if args.model is None:
            raise
        client.target = replace(client.target, model=args.model)
        return None


async def _counts(session: aiohttp.ClientSession, urls: Sequence[str]) -> EngineCounts | None:
    """Return the counters of all ``urls``."""
    import aiohttp

    from skymemory_lab.replay.client import base_url
    from skymemory_lab.replay.report import counts_of

    total: EngineCounts | None = None
    for url in urls:
        metrics_url = url if url.rstrip("/").endswith("/metrics") else f"{base_url(url)}/metrics"
        try:
            async with session.get(metrics_url, timeout=aiohttp.ClientTimeout(total=10)) as answer:
                answer.raise_for_status()
                counts = counts_of(await answer.text())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise SkyMemoryError(f"--metrics {metrics_url}: {connection_reason(error)}") from error
        total = counts if total is None else total.plus(counts)
    return total


def _engine_lines(replay: _RunningReplay, report: ReplayReport) -> list[str]:
    if replay.before is None or replay.after is None:
        return []
    counts, lines = replay.after.since(replay.before), ["  by the engines' own /metrics, beside what the answers said:"]
    answered = (report.completed, report.prompt_tokens, report.cached_tokens, report.output_tokens)
    names = ("requests", "prompt tokens", "of them cached", "tokens answered")
    for name, theirs, ours in zip(names, counts.all(), answered, strict=True):
        lines.append(f"    {name:<18}{'not counted' if theirs is None else f'{theirs:,.0f}':>14}{ours:>14,}")
    return lines


def _object(replay: _RunningReplay, report: ReplayReport, url: str, interrupted: bool) -> dict[str, Any]:
    from skymemory_lab.replay.report import as_json

    args = replay.args
    counts = None if replay.before is None or replay.after is None else replay.after.since(replay.before)
    return {
        "url": url,
        "model": replay.model,
        "source": str(args.trace) if args.trace is not None else args.workload,
        "seed": args.seed,
        "rate": args.rate,
        "scale_lengths": args.scale_lengths,
        "prompt_unit": args.prompt_unit,
        "api": args.settings.api,
        "ended_early": interrupted,
        "left_out": replay.plan.too_long,
        "tokens_per_word": None if replay.measure is None else round(replay.measure.tokens_per_word, 4),
        **as_json(report),
        "engines": None if counts is None else asdict(counts),
    }


class ReplayProgress:
    def __init__(
        self,
        stream: TextIO,
        player: OpenLoopPlayer,
        outcomes: Sequence[ReplayOutcome],
        requests: Sequence[PlannedRequest],
    ) -> None:
        self._stream = stream
        self._player = player
        self._outcomes = outcomes
        self._asks = requests

    async def follow(self) -> None:
        import asyncio

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
        from skymemory.metrics import spread
        from skymemory_lab.replay.report import ResponseStatus

        latest = self._outcomes[-_LATEST:]
        ttft = spread(outcome.ttft_s for outcome in latest if outcome.status is ResponseStatus.COMPLETED)
        late = spread(outcome.late_s for outcome in latest)
        bad = sum(outcome.status is not ResponseStatus.COMPLETED for outcome in self._outcomes)
        words = (
            f"{max(0.0, self._player.clock()):6.1f} of {self._asks[-1].due_s:.1f} s: {self._player.begun:,} of "
            f"{len(self._asks):,} sent, {self._player.under_way:,} in flight, {len(self._outcomes) - bad:,} completed, "
            f"{bad:,} failed"
        )
        if ttft.count:
            words += f"; TTFT p50 {ttft.p50:.3f} s, p90 {ttft.p90:.3f} s; late by {late.p90 * 1000:.1f} ms (p90)"
        return words
