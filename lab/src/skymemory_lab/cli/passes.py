"""``skymemory passes``: satellites rising over a place. ``skymemory shells``: contents of a file of element sets."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.cli._options import add_json, argument
from skymemory.errors import InvalidInput
from skymemory.testbed.element_files import read_element_file
from skymemory.text import Table, width_of, write_line

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory.constellation.clustering import ClusteredShell, Clustering, Drift
    from skymemory.constellation.tle import ElementFile
    from skymemory_lab.passes import Pass, Passes, Sky

_DEFAULT_PRESET = "starlink-a"
_SHOWN = 20
# With thrust and drag, a low satellite is minutes away from its elements in a week, anywhere in its orbit in a month.
_STALE_DAYS, _MOST_DAYS = 7.0, 30.0
_DAY_S = 86_400.0
_MEANING = {
    "spare": "share a slot with another satellite",
    "off plane": "fly between the planes, or in no two of them",
    "no slots": "are in no regular slots: parked",
    "moving": "are being raised or lowered",
    "off shell": "are at no shell's altitude and inclination",
    "stale": "have elements days away from the others'",
    "sgp4": "cannot be propagated",
}


def add_parser(subparsers: Subparsers) -> None:
    passes = subparsers.add_parser(
        "passes",
        help="when satellites rise, culminate and set over a place",
        description="Find all passes of a constellation over a place on the ellipsoid of WGS84: of a preset by its "
        "orbits, of real satellites by SGP4 from a file of element sets (CelesTrak, Space-Track). Times are UTC; "
        "elevations are without refraction. Exit code 1: nothing rises above the mask.",
    )
    add = passes.add_argument
    add("--lat", type=float, required=True, metavar="DEG", help="latitude of the place, north positive")
    add("--lon", type=float, required=True, metavar="DEG", help="longitude, east positive")
    add("--hours", type=float, default=24.0, metavar="H", help="how long (default: 24, at most 168)")
    add("--mask", type=float, metavar="DEG", help="lowest elevation (default: 25)")
    add("--start", type=argument(_moment), metavar="TIME", help="'now' or UTC as 2026-01-31T12:00 (default: the epoch)")
    source = passes.add_mutually_exclusive_group()
    source.add_argument("--tle", type=Path, metavar="FILE", help="element sets: two-line, or OMM as CSV, JSON or XML")
    source.add_argument("--preset", metavar="NAME", help=f"constellation (default: {_DEFAULT_PRESET})")
    add("--skip-bad", action="store_true", help="leave bad records of FILE out instead of refusing it")
    add_json(passes)
    shells = subparsers.add_parser(
        "shells",
        help="the shells, planes and slots that real satellites fly in",
        description="Recover shells, planes and slots from a file of element sets, with its gaps, what is in no slot "
        "and why, and how far SGP4 drifts from a closed form that is fitted to each shell.",
    )
    shells.add_argument("file", type=Path, metavar="FILE", help="element sets: two-line, or OMM as CSV, JSON or XML")
    shells.add_argument("--skip-bad", action="store_true", help="leave bad records out instead of refusing the file")
    add_json(shells)


def run(args: argparse.Namespace) -> int:
    return _passes(args) if args.verb == "passes" else _shells(args)


def _moment(text: str) -> float:
    if text == "now":
        return datetime.now(UTC).timestamp()
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(f"{text!r}: expected 'now' or a time in UTC such as 2026-01-31T12:00") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _passes(args: argparse.Namespace) -> int:
    from skymemory.constellation.presets import preset_named
    from skymemory.constellation.visibility import DEFAULT_MASK_DEG, GroundHost
    from skymemory_lab.passes import ElementSky, ShellSky, find_passes

    place = GroundHost(args.lat, args.lon)
    mask_deg = DEFAULT_MASK_DEG if args.mask is None else args.mask
    skipped: tuple[str, ...] = ()
    sky: Sky
    if args.tle is not None:
        file = read_element_file(args.tle, args.skip_bad)
        skipped = file.skipped
        sky = ElementSky(file.elements)
        source, epoch_unix_s = args.tle.name, max(element_set.epoch_unix_s for element_set in file.elements)
    else:
        if args.skip_bad:
            raise InvalidInput("--skip-bad without --tle: a preset has no records")
        preset = preset_named(_DEFAULT_PRESET if args.preset is None else args.preset)
        if preset.torus != preset.shell.torus:
            raise InvalidInput(f"{preset.name} has no orbits of its own: expected another preset, such as starlink-a")
        sky = ShellSky(preset.shell, preset.epoch_unix_s)
        source, epoch_unix_s = preset.name, preset.epoch_unix_s
    start_unix_s = epoch_unix_s if args.start is None else args.start
    days = abs(start_unix_s - epoch_unix_s) / _DAY_S
    if args.tle is not None and days > _STALE_DAYS:
        stale = f"{source} is of {_utc(epoch_unix_s)}, {days:.0f} days from --start"
        if days > _MOST_DAYS:
            raise InvalidInput(
                f"{stale}: expected at most {_MOST_DAYS:g}, beyond which SGP4 is no answer; use newer ones"
            )
        write_line(f"skymemory: {stale}: times may be off by minutes", sys.stderr)
    passes = find_passes(sky, place, start_unix_s, args.hours * 3600, mask_deg, _progress)
    left_out = {sky.name(at): reason for at, reason in sky.left_out.items()} if isinstance(sky, ElementSky) else {}
    position = f"{abs(args.lat):g}° {'N' if args.lat >= 0 else 'S'} {abs(args.lon):g}° {'E' if args.lon >= 0 else 'W'}"
    subject = f"{sky.satellites} satellites of {source} above {mask_deg:g}° over {position}"
    if args.json:
        print(
            json.dumps(
                {
                    "source": source,
                    "satellites": sky.satellites,
                    "place": {"latitude_deg": place.latitude_deg, "longitude_deg": place.longitude_deg},
                    "start": _utc(start_unix_s),
                    "hours": args.hours,
                    "mask_deg": mask_deg,
                    "in_sight": asdict(passes.in_sight),
                    "highest_deg": passes.highest_deg,
                    "passes": [_as_json(element_set, sky) for element_set in passes.passes],
                    "left_out": [{"satellite": name, "reason": reason} for name, reason in left_out.items()],
                    "skipped": list(skipped),
                },
                indent=2,
            )
        )
    elif passes.passes:
        write_line(f"{subject}, {args.hours:g} h from {_utc(start_unix_s)}")
        _print_passes(passes, sky)
        _print_missing(left_out, skipped)
    if not passes.passes:
        best = ""
        if passes.highest is not None:
            best = f": the highest, {sky.name(passes.highest)}, reaches {passes.highest_deg:.1f}°"
        write_line(f"skymemory: none of {subject} in {args.hours:g} h{best}", sys.stderr)
        for reason, count in Counter(left_out.values()).most_common():
            write_line(f"skymemory: {count} left out: {reason}", sys.stderr)
        return 1
    return 0


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        line = "" if done == of else f"{done} of {of} satellites"
        print(f"\r\x1b[K{line[: width_of(sys.stderr) - 1]}", end="", file=sys.stderr, flush=True)


def _utc(unix_s: float, sep: str = "T") -> str:
    moment = datetime.fromtimestamp(round(unix_s, 3), UTC)
    return moment.isoformat(sep, "milliseconds").replace("+00:00", "Z")


def _as_json(satellite_pass: Pass, sky: Sky) -> dict[str, Any]:
    return {
        "satellite": sky.name(satellite_pass.satellite),
        "rise": None if satellite_pass.rise_unix_s is None else _utc(satellite_pass.rise_unix_s),
        "culmination": _utc(satellite_pass.culmination_unix_s),
        "set": None if satellite_pass.set_unix_s is None else _utc(satellite_pass.set_unix_s),
        "elevation_deg": round(satellite_pass.elevation_deg, 4),
        "azimuth_deg": round(satellite_pass.azimuth_deg, 4),
    }


def _print_passes(passes: Passes, sky: Sky) -> None:
    sight = passes.in_sight
    write_line(f"in sight      at least {sight.fewest}, on average {sight.mean:.1f}, at most {sight.most}", hanging=14)
    if sight.longest_gap_s:
        longest = _span(sight.longest_gap_s)
        write_line(f"none in sight {1 - sight.covered:.1%} of the time, for {longest} at the longest", hanging=14)
    if sight.highest_for_s is not None:
        write_line(f"the highest   changes every {_span(sight.highest_for_s)} on average", hanging=14)
    more = f", the first {_SHOWN}" if len(passes.passes) > _SHOWN else ""
    write_line(f"passes        {len(passes.passes)}{more}:")
    rows = [
        [
            _clock(satellite_pass.rise_unix_s, "before"),
            _clock(satellite_pass.culmination_unix_s, ""),
            _clock(satellite_pass.set_unix_s, "after"),
            f"{satellite_pass.elevation_deg:.1f}°",
            f"{satellite_pass.azimuth_deg:.0f}°",
            sky.name(satellite_pass.satellite),
        ]
        for satellite_pass in passes.passes[:_SHOWN]
    ]
    Table(("rises", "culminates", "sets", "elevation", "azimuth", "satellite"), rows, left=(0, 1, 2, 5)).print()


def _clock(unix_s: float | None, otherwise: str) -> str:
    return otherwise if unix_s is None else datetime.fromtimestamp(unix_s, UTC).strftime("%m-%d %H:%M:%S")


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _print_missing(left_out: dict[str, str], skipped: tuple[str, ...]) -> None:
    for reason, count in Counter(left_out.values()).most_common():
        write_line(f"left out      {count}: {reason}")
    if skipped:
        write_line(f"skipped       {len(skipped)} bad records, the first: {skipped[0]}")


def _shells(args: argparse.Namespace) -> int:
    from skymemory.constellation.clustering import cluster, drift

    file = read_element_file(args.file, args.skip_bad)
    clustering = cluster(file.elements)
    drifts = [[drift(shell, days * _DAY_S) for days in (1, 7)] for shell in clustering.shells]
    if args.json:
        print(json.dumps(_clustering_as_json(clustering, drifts, file), indent=2))
    else:
        _print_shells(clustering, drifts, file)
    if not clustering.shells:
        write_line(f"skymemory: no shell in {args.file}: {len(file.elements)} satellites are in no planes", sys.stderr)
        return 1
    return 0


def _kind(shell: ClusteredShell) -> str:
    if shell.star:
        return "star"
    if shell.phase is not None:
        return f"delta, F {shell.phase}"
    return "delta" if shell.even else "uneven nodes"


def _print_shells(clustering: Clustering, drifts: list[list[Drift]], file: ElementFile) -> None:
    placed_count = sum(shell.satellites for shell in clustering.shells)
    write_line(
        f"{len(file.elements)} satellites: {placed_count} in {len(clustering.shells)} shells, "
        f"{len(clustering.left_out)} left out"
    )
    if clustering.shells:
        write_line(f"epoch {_utc(clustering.shells[0].epoch_unix_s)}; drift along track in slots, median and p99")
        rows = [
            [
                f"{number}",
                f"{shell.inclination_deg:.2f}°",
                f"{shell.altitude_m / 1000:.0f} km",
                *(str(n) for n in (shell.planes, shell.slots_per_plane, shell.satellites, shell.gaps)),
                f"{len(shell.empty_planes)}",
                _kind(shell),
                *(f"{drifted.median_slots:.3f} {drifted.p99_slots:.3f}" for drifted in (day, week)),
            ]
            for number, (shell, (day, week)) in enumerate(zip(clustering.shells, drifts, strict=True), 1)
        ]
        head = ("shell", "inclination", "altitude", "planes", "slots", "filled", "gaps", "empty planes", "nodes")
        Table((*head, "after 1 day", "7 days"), rows, left=(8,)).print()
    for reason, count in Counter(satellite.why for satellite in clustering.left_out).most_common():
        write_line(f"left out      {count} {_MEANING[reason]}", hanging=14)
    _print_missing({}, file.skipped)


def _clustering_as_json(clustering: Clustering, drifts: list[list[Drift]], file: ElementFile) -> dict[str, Any]:
    return {
        "satellites": len(file.elements),
        "shells": [
            {
                "shell": number,
                "planes": shell.planes,
                "slots_per_plane": shell.slots_per_plane,
                "altitude_m": shell.altitude_m,
                "inclination_deg": shell.inclination_deg,
                "epoch": _utc(shell.epoch_unix_s),
                "star": shell.star,
                "even": shell.even,
                "phase": shell.phase,
                "satellites": shell.satellites,
                "gaps": shell.gaps,
                "empty_planes": list(shell.empty_planes),
                "drift": [asdict(satellite) for satellite in drifted],
                "nodes_rad": list(shell.nodes_rad),
                "offsets_slots": list(shell.offsets_slots),
                "placed": [
                    [None if satellite is None else satellite.number for satellite in plane] for plane in shell.placed
                ],
            }
            for number, (shell, drifted) in enumerate(zip(clustering.shells, drifts, strict=True), 1)
        ],
        "left_out": [
            {
                "satellite": satellite.elements.number,
                "name": satellite.elements.name,
                "why": satellite.why,
                "reason": satellite.reason,
            }
            for satellite in clustering.left_out
        ],
        "skipped": list(file.skipped),
    }
