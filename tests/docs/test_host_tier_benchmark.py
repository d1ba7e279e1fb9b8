"""`benchmarks/host_tier.py` measures and `plot_host_tier.py` draws what is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, *words: object) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


@pytest.mark.slow
def test_stores_beside_the_host_tier_are_measured_and_drawn(tmp_path: Path) -> None:
    out, drawn = tmp_path / "out.json", tmp_path / "out.svg"
    said = run("host_tier.py", "--quick", "--sizes", 65_536, 524_288, "--lmcache", tmp_path / "none", "--json", out)
    assert "LMCache is not installed in" in said
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert [row["verb"] for row in rows] == ["read", "write"] * 2
    stores = {"host", "copy"} | {
        who for who, program in (("Redis", "redis-server"), ("memcached", "memcached")) if shutil.which(program)
    }
    for row in rows:
        assert {name.removesuffix("_gb_per_s") for name in row if name.endswith("_gb_per_s")} == stores
        assert all(row[f"{who}_us"] > 0 and row[f"{who}_cpu_s_per_gb"] > 0 for who in stores), row
        assert (row["in_place_cpu_s_per_gb"] is None) == (row["verb"] == "write")
    run("plot_host_tier.py", out, drawn)
    assert ">host tier, in place</text>" in drawn.read_text("utf-8") and ">LMCache</text>" not in drawn.read_text(
        "utf-8"
    )
