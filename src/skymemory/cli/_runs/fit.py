"""One fit: the engine, its measuring, the cost model, and how far off it is."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from skymemory.cli._options import token_ids
from skymemory.conductor.cost_model.fit import (
    DecodePoint,
    Errors,
    PrefillPoint,
    decode_errors,
    dump,
    fit_decode,
    fit_prefill,
    prefill_errors,
)
from skymemory.conductor.cost_model.model import CostModel, Machine, ModelShape, shape_of
from skymemory.demo.processes import service
from skymemory.engine.inputs import SMALL_MODEL_FOLDER
from skymemory.errors import InvalidInput
from skymemory.files import read_bounded
from skymemory.serving.fitting import DecodeCell, MakePrompt, Measuring, Spent, decode_cells, prefill_cells
from skymemory.serving.replay.client import Client, Target, base_url
from skymemory.serving.replay.play import agree, calibrate, look
from skymemory.serving.replay.prompts import Prompt
from skymemory.serving.replay.report import samples_of
from skymemory.sim.workload import WORDS

_FLOAT32_BYTES = 4


@dataclass
class _Measured:
    model: str
    prefills: list[tuple[PrefillPoint, bool]]
    decodes: list[tuple[DecodePoint, bool]]
    never: list[DecodeCell]
    seconds: float


@dataclass
class _Fitted:
    cost: CostModel
    errors: dict[str, Errors]
    """Of prefills and decodes, each fitted on and held out."""


def fit(args: argparse.Namespace, key: str | None) -> int:
    """Exit code 1 where ``--within`` is missed."""
    shape = _shape(args)
    least, most = args.lengths
    prefill_cells(least, most, args.shares)  # what cannot be measured is said before an engine is started
    measured = asyncio.run(_measure(args, key))
    fitted = _fitted(args, shape, measured)
    notes = {
        "model": measured.model,
        "measured": "engine small, started for it" if args.engine else base_url(args.url),
        "statistic": f"{args.statistic} of {args.repeats}, {args.clock} time",
        "errors": {name: asdict(one) for name, one in fitted.errors.items()},
    }
    if args.out is not None:
        args.out.write_text(dump(fitted.cost, notes), encoding="utf-8")
    if args.json:
        print(json.dumps(_object(measured, fitted, notes), indent=1))
    else:
        print("\n".join(_lines(args, measured, fitted)))
    worst = fitted.errors["prefills held out"].worst
    return 1 if args.within is not None and worst > args.within else 0


def _shape(args: argparse.Namespace) -> ModelShape:
    file = args.shape or Path(SMALL_MODEL_FOLDER) / "config.json"
    try:
        config = json.loads(read_bounded(file))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"--shape {file}: {error}") from error
    if not isinstance(config, dict):
        raise InvalidInput(f"--shape {file}: a model's config.json is wanted")
    if args.engine is not None:
        return shape_of("the small model", config, _FLOAT32_BYTES)
    return shape_of(str(config.get("_name_or_path") or file.resolve().parent.name), config)


async def _measure(args: argparse.Namespace, key: str | None) -> _Measured:
    began_s = time.perf_counter()
    async with AsyncExitStack() as stack:
        url = args.url
        if args.engine is not None:
            words = ("serve", "--model", args.engine, "--listen", "127.0.0.1:0", "--threads", str(args.threads))
            more = ("--cache", "256MiB", "--running", str(max(8, 2 * args.batch)))
            (url,) = await stack.enter_async_context(service("the engine", 1, *words, *more))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, connector=connector))
        client = Client(session, Target(base_url(url), args.model or ""))
        known = await look(client, args.model)
        least, most = args.lengths
        if known.context_tokens is not None and most + 8 > known.context_tokens:
            raise InvalidInput(f"--lengths {least}-{most}: {known.model} takes {known.context_tokens} tokens")
        make = await _prompts(args, client, known.context_tokens)
        spent = _spent(session, base_url(url)) if args.clock == "processor" else None
        measuring = Measuring(client, make, time.perf_counter, args.seed, _progress, spent)
        try:
            cells = prefill_cells(least, most, args.shares)
            prefills = await measuring.prefills(cells, args.repeats, args.statistic)
            decodes: list[tuple[DecodePoint, bool]] = []
            never: list[DecodeCell] = []
            if not args.no_decode:
                batches = decode_cells(args.batch, args.contexts)
                decodes, never = await measuring.decodes(batches, args.repeats, args.statistic)
        finally:
            _progress("", 1.0)
    return _Measured(known.model, prefills, decodes, never, time.perf_counter() - began_s)


def _spent(session: aiohttp.ClientSession, url: str) -> Spent:
    async def spent() -> tuple[float, float]:
        async with session.get(f"{url}/metrics") as answer:
            told = samples_of(await answer.text())
        prefill_s, decode_s = (told[f"skymemory:{one}_processor_seconds_total"] for one in ("prefill", "decode"))
        return prefill_s, decode_s

    return spent


async def _prompts(args: argparse.Namespace, client: Client, context_tokens: int | None) -> MakePrompt:
    if args.prompt_unit == "ids":
        first, last = token_ids(args.ids)
        await agree(client, [first] * 8, time.perf_counter)

        def by_ids(tokens: int, dice: random.Random) -> Prompt:
            return [dice.randint(first, last) for _ in range(tokens)]

        return by_ids
    measure, _ = await calibrate(client, WORDS, args.seed, context_tokens, time.perf_counter)

    def by_words(tokens: int, dice: random.Random) -> Prompt:
        return " ".join(dice.choices(WORDS, k=measure.words(tokens)))

    return by_words


def _fitted(args: argparse.Namespace, shape: ModelShape, measured: _Measured) -> _Fitted:
    machine = None
    if args.flops is not None:
        machine = Machine("as named", args.flops, float(args.memory), float(args.network))
    on, held = _apart(measured.prefills)
    cost = fit_prefill(on, shape, machine)
    found = {"prefills fitted on": prefill_errors(cost, on), "prefills held out": prefill_errors(cost, held)}
    if measured.decodes:
        steps_on, steps_held = _apart(measured.decodes)
        cost = fit_decode(steps_on, cost)
        found["decoding steps fitted on"] = decode_errors(cost, steps_on)
        if steps_held:
            found["decoding steps held out"] = decode_errors(cost, steps_held)
    if machine is None:
        cost = replace(cost, machine=replace(cost.machine, network_bytes_per_s=float(args.network)))
    return _Fitted(cost, found)


def _apart(pairs: Sequence[tuple[Any, bool]]) -> tuple[list[Any], list[Any]]:
    return [one for one, held in pairs if not held], [one for one, held in pairs if held]


def _lines(args: argparse.Namespace, measured: _Measured, fitted: _Fitted) -> list[str]:
    cost = fitted.cost
    lines = [
        f"{measured.model}, measured in {measured.seconds:.0f} s: {args.statistic} of {args.repeats}, "
        f"{args.clock} time (* held out)",
        "",
    ]
    lines.append(f"  {'tokens':>8}{'cached':>8}{'measured':>12}{'fitted':>12}{'off':>9}")
    for point, held in measured.prefills:
        lines.append(_row(held, point.tokens, point.cached, point.seconds, cost.prefill_s(point.tokens, point.cached)))
    if measured.decodes:
        lines += ["", f"  {'batch':>8}{'context':>8}{'measured':>12}{'fitted':>12}{'off':>9}"]
        for step, held in measured.decodes:
            context = round(step.kv_tokens / step.batch)
            lines.append(_row(held, step.batch, context, step.seconds, cost.decode_step_s(step.batch, step.kv_tokens)))
    for cell in measured.never:
        lines.append(f"  {cell.batch} answers over {cell.context} tokens never ran all at once: not measured")
    lines.append("")
    for name, one in fitted.errors.items():
        lines.append(
            f"{name + ':':<26} off by {one.mean:.1%} on average, {one.worst:.1%} at worst, bias {one.bias:+.1%}"
        )
    lines += ["", _law(cost)]
    if args.out is not None:
        lines.append(f"written to {args.out}: skymemory route --cost {args.out}")
    return lines


def _row(held: bool, first: int, second: int, measured_s: float, fitted_s: float) -> str:
    mark = "*" if held else " "
    off = fitted_s / measured_s - 1
    return f"{mark} {first:>8,}{second:>8,}{measured_s * 1e3:>9.2f} ms{fitted_s * 1e3:>9.2f} ms{off:>+9.1%}"


def _law(cost: CostModel) -> str:
    """The model in the numbers that people compare."""
    per_token_s = (
        cost.shape.layers * cost.shape.weight_flops * cost.shape.width**2 / (cost.machine.flops_per_s * cost.mfu)
    )
    again = cost.shape.attention_flops / (cost.shape.weight_flops * cost.shape.width)
    words = (
        f"prefill: {cost.fixed_s * 1e3:.2f} ms + {per_token_s * 1e6:.2f} µs a computed token, {again * 1000:.2%} more "
        f"for every 1,000 that it attends to (n + p), + {cost.cached_token_s * 1e6:.2f} µs a cached one; "
        f"{cost.machine.flops_per_s * cost.mfu:.3g} operations/s"
    )
    if cost.decode_fixed_s or cost.decode_request_s:
        words += f"\ndecoding step: {cost.decode_fixed_s * 1e3:.2f} ms + {cost.decode_request_s * 1e3:.2f} ms a request"
        words += f" beside reading at {cost.machine.memory_bytes_per_s * cost.memory_share:.3g} bytes/s and computing"
    return words


def _object(measured: _Measured, fitted: _Fitted, notes: dict[str, Any]) -> dict[str, Any]:
    cost = fitted.cost
    return {
        **notes,
        "seconds": round(measured.seconds, 3),
        "cost": json.loads(dump(cost)),
        "prefills": [
            {**asdict(point), "fitted_s": cost.prefill_s(point.tokens, point.cached), "held_out": held}
            for point, held in measured.prefills
        ],
        "decodes": [
            {**asdict(step), "fitted_s": cost.decode_step_s(step.batch, step.kv_tokens), "held_out": held}
            for step, held in measured.decodes
        ],
        "never": [asdict(cell) for cell in measured.never],
    }


def _progress(what: str, share: float) -> None:
    """One line that is drawn over, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{f'measuring {what}: {share:.0%}' if what else ''}", end="", file=sys.stderr, flush=True)
