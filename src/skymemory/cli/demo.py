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


def run(args: argparse.Namespace) -> int:
    from skymemory.cli._demo_run import run_demo
    from skymemory.engine.tokenizer import read_document, shipped_document

    document = read_document(args.document) if args.document else shipped_document()
    return run_demo(args, document)
