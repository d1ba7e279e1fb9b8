"""``skymemory figures``: the paper's figures, drawn from our own code, with the numbers behind them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "figures",
        help="draw the paper's figures as PNG, SVG and CSV",
        description="Draw figures of the SkyMemory paper: 1 and 2 (link delays), 4 to 8 (layouts), "
        "13 to 15 (layouts of 9 to 81 servers), 16 (latency of 132 settings). Needs the extra 'figures'.",
    )
    parser.add_argument("numbers", nargs="*", type=int, metavar="N", help="which figures (default: all)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("figures"),
        metavar="DIR",
        help="folder to write to (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from skymemory.sim.latency import claims
    from skymemory.view.figures import FIGURES, check_figure, write_figure

    numbers: list[int] = list(dict.fromkeys(args.numbers)) or sorted(FIGURES)
    for number in numbers:
        check_figure(number)
    for number in numbers:
        for path in write_figure(number, args.out):
            print(path)
    if 16 in numbers:
        print("\nWhat the paper concludes, and what its own model says:")
        for what, paper, model in claims():
            print(f"  {what}\n    paper: {paper}\n    model: {model}")
    return 0
