"""A pytest plugin (``-p tests.flight.real``): constellations of processes that any test starts have satellites in C.

The environment variable ``SATELLITES`` says which: ``c`` (default) or ``mixed``. It holds for ``supervisor.start`` in
the test's process, and for `skymemory constellation up` in others, which find ``chosen/sitecustomize.py``. A test that
says itself which satellites it wants is left alone.
"""

from __future__ import annotations

import os
from functools import wraps
from pathlib import Path
from typing import Any

from skymemory.testbed import supervisor
from skymemory.testbed.flight import daemon_path, kinds_of
from skymemory.testbed.plan import ConstellationPlan
from skymemory.testbed.run_directory import RunDirectory

CHOSEN = os.environ.setdefault("SATELLITES", "c")
_start = supervisor.start
started = {"c": 0, "python": 0}
"""Hosts, by kind."""


@wraps(_start)
def start(directory: RunDirectory, plan: ConstellationPlan, **options: Any) -> supervisor.Started:
    if not options.get("kinds"):
        options["kinds"] = kinds_of("mixed" if CHOSEN == "mixed" else "c", plan.hosts)
    in_c = len(options["kinds"])
    started["c"] += in_c
    started["python"] += len(plan.hosts) - in_c
    return _start(directory, plan, **options)


def install() -> None:
    daemon_path()
    supervisor.start = start


def pytest_configure() -> None:
    install()
    folder = Path(__file__).with_name("chosen")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"SATELLITES={CHOSEN}: hosts started within this process: {started}")
