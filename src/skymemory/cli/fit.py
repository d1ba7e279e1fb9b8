"""``skymemory fit``: what prefills and decoding steps take at an engine, measured and made a cost model of."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from skymemory.cli._options import add_json, argument, check_serving_installed, fraction, size
from skymemory.errors import InvalidInput, MissingExtra

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "fit",
        help="fit the cost model to an engine by measuring it",
        description="Measure what prompts of several lengths and cached shares, and answers in several batches, take "
        "at an OpenAI endpoint that does nothing else meanwhile; fit the conductor's cost model to it, and show how "
        "far off it is for lengths that it was not fitted on.",
        epilog="docs/guide/fitting.md says what is measured how. The file is for `skymemory route --cost FILE`.",
    )
    add = parser.add_argument
    add("--engine", choices=("small",), help="start this engine here and measure it")
    add("--url", help="measure this endpoint, as http://127.0.0.1:8000")
    add("--shape", type=Path, metavar="FILE", help="the model's config.json (default with --engine: its own)")
    add("--out", type=Path, metavar="FILE", help="where the cost model is written")
    add(
        "--within",
        type=fraction,
        metavar="SHARE",
        help="exit code 1 if a prefill held out is further off, such as 10%%",
    )
    add("--lengths", type=argument(_range), default=(64, 4096), metavar="A-B", help="of prompts (default: 64-4096)")
    add(
        "--shares",
        type=argument(_shares),
        default=(0.0, 0.5, 0.9),
        metavar="S,S",
        help="of prompts that are cached (default: 0,0.5,0.9)",
    )
    add("--batch", type=int, default=8, metavar="N", help="answers at once, at most (default: 8)")
    add(
        "--contexts",
        type=argument(_wholes),
        default=(64, 256, 1024),
        metavar="N,N",
        help="of answers (default: 64,256,1024)",
    )
    add("--no-decode", action="store_true", help="measure prompts only")
    add("--repeats", type=int, default=5, metavar="N", help="of each measurement (default: 5)")
    add("--statistic", choices=("median", "fastest"), default="median", help="of the repeats (default: median)")
    add(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="processor: by what the engine's thread took of a processor, where others use the computer too "
        "(--engine only; default: wall)",
    )
    add(
        "--prompt-unit", choices=("ids", "tokens"), default="ids", help="prompts are token ids, or words (default: ids)"
    )
    add("--ids", metavar="A-B", default="300-1000", help="token ids to choose from (default: 300-1000)")
    add(
        "--flops",
        type=float,
        metavar="N",
        help="operations per second that the machine could do (default: what was reached)",
    )
    add("--memory", type=size, metavar="SIZE", help="bytes per second that its memory could do (with --flops)")
    add(
        "--network",
        type=size,
        default=1_250_000_000,
        metavar="SIZE",
        help="bytes per second of its network, which is not measured (default: 10 Gbit/s)",
    )
    add("--model", metavar="NAME", help="(default: the one that the endpoint serves)")
    add(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="the environment variable with the key (default: OPENAI_API_KEY)",
    )
    add("--threads", type=int, default=1, metavar="N", help="of the engine that is started (default: 1)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and their order (default: 0)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    check(args)
    if args.engine is not None:
        check_serving_installed()
    try:
        from skymemory.cli._runs.fit import fit
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{error.name} is missing: pip install 'skymemory[router]'") from error
    return fit(args, os.environ.get(args.api_key_env) or None)


def check(args: argparse.Namespace) -> None:
    """Raises InvalidInput for what cannot go together."""
    if (args.engine is None) == (args.url is None):
        raise InvalidInput("fit: name --engine small, or an endpoint with --url, and not both")
    if args.clock == "processor" and (args.engine is None or args.threads != 1):
        raise InvalidInput("fit: --clock processor is for --engine small with one thread, which tells it")
    if args.url is not None and args.shape is None:
        raise InvalidInput("fit: --url needs --shape FILE, the config.json of the model that it serves")
    if (args.flops is None) != (args.memory is None):
        raise InvalidInput("fit: --flops and --memory go together: what the machine could do at best")
    if args.flops is not None and not (args.flops > 0 and args.memory > 0):
        raise InvalidInput("fit: --flops and --memory are above 0")
    for name in ("repeats", "threads", "network"):
        if getattr(args, name) < 1:
            raise InvalidInput(f"--{name} {getattr(args, name)}: expected 1 or more")


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not first.isdecimal() or not last.isdecimal():
        raise InvalidInput(f"{text!r}: expected two lengths, such as 64-4096")
    return int(first), int(last)


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(sorted({float(one) for one in text.split(",")}))
    except ValueError:
        raise InvalidInput(f"{text!r}: expected shares such as 0,0.5,0.9") from None


def _wholes(text: str) -> tuple[int, ...]:
    if not all(one.isdecimal() for one in text.split(",")):
        raise InvalidInput(f"{text!r}: expected whole numbers such as 64,256,1024")
    return tuple(sorted({int(one) for one in text.split(",")}))
