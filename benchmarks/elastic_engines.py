"""Goodput of elastic pools beside each fixed split, on real engines: `python benchmarks/elastic_engines.py`.

Engines (``skymemory serve --role both``) over one store behind ``skymemory route``. The mix of the load changes: first
long prompts with short answers, then short prompts with long answers. A request counts if it met both objectives, its
first token and the mean between its tokens. Each run starts new processes and sends the same requests at the same
times. Engines compute on one core each, one prompt or one token at a time, and share the machine's cores: on two, two
engines of one pool do twice what one does while the third has little to do, so the split matters all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from _bench import print_table, write_json
from skymemory_lab.demo.processes import service

START_S = 60.0
_ELASTIC = '[elastic]\nsmoothing = "{smoothing:g}s"\nsettle = "{settle:g}s"\n'


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    prompt: tuple[int, int]
    """Tokens, from and to."""
    answer: int
    per_s: float
    """Requests a second, Poisson."""


@dataclass(slots=True)
class Result:
    phase: str
    status: int = 0
    ttft_s: float = 0.0
    tbt_s: float = 0.0
    tokens: int = 0
    estimated_s: float | None = None
    """Of the first token, by the router as it chose the servers."""


async def run(args: argparse.Namespace, split: tuple[int, int], elastic: bool) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sky-")))
        store = folder / "s"
        words = ("store", "serve", "memory://512MiB", "--listen", f"unix://{store}")
        await stack.enter_async_context(service("the store", 0, *words))
        async with asyncio.timeout(START_S):
            while not store.is_socket():
                await asyncio.sleep(0.1)
        words = ("serve", "--listen", "127.0.0.1:0", "--store", f"unix://{store}", "--role", "both")
        starting = [stack.enter_async_context(service("an engine", 1, *words)) for _ in range(sum(split))]
        engines = [url for urls in await asyncio.gather(*starting) for url in urls]
        settings = folder / "route.toml"
        roles = [("prefill" if at < split[0] else "decode", url) for at, url in enumerate(engines)]
        servers = [
            f'[[backends]]\nurl = "{url}"\nrole = "{role}"\nelastic = {str(elastic).lower()}\n' for role, url in roles
        ]
        objectives = f'[admission]\nttft = "{args.ttft}s"\ntbt = "{args.tbt}s"\n'
        pools = _ELASTIC.format(smoothing=args.smoothing, settle=args.settle)
        settings.write_text("".join([*servers, objectives, pools]), "utf-8")
        words = ("route", "--listen", "127.0.0.1:0", "--settings", str(settings))
        (url,) = await stack.enter_async_context(service("the router", 1, *words))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await warm(session, engines, args.seed)
        return await played(session, url, args, split, elastic)


async def warm(session: aiohttp.ClientSession, engines: list[str], seed: int) -> None:
    dice = random.Random(seed + 1)
    for url in engines:
        for prompt in (50, 500, 2500):
            await asked(session, url, [dice.randrange(3, 8000) for _ in range(prompt)], 8, Result("warm"))


async def played(
    session: aiohttp.ClientSession, url: str, args: argparse.Namespace, split: tuple[int, int], elastic: bool
) -> dict[str, Any]:
    dice, results, tasks, splits = random.Random(args.seed), list[Result](), list[asyncio.Task[None]](), list[Any]()
    began_s, due_s = time.monotonic(), 0.0

    async def watch() -> None:
        while True:
            async with session.get(f"{url}/ready") as answer:
                roles = [each["role"] for each in (await answer.json())["servers"] if each["state"] == "serving"]
            now = [roles.count("prefill"), roles.count("decode")]
            if not splits or splits[-1][1] != now:
                splits.append([round(time.monotonic() - began_s, 1), now])
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    for number in range(args.rounds * len(PHASES)):
        phase = PHASES[number % len(PHASES)]
        ends_s = (number + 1) * args.seconds
        due_s = number * args.seconds
        while (due_s := due_s + dice.expovariate(phase.per_s * args.scale)) < ends_s:
            prompt = [dice.randrange(3, 8000) for _ in range(dice.randint(*phase.prompt))]
            await asyncio.sleep(max(0.0, began_s + due_s - time.monotonic()))
            results.append(Result(phase.name))
            tasks.append(asyncio.create_task(asked(session, url, prompt, phase.answer, results[-1])))
    await asyncio.gather(*tasks)
    watching.cancel()
    row: dict[str, Any] = {
        "seed": args.seed,
        "split": f"{split[0]}P{split[1]}D",
        "elastic": elastic,
        "requests": len(results),
        "splits": splits,
    }
    good = [each for each in results if each.status == 200 and each.ttft_s <= args.ttft and each.tbt_s <= args.tbt]
    row["failed"] = sum(each.status != 200 for each in results)
    row["good"] = len(good)
    row["goodput_per_s"] = round(len(good) / (args.rounds * len(PHASES) * args.seconds), 3)
    for phase in PHASES:
        its = [each for each in results if each.phase == phase.name and each.status == 200]
        row[phase.name] = {
            "requests": len(its),
            "good": sum(each.phase == phase.name for each in good),
            "ttft_p50_s": round(statistics.median(each.ttft_s for each in its), 3),
            "ttft_p90_s": round(statistics.quantiles((each.ttft_s for each in its), n=10)[-1], 3),
            "tbt_p50_s": round(statistics.median(each.tbt_s for each in its), 4),
            "estimated_ttft_p50_s": _median([each.estimated_s for each in its if each.estimated_s is not None]),
            "ttft_less_estimated_p50_s": _median(
                [each.ttft_s - each.estimated_s for each in its if each.estimated_s is not None]
            ),
            "tbt_p90_s": round(statistics.quantiles((each.tbt_s for each in its), n=10)[-1], 4),
        }
    return row


def _median(seconds: list[float]) -> float | None:
    return round(statistics.median(seconds), 3) if seconds else None


async def asked(session: aiohttp.ClientSession, url: str, prompt: list[int], answer: int, result: Result) -> None:
    fixed = {"max_tokens": answer, "min_tokens": answer, "temperature": 0, "ignore_eos": True, "stream": True}
    began_s, times = time.monotonic(), list[float]()
    try:
        asked_for = {"x-skymemory-decision": "1"}
        body = {"prompt": prompt, **fixed}
        async with session.post(f"{url}/v1/completions", json=body, headers=asked_for) as response:
            if decision := response.headers.get("x-skymemory-decision"):
                result.estimated_s = json.loads(decision).get("estimated_ttft_s")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    if not json.loads(line[6:]).get("choices"):
                        return
                    times.append(time.monotonic())
            result.status = response.status
    except (aiohttp.ClientError, TimeoutError):
        return
    if not times:
        result.status = 0
        return
    result.ttft_s, result.tokens = times[0] - began_s, answer
    result.tbt_s = (times[-1] - times[0]) / max(1, answer - 1)


PHASES = (Phase("long prompts", (1500, 3000), 4, 1.7), Phase("long answers", (16, 48), 192, 1.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ["2P1D", "1P2D", "2P1D+", "1P2D+"]
    parser.add_argument("--runs", nargs="+", default=every, help="splits; +: elastic from there on")
    parser.add_argument("--seconds", type=float, default=36.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="of the rates of arrivals")
    parser.add_argument("--per-s", type=float, nargs=2, default=(1.7, 1.0), help="rates of the two phases")
    parser.add_argument("--ttft", type=float, default=3.0, help="objective, seconds")
    parser.add_argument("--tbt", type=float, default=0.04, help="objective, seconds")
    parser.add_argument("--smoothing", type=float, default=5.0)
    parser.add_argument("--settle", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also of runs before: those in the file stay, unless run again")
    args = parser.parse_args()
    global PHASES
    PHASES = tuple(
        Phase(one.name, one.prompt, one.answer, per_s) for one, per_s in zip(PHASES, args.per_s, strict=True)
    )
    rows: list[dict[str, Any]] = []
    if args.json is not None and args.json.is_file():
        rows = json.loads(args.json.read_text("utf-8"))["rows"]
    for words in args.runs:
        prefill, _, decode = words.rstrip("D+").partition("P")
        made = asyncio.run(run(args, (int(prefill), int(decode)), words.endswith("+")))
        key = ("seed", "split", "elastic")
        rows = [row for row in rows if any(row[one] != made[one] for one in key)] + [made]
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        write_json(args.json, "elastic_engines", args.seed, rows)
    rows.sort(key=lambda row: (row["seed"], row["elastic"], row["split"]))
    report(rows)


def report(rows: list[dict[str, Any]]) -> None:
    head = ("seed", "split", "good", "of", "of the best", *(f"{one.name}: good, TTFT p90, TBT p90" for one in PHASES))
    table = []
    for row in rows:
        best = max((one["good"] for one in rows if one["seed"] == row["seed"] and not one["elastic"]), default=0)
        share = f"{row['good'] / best:.0%}" if best else "-"
        cells = [str(row["seed"]), row["split"] + "+" * row["elastic"], str(row["good"]), str(row["requests"]), share]
        for phase in PHASES:
            of = row[phase.name]
            times = f"{of['ttft_p90_s']:.2f} s, {of['tbt_p90_s'] * 1e3:.0f} ms"
            cells.append(f"{of['good']}/{of['requests']}, {times}")
        table.append(cells)
    print_table("Requests that met both objectives; best: of the fixed splits, in hindsight", head, table)


if __name__ == "__main__":
    main()
