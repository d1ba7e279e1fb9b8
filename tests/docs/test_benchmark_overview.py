"""What the first table of the benchmarks says was reached is what the runs' JSON says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/benchmarks.md").read_text("utf-8")
REACHED = {
    cells[3].strip().strip("`"): cells[2].strip()
    for cells in (line.split("|") for line in reversed(PAGE.splitlines()) if line.startswith("| "))
}
"""By command; the first row of each."""


def rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / f"docs/benchmarks/{name}.json").read_text("utf-8"))["rows"]
    return rows


def test_time_to_first_token() -> None:
    shares = {
        delay: [100 * row["share"] for row in rows_of("ttft") if row["delay"] == delay] for delay in ("off", "real")
    }
    off, real = (", ".join(f"{share:.1f}" for share in shares[delay]) for delay in ("off", "real"))
    assert REACHED["python benchmarks/ttft.py"] == f"{off} %; real delays {real} %"


def test_cake() -> None:
    rows = rows_of("cake")
    best, hindsight = (max(row[key] for row in rows) for key in ("of_best", "of_hindsight"))
    met = sum(row["of_hindsight"] <= 1.08 for row in rows)
    said = f"{best:.3f} ×; {met} of {len(rows)} cells, worst {hindsight:.3f}: **{len(rows) - met} missed**"
    assert REACHED["python benchmarks/cake.py"] == said


def test_the_router() -> None:
    (default,) = [row for row in rows_of("picking") if row.get("strategy") == "least-ttft"]
    assert REACHED["python benchmarks/picking.py"] == (
        f"{default['pick']['p50_us']:.0f} and {default['pick']['p99_us']:.0f} µs"
    )
    ours = {
        row["connections"]: row for row in rows_of("proxy") if "default" in row["way"] and row["body_bytes"] == 8192
    }
    shares = " and ".join(f"{ours[connections]['per_s_over_peer']:.2f}" for connections in (8, 64))
    assert REACHED["python benchmarks/proxy.py"] == f"{shares}: **missed**"
    assert REACHED["python benchmarks/envoy_picker.py"] == f"{rows_of('envoy_picker')[1]['p50_ms']:.2f} ms"
    floods = rows_of("picker_floods")
    late, more = [row["p99_ms"] for row in floods], max(row["more_mib"] for row in floods)
    assert REACHED["python benchmarks/picker_floods.py"] == (
        f"{len(floods)} floods: {min(late):.0f} to {max(late):.0f} ms, ≤ {more:.0f} MiB"
    )


def test_the_arena() -> None:
    cells = json.loads((ROOT / "docs/benchmarks/arena.json").read_text("utf-8"))["verdicts"]
    below = [cell for cell in cells if not cell["saturated"]]
    led = f"{sum(cell['ratio'] <= 1 for cell in below)} of {len(below)} cells"
    assert REACHED["python benchmarks/arena.py"] == f"{led} below saturation"
    assert led in " ".join((ROOT / "CHANGELOG.md").read_text("utf-8").split())


def test_the_rest() -> None:
    both = next(row for row in rows_of("security") if row.get("way") == "both")
    assert REACHED["python benchmarks/security.py"] == f"{100 * (1 - both['read_x']):.0f} %"
    mutants = json.loads((ROOT / "docs/benchmarks/mutants.json").read_text("utf-8"))
    assert REACHED["make mutants"] == f"{mutants['killed']} of {mutants['faults']}"
    codec = next(row for row in rows_of("codecs") if (row["source"], row["codec"]) == ("quality", "cachegen"))
    assert REACHED["python benchmarks/codecs.py"] == (
        f"{codec['times_smaller_than_quanto8']:.2f} × at {codec['higher_percent']:.2f} ± {codec['error_percent']:.2f} %"
    )
    (footprint,) = rows_of("footprint")
    start, memory = footprint["start_s"], footprint["memory_MB"]
    assert REACHED["python benchmarks/footprint.py"] == f"{start:.2f} s, {memory:.0f} MB, < 0.1 %"
