"""What a demo knows of the computer's cores before it says how long it will take."""

from __future__ import annotations

import pytest

from skymemory_lab.demo import resources


@pytest.mark.parametrize(
    ("running", "cores", "machine", "processes", "expected"),
    [(1, 2, 2, 2, 1.0), (1, 1, 2, 2, 2.0), (3, 2, 2, 2, 2.0), (1, 8, 8, 2, 1.0), (65, 2, 128, 2, 1.5)],
    ids=["quiet", "one core", "two busy programs", "many cores", "a share of a large busy machine"],
)
def test_contention(
    running: int, cores: int, machine: int, processes: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "_words", lambda path: ["0.1", "0.2", "0.3", f"{running}/300", "17"])
    monkeypatch.setattr(resources, "usable_cores", lambda: cores)
    monkeypatch.setattr(resources.os, "cpu_count", lambda: machine)
    monkeypatch.setattr(resources.time, "sleep", lambda seconds: None)
    assert resources.contention(processes) == expected
