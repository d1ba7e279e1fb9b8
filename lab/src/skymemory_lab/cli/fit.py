"""``skymemory fit``: measures prefills and decoding steps of an engine and fits the cost model to them."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.cli._options import (
    add_json,
    add_rare_settings,
    check_router_installed,
    check_serving_installed,
    fraction,
)
from skymemory.config import (
    integer,
    one_of,
    positive,
    setting,
    share,
    size,
    text,
    whole_number,
    whole_numbers,
    yes_or_no,
)
from skymemory.errors import InvalidInput, quoted
from skymemory.files import read_json
from skymemory.text import width_of, write_line
from skymemory_lab.cli._settings import pair, token_ids

if TYPE_CHECKING:
    import aiohttp

    from skymemory.cli.main import Subparsers
    from skymemory.conductor.cost_fit import DecodePoint, Errors, PrefillPoint
    from skymemory.conductor.cost_model import CostModel, ModelShape
    from skymemory_lab.fitting import DecodeCell, MakePrompt, Spent
    from skymemory_lab.replay.client import Client
    from skymemory_lab.replay.prompts import Prompt


_FLOAT32_BYTES = 4


def _shares(value: object) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise InvalidInput(f"{quoted(value)}: expected a list of shares, such as [0, 0.5, 0.9]")
    return tuple(sorted(set(map(share, value))))


@dataclass(frozen=True, slots=True)
class FitSettings:
    lengths: tuple[int, int] = setting("lengths", pair, (64, 4096), "shortest and longest prompt, in tokens")
    shares: tuple[float, ...] = setting("shares", _shares, (0.0, 0.5, 0.9), "cached shares of prompts")
    batch: int = setting("batch", whole_number, 8, "largest batch of answers")
    contexts: tuple[int, ...] = setting("contexts", whole_numbers, (64, 256, 1024), "context lengths of answers")
    decode: bool = setting("decode", yes_or_no, True, "measure answers, too; false: prompts only")
    repeats: int = setting("repeats", whole_number, 5, "repeats of each measurement")
    statistic: str = setting(
        "statistic", one_of("median", "fastest"), "median", "which of the repeats counts: `median` or `fastest`"
    )
    clock: str = setting(
        "clock",
        one_of("wall", "processor"),
        "wall",
        "`processor`: CPU time of the engine's thread, for computers that do other work, too (without `--url` only)",
    )
    prompt_unit: str = setting(
        "prompt_unit", one_of("ids", "tokens"), "ids", "send prompts as token ids (`ids`) or as words (`tokens`)"
    )
    ids: tuple[int, int] = setting("ids", token_ids, (300, 1000), "range of token ids to draw from")
    flops: float | None = setting("flops", positive, None, "peak FLOPS of the machine; default: what was reached")
    memory_bytes_per_s: int | None = setting(
        "memory", size, None, "peak memory bandwidth in bytes per second, with `flops`"
    )
    network_bytes_per_s: int = setting(
        "network", size, 1_250_000_000, "network bandwidth in bytes per second, which is not measured"
    )
    model: str | None = setting("model", text, None, "name of the model; default: the one that the endpoint serves")
    api_key_env: str = setting("api_key_env", text, "OPENAI_API_KEY", "environment variable with the API key")
    threads: int = setting("threads", whole_number, 1, "threads of the engine that is started")
    seed: int = setting("seed", integer, 0, "seed of prompts and their order")

    def __post_init__(self) -> None:
        if (self.flops is None) != (self.memory_bytes_per_s is None):
            raise InvalidInput("`flops` and `memory` need each other")
        for name, value in (
            ("repeats", self.repeats),
            ("threads", self.threads),
            ("network", self.network_bytes_per_s),
            ("memory", 1 if self.memory_bytes_per_s is None else self.memory_bytes_per_s),
        ):
            if value < 1:
                raise InvalidInput(f"{name}: {value}: expected 1 or more")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "fit",
        help="fit the cost model to an engine by measuring it",
        description="Time prompts of several lengths and cached shares, and answers in several batches, at an idle "
        "OpenAI endpoint; fit the conductor's cost model to the times, and show its error at lengths that were held "
        "out.",
        epilog="How each value is measured: docs/guide/fitting.md. Use the file with `skymemory route --cost FILE`.",
    )
    add = parser.add_argument
    add("--url", help="the endpoint, such as http://127.0.0.1:8000 (default: an engine of the small model is started)")
    add("--shape", type=Path, metavar="FILE", help="with --url: the model's config.json")
    add("--out", type=Path, metavar="FILE", help="file for the cost model")
    add(
        "--within",
        type=fraction,
        metavar="SHARE",
        help="exit code 1 if the error of a held-out prefill is larger, such as 10%%",
    )
    add_rare_settings(parser, FitSettings)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    check(args)
    if args.url is None:
        check_serving_installed("small")
    check_router_installed()
    return _fit(args, os.environ.get(args.settings.api_key_env) or None)


def check(args: argparse.Namespace) -> None:
    settings: FitSettings = args.settings
    if settings.clock == "processor" and (args.url is not None or settings.threads != 1):
        raise InvalidInput("fit: clock = 'processor' needs an engine that is started here, with one thread")
    if args.url is not None and args.shape is None:
        raise InvalidInput("fit: --url needs --shape FILE, the config.json of the model that it serves")


@dataclass
class _Measured:
    """Measured points, True if held out from the fit."""

    model: str
    prefills: list[tuple[PrefillPoint, bool]]
    decodes: list[tuple[DecodePoint, bool]]
    never: list[DecodeCell]  # batches whose answers never overlapped
    seconds: float


@dataclass
class _Fitted:
    cost: CostModel
    errors: dict[str, Errors]
    """Errors of prefills and decoding steps, fitted and held out."""


def _fit(args: argparse.Namespace, key: str | None) -> int:
    import asyncio

    from skymemory.conductor.cost_fit import dump
    from skymemory_lab.fitting import prefill_cells
    from skymemory_lab.replay.client import base_url

    settings: FitSettings = args.settings

    shape = _shape(args)
    least, most = settings.lengths
    # Checked before an engine is started, which takes seconds.
    prefill_cells(least, most, settings.shares)
    measured = asyncio.run(_measure(args, key))
    fitted = _fitted(args, shape, measured)
    notes = {
        "model": measured.model,
        "measured": "engine small, started for it" if args.url is None else base_url(args.url),
        "statistic": f"{settings.statistic} of {settings.repeats}, {settings.clock} time",
        "errors": {name: asdict(error) for name, error in fitted.errors.items()},
    }
    if args.out is not None:
        args.out.write_text(dump(fitted.cost, notes), encoding="utf-8")
    if args.json:
        print(json.dumps(_object(measured, fitted, notes), indent=1))
    else:
        write_line("\n".join(_lines(args, measured, fitted)))
    worst = fitted.errors["prefills held out"].worst
    return 1 if args.within is not None and worst > args.within else 0


def _shape(args: argparse.Namespace) -> ModelShape:
    from skymemory.conductor.cost_model import shape_of
    from skymemory.engine.inputs import small_model_folder

    file = args.shape or small_model_folder() / "config.json"
    config = read_json(file, "a model's config.json")
    if args.url is None:
        return shape_of("the small model", config, _FLOAT32_BYTES)
    return shape_of(str(config.get("_name_or_path") or file.resolve().parent.name), config)


async def _measure(args: argparse.Namespace, key: str | None) -> _Measured:
    import aiohttp

    from skymemory_lab.demo.processes import service
    from skymemory_lab.fitting import Measurement, decode_cells, prefill_cells
    from skymemory_lab.replay.client import Client, Target, base_url
    from skymemory_lab.replay.play import find_model

    settings: FitSettings = args.settings

    started_s = time.perf_counter()
    async with AsyncExitStack() as stack:
        url = args.url
        if url is None:
            words = ("serve", "--model", "small", "--listen", "127.0.0.1:0")
            # Room for all cached shares at once, and for batches twice as large as the measured batches.
            options = (
                "--cache",
                "256MiB",
                "--threads",
                str(settings.threads),
                "--running",
                str(max(8, 2 * settings.batch)),
            )
            (url,) = await stack.enter_async_context(service("the engine", 1, *words, *options))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, connector=connector))
        client = Client(session, Target(base_url(url), settings.model or ""))
        endpoint = await find_model(client, settings.model)
        least, most = settings.lengths
        # A measured prompt needs room for a few tokens of its answer, and for tokens that a server prepends.
        if endpoint.context_tokens is not None and most + 8 > endpoint.context_tokens:
            raise InvalidInput(
                f"lengths: [{least}, {most}]: expected at most {endpoint.context_tokens - 8} for {endpoint.model}"
            )
        make = await _prompts(args, client, endpoint.context_tokens)
        spent = _spent(session, base_url(url)) if settings.clock == "processor" else None
        measuring = Measurement(client, make, time.perf_counter, settings.seed, _progress, spent)
        try:
            cells = prefill_cells(least, most, settings.shares)
            prefills = await measuring.prefills(cells, settings.repeats, settings.statistic)
            decodes: list[tuple[DecodePoint, bool]] = []
            never: list[DecodeCell] = []
            if settings.decode:
                batches = decode_cells(settings.batch, settings.contexts)
                decodes, never = await measuring.decodes(batches, settings.repeats, settings.statistic)
        finally:
            _progress("", 1.0)
    return _Measured(endpoint.model, prefills, decodes, never, time.perf_counter() - started_s)


def _spent(session: aiohttp.ClientSession, url: str) -> Spent:
    # Return a reader of the engine's processor seconds for prefill and decoding.
    from skymemory_lab.replay.report import samples_of

    async def spent() -> tuple[float, float]:
        async with session.get(f"{url}/metrics") as answer:
            samples = samples_of(await answer.text())
        prefill_s, decode_s = (samples[f"skymemory:{phase}_processor_seconds_total"] for phase in ("prefill", "decode"))
        return prefill_s, decode_s

    return spent


async def _prompts(args: argparse.Namespace, client: Client, context_tokens: int | None) -> MakePrompt:
    from skymemory_lab.replay.play import calibrate, negotiate_features
    from skymemory_lab.sim.prompt_text import WORDS

    settings: FitSettings = args.settings

    if settings.prompt_unit == "ids":
        first, last = settings.ids
        await negotiate_features(client, [first] * 8, time.perf_counter)

        def by_ids(tokens: int, dice: random.Random) -> Prompt:
            return [dice.randint(first, last) for _ in range(tokens)]

        return by_ids
    measure, _ = await calibrate(client, WORDS, settings.seed, context_tokens, time.perf_counter)

    def by_words(tokens: int, dice: random.Random) -> Prompt:
        return " ".join(dice.choices(WORDS, k=measure.words(tokens)))

    return by_words


def _fitted(args: argparse.Namespace, shape: ModelShape, measured: _Measured) -> _Fitted:
    from skymemory.conductor.cost_fit import decode_errors, fit_decode, fit_prefill, prefill_errors
    from skymemory.conductor.cost_model import Machine

    settings: FitSettings = args.settings

    machine = None
    if settings.flops is not None and settings.memory_bytes_per_s is not None:
        machine = Machine(
            "as named", settings.flops, float(settings.memory_bytes_per_s), float(settings.network_bytes_per_s)
        )
    # A fit is judged at held-out lengths: errors of fitted points only show how flexible the model is.
    fitted_on, held_out = _split_held_out(measured.prefills)
    cost = fit_prefill(fitted_on, shape, machine)
    errors = {
        "prefills fitted on": prefill_errors(cost, fitted_on),
        "prefills held out": prefill_errors(cost, held_out),
    }
    if measured.decodes:
        steps_on, steps_held = _split_held_out(measured.decodes)
        cost = fit_decode(steps_on, cost)
        errors["decoding steps fitted on"] = decode_errors(cost, steps_on)
        if steps_held:
            errors["decoding steps held out"] = decode_errors(cost, steps_held)
    # Without `flops`, the machine is the measured machine, but a network cannot be measured at one endpoint.
    if machine is None:
        cost = replace(cost, machine=replace(cost.machine, network_bytes_per_s=float(settings.network_bytes_per_s)))
    return _Fitted(cost, errors)


def _split_held_out(pairs: Sequence[tuple[Any, bool]]) -> tuple[list[Any], list[Any]]:
    return [point for point, is_held_out in pairs if not is_held_out], [
        point for point, is_held_out in pairs if is_held_out
    ]


def _lines(args: argparse.Namespace, measured: _Measured, fitted: _Fitted) -> list[str]:
    settings: FitSettings = args.settings
    cost = fitted.cost
    lines = [
        f"{measured.model}, measured in {measured.seconds:.0f} s: {settings.statistic} of {settings.repeats}, "
        f"{settings.clock} time (* held out)",
        "",
    ]
    lines.append(f"  {'tokens':>8}{'cached':>8}{'measured':>12}{'fitted':>12}{'off':>9}")
    for point, is_held_out in measured.prefills:
        lines.append(
            _row(is_held_out, point.tokens, point.cached, point.seconds, cost.prefill_s(point.tokens, point.cached))
        )
    if measured.decodes:
        lines += ["", f"  {'batch':>8}{'context':>8}{'measured':>12}{'fitted':>12}{'off':>9}"]
        for step, is_held_out in measured.decodes:
            context = round(step.kv_tokens / step.batch)
            lines.append(
                _row(is_held_out, step.batch, context, step.seconds, cost.decode_step_s(step.batch, step.kv_tokens))
            )
    for cell in measured.never:
        lines.append(
            f"  {cell.batch} answers with {cell.context} tokens of context never ran in one batch: not measured"
        )
    lines.append("")
    for name, error in fitted.errors.items():
        lines.append(
            f"{name + ':':<26} off by {error.mean:.1%} on average, {error.worst:.1%} at worst, bias {error.bias:+.1%}"
        )
    lines += ["", _law(cost)]
    if args.out is not None:
        lines.append(f"written to {args.out}; use it with: skymemory route --cost {args.out}")
    return lines


def _row(is_held_out: bool, first: int, second: int, measured_s: float, fitted_s: float) -> str:
    mark = "*" if is_held_out else " "
    off = fitted_s / measured_s - 1
    return f"{mark} {first:>8,}{second:>8,}{measured_s * 1e3:>9.2f} ms{fitted_s * 1e3:>9.2f} ms{off:>+9.1%}"


def _law(cost: CostModel) -> str:
    per_token_s = (
        cost.shape.layers * cost.shape.weight_flops * cost.shape.width**2 / (cost.machine.flops_per_s * cost.mfu)
    )
    # The quadratic part of a prefill: attention per attended token, relative to the weights' work per token.
    share = cost.shape.attention_flops / (cost.shape.weight_flops * cost.shape.width)
    words = (
        f"prefill: {cost.fixed_s * 1e3:.2f} ms + {per_token_s * 1e6:.2f} µs per computed token "
        f"({share * 1000:.2%} more per 1,000 tokens attended to) + {cost.cached_token_s * 1e6:.2f} µs per cached "
        f"token; {cost.machine.flops_per_s * cost.mfu:.3g} operations/s"
    )
    if cost.decode_fixed_s or cost.decode_request_s:
        words += (
            f"\ndecoding step: {cost.decode_fixed_s * 1e3:.2f} ms + {cost.decode_request_s * 1e3:.2f} ms per request"
        )
        words += f" + memory reads at {cost.machine.memory_bytes_per_s * cost.memory_share:.3g} bytes/s + compute"
    return words


def _object(measured: _Measured, fitted: _Fitted, notes: dict[str, Any]) -> dict[str, Any]:
    from skymemory.conductor.cost_fit import dump

    cost = fitted.cost
    return {
        **notes,
        "seconds": round(measured.seconds, 3),
        "cost": json.loads(dump(cost)),
        "prefills": [
            {**asdict(point), "fitted_s": cost.prefill_s(point.tokens, point.cached), "held_out": is_held_out}
            for point, is_held_out in measured.prefills
        ],
        "decodes": [
            {**asdict(step), "fitted_s": cost.decode_step_s(step.batch, step.kv_tokens), "held_out": is_held_out}
            for step, is_held_out in measured.decodes
        ],
        "never": [asdict(cell) for cell in measured.never],
    }


def _progress(name: str, share: float) -> None:
    if sys.stderr.isatty():
        line = f"measuring {name}: {share:.0%}" if name else ""
        print(f"\r\x1b[K{line[: width_of(sys.stderr) - 1]}", end="", file=sys.stderr, flush=True)
