"""The claims with a number in the five documents: by our run of the document's model, by physics, and measured."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import numpy as np

from skymemory.constellation.orbit import Shell
from skymemory.constellation.presets import DEFAULT_HOST, EPOCH_UNIX_S, preset_named
from skymemory.constellation.sight import reach_cosine, slant_s
from skymemory.constellation.visibility import DEFAULT_MASK_DEG, EARTH_ROTATION_RAD_S, elevations_deg
from skymemory.installation import find_checkout
from skymemory.kv.block import KVLayout
from skymemory.placement.layout import Strategy
from skymemory.units import SPEED_OF_LIGHT_M_S
from skymemory_lab.reproduce.cake import Headline, reproduce
from skymemory_lab.sim.latency import LatencySetting as PaperSetting
from skymemory_lab.sim.latency import claims as latency_claims
from skymemory_lab.sim.sky.physical import LinkRates, TransferSetting, latency_s, sight_of, ways_of
from skymemory_lab.view.figures import DISCLOSED, constellations, disclosed_shell
from skymemory_lab.view.layout_map import paper_map
from skymemory_lab.view.protocol_sequence import label, record

_CHECKOUT = find_checkout()
DOCS = None if _CHECKOUT is None else _CHECKOUT / "docs"
"""Documentation with the kept runs, in a checkout of the repository."""

NO_SKY = "— (nothing of the sky in it)"
NO_RATES = "— (needs rates and queues of links)"
NOT_MEASURED = "— (not measured)"
NO_GPU = "— (needs the paper's GPUs)"
NO_CHECKOUT = "— (runs are kept in a checkout of the repository)"


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim as its document states it (``paper``), and our three values, or instead a reason: "— (…)"."""

    key: str
    document: str
    what: str
    paper: str
    model: str
    physics: str
    measured: str
    command: str = ""


def all_claims(physics: Mapping[str, Callable[[], str]] | None = None) -> list[Claim]:
    """Return all claims. ``physics`` adds to ``PHYSICS``, by the claim's key."""
    known = {**PHYSICS, **(physics or {})}
    listed = [*_paper(), *_disclosure(), *_cake(), *_mooncake(), *_routing()]
    return [
        Claim(**{**asdict(claim), "physics": known[claim.key]()}) if claim.key in known else claim for claim in listed
    ]


# Physics: results of light, orbits and the horizon alone.

_SAMPLES = 96


def _starlink() -> Shell:
    return disclosed_shell("Starlink A")


def _satellites_in_sight() -> str:
    shell = _starlink()
    counts_by_mask = []
    for mask_deg in (10.0, DEFAULT_MASK_DEG):
        counts = [
            int((elevations_deg(shell, DEFAULT_HOST, EPOCH_UNIX_S, shell.period_s * at / _SAMPLES) >= mask_deg).sum())
            for at in range(_SAMPLES)
        ]
        counts_by_mask.append(f"{min(counts)} to {max(counts)} above {mask_deg:g}°")
    return f"Starlink A from {DEFAULT_HOST.latitude_deg:g}° north: {', '.join(counts_by_mask)}"


def _longest_pass() -> str:
    shell = _starlink()
    # A pass straight overhead, relative to the Earth's rotation in the same direction.
    rate_rad_s = 2 * math.pi / shell.period_s - EARTH_ROTATION_RAD_S * math.cos(math.radians(shell.inclination_deg))
    durations = []
    for mask_deg in (0.0, 10.0, DEFAULT_MASK_DEG):
        minutes = 2 * math.acos(reach_cosine(shell, mask_deg)) / rate_rad_s / 60
        durations.append(f"{minutes:.1f} min above {mask_deg:g}°")
    return f"Starlink A, longest pass: {', '.join(durations)}"


def _beam() -> str:
    shell = _starlink()
    one_way_ms = [slant_s(shell, cosine) * 1e3 for cosine in (1.0, reach_cosine(shell, DEFAULT_MASK_DEG))]
    low, high = (2 * time_ms for time_ms in one_way_ms)
    return f"light to Starlink A and back: {low:.1f} ms overhead, {high:.1f} at {DEFAULT_MASK_DEG:g}°"


def _in_plane() -> str:
    return f"{_starlink().chord_m(1, 0):,.0f} m by positions, constant"


def _across() -> str:
    shell = _starlink()
    lengths_m = [shell.chord_m(0, 1, math.tau * at / 360) for at in range(360)]
    return f"{min(lengths_m):,.0f} to {max(lengths_m):,.0f} m by positions, twice each orbit"


def _near_neighbours() -> str:
    # Return the least satellites per plane with links under 2 ms.
    shell, count = _starlink(), 2
    while (
        Shell(shell.planes, count, shell.altitude_m, shell.inclination_deg).chord_m(1, 0) >= 2e-3 * SPEED_OF_LIGHT_M_S
    ):
        count += 1
    return f"{count}+ at {shell.altitude_m / 1e3:g} km, by positions"


def _flat_sky() -> str:
    """Return the error of equations 3 and 4 at the box's corner."""
    shell = Shell(15, 15, PaperSetting().altitude_m, 53.0)
    flat, real = (shell.slant_one_way_s(4, 4, model=model) * 1e3 for model in ("paper", "exact"))
    return f"light to the corner of 9 × 9: {flat:.0f} ms by equations 3 and 4, {real:.0f} over a round Earth"


_RATES = LinkRates(1.2e9, 1.2e9, 10e9)
_RATES_SAID = "Starlink A, hybrid, 1.2 Gbit/s a beam, 10 between satellites"


def _median_s(strategy: Strategy, servers: int, kvc_bytes: int, chunk_s: float) -> float:
    preset = preset_named("starlink-a")
    times_s = [preset.shell.period_s * at / 24 for at in range(24)]
    sight = sight_of(preset, DEFAULT_MASK_DEG, "climbing")
    ways = ways_of(preset, sight, "hybrid", times_s, strategy=strategy, servers=servers, exact_links=True)
    return float(np.median(latency_s(ways, TransferSetting(kvc_bytes, 12_288, server_s=chunk_s), _RATES)))


def _more_servers() -> str:
    changes = []
    for chunk_s, words in ((0.02, "20 ms"), (0.002, "2 ms"), (25e-6, "25 µs (measured here)")):
        few, many = (_median_s("rotation_hop", servers, 21 << 20, chunk_s) for servers in (9, 81))
        changes.append(f"{'less' if many < few else 'more'} by {abs(1 - many / few):.0%} with chunks of {words}")
    return f"9 to 81 servers: {', '.join(changes)} ({_RATES_SAID})"


def _strategies_apart() -> str:
    spreads = []
    for kvc_bytes in (1 << 20, 21 << 20):
        for chunk_s in (0.002, 0.02):
            times_s = [_median_s(strategy, 81, kvc_bytes, chunk_s) for strategy in ("rotation", "rotation_hop", "cost")]
            spreads.append(max(times_s) / min(times_s) - 1)
    return f"apart by {min(spreads):.0%} to {max(spreads):.0%}, rotation, rotation_hop and cost ({_RATES_SAID})"


PHYSICS: dict[str, Callable[[], str]] = {
    "in-sight": _satellites_in_sight,
    "pass": _longest_pass,
    "laser": _beam,
    "d-m": _in_plane,
    "d-n": _across,
    "link": _near_neighbours,
    "altitude": _flat_sky,
    "servers": _more_servers,
    "similar": _strategies_apart,
}


# Measured: from the JSON in docs/benchmarks.


def _rows(name: str) -> list[dict[str, Any]]:
    assert DOCS is not None
    rows: list[dict[str, Any]] = json.loads((DOCS / "benchmarks" / f"{name}.json").read_text("utf-8"))["rows"]
    return rows


def _measured(words: Callable[[], str]) -> str:
    return NO_CHECKOUT if DOCS is None else words()


def _first_token() -> str:
    rows = [row for row in _rows("ttft") if row["delay"] == "real"]
    shares = ", ".join(f"{100 * row['share']:.1f}" for row in rows)
    tokens = ", ".join(f"{row['tokens']:,}" for row in rows)
    return f"first token at {shares} % of computing ({tokens} tokens, CPU)"


def _block_bytes() -> str:
    row = _rows("ttft")[0]
    of = {row["codec"]: row["block_bytes"] / 1e6 for row in _rows("table_3")}
    return f"{row['bytes'] / row['tokens'] * 128 / 1e6:.2f} MB in 16 bit, {of['quanto8']:.2f} in 8"


def _table_3(codec: str) -> str:
    (row,) = (row for row in _rows("table_3") if row["codec"] == codec)
    plain_s, sky_s = row["plain_total_s"], row["sky_total_s"]
    return f"{plain_s:.1f} s → {sky_s:.1f} s, {100 * (1 - sky_s / plain_s):.0f} % (CPU)"


_TABLE_3 = "skymemory demo --json"


def _paper() -> Iterator[Claim]:
    document = "SkyMemory paper"
    layout = KVLayout(layers=22, kv_heads=4, head_dim=64, block_tokens=128, dtype="float16")
    yield Claim(
        "block",
        document,
        "KV of 128 tokens of a 1B model",
        "about 3 MB; 2.9 MB with 8 bits",
        f"{layout.block_bytes / 1e6:.2f} MB in 16 bit: the printed size is not the one of 8 bits",
        NO_SKY,
        _measured(_block_bytes),
        "python benchmarks/ttft.py; skymemory demo --json",
    )
    yield Claim(
        "blocks",
        document,
        "blocks of 128 tokens of a 250-character prompt",
        "4",
        "1 at most: a tokenizer makes no more tokens than bytes",
        NO_SKY,
        NOT_MEASURED,
    )
    yield Claim(
        "first-token",
        document,
        "caching improves latency",
        "by an order of magnitude",
        "—",
        NO_RATES,
        _measured(_first_token),
        "python benchmarks/ttft.py",
    )
    yield Claim(
        "in-sight", document, "satellites in sight from one point", "10 to 20", "all of the box", "", NOT_MEASURED
    )
    yield Claim("pass", document, "a satellite stays in sight", "5 to 10 minutes", "—", "", NOT_MEASURED)
    yield Claim("laser", document, "table 1: LEO, theoretical laser", "2 to 4 ms", "—", "", "— (no laser at hand)")
    of = {claim.what: claim for claim in latency_claims()}
    for key, what in (
        ("link", "links under 2 ms"),
        ("servers", "8× the servers"),
        ("altitude", "rotation_hop against rotation"),
        ("similar", "KV cache size and processing time"),
    ):
        yield Claim(key, document, what, of[what].paper, of[what].model, NO_RATES, NOT_MEASURED)
    rotation = paper_map(8)
    moves = ", ".join(
        f"{server + 1}: {label(source)}→{label(target)}" for server, source, target in sorted(rotation.handovers)
    )
    packets = ", ".join(f"{label(source)}→{label(target)}" for source, target in sorted(record().handed_over()))
    yield Claim(
        "figure-8",
        document,
        "chunks that move at a rotation (figure 8)",
        "6: (5,2)→(2,2), 3: (5,3)→(2,3), 8: (5,4)→(2,4)",
        moves,
        NO_SKY,
        f"{packets} (packets of a run in virtual time)",
        "skymemory figures 9",
    )
    for codec, name, paper in (
        ("quanto8", "Optimum Quanto", "6.2 s → 4.9 s, 21 %"),
        ("hqq8", "HQQ", "10.2 s → 7.8 s, about 24 %"),
    ):
        yield Claim(
            f"table-3-{codec}",
            document,
            f"30 tokens without and with the cache, {name}",
            paper,
            "—",
            NO_RATES,
            _measured(lambda codec=codec: _table_3(codec)),  # type: ignore[misc]
            _TABLE_3,
        )


def _disclosure() -> Iterator[Claim]:
    document = "SkyMemory disclosure"
    shell = _starlink()
    d_m, d_n = shell.d_m_m(), shell.d_n_max_m()
    light = SPEED_OF_LIGHT_M_S / 1e3
    yield Claim(
        "d-m",
        document,
        "Starlink A: neighbours in a plane",
        "1,969,922 m, 6.6 ms",
        f"{d_m:,.0f} m, {d_m / light:.3f} ms",
        "",
        NOT_MEASURED,
    )
    yield Claim(
        "d-n",
        document,
        "Starlink A: neighbours of two planes, most",
        "603,780 m, 2 ms",
        f"{d_n:,.0f} m, {d_n / light:.3f} ms",
        "",
        NOT_MEASURED,
    )
    for row in constellations().rows:
        name, least_km, most_km, blocked = row[0], float(str(row[7])), float(str(row[8])), row[10]
        yield Claim(
            f"shell-{DISCLOSED[str(name)]}",
            document,
            f"{name}: links between planes",
            f"N = {row[1]}, M = {row[2]}, {row[3]} km, {row[4]:g}°",
            f"D_N(t) from {least_km:,.0f} to {most_km:,.0f} km",
            f"blocked by the Earth {blocked:g} % of an orbit",
            NOT_MEASURED,
        )


_CAKE_MEASURED = "python benchmarks/cake.py"
_MEASURED_OF: dict[tuple[int, str], tuple[Callable[[], str], str]] = {
    (5, "A100: saved of computing alone, most"): (
        lambda: _saved("compute_s", full_share=True, part="most"),
        _CAKE_MEASURED,
    ),
    (5, "A100: saved of I/O alone, least"): (lambda: _saved("load_s", full_share=True, part="least"), _CAKE_MEASURED),
    (5, "A100: saved of I/O alone, most"): (lambda: _saved("load_s", full_share=True, part="most"), _CAKE_MEASURED),
    (6, "saved of computing alone, least"): (
        lambda: _saved("compute_s", full_share=False, part="least"),
        _CAKE_MEASURED,
    ),
    (6, "saved of computing alone, most"): (lambda: _saved("compute_s", full_share=False, part="most"), _CAKE_MEASURED),
    (6, "saved of I/O alone, least"): (lambda: _saved("load_s", full_share=False, part="least"), _CAKE_MEASURED),
    (6, "saved of I/O alone, most"): (lambda: _saved("load_s", full_share=False, part="most"), _CAKE_MEASURED),
    (8, "average saved of computing alone"): (
        lambda: _saved("compute_s", full_share=False, part="mean"),
        _CAKE_MEASURED,
    ),
    (8, "average saved of I/O alone"): (lambda: _saved("load_s", full_share=False, part="mean"), _CAKE_MEASURED),
}


def _saved(than: str, *, full_share: bool, part: str) -> str:
    # Return how much Cake saves of computing or loading alone (``than``) in the kept measurements. ``full_share``: only
    # those with whole steps for the prompt, else all others. ``part``: least, most or mean.
    saved = [100 * (1 - row["cake_s"] / row[than]) for row in _rows("cake") if (row["share"] == 1.0) == full_share]
    value = min(saved) if part == "least" else max(saved) if part == "most" else mean(saved)
    return f"{value:.1f} % (CPU, {len(saved)} other settings)"


def _value(headline: Headline, value: float) -> str:
    return f"{value:.4g} {headline.unit}"


def _cake() -> Iterator[Claim]:
    document = "Cake"
    for result in reproduce([2, 3, 5, 6, 8]):
        for headline in result.headlines:
            words, command = _MEASURED_OF.get((result.figure, headline.what), (None, ""))
            fitted = " (fitted to it)" if headline.kind == "fitted" else ""
            yield Claim(
                f"cake-{result.figure}-{re.sub(r'[^a-z0-9]+', '-', headline.what.lower()).strip('-')}",
                document,
                f"figure {result.figure}: {headline.what}",
                _value(headline, headline.paper),
                f"{_value(headline, headline.ours)}{fitted}",
                NO_SKY,
                NO_GPU if words is None else _measured(words),
                command,
            )

    def overhead() -> str:
        return f"{100 * _rows('loading')[0]['scheduling_share']:.3f} % of a step"

    yield Claim(
        "cake-7-overhead",
        document,
        "figure 7: a step is longer by",
        "negligible",
        "—",
        NO_SKY,
        _measured(overhead),
        "python benchmarks/loading.py",
    )

    def smaller(codec: str) -> str:
        of = {row["codec"]: row["bits"] for row in _rows("codecs") if row["source"] == "small trained model"}
        return f"{of['raw'] / of[codec]:.2f} × smaller than 16 bit"

    for codec, paper, ours in (("8 bit", "1.95 ×", "quanto8"), ("CacheGen", "7.97 ×", "cachegen")):
        yield Claim(
            f"cake-codec-{ours}",
            document,
            f"transfers with {codec} are faster",
            paper,
            "— (taken over)",
            NO_SKY,
            _measured(lambda ours=ours: smaller(ours)),  # type: ignore[misc]
            "python benchmarks/codecs.py",
        )


_MOONCAKE_ROW = re.compile(
    r"^\| (?P<what>[^|]+?) \| (?P<paper>[^|]+?) \| (?P<ours>[^|]+?) \| (?P<unit>[^|]*?) ?\| [^|]*\|$"
)
_MOONCAKE_COMMAND = "skymemory reproduce mooncake --trace conversation_trace.jsonl --seed 1"


def _mooncake() -> Iterator[Claim]:
    """Yield the claims of the kept run, from its page."""
    document = "Mooncake"
    if DOCS is None:
        yield Claim(
            "mooncake", document, "all experiments", "see there", NO_CHECKOUT, NO_SKY, NO_GPU, _MOONCAKE_COMMAND
        )
        return
    experiment, compares = "", False
    for line in (DOCS / "reproduce" / "mooncake.md").read_text("utf-8").splitlines():
        if named := re.match(r"`([a-z-]+)`; published as ([^.]+)\.", line):
            experiment, published_as = named.groups()
        cells = _MOONCAKE_ROW.match(line)
        if not line.startswith("|"):
            compares = False
        elif line.startswith("| what | published | ours |"):
            compares = True
        if not compares or not cells or cells["paper"] in ("-", "published", "---:") or cells["unit"] == "requests":
            continue
        unit = f" {cells['unit']}" if cells["unit"] else ""
        yield Claim(
            f"mooncake-{experiment}-{re.sub(r'[^a-z0-9]+', '-', cells['what'].lower()).strip('-')}",
            document,
            f"{published_as}: {cells['what']}",
            f"{cells['paper']}{unit}",
            f"{cells['ours']}{unit}",
            NO_SKY,
            NO_GPU,
            _MOONCAKE_COMMAND,
        )


def _routing() -> Iterator[Claim]:
    document = "Prefix-aware routing"

    def hits(*players: str) -> str:
        of = {
            row["player"]: 100 * row["token_hits"]
            for row in _rows("arena")
            if (row["family"], row["blocks"], row["rate"], row["whole"]) == ("conversation (trace)", 5000, 1.0, 0.0)
        }
        return "tokens that hit: " + ", ".join(f"{player} {of[player]:.1f} %" for player in players)

    for key, what, paper, players in (
        ("routing-trie", "hash trie against a hashed prefix", "better hits", ("hash-trie", "chwbl", "session")),
        ("routing-accurate", "index of engines' events against an estimate", "best hits", ("precise", "approximate")),
    ):
        yield Claim(
            key,
            document,
            what,
            paper,
            _measured(lambda players=players: hits(*players)),  # type: ignore[misc]
            NO_SKY,
            "— (simulated servers; real ones: docs/benchmarks/router.md)",
            "python benchmarks/arena.py",
        )


# As text, Markdown and JSON.


def as_text(claims: list[Claim], width: int) -> str:
    lines = []
    for document in dict.fromkeys(claim.document for claim in claims):
        lines += ["", *textwrap.wrap(document, width)]
        for claim in (claim for claim in claims if claim.document == document):
            lines += textwrap.wrap(claim.what, width, initial_indent="  ", subsequent_indent="  ")
            for name in ("paper", "model", "physics", "measured"):
                text = str(getattr(claim, name))
                if text.startswith("—") and name != "model":
                    continue
                line = f"{text}  [{claim.command}]" if name == "measured" and claim.command else text
                lines += textwrap.wrap(
                    line,
                    width,
                    initial_indent=f"    {name + ':':<10}",
                    subsequent_indent=" " * 14,
                    break_on_hyphens=False,
                )
    return "\n".join(lines).lstrip("\n")


def as_markdown(claims: list[Claim]) -> str:
    """Return the page docs/reproduce/claims.md."""
    lines = [
        "<!-- Generated: skymemory reproduce claims --markdown -->",
        "",
        "# Claims of the papers, and what we find",
        "",
        "Each claim that has a number. *Its model*: our run of the document's own model. *Physics*: light, orbits and",
        "horizon alone. *Measured*: by the command beside it, from the JSON in `docs/benchmarks`. A dash says why not.",
        "What the disclosure states like the paper stands once.",
    ]
    for document in dict.fromkeys(claim.document for claim in claims):
        mine = [claim for claim in claims if claim.document == document]
        lines += ["", f"## {document}", ""]
        # A command that all claims share is printed before the table.
        shared = mine[0].command if len(mine) > 1 and len({claim.command for claim in mine}) == 1 else ""
        if shared:
            lines += [f"All by `{shared}`.", ""]
        columns = {
            "claim": [claim.what for claim in mine],
            "paper": [claim.paper for claim in mine],
            "its model": [claim.model for claim in mine],
            "physics": [claim.physics for claim in mine],
            "measured": [claim.measured for claim in mine],
            "by": [
                "" if shared else ", ".join(f"`{part.strip()}`" for part in claim.command.split(";") if part)
                for claim in mine
            ],
        }
        # A reason for a missing value that all rows share is printed before the table, too.
        for name in ("physics", "measured"):
            if len(texts := set(columns[name])) == 1 and (reason := next(iter(texts))).startswith("— ("):
                lines += [f"{name.capitalize()}: {reason[3:-1]}.", ""]
                del columns[name]
        if not any(columns["by"]):
            del columns["by"]
        lines += [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
        for cells in zip(*columns.values(), strict=True):
            lines.append(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in cells)} |")
    return "\n".join(lines) + "\n"


def as_json(claims: list[Claim]) -> str:
    return json.dumps([asdict(claim) for claim in claims], indent=1, ensure_ascii=False)
