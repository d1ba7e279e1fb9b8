"""The tables of `data_path.py sizes`, and that it measures, leaves out what is not there, and is drawn."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import benchmark_tables

ROOT = Path(__file__).parents[2]
ROWS: list[dict[str, Any]] = [
    {"path": "Redis", "us": 50.0, "x": 1.0, "clients_s_per_gb": 0.5, "servers_s_per_gb": 0.25},
    {"path": "memcached", "us": 30.0, "x": 1.7, "clients_s_per_gb": 0.25, "servers_s_per_gb": 0.125},
    {"path": "Mooncake", "us": 400.0, "x": 0.12, "failed": 0.25},
    {"path": "by size", "us": 60.0, "x": 0.8, "clients_s_per_gb": 1.0, "servers_s_per_gb": 2.0},
    {"path": "on ten", "us": 20.0, "x": 2.5, "clients_s_per_gb": 3.0, "servers_s_per_gb": 4.0},
]


def cell_of(clients: int, *paths: str) -> list[dict[str, Any]]:
    about = {"section": "sizes", "size_bytes": 65_536, "clients": clients, "verb": "read"}
    return [about | row for row in ROWS if row["path"] in paths]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """With all stores for one client, without Redis and Mooncake for 8, ours alone for 64."""
    rows = cell_of(64, "by size") + cell_of(1, *(row["path"] for row in ROWS))
    rows += cell_of(8, "memcached", "by size", "on ten") + [{"section": "ways"}]
    monkeypatch.setattr(benchmark_tables, "rows_of", lambda name: rows)
    return {name: benchmark_tables.TABLES[f"data path, {name}"]().splitlines() for name in ("sizes", "processor")}


def test_ours_stands_beside_the_fastest_other_store(lines: dict[str, list[str]]) -> None:
    heads, _, one, eight, many = lines["sizes"]
    assert heads == (
        "| value | clients |  | by size | Redis | memcached | Mooncake | on ten | by size, of the best peer |"
    )
    assert one == (
        "| 66 KB | 1 | read | 60 µs (0.80 ×) | 50 µs | 30 µs (1.70 ×) | 400 µs (0.12 ×), 25.0% failed | 20 µs (2.50 ×) "
        "| 0.50 × memcached |"
    )
    assert eight.startswith("| 66 KB | 8 | read | 60 µs (0.80 ×) |  | 30 µs") and eight.endswith("| 0.50 × memcached |")
    assert many == "| 66 KB | 64 | read | 60 µs (0.80 ×) |  |  |  |  |  |"


def test_seconds_of_the_processor(lines: dict[str, list[str]]) -> None:
    heads, _, one, *_ = lines["processor"]
    assert heads == "| value | clients |  | by size | Redis | memcached | on ten |", "those measured before have none"
    assert one == "| 66 KB | 1 | read | 1.00 + 2.00 | 0.50 + 0.25 | 0.25 + 0.12 | 3.00 + 4.00 |"


def run(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)


CLIENTS = """
import sys
sys.path.insert(0, sys.argv[1])
import _data_path_clients as side

def store(ends_at):
    def open_value(name, value):
        number, reads = int(name.partition("-")[2]), iter(range(100))
        def read():
            count = next(reads)
            if (number, count) == (1, ends_at):
                raise SystemExit(1)
            if number == 0 and count in (2, 3):
                raise side.Failed
            return value
        return read, lambda: None
    return open_value

side.STORES["odd"] = store, "json"
clients = side.Clients("odd", 4096, 3)
clients.carry_out({"clients": 3, "arguments": [5]})
clients.carry_out({"size_bytes": 4096})
for verb in ("read", "write"):
    print(clients.carry_out({"verb": verb, "runs": 3})["failed"])
try:
    clients.carry_out({"verb": "read", "runs": 3})
except EOFError:
    print("ended")
"""


def test_failures_are_counted_and_a_client_that_ends_is_noticed() -> None:
    command = [sys.executable, "-c", CLIENTS, str(ROOT / "benchmarks")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "2\n0\nended\n"


@pytest.mark.slow
def test_sizes_are_measured_and_drawn(tmp_path: Path) -> None:
    out, drawn = tmp_path / "out.json", tmp_path / "out.svg"
    wanted = [word for name in ("by size", "memcached", "LMCache") for word in ("--only", name)]
    grid = ("--sizes", 4096, 65_536, "--clients", 1, 2, "--size-rounds", 2, "--lmcache", tmp_path / "none")
    said = run("data_path.py", "sizes", *wanted, *grid, "--json", out).stderr
    assert "LEFT OUT: LMCache: it is not installed in" in said
    rows = json.loads(out.read_text("utf-8"))["rows"]
    stores = {"by size"} | ({"memcached"} if shutil.which("memcached") else set())
    assert {row["path"] for row in rows} == stores
    assert len(rows) == len(stores) * 2 * 2 * 2
    for row in rows:
        assert row["failed"] == 0 and row["us"] > 0 and row["clients_s_per_gb"] > 0 and row["servers_s_per_gb"] > 0, row
        used_s = row["clients_s_per_gb"] * row["size_bytes"] * row["clients"] / 1e9
        assert used_s < 10 * row["clients"] * row["us"] / 1e6, "no more than its processors have"
    run("plot_data_path.py", out, drawn)
    assert ">by size</text>" in drawn.read_text("utf-8") and ">Redis</text>" not in drawn.read_text("utf-8")
