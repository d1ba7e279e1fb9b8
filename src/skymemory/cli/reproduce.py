"""``skymemory reproduce``: a paper's figures from our own code, its headline figures beside ours."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from skymemory.errors import InvalidInput

if TYPE_CHECKING:
    from skymemory.reproduce.cake import Headline, Reproduction

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "reproduce",
        help="a paper's figures from our own code, beside what the paper says",
        description='cake: figures of "Compute or load KV cache? Why not both?" with our loader in virtual time, '
        "on GPUs modelled by what the paper says of them: 2 (equivalent bandwidth), 3 (steps), 5 (whole GPUs), "
        "6 (14k tokens on a part of one), 7 (overhead, measured here), 8 (9k and 14k tokens, averages). "
        "mooncake: the experiments of Mooncake in our cluster simulator: popularity (figure 6), hits (table1), "
        "layer-wise (7), scheduling (8; 5 of FAST'25), bandwidth, ratio, datasets (11), simulated (12), real (13), "
        "rejections (table3), swings (9, 10).",
    )
    parser.add_argument("paper", choices=["cake", "mooncake"], help="which paper")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--fig", action="append", metavar="N|NAME", help="which figure; may be given again")
    which.add_argument("--all", action="store_true", help="all figures (the default)")
    parser.add_argument("--json", action="store_true", help="print JSON: headline figures and the numbers behind them")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write CSV there, and PNG where the extra 'figures' is installed"
    )
    ours = parser.add_argument_group("mooncake")
    ours.add_argument("--trace", type=Path, metavar="FILE", help="the released trace (default: a seeded generator)")
    ours.add_argument("--seed", type=int, default=0, help="of the generator, jitter and ties (default: 0)")
    ours.add_argument("--quick", action="store_true", help="ten minutes of requests, fewer settings")
    ours.add_argument("--markdown", action="store_true", help="print sections of a page instead of tables")
    ours.add_argument("--jobs", type=int, metavar="N", help="processes at once (default: one per processor)")
    ours.add_argument(
        "--way",
        choices=("processes", "sequence", "ray"),
        default="processes",
        help="where simulations run (default: processes); the numbers are the same",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.paper == "mooncake":
        from skymemory.reproduce.mooncake.run import run_mooncake

        return run_mooncake(args)
    from skymemory.reproduce.cake import FIGURES, reproduce

    told = reproduce(list(dict.fromkeys(map(_whole, args.fig))) if args.fig else list(FIGURES))
    if args.json:
        print(json.dumps([_as_json(one) for one in told], indent=1, ensure_ascii=False))
    else:
        for one in told:
            _print(one)
    if args.out is not None:
        _write(told, args.out, sys.stderr if args.json else sys.stdout)
    return 0


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"--fig {text}: the Cake paper's figures have numbers") from None


def _as_json(told: Reproduction) -> dict[str, object]:
    headlines = [asdict(headline) | {"deviation": headline.deviation} for headline in told.headlines]
    rows = [dict(zip(told.header, row, strict=True)) for row in told.rows]
    return {"paper": "cake", "figure": told.figure, "title": told.title, "headlines": headlines, "rows": rows}


def _print(told: Reproduction) -> None:
    print(f"\nFigure {told.figure}. {told.title}")
    width = max(len(headline.what) for headline in told.headlines)
    print(f"  {'':<{width}}  {'paper':>10}  {'ours':>10}  {'deviation':>13}")
    for headline in told.headlines:
        print(
            f"  {headline.what:<{width}}  {_value(headline, headline.paper):>10}  {_value(headline, headline.ours):>10}"
            f"  {headline.deviation:>13}{_remark(headline)}"
        )


def _value(headline: Headline, value: float) -> str:
    return f"{value:.2f} {'p' if headline.unit == 'points' else headline.unit}"


def _remark(headline: Headline) -> str:
    words = {"fitted": "the model was fitted to it", "measured": "measured on this computer", "ours": ""}
    remark = ", ".join(word for word in (words[headline.kind], headline.note) if word)
    return f"  ({remark})" if remark else ""


def _write(told: list[Reproduction], folder: Path, stream: TextIO) -> None:
    from skymemory.errors import MissingExtra
    from skymemory.reproduce.figures_cake import write_cake_csv, write_cake_figure

    for one in told:
        print(write_cake_csv(one, folder), file=stream)
    try:
        for one in told:
            print(write_cake_figure(one, folder), file=stream)
    except MissingExtra as error:
        print(f"skymemory: no PNG: {error}", file=sys.stderr)
