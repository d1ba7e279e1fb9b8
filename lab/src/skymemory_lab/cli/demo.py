"""``skymemory demo``: the paper's testbed and its table 3 on this machine, and seven other demos."""

# ruff: noqa: RUF009 - defaults are frozen values

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skymemory.cli._options import add_rare_settings, add_satellite_kind, argument, check_serving_installed
from skymemory.config import integer, number, one_of, path, setting, size, suggestion, text, whole_number
from skymemory.constellation.ground_track import CellGrid, parse_grid
from skymemory.errors import InvalidInput

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers

_QUICK_STRATEGIES = ("random", "round-robin", "least-load", "approximate", "least-ttft")
_STRATEGIES = (*_QUICK_STRATEGIES[:-1], "precise", "least-ttft")


@dataclass(frozen=True, slots=True)
class CellsSettings:
    grid: CellGrid = setting("grid", lambda value: parse_grid(text(value)), CellGrid(24, 24), "rows and columns")
    cell_m: float = setting("cell_m", number, 500.0, "distance between cells in metres")
    speed_kmh: float = setting("speed_kmh", number, 50.0, "speed of the user")
    legs: int = setting("legs", whole_number, 3, "straight legs to random places")
    servers: int = setting("servers", whole_number, 9, "cells that hold the value")
    value_bytes: int = setting("value", size, 2_883_584, "size of the value")
    seed: int = setting("seed", integer, 1, "seed of the drive and of the value's bytes")


@dataclass(frozen=True, slots=True)
class ConductorSettings:
    pools: str = setting(
        "pools",
        one_of("fixed", "elastic"),
        "fixed",
        "`elastic`: machines change between prefill and decode as the load does",
    )
    trace: Path | None = setting(
        "trace", path, None, "the released conversation trace, a file; default: a seeded generator"
    )
    seed: int = setting("seed", integer, 0, "seed of requests, jitter and ties")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="watch it work: the paper's table 3 on this computer, and seven other demos",
        description="Starts the 19x5 constellation as five processes with the delays of its geometry, runs a model of "
        "TinyLlama-1.1B's shape over a document with and without the cache, and prints the paper's table 3.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a smaller model and fewer tokens; under 60 s")
    add(
        "--model",
        metavar="NAME|DIR",
        help="small (the trained model that is shipped), small-random, tinyllama-random, "
        "tinyllama-6-random, or a folder saved by transformers (default: as many layers of "
        "tinyllama-random as fit the time)",
    )
    add("--document", type=Path, metavar="FILE", help="text to use as context (default: a shipped handbook)")
    add(
        "--tokens",
        type=int,
        metavar="N",
        help="length of the prompt (default: 524, four blocks and a tail, if that fits the time)",
    )
    add("--seed", type=int, metavar="N", default=0, help="seed of the random weights (default: 0)")
    add("--json", action="store_true", help="print the results as one JSON object")
    demos = parser.add_subparsers(
        dest="what",
        metavar="motion|cells|cake|route|conductor|vllm|disagg",
        help="another demo: see `skymemory demo motion --help`",
    )
    _add_motion(demos)
    _add_cells(demos)
    _add_cake(demos)
    _add_route(demos)
    _add_conductor(demos)
    _add_vllm(demos)
    _add_disagg(demos)


def _add_motion(subparsers: Subparsers) -> None:
    motion = subparsers.add_parser(
        "motion",
        help="an orbit in fast motion: the box moves, a plane fails and returns, reads go on",
        description="Starts the 19x5 constellation with a fast clock, draws the box as it moves over the grid, reads "
        "known values throughout, kills the process of one plane halfway and restarts it, and reports what was moved, "
        "lost and recomputed. Needs no model.",
    )
    add = motion.add_argument
    add("--seconds", type=float, default=36.0, metavar="N", help="duration (default: 36)")
    add("--speed", type=float, default=160.0, metavar="X", help="speed of the clock, times real time (default: 160)")
    add_satellite_kind(motion)
    add("--seed", type=int, metavar="N", default=0, help="seed of the values' bytes (default: 0)")
    add("--json", action="store_true", help="print the report as one JSON object, progress on standard error")


def _add_cells(subparsers: Subparsers) -> None:
    cells = subparsers.add_parser(
        "cells",
        help="a user among base stations on the ground: the cache follows, or stays",
        description="Drives through a grid of base stations in virtual time, reading a value throughout, once "
        "with a cache that follows the user (rotation_hop) and once with one that stays (hop), and reports reads, "
        "latency and bytes handed over. Starts no process and needs no model. The exit code is 1 if a read missed.",
    )
    add_rare_settings(cells, CellsSettings)
    cells.add_argument(
        "--json", action="store_true", help="print the report as one JSON object, progress on standard error"
    )


def _add_cake(subparsers: Subparsers) -> None:
    cake = subparsers.add_parser(
        "cake",
        help="a prompt is computed, loaded, and both at once from its two ends (Cake)",
        description="Runs a small model over one prompt three times: computing it, loading its KV cache over a link of "
        "limited rate, and both at once, computed from the front and loaded from the back until the two meet. Draws "
        "the three as bars, then repeats it at other rates. Starts no process. The exit code is 1 if the three "
        "differ in the next token.",
    )
    add = cake.add_argument
    add("--quick", action="store_true", help="a shorter prompt; under 25 s")
    add("--tokens", type=int, metavar="N", help="length of the prompt (default: what takes about 2 s to compute)")
    add(
        "--share",
        type=float,
        default=1.0,
        metavar="S",
        help="share of the compute that the prompt gets; other prompts get the rest (default: 1)",
    )
    add("--seed", type=int, metavar="N", default=0, help="seed of the weights and of the prompt (default: 0)")
    add("--json", action="store_true", help="print the results as one JSON object, progress on standard error")


def _add_route(subparsers: Subparsers) -> None:
    route = subparsers.add_parser(
        "route",
        help="four real engines behind the router: the same requests under each strategy",
        description="Starts four engines of the shipped small model, each with a prefix cache for a third of the "
        "prompts' blocks, and the router before them, and sends the same prompts at the same times once for each "
        "strategy. Prints measured hits, load and times to first token. The exit code is 1 if a request was not "
        "answered.",
    )
    add = route.add_argument
    add("--quick", action="store_true", help="fewer requests; under 45 s")
    add(
        "--strategies",
        type=argument(_strategies),
        metavar="A,B,…",
        help=f"strategies of the router (default: {','.join(_STRATEGIES)}; with --quick without precise)",
    )
    add(
        "--workload",
        choices=("conversations", "tenants"),
        default="conversations",
        help="prompts as in Mooncake's conversation trace (default), or of many tenants, each with a long system "
        "prompt",
    )
    add("--requests", type=int, metavar="N", help="requests per strategy (default: 50, with --quick 32)")
    add(
        "--seed",
        type=int,
        metavar="N",
        default=0,
        help="seed of prompts, arrivals, the order of strategies and ties (default: 0)",
    )
    add("--json", action="store_true", help="print the results as one JSON object, progress on standard error")


def _add_conductor(subparsers: Subparsers) -> None:
    conductor = subparsers.add_parser(
        "conductor",
        help="a simulated cluster: queues, hits, transfers and refusals under four schedulers",
        description="Simulates eight prefill and eight decode machines, once for each of four schedulers, with the "
        "production schedulers and admission rules, and plays the four back side by side: queues, cache hits, "
        "transfers between machines, refusals. Ends with a table of the results.",
    )
    add = conductor.add_argument
    add("--quick", action="store_true", help="four minutes of requests instead of ten; under 30 s")
    add("--rate", type=float, default=2.0, metavar="X", help="request rate, times the workload's own (default: 2)")
    add("--admission", default="early", metavar="RULE", help="admission rule (default: early)")
    add(
        "--cost",
        type=Path,
        metavar="FILE|NAME",
        help="cost model of a machine from `skymemory fit`, or a preset (default: LLaMA-70B on 8×A800)",
    )
    add("--no-play", action="store_true", help="print only the table")
    add(
        "--out",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="write a page of plots to a .png, .svg or .pdf file (needs the extra 'figures'), or a timeline for "
        "chrome://tracing or Perfetto to a .json file; may be repeated",
    )
    add_rare_settings(conductor, ConductorSettings)
    add("--json", action="store_true", help="print the results as one JSON object, progress on standard error")


def _strategies(text: str) -> tuple[str, ...]:
    from skymemory.conductor.strategies.registry import NAMES

    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in NAMES:
            raise InvalidInput(f"no routing strategy {name!r}; {suggestion(name, NAMES)}")
    if not names:
        raise InvalidInput(f"no strategy in {text!r}: expected some, such as random,least-ttft")
    return names


def _add_vllm(subparsers: Subparsers) -> None:
    vllm = subparsers.add_parser(
        "vllm",
        help="two vLLM servers that share memory, beside a plain one",
        description="Starts plain vLLM, then a process that owns memory for all engines and two vLLM servers with the "
        "connector that map it, and asks each the same three questions about a document by the openai client. The "
        "exit code is 1 if the second server loaded nothing of what the first had stored, or one answered otherwise. "
        "`make demo-vllm` makes the environment with vLLM.",
    )
    _add_vllm_environment(vllm)
    add = vllm.add_argument
    add(
        "--store",
        metavar="ADDRESS",
        help="store that the owner process serves, such as host://4GiB, tiers:... or constellation, which it starts "
        "(default: a host:// store as large as is needed and free in /dev/shm)",
    )
    add("--windows", action="store_true", help="a model of Gemma 3's shape, most of whose layers see 512 tokens")
    add("--json", action="store_true", help="print the answers as one JSON object, progress on standard error")


def _add_vllm_environment(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python",
        type=Path,
        default=Path(".venv-vllm/bin/python"),
        metavar="FILE",
        help="Python of the environment with vLLM (default: .venv-vllm/bin/python)",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder of a model (default: one of random weights)")


def _add_disagg(subparsers: Subparsers) -> None:
    disagg = subparsers.add_parser(
        "disagg",
        help="one engine prefills, another decodes: who computed what, and a burst with early refusals",
        description="Starts the 19x5 constellation, the store daemon in front of it, an engine that prefills, one that "
        "decodes and the router, which takes the two steps of each request. Prints for ten requests what was computed "
        "where and what was moved; then sends a burst of which the router refuses early what would come too late. The "
        "exit code is 1 if an answer failed or had other words than one engine's, or if a refused request cost a "
        "prefill.",
    )
    add = disagg.add_argument
    add(
        "--engine",
        choices=("vllm", "own"),
        help="vLLM, or the project's own engine with a small model (default: vLLM where its environment is)",
    )
    _add_vllm_environment(disagg)
    add("--requests", type=int, default=10, metavar="N", help="one after the other (default: 10)")
    add("--burst", type=int, default=16, metavar="N", help="requests at once (default: 16)")
    add("--json", action="store_true", help="print the results as one JSON object, progress on standard error")


def run(args: argparse.Namespace) -> int:
    for ending in (signal.SIGTERM, signal.SIGHUP):
        # As for Ctrl-C: the stack unwinds, and everything that a demo started is ended.
        if signal.getsignal(ending) is signal.SIG_DFL:
            signal.signal(ending, signal.default_int_handler)
    if args.what == "vllm":
        from skymemory_lab.demo.vllm import run_vllm

        return run_vllm(args)
    if args.what == "disagg":
        if not 1 <= args.requests <= 40 or not 2 <= args.burst <= 40:
            raise InvalidInput(f"--requests {args.requests}, --burst {args.burst}: expected 1 to 40, and 2 to 40")
        check_serving_installed("small" if args.model is None else None)
        from skymemory_lab.demo.disagg import run_disagg

        return run_disagg(args)
    if args.what == "conductor":
        from skymemory_lab.demo.conductor import run_conductor

        return run_conductor(args)
    # Numbers are checked here, before torch or an engine is loaded: a typing error must not cost ten seconds.
    if args.what == "route":
        if args.requests is not None and not 10 <= args.requests <= 5000:
            raise InvalidInput(f"--requests {args.requests}: expected 10 to 5000")
        check_serving_installed("small")
        args.are_strategies_chosen = args.strategies is not None
        args.strategies = args.strategies or (_QUICK_STRATEGIES if args.quick else _STRATEGIES)
        from skymemory_lab.demo.route import run_route

        return run_route(args)
    if args.what == "cake":
        if not 0 < args.share <= 1:
            raise InvalidInput(f"--share {args.share}: expected above 0, at most 1")
        from skymemory.engine.inputs import check_engine_installed
        from skymemory.progress import Progress

        if args.tokens is not None and not 320 <= args.tokens <= 8000:
            raise InvalidInput(f"--tokens {args.tokens}: expected 320 to 8000")
        check_engine_installed("small")
        progress = Progress(sys.stderr if args.json else sys.stdout)
        progress.say("the speed of this computer is measured first, and decides how much is shown")
        with progress.wait("loading torch and transformers", 6.0):
            from skymemory_lab.demo.cake import run_cake

        return run_cake(args, progress)
    if args.what == "cells":
        from skymemory_lab.demo.cells import run_cells

        return run_cells(args)
    if args.what == "motion":
        from skymemory_lab.demo.motion import run_motion

        return run_motion(args)
    from skymemory.engine.inputs import read_document, shipped_document
    from skymemory_lab.demo.table3 import run_demo

    document = read_document(args.document) if args.document else shipped_document()
    return run_demo(args, document)
