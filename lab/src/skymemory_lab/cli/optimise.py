"""``skymemory optimise``: servers, placement, chunk, window and access for a load, with curves of each parameter."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skymemory.cli._options import add_json, add_rare_settings, size
from skymemory.config import setting, share
from skymemory.text import Table, width_of, write
from skymemory.units import format_size
from skymemory_lab.cli._settings import LinkSettings, add_outputs, outputs

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory_lab.sim.sky.optimise import ChoiceOutcome, Optimum

_SHOWN = {
    "access": "access",
    "strategy": "placement",
    "servers": "servers",
    "chunk_bytes": "chunk, bytes",
    "window_bytes": "window, bytes",
}


@dataclass(frozen=True, slots=True)
class OptimiseSettings(LinkSettings):
    puts_share: float = setting("puts", share, 0.2, "writes, as a share of the requests")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "optimise",
        help="choose servers, placement, chunk, window and access for a load",
        description="Compute every setting of a grid by the physical latency model (light, rates, queues) at times "
        "over one orbit, choose by the first half of it and judge by the second. Prints the best setting, its distance "
        "from the lower bound, the second best, and what each parameter does.",
    )
    add = parser.add_argument
    add("--preset", default="starlink-a", metavar="NAME", help="constellation (default: %(default)s)")
    add("--value", type=size, default="2.75MiB", metavar="SIZE", help="size of a value (default: %(default)s)")
    add("--requests", type=float, default=0.0, metavar="N", help="requests a second on these links (default: 0)")
    add(
        "--access",
        action="append",
        metavar="MODE",
        help="gateway, hybrid, los or onboard; may be repeated (default: gateway and hybrid, which can be flown)",
    )
    add(
        "--servers",
        type=int,
        action="append",
        metavar="S",
        help="a number to choose; may be repeated (default: 1 to 81)",
    )
    add_rare_settings(parser, OptimiseSettings)
    add_outputs(parser, "the curves")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from skymemory.constellation.presets import preset_named
    from skymemory.constellation.sight import check_mask
    from skymemory_lab.sim.sky.optimise import RequestMix, SearchSpace, at_place, optimise
    from skymemory_lab.sim.sky.physical import LinkRates
    from skymemory_lab.view.drawing import save_csv

    settings: OptimiseSettings = args.settings
    csv_path, drawing = outputs(args.out)
    check_mask(settings.mask_deg)
    preset = at_place(preset_named(args.preset), settings.lat, settings.lon)
    rates = LinkRates(settings.up_bit_s, settings.down_bit_s, settings.isl_bit_s)
    load = RequestMix(args.value, settings.server_s, settings.puts_share, args.requests)
    optimum = optimise(
        preset,
        rates,
        load,
        mask_deg=settings.mask_deg,
        space=SearchSpace(tuple(args.access or ("gateway", "hybrid")), servers=args.servers),
        report=_progress,
    )
    _progress("")
    if csv_path is not None:
        rows = [{"parameter": name, **outcome.row()} for name, curve in optimum.curves.items() for outcome in curve]
        save_csv(csv_path, list(rows[0]), [list(row.values()) for row in rows])
    if drawing is not None:
        _draw(optimum, drawing)
    if args.json:
        print(json.dumps(_as_json(optimum, preset.name), indent=1))
    else:
        _print(optimum, args.value, preset.name)
    return 0


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line[: width_of(sys.stderr) - 1]}", end="", file=sys.stderr, flush=True)


def _as_json(optimum: Optimum, preset: str) -> dict[str, object]:
    return {
        "preset": preset,
        "chosen": optimum.chosen.row(),
        "second": None if optimum.second is None else optimum.second.row(),
        "seconds_when_chosen": optimum.chosen_s,
        "best_when_judged": optimum.judged_best.row(),
        "settings": optimum.settings,
        "overloaded": optimum.overloaded,
        "in_sight_share": optimum.seen_share,
        "curves": {name: [outcome.row() for outcome in curve] for name, curve in optimum.curves.items()},
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


_HEADER = ("get ms", "bound", "set ms", "bound", "mix ms", "× bound", "worst ms", "used")


def _cells(outcome: ChoiceOutcome) -> tuple[str, ...]:
    if not outcome.carries:
        return ("-",) * 7 + (f"{outcome.utilisation:.0%}",)
    return (
        _ms(outcome.get_s),
        _ms(outcome.get_bound_s),
        _ms(outcome.set_s),
        _ms(outcome.set_bound_s),
        _ms(outcome.seconds),
        f"{outcome.of_bound:.2f}",
        _ms(outcome.worst_s),
        f"{outcome.utilisation:.0%}",
    )


def _print(optimum: Optimum, value_bytes: int, preset: str) -> None:
    rows: list[tuple[str, ...]] = []
    for name, curve in optimum.curves.items():
        rows.append((_SHOWN[name], *(_HEADER if not rows else ("",) * len(_HEADER))))
        for outcome in curve:
            mark = "→ " if outcome.choice == optimum.chosen.choice else "  "
            other = f" ({outcome.choice.strategy})" if name == "access" else ""
            rows.append((f"{mark}{getattr(outcome.choice, name)}{other}", *_cells(outcome)))
    best = optimum.chosen
    write(
        f"{preset}, values of {format_size(value_bytes)}: {optimum.settings} settings, {optimum.overloaded} overloaded"
    )
    write(
        f"chosen  {_setting(best)}: {_ms(best.seconds)} ms, {best.of_bound:.2f} × the bound of {_ms(best.bound_s)} ms"
    )
    if optimum.second is not None:
        more = optimum.second.seconds / best.seconds - 1
        write(f"second  {_setting(optimum.second)}: {_ms(optimum.second.seconds)} ms, {more:+.1%}")
    lost = best.seconds / optimum.judged_best.seconds - 1
    write(
        f"chosen at {_ms(optimum.chosen_s)} ms in the orbit's first half; the best of the second would save {lost:.1%}"
    )
    if optimum.seen_share < 1:
        write(f"a satellite is in sight {optimum.seen_share:.0%} of the time; only that is counted")
    print()
    Table(rows[0], rows[1:]).print()


def _setting(outcome: ChoiceOutcome) -> str:
    choice = outcome.choice
    return (
        f"{choice.access}, {choice.strategy}, {choice.servers} servers, chunks of {choice.chunk_bytes}, "
        f"window {format_size(choice.window_bytes)}"
    )


def _draw(optimum: Optimum, path: Path) -> None:
    from skymemory_lab.view.drawing import ORANGES, SERIES, new_figure, save

    figure = new_figure(12.0, 6.4)
    figure.suptitle(f"chosen: {_setting(optimum.chosen)}", fontsize=11)
    axes = figure.subplots(2, 3).ravel()
    for ax, (name, curve) in zip(axes, optimum.curves.items(), strict=False):
        feasible = [outcome for outcome in curve if outcome.carries]
        places = list(range(len(feasible)))
        for part, colour, marker in (("get", SERIES["hop"][0], "o"), ("set", SERIES["rotation"][0], "s")):
            for which, line in ((f"{part}_s", "-"), (f"{part}_bound_s", ":")):
                values = [getattr(outcome, which) * 1e3 for outcome in feasible]
                label = part if line == "-" else f"{part}, lower bound"
                ax.plot(
                    places, values, line, color=colour, marker=marker, markersize=4 if line == "-" else 0, label=label
                )
        chosen = [at for at, outcome in enumerate(feasible) if outcome.choice == optimum.chosen.choice]
        for at in chosen:
            ax.axvspan(at - 0.3, at + 0.3, color=ORANGES[-1], zorder=0)
        ax.set_xticks(places, [_tick(name, getattr(outcome.choice, name)) for outcome in feasible], fontsize=8)
        ax.set_title(_SHOWN[name].partition(",")[0])
        ax.set_ylabel("ms")
        ax.set_ylim(bottom=0)
    axes[5].axis("off")
    handles, labels = axes[0].get_legend_handles_labels()
    axes[5].legend(handles, labels, loc="center", title="means over half an orbit; chosen: shaded")
    print(save(figure, path), file=sys.stderr)


def _tick(name: str, value: object) -> str:
    if isinstance(value, int) and name != "servers":
        return format_size(value).replace(".0 ", " ").replace("iB", "").replace(" ", "")
    return str(value).replace("rotation_hop", "rotation\n+ hop")
