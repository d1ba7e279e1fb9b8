"""``skymemory breakeven``: compute a prompt's KV, load it from the sky, or both; a map over speed, rate and length."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.cli._options import add_json, add_rare_settings
from skymemory.config import setting, texts
from skymemory.errors import InvalidInput, quoted
from skymemory.text import Table, write, write_line
from skymemory.units import format_duration
from skymemory_lab.cli._settings import LinkSettings, add_outputs, outputs, rate

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory_lab.sim.sky.breakeven import BreakEven, BreakevenCell, Measured
    from skymemory_lab.sim.sky.onboard import Places

_LENGTHS = (512, 2048, 8192, 32_768)
_SPEEDS = tuple(float(f"{10 ** (exponent / 3):.2g}") for exponent in range(3, 16))
_RATES = tuple(float(f"{10 ** (exponent / 2):.2g}") for exponent in range(14, 23))
_LETTERS = {"compute": "C", "load": "L", "both": "B"}
_TIMES = 12
# Tokens per second of a processor, a small and a large accelerator, for 8 billion parameters.
_GROUND_SPEEDS = (300.0, 3000.0, 30_000.0)
Row = dict[str, Any]


def _rates(value: object) -> tuple[float, ...]:
    found = tuple(map(rate, value)) if isinstance(value, list) else ()
    if not found or None in found:
        raise InvalidInput(f'{quoted(value)}: expected a list of rates, such as ["100Mbit", "1Gbit"]')
    return tuple(bit_s for bit_s in found if bit_s is not None)


@dataclass(frozen=True, slots=True)
class BreakevenSettings(LinkSettings):
    rates: tuple[float, ...] = setting("rates", _rates, _RATES, "rates to map, in bit/s")
    measured: tuple[str, ...] = setting("measured", texts, (), "JSON files of further measured engines")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "breakeven",
        help="map when loading KV from the sky beats computing it",
        description="For each prefill speed, rate of the beam down and prompt length: is the prompt's KV cache sooner "
        "there computed (C), loaded from the sky (L), or both at once, from the front and from the back (B)? By the "
        "physical latency model and the loader itself in virtual time. Engines that were measured are shown in it.",
    )
    add = parser.add_argument
    add("--preset", default="starlink-a", metavar="NAME", help="constellation (default: %(default)s)")
    add(
        "--model",
        default="llama-3.1-8b",
        metavar="NAME|BYTES",
        help="a model, or KV bytes a token (default: %(default)s)",
    )
    add("--access", default="gateway", metavar="MODE", help="gateway, hybrid, ideal or onboard (default: %(default)s)")
    add("--servers", type=int, default=9, metavar="S", help="satellites a value is on (default: %(default)s)")
    add(
        "--tokens",
        type=int,
        action="append",
        metavar="N",
        help="prompt length; may be repeated (default: 512 to 32768)",
    )
    add(
        "--board",
        type=float,
        metavar="TOKENS/S",
        help="a model on board prefills so fast: where is a prompt's first token sooner, there or on the ground?",
    )
    add_rare_settings(parser, BreakevenSettings)
    add_outputs(parser, "the map")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    import numpy as np

    from skymemory.constellation.presets import preset_named
    from skymemory.constellation.sight import check_mask
    from skymemory_lab.sim.sky.breakeven import BreakEven, fitted_gpus, kv_bytes_of, read_measured
    from skymemory_lab.sim.sky.onboard import Places
    from skymemory_lab.sim.sky.optimise import at_place
    from skymemory_lab.sim.sky.physical import LinkRates, TransferSetting, sight_of, ways_of
    from skymemory_lab.view.drawing import save_csv

    settings: BreakevenSettings = args.settings
    csv_path, drawing = outputs(args.out)
    if args.board is not None and args.access == "onboard":
        raise InvalidInput("--board compares with a host on the ground: expected --access gateway, hybrid or ideal")
    check_mask(settings.mask_deg)
    kv_bytes = kv_bytes_of(args.model)
    preset = at_place(preset_named(args.preset), settings.lat, settings.lon)
    period_s = preset.shell.period_s
    ways = ways_of(
        preset,
        sight_of(preset, settings.mask_deg, "climbing"),
        args.access,
        [period_s * number / _TIMES for number in range(_TIMES)],
        servers=args.servers,
        exact_links=True,
    )
    even = BreakEven(
        ways,
        TransferSetting(1, server_s=settings.server_s),
        LinkRates(settings.up_bit_s, settings.down_bit_s, settings.isl_bit_s),
    )
    lengths = args.tokens or _LENGTHS
    cells = even.grid(lengths, _SPEEDS, settings.rates, kv_bytes)
    engines = [
        *read_measured(),
        *(engine for path in settings.measured for engine in read_measured(Path(path))),
        *fitted_gpus(),
    ]
    rows = _engine_rows(even, engines, settings.down_bit_s or max(settings.rates))
    boards = []
    if args.board is not None:
        sight = sight_of(preset, settings.mask_deg, "climbing")
        times_s = ways.times_s.tolist()
        own, board = (
            ways_of(preset, sight, access, times_s, servers=args.servers, exact_links=True)
            for access in ("gateway", "onboard")
        )
        places = Places(
            even,
            BreakEven(board, TransferSetting(1, server_s=settings.server_s), even.rates),
            even.rates,
            float(np.median(own.one_way_s.min(axis=1))),
            float(ways.hops.mean()),
            float(board.hops.mean()),
        )
        boards = _board_rows(places, lengths, args.board, kv_bytes)
    if csv_path is not None:
        header = [*asdict(cells[0]), "saved_of_compute"]
        save_csv(csv_path, header, [[*asdict(cell).values(), cell.saved] for cell in cells])
    if drawing is not None:
        _draw(cells, engines, kv_bytes, drawing)
    if args.json:
        content = {"kv_bytes_per_token": kv_bytes, "cells": [asdict(cell) for cell in cells], "engines": rows}
        if boards:
            content["on_board"] = boards
        print(json.dumps(content, indent=1))
    else:
        _print(
            cells, rows, f"{preset.name}, {args.access}, {args.servers} servers, {args.model}: {kv_bytes} bytes a token"
        )
        if boards:
            _print_boards(boards, args.board)
    return 0


def _engine_rows(even: BreakEven, engines: list[Measured], rate_bit_s: float) -> list[dict[str, object]]:
    rows = []
    for engine in engines:
        for tokens, seconds in engine.prefill:
            speed, bytes_per_token = tokens / seconds, engine.kv_bytes_per_token
            even_bit_s = even.even_bit_s(tokens, speed, bytes_per_token)
            row: dict[str, object] = {"engine": engine.name, "device": engine.device, "source": engine.source}
            row |= asdict(even.cell(tokens, speed, rate_bit_s, bytes_per_token))
            rows.append({**row, "even_bit_s": even_bit_s if math.isfinite(even_bit_s) else None})
    return rows


def _board_rows(places: Places, lengths: Sequence[int], board_tokens_per_s: float, kv_bytes: int) -> list[Row]:
    from skymemory_lab.sim.sky.onboard import BOARD_W, GROUND_W, OnboardComputer, held_w

    rows: list[Row] = []
    for tokens in lengths:
        board = places.on_board(tokens, OnboardComputer(board_tokens_per_s, BOARD_W), kv_bytes)
        for speed in _GROUND_SPEEDS:
            ground = places.on_ground(tokens, OnboardComputer(speed, GROUND_W), kv_bytes)
            rows.append(
                {
                    "tokens": tokens,
                    "ground_tokens_per_s": speed,
                    "ground": asdict(ground),
                    "board": asdict(board),
                    "held_j_per_hour": 3600 * held_w(tokens, kv_bytes),
                    "sooner": "board" if board.ttft_s < ground.ttft_s else "ground",
                }
            )
    return rows


def _print_boards(rows: list[Row], board_tokens_per_s: float) -> None:
    print()
    write(
        f"first token of a model on board ({_si(board_tokens_per_s)} tokens/s), or on the ground; its energy, with "
        "the user's terminal; held: of memory, an hour that it keeps the KV; without idle machines, cooling and panels"
    )
    heads = ("tokens", "ground at", "ground", "time", "energy", "board", "time", "energy", "held", "sooner")
    cells = []
    for row in rows:
        places = [
            [row[place]["way"], format_duration(row[place]["ttft_s"]), f"{row[place]['joules']:.0f} J"]
            for place in ("ground", "board")
        ]
        energy = f"{row['held_j_per_hour']:.0f} J"
        cells.append(
            [str(row["tokens"]), _si(row["ground_tokens_per_s"]), *places[0], *places[1], energy, row["sooner"]]
        )
    Table(heads, cells, left=(2, 5, 9), keys=2).print()


def _si(value: float) -> str:
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


def _print(cells: list[BreakevenCell], rows: list[dict[str, object]], title: str) -> None:
    write(f"{title}\nC compute, L load, B both; the share of the compute time that is saved, in percent")
    lengths = list(dict.fromkeys(cell.tokens for cell in cells))
    rates = list(dict.fromkeys(cell.rate_bit_s for cell in cells))
    by_setting = {(cell.tokens, cell.tokens_per_s, cell.rate_bit_s): cell for cell in cells}
    for tokens in lengths:
        write_line(f"\n{tokens} tokens: tokens/s down, bit/s across")
        map_rows = []
        for speed in _SPEEDS:
            row_cells = (by_setting[tokens, speed, link_rate] for link_rate in rates)
            marks = [f"{_LETTERS[cell.best]}{max(0, cell.saved) * 100:>3.0f}" for cell in row_cells]
            map_rows.append([_si(speed), *marks])
        Table(["", *map(_si, rates)], map_rows, left=()).print()
    write_line("\nengines, each with its own KV, over the beam down as given")
    engines = []
    for row in rows:
        even = "never" if row["even_bit_s"] is None else _si(float(str(row["even_bit_s"])))
        times = (format_duration(float(str(row[name]))) for name in ("compute_s", "load_s", "load_bound_s", "both_s"))
        engines.append([str(row["engine"]), str(row["tokens"]), *times, str(row["best"]), even])
    head = ("engine", "tokens", "compute", "load", "bound", "both", "best", "even at bit/s")
    Table(head, engines, left=(0, 6), keys=2).print()


def _draw(cells: list[BreakevenCell], engines: list[Measured], kv_bytes: int, path: Path) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    from skymemory_lab.view.drawing import INK, ORANGES, new_figure, save

    colours = {"compute": "#cfd8df", "both": ORANGES[0], "load": "#a6d3b5"}
    lengths = list(dict.fromkeys(cell.tokens for cell in cells))
    rates = list(dict.fromkeys(cell.rate_bit_s for cell in cells))
    columns = min(2, len(lengths))
    rows = -(-len(lengths) // columns)
    figure = new_figure(5.4 * columns, 3.9 * rows + 0.8)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    names: dict[str, int] = {}
    for ax, tokens in zip(axes, lengths, strict=False):
        best = {(cell.tokens_per_s, cell.rate_bit_s): cell.best for cell in cells if cell.tokens == tokens}
        table = [[list(colours).index(best[speed, link_rate]) for link_rate in rates] for speed in _SPEEDS]
        ax.pcolormesh(
            _edges(rates), _edges(_SPEEDS), table, cmap=ListedColormap(list(colours.values())), vmin=0, vmax=2
        )
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.grid(False)
        ax.set_title(f"{tokens} tokens")
        ax.set_xlabel("beam down, bit/s")
        ax.set_ylabel("prefill, tokens/s")
        for engine in engines:
            length, speed = engine.nearest(tokens)
            equal = speed * engine.kv_bytes_per_token / kv_bytes
            low, high = _edges(_SPEEDS)[0], _edges(_SPEEDS)[-1]
            if max(length / tokens, tokens / length) <= 2 and low <= equal <= high:
                number = names.setdefault(engine.name, len(names) + 1)
                ax.axhline(equal, color=INK, linewidth=0.8, linestyle=":")
                # Each name at its own rate, so that names of equally fast engines do not overlap.
                at = rates[(number - 1) % len(rates)]
                ax.text(at, equal, f"{number}", va="bottom", ha="center", fontsize=8, color=INK)
    for ax in axes[len(lengths) :]:
        ax.axis("off")
    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    notes = "\n".join(f"{number}  {name}" for name, number in names.items())
    figure.legend(handles=patches, loc="outside upper center", ncols=3)
    figure.supxlabel(
        f"{notes}\nan engine with other KV is at the speed that makes as many bytes of {kv_bytes} a token",
        fontsize=8,
        ha="center",
    )
    print(save(figure, path), file=sys.stderr)


def _edges(values: tuple[float, ...] | list[float]) -> list[float]:
    # Return the borders of cells around ``values``, on a logarithmic axis.
    if len(values) == 1:
        return [values[0] / 2, values[0] * 2]
    middles = [math.sqrt(a * b) for a, b in pairwise(values)]
    return [values[0] ** 2 / middles[0], *middles, values[-1] ** 2 / middles[-1]]
