"""``skymemory layout``: the server number of each satellite, as a map in the terminal, as JSON or as an image."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from skymemory.cli._options import add_json
from skymemory.errors import InvalidInput

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory_lab.view.layout_map import LayoutMap


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "layout",
        help="show which satellite is which server, now or after some rotations",
        description="Print the map of a placement as in figures 4 to 8 of the SkyMemory paper: rows are planes, "
        "columns are the satellites of a plane, which fly east; the one overhead is in parentheses. "
        "Numbers are 1-based as in the paper.",
    )
    add = parser.add_argument
    add("--preset", metavar="NAME", help="constellation (default: testbed-19x5)")
    add("--strategy", metavar="NAME", help="rotation, hop, rotation_hop, cost or baseline (default: the preset's)")
    add("--servers", type=int, metavar="S", help="number of servers (default: the preset's)")
    add("--rotations", type=int, default=0, metavar="R", help="slot moves since the value was stored (default: 0)")
    add("--planes", type=int, default=0, metavar="P", help="plane moves since the value was stored (default: 0)")
    add("--figure", type=int, metavar="N", help="show a figure of the paper: 4, 5, 6, 7 or 8")
    add("--out", type=Path, metavar="FILE", help="draw it to a .png, .svg or .pdf file")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from skymemory.text import has_colour, width_of
    from skymemory_lab.view.layout_map import render

    layout = _make_layout_map(args)
    if args.out is not None:
        from skymemory_lab.view.drawing import drawing_path, save
        from skymemory_lab.view.figures import draw_layout, draw_paper_map

        path = drawing_path(args.out)
        print(save(draw_layout(layout) if args.figure is None else draw_paper_map(args.figure), path))
    elif args.json:
        print(json.dumps(_as_json(layout), indent=2))
    else:
        print(render(layout, has_colour(sys.stdout), width_of()))
    return 0


def _make_layout_map(args: argparse.Namespace) -> LayoutMap:
    from skymemory.constellation.presets import DEFAULT_PRESET, preset_named
    from skymemory.placement.layout import parse_strategy
    from skymemory.placement.locate import Placement
    from skymemory_lab.view.layout_map import layout_map, paper_map

    if args.figure is not None:
        # A figure of the paper is a complete setting; other options would change it.
        if any((args.preset, args.strategy, args.servers, args.rotations, args.planes)):
            raise InvalidInput(f"--figure {args.figure} sets the layout: leave its other options out")
        return paper_map(args.figure)
    preset = preset_named(DEFAULT_PRESET if args.preset is None else args.preset)
    strategy = None if args.strategy is None else parse_strategy(args.strategy)
    placement = Placement.for_preset(preset, strategy, args.servers)
    return layout_map(placement, (args.rotations, args.planes))


def _as_json(layout: LayoutMap) -> dict[str, object]:
    placement, box = layout.placement, layout.placement.box
    satellites = placement.locate_all((0, 0), layout.now_moves)
    return {
        "indices": "0-based",
        "strategy": placement.strategy,
        "planes": placement.torus.planes,
        "slots_per_plane": placement.torus.slots_per_plane,
        "servers": placement.servers,
        "box": {"width": box.width, "height": box.height, "west": box.west, "north": box.north},
        "moves": {"slot": layout.now_moves[0], "plane": layout.now_moves[1]},
        "overhead": {"plane": layout.centre.plane, "slot": layout.centre.slot},
        "map": [
            {"server": server, "plane": satellite.plane, "slot": satellite.slot}
            for server, satellite in enumerate(satellites)
        ],
        "handovers": [
            {
                "server": server,
                "from": {"plane": source.plane, "slot": source.slot},
                "to": {"plane": target.plane, "slot": target.slot},
            }
            for server, source, target in layout.handovers
        ],
    }
