"""``skymemory reproduce``: figures of the Cake and Mooncake papers, and all claims; ``figures``: draw every figure."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from skymemory.errors import InvalidInput
from skymemory.text import Table, width_of, write, write_line

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory_lab.reproduce.cake import Headline, Reproduction


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "reproduce",
        help="compute the figures of the Cake or Mooncake paper, or every paper's claims, beside the papers' own",
        description='cake: figures of "Compute or load KV cache? Why not both?" with our loader in virtual time, '
        "on GPUs modelled from the paper: 1 (workflow), 2 (equivalent bandwidth), 3 (steps), 4 (how both sides meet), "
        "5 (whole GPUs), 6 (14k tokens on a share of one), 7 (overhead, measured here), "
        "8 (9k and 14k tokens, averages). "
        "claims: each claim of the five documents that has a number, by its own model, by physics, and as measured. "
        "mooncake: the experiments of Mooncake in our cluster simulator: popularity (figure 6), hits (table1), "
        "layer-wise (7), scheduling (8; 5 of FAST'25), bandwidth, ratio, datasets (11), simulated (12), real (13), "
        "rejections (table3), swings (9, 10).",
    )
    parser.add_argument("paper", choices=["cake", "mooncake", "claims"], help="which paper, or the claims of all")
    parser.add_argument(
        "--fig", action="append", metavar="N|NAME", help="figure to compute; may be repeated (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: headline figures and their data")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for CSV, and PNG if the extra 'figures' is installed"
    )
    parser.add_argument("--markdown", action="store_true", help="mooncake, claims: print Markdown instead of tables")
    add = parser.add_argument_group("mooncake").add_argument
    add("--trace", type=Path, metavar="FILE", help="a released trace (default: a seeded generator)")
    add("--seed", type=int, metavar="N", default=0, help="seed of the generator, jitter and ties (default: 0)")
    add("--quick", action="store_true", help="ten minutes of requests, fewer settings")
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
        from skymemory_lab.reproduce.mooncake.run import run_mooncake

        return run_mooncake(args)
    if args.paper == "claims":
        return _claims(args)
    from skymemory_lab.reproduce.cake import FIGURES, reproduce

    results = reproduce(list(dict.fromkeys(map(_parse_figure, args.fig))) if args.fig else list(FIGURES))
    if args.json:
        print(json.dumps([_as_json(result) for result in results], indent=1, ensure_ascii=False))
    else:
        for result in results:
            _print(result)
    if args.out is not None:
        _write(results, args.out, sys.stderr if args.json else sys.stdout)
    return 0


def _claims(args: argparse.Namespace) -> int:
    from skymemory_lab.reproduce.claims import all_claims, as_json, as_markdown, as_text

    if args.fig or args.out is not None:
        raise InvalidInput("claims: takes no --fig and no --out; print them with --json or --markdown into a file")
    claims = all_claims()
    text = as_json(claims) if args.json else as_markdown(claims) if args.markdown else as_text(claims, width_of())
    print(text.rstrip("\n"))
    return 0


def _parse_figure(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"--fig {text}: expected the number of a figure of the Cake paper") from None


def _as_json(result: Reproduction) -> dict[str, object]:
    headlines = [asdict(headline) | {"deviation": headline.deviation} for headline in result.headlines]
    rows = [dict(zip(result.header, row, strict=True)) for row in result.rows]
    return {"paper": "cake", "figure": result.figure, "title": result.title, "headlines": headlines, "rows": rows}


def _print(result: Reproduction) -> None:
    print()
    write(f"Figure {result.figure}. {result.title}")
    if not result.headlines:
        from skymemory_lab.reproduce.mooncake.run import table

        table(result.header, result.rows).print(indent="  ")
        return
    rows = [
        [
            headline.what,
            _value(headline, headline.paper),
            _value(headline, headline.ours),
            headline.deviation,
            _remark(headline),
        ]
        for headline in result.headlines
    ]
    Table(("", "paper", "ours", "deviation", "remark"), rows, left=(0, 4)).print(indent="  ")


def _value(headline: Headline, value: float) -> str:
    return f"{value:.2f} {'p' if headline.unit == 'points' else headline.unit}"


def _remark(headline: Headline) -> str:
    words = {"fitted": "the model is fitted to it", "measured": "measured on this computer", "ours": ""}
    remark = ", ".join(word for word in (words[headline.kind], headline.note) if word)
    return f"({remark})" if remark else ""


def _write(results: list[Reproduction], folder: Path, stream: TextIO) -> None:
    from skymemory.errors import MissingExtra
    from skymemory_lab.reproduce.cake_figures import exhibit_of
    from skymemory_lab.view.drawing import PRINT_DPI, save, save_csv

    for result in results:
        print(save_csv(folder / f"cake-{result.figure:02d}.csv", result.header, result.rows), file=stream)
    try:
        for result in results:
            drawn = exhibit_of(result)
            print(save(drawn.draw(), folder / f"{drawn.stem}.png", PRINT_DPI), file=stream)
    except MissingExtra as error:
        write_line(f"skymemory: no PNG: {error}", sys.stderr)


def _add_figures(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "figures",
        help="draw every figure and table of the papers as PNG, SVG or PDF, with their numbers as CSV",
        description="Draw figures and tables. Of the SkyMemory paper: 1 to 16, table-1 to table-3; of its disclosure: "
        "disclosure-constellations, disclosure-d-n; of the Cake paper: cake-1 to cake-8; of Mooncake: mooncake-NAME, "
        "from the CSV of a full run. A wrong name lists all. Needs the extra 'figures'.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="N|NAME",
        help="what to draw (default: the SkyMemory paper's); all: those of all papers, most of a minute",
    )
    parser.add_argument(
        "--format", default="png,svg", metavar="LIST", help="of png, svg, pdf; PNG has 300 dpi (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("figures"), metavar="DIR", help="folder to write to (default: %(default)s)"
    )


def _figures(args: argparse.Namespace) -> int:
    from skymemory_lab.reproduce.gallery import chosen, formats_of
    from skymemory_lab.reproduce.mooncake.run import SweepProgress
    from skymemory_lab.sim.latency import claims

    # Check all names before the first drawing, which takes seconds.
    draws_all = "all" in args.names
    if draws_all and len(args.names) > 1:
        raise InvalidInput("figures: either names, or all")
    wanted, formats = chosen([] if draws_all else args.names, draws_all), formats_of(args.format)
    progress = SweepProgress(sys.stderr, "figures")
    missing = []
    try:
        for done, (name, exhibit) in enumerate(wanted.items()):
            progress.show(done, len(wanted))
            try:
                written = exhibit.write(args.out, formats)
            except InvalidInput as error:
                # The figure needs a file of a checkout: an error if named by the user, a remark among all figures.
                if args.names and not draws_all:
                    raise
                missing.append(f"skymemory: no {name}: {error}")
                continue
            progress.close()
            for path in written:
                print(path, flush=True)
    finally:
        progress.close()
    for words in missing:
        print(words, file=sys.stderr)
    if "16" in wanted:
        write_line("\nConclusions of the paper, and what its model gives (all: skymemory reproduce claims):")
        for claim, paper, model in claims():
            print(f"  {claim}\n    paper: {paper}\n    model: {model}")
    return 0
