"""``skymemory reproduce``: figures of the Cake and Mooncake papers; ``figures``: those of the SkyMemory paper."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from skymemory.errors import InvalidInput

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory.reproduce.cake import Headline, Reproduction


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "reproduce",
        help="compute the figures of the Cake or Mooncake paper, beside the papers' own",
        description='cake: figures of "Compute or load KV cache? Why not both?" with our loader in virtual time, '
        "on GPUs modelled from the paper: 2 (equivalent bandwidth), 3 (steps), 5 (whole GPUs), "
        "6 (14k tokens on a share of one), 7 (overhead, measured here), 8 (9k and 14k tokens, averages). "
        "mooncake: the experiments of Mooncake in our cluster simulator: popularity (figure 6), hits (table1), "
        "layer-wise (7), scheduling (8; 5 of FAST'25), bandwidth, ratio, datasets (11), simulated (12), real (13), "
        "rejections (table3), swings (9, 10).",
    )
    parser.add_argument("paper", choices=["cake", "mooncake"], help="which paper")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--fig", action="append", metavar="N|NAME", help="figure to compute; may be repeated")
    which.add_argument("--all", action="store_true", help="all figures (the default)")
    parser.add_argument("--json", action="store_true", help="print JSON: headline figures and their data")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for CSV, and PNG if the extra 'figures' is installed"
    )
    add = parser.add_argument_group("mooncake").add_argument
    add("--trace", type=Path, metavar="FILE", help="a released trace (default: a seeded generator)")
    add("--seed", type=int, metavar="N", default=0, help="seed of the generator, jitter and ties (default: 0)")
    add("--quick", action="store_true", help="ten minutes of requests, fewer settings")
    add("--markdown", action="store_true", help="print Markdown sections instead of tables")
    add("--jobs", type=int, metavar="N", help="in parallel (default: one per core)")
    add(
        "--on",
        choices=("processes", "ray", "sequence"),
        default="processes",
        help="where cells run; ray: the cluster of RAY_ADDRESS, else one of this computer (default: processes)",
    )
    _add_figures(subparsers)


def run(args: argparse.Namespace) -> int:
    if args.verb == "figures":
        return _figures(args)
    if args.paper == "mooncake":
        from skymemory.reproduce.mooncake.run import run_mooncake

        return run_mooncake(args)
    from skymemory.reproduce.cake import FIGURES, reproduce

    results = reproduce(list(dict.fromkeys(map(_whole, args.fig))) if args.fig else list(FIGURES))
    if args.json:
        print(json.dumps([_as_json(result) for result in results], indent=1, ensure_ascii=False))
    else:
        for result in results:
            _print(result)
    if args.out is not None:
        _write(results, args.out, sys.stderr if args.json else sys.stdout)
    return 0


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"--fig {text}: expected the number of a figure of the Cake paper") from None


def _as_json(result: Reproduction) -> dict[str, object]:
    headlines = [asdict(headline) | {"deviation": headline.deviation} for headline in result.headlines]
    rows = [dict(zip(result.header, row, strict=True)) for row in result.rows]
    return {"paper": "cake", "figure": result.figure, "title": result.title, "headlines": headlines, "rows": rows}


def _print(result: Reproduction) -> None:
    print(f"\nFigure {result.figure}. {result.title}")
    width = max(len(headline.what) for headline in result.headlines)
    print(f"  {'':<{width}}  {'paper':>10}  {'ours':>10}  {'deviation':>13}")
    for headline in result.headlines:
        print(
            f"  {headline.what:<{width}}  {_value(headline, headline.paper):>10}  {_value(headline, headline.ours):>10}"
            f"  {headline.deviation:>13}{_remark(headline)}"
        )


def _value(headline: Headline, value: float) -> str:
    return f"{value:.2f} {'p' if headline.unit == 'points' else headline.unit}"


def _remark(headline: Headline) -> str:
    words = {"fitted": "the model is fitted to it", "measured": "measured on this computer", "ours": ""}
    remark = ", ".join(word for word in (words[headline.kind], headline.note) if word)
    return f"  ({remark})" if remark else ""


def _write(results: list[Reproduction], folder: Path, stream: TextIO) -> None:
    from skymemory.errors import MissingExtra
    from skymemory.reproduce.cake import write_cake_csv, write_cake_figure

    for result in results:
        print(write_cake_csv(result, folder), file=stream)
    try:
        for result in results:
            print(write_cake_figure(result, folder), file=stream)
    except MissingExtra as error:
        print(f"skymemory: no PNG: {error}", file=sys.stderr)


def _add_figures(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "figures",
        help="draw the SkyMemory paper's figures as PNG, SVG and CSV",
        description="Draw figures of the SkyMemory paper: 1 and 2 (link delays), 4 to 8 (layouts), "
        "13 to 15 (layouts of 9 to 81 servers), 16 (latency of 132 settings). Needs the extra 'figures'.",
    )
    parser.add_argument("numbers", nargs="*", type=int, metavar="N", help="figures to draw (default: all)")
    parser.add_argument(
        "--out", type=Path, default=Path("figures"), metavar="DIR", help="folder to write to (default: %(default)s)"
    )


def _figures(args: argparse.Namespace) -> int:
    from skymemory.sim.latency import claims
    from skymemory.view.figures import FIGURES, check_figure, write_figure

    numbers: list[int] = list(dict.fromkeys(args.numbers)) or sorted(FIGURES)
    # All numbers before the first drawing, which takes seconds.
    for number in numbers:
        check_figure(number)
    for number in numbers:
        for path in write_figure(number, args.out):
            print(path)
    if 16 in numbers:
        print("\nConclusions of the paper, and what its model gives:")
        for what, paper, model in claims():
            print(f"  {what}\n    paper: {paper}\n    model: {model}")
    return 0
