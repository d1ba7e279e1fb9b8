"""Sweeps give the same answers in sequence, in processes and on Ray."""

from __future__ import annotations

import os

import pytest

from skymemory.errors import InvalidInput, MissingExtra, SkyMemoryError
from skymemory_lab.sim.sweeps import has_ray, sweep
from skymemory_lab.sim.trace import TraceStatistics, statistics_of
from skymemory_lab.sim.workload import ARXIV, L_EVAL, poisson

CELLS = [(workload, seed) for workload in (ARXIV, L_EVAL) for seed in range(3)]


def test_in_processes_as_in_sequence() -> None:
    log: list[tuple[int, int]] = []
    cells = [poisson(workload, 2.0, 60, seed) for workload, seed in CELLS]
    ours = sweep(statistics_of, cells, "sequence")
    assert sweep(statistics_of, cells, "processes", jobs=2, progress=lambda *one: log.append(one)) == ours
    assert log == [(done, len(cells)) for done in range(1, len(cells) + 1)]
    assert len({one.mean_prompt_tokens for one in ours}) == len(cells)


@pytest.mark.slow
def test_on_ray_as_in_sequence() -> None:
    if not has_ray():
        pytest.skip("Ray is not installed: make test-ray does it")
    cells = [poisson(workload, 2.0, 60, seed) for workload, seed in CELLS]
    ours: list[TraceStatistics] = sweep(statistics_of, cells, "sequence")
    assert sweep(statistics_of, cells, "ray", jobs=2) == ours


def test_says_what_is_missing_without_ray() -> None:
    if has_ray():
        pytest.skip("Ray is installed")
    with pytest.raises(MissingExtra, match=r"pip install .*\[ray\]"):
        sweep(statistics_of, [poisson(ARXIV, 1.0, 2, 1)], "ray")


def test_a_killed_worker_is_an_error_of_one_line() -> None:
    with pytest.raises(SkyMemoryError, match="one of 2 worker processes was killed: run fewer in parallel"):
        sweep(os._exit, [1, 1], "processes", jobs=2)


def test_an_error_of_one_cell_is_raised() -> None:
    with pytest.raises(InvalidInput, match="no requests"):
        sweep(statistics_of, [poisson(ARXIV, 1.0, 2, 1), [], poisson(ARXIV, 1.0, 2, 1)], "processes", jobs=2)


def test_refuses_no_jobs_and_no_such_way() -> None:
    with pytest.raises(InvalidInput, match="jobs"):
        sweep(len, [[]], jobs=0)
    with pytest.raises(InvalidInput, match="sequence, processes, ray"):
        sweep(len, [[]], "threads")  # type: ignore[arg-type]
    assert sweep(len, [], "processes") == []
