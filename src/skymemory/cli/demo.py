"""``skymemory demo``: the paper's testbed and its table 3, on this machine, from nothing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers

DEMO_CODECS = ("raw", "quanto8", "hqq8")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="a prompt's KV cache goes up to a constellation and comes back sooner than it can be computed",
        description="Starts the 19x5 constellation as five processes with the delays of its geometry, runs a model of "
        "TinyLlama-1.1B's shape over a document with and without the cache, and prints the paper's table 3.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a smaller model and fewer tokens: under 45 s")
    add("--model", type=Path, metavar="DIR", help="a model saved by transformers (default: random weights)")
    add("--document", type=Path, metavar="FILE", help="the text to use as context (default: a shipped handbook)")
    add("--tokens", type=int, metavar="N", help="tokens of prompt (default: 524, four blocks and a tail)")
    add("--seed", type=int, default=0, help="seed of the random weights")
    add("--json", action="store_true", help="print the results as one JSON object")
    _add_motion(parser.add_subparsers(dest="what", metavar="motion", help="another demo, see demo motion --help"))


def _add_motion(others: Subparsers) -> None:
    motion = others.add_parser(
        "motion",
        help="an orbit run fast: the box moves over the grid, a plane dies and returns, reads go on",
        description="Starts the 19x5 constellation with its clock running fast, draws the box as it moves over the "
        "grid, reads known values all the while, kills the process of one plane in the middle and starts it again, "
        "and reports what was moved, lost and computed again. Needs no model.",
    )
    add = motion.add_argument
    add("--seconds", type=float, default=36.0, metavar="N", help="how long it flies (default: 36)")
    add("--speed", type=float, default=160.0, metavar="X", help="times as fast as real (default: 160)")
    add("--no-color", action="store_true", help="draw without colours (NO_COLOR does the same)")
    add("--seed", type=int, default=0, help="seed of the values' bytes")
    add("--json", action="store_true", help="print the report as one JSON object, progress on standard error")


def run(args: argparse.Namespace) -> int:
    if args.what == "motion":
        from skymemory.cli._demo_motion import run_motion

        return run_motion(args)
    from skymemory.cli._demo_run import run_demo
    from skymemory.engine.tokenizer import read_document, shipped_document

    document = read_document(args.document) if args.document else shipped_document()
    return run_demo(args, document)
