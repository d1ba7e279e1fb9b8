"""The tables of the reproduction of Mooncake are those of the run whose CSV files lie beside them."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

pytest.importorskip("skymemory_lab", reason="the laboratory is not installed")

from skymemory_lab.reproduce.mooncake.experiments import EXPERIMENTS
from skymemory_lab.reproduce.mooncake.run import _cell

ROOT = Path(__file__).parents[2]
TABLES = (ROOT / "docs/reproduce/mooncake.md").read_text("utf-8")
PAGE = " ".join((ROOT / "docs/reproduce.md").read_text("utf-8").split())
"""Sentences, wherever their lines break."""
SYSTEMS = ("3P+1D", "4 coupled")
FILES = sorted(path for path in ROOT.glob("docs/figures/mooncake-*.csv") if not path.stem.endswith("-series"))


def shown(text: str) -> str:
    """A cell of the file as the page has it."""
    if not text:
        return "-"
    try:
        return _cell(float(text) if not text.lstrip("-").isdigit() else int(text))
    except ValueError:
        return text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_table_is_that_of_the_run(path: Path) -> None:
    with path.open(encoding="utf-8", newline="") as stream:
        header, *rows = csv.reader(stream)
    assert f"| {' | '.join(header)} |".replace("_", " ") in TABLES
    assert rows
    for row in rows:
        assert f"| {' | '.join(map(shown, row))} |" in TABLES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_numbers_are_the_commands_own(path: Path) -> None:
    """Not those of the page, which has fewer digits."""
    assert re.search(r"\d\.\d{6}", path.read_text("utf-8"))


def test_every_experiment_has_its_section() -> None:
    for name in EXPERIMENTS:
        assert f"\n`{name}`; published as " in TABLES
        assert (ROOT / f"docs/figures/mooncake-{name}.csv") in FILES


def records(name: str) -> list[dict[str, str]]:
    with (ROOT / f"docs/figures/mooncake-{name}.csv").open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize(
    ("name", "what", "decodings"),
    [
        ("datasets", ("workload", "system", "rule"), ["memory", "vllm", "fast contexts"]),
        ("simulated", ("workload", "system", "rule"), ["memory", "vllm", "fast contexts"]),
        ("real", ("system", "what"), ["memory", "vllm", "turbomind"]),
    ],
)
def test_coupled_machines_are_compared_with_each_decoding_alike(
    name: str, what: tuple[str, ...], decodings: list[str]
) -> None:
    rows = records(name)
    assert list(dict.fromkeys(row["decoding"] for row in rows)) == decodings
    compared = [[tuple(row[key] for key in what) for row in rows if row["decoding"] == one] for one in decodings]
    assert compared[0] == compared[1] == compared[2]


def test_what_is_said_of_the_decodings_is_what_was_found() -> None:
    found = {
        (row["workload"], row["decoding"], row["system"]): row for row in records("simulated") if row["rule"] == "p90"
    }
    lengths = list(dict.fromkeys(workload for workload, *_ in found))
    words = []
    for decoding in ("memory", "vllm", "fast contexts"):
        rates = [[float(found[one, decoding, name]["requests_per_s"]) for one in lengths] for name in SYSTEMS]
        gains = [round(100 * (ours / theirs - 1)) for ours, theirs in zip(*rates, strict=True)]
        assert gains == sorted(gains)
        words.append(f"{gains[0]} to {gains[-1]} %".replace("-", "−"))
    bound, vllm, fast = words
    assert f"it is {bound} with the bound (published: 50 to 525), {vllm} with vLLM's steps, and {fast} with" in PAGE
    busy = [f"{100 * float(found[one, 'vllm', '3P+1D']['prefill_utilisation']):.0f}" for one in lengths[:3]]
    assert f"busy {busy[0]}, {busy[1]} and {busy[2]} % of the time" in PAGE


def test_what_is_said_of_the_real_workload_is_what_was_found() -> None:
    met = {
        (row["decoding"], row["system"], float(row["rate"])): 100 * float(row["tbt_met"])
        for row in records("real")
        if row["what"] == "measured"
    }
    coupled = [met["vllm", "20 coupled", rate] for rate in (1.0, 1.5, 2.0)]
    apart = [met["vllm", "10P+10D", rate] for rate in (1.0, 1.5, 2.0)]
    assert (
        f"is met by {apart[0]:.0f} % apart and {coupled[0]:.0f} % coupled at the trace's own rate, by {apart[1]:.1f}"
        f" and {coupled[1]:.1f} % at 1.5 times, by {apart[2]:.0f} and {coupled[2]:.0f} % at twice"
    ) in PAGE
    assert coupled[1] > 57 > coupled[2]
