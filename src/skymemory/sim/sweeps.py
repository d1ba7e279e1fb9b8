"""The same function over many cells: one after the other, in processes, or on Ray; the answers are the same.

What is run must depend on its cell alone (simulations draw from seeds in it), and function and cells must be what
pickle can carry: a module's own function, and frozen dataclasses. Answers come in the order of the cells.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, Literal, TypeVar, get_args

from skymemory.errors import InvalidInput, MissingExtra

Cell = TypeVar("Cell")
Answer = TypeVar("Answer")
Way = Literal["sequence", "processes", "ray"]
WAYS: tuple[Way, ...] = get_args(Way)
Told = Callable[[int, int], None]
"""Called with how many cells are done, and how many there are."""


def sweep(
    run: Callable[[Cell], Answer],
    cells: Sequence[Cell],
    way: Way = "processes",
    jobs: int | None = None,
    told: Told = lambda done, of: None,
) -> list[Answer]:
    """What ``run`` says of each cell. ``jobs``: at once, as many as there are processors where it is not said.

    Raises:
        InvalidInput: no such way, or no jobs.
        MissingExtra: Ray is not installed.
        Exception: whatever ``run`` raised for a cell; cells that had not begun are given up.
    """
    if way not in WAYS:
        raise InvalidInput(f"sweeps run in {', '.join(WAYS)}; not in {way!r}")
    if jobs is not None and jobs < 1:
        raise InvalidInput(f"{jobs} jobs at once do nothing; at least one is needed")
    jobs = min(jobs or os.cpu_count() or 1, max(1, len(cells)))
    if way == "ray":
        return _on_ray(run, cells, jobs, told)
    if way == "sequence" or jobs == 1:
        answers = []
        for number, cell in enumerate(cells):
            answers.append(run(cell))
            told(number + 1, len(cells))
        return answers
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(run, cell) for cell in cells]
        try:
            for number, future in enumerate(as_completed(futures)):
                future.result()
                told(number + 1, len(cells))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]


def has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


def _on_ray(run: Callable[[Cell], Answer], cells: Sequence[Cell], jobs: int, told: Told) -> list[Answer]:
    """On the cluster that RAY_ADDRESS names or that runs already; else on this machine, for as long as it takes."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("sweeps on Ray need it: pip install 'skymemory[ray]'") from error
    ours = not ray.is_initialized()
    if ours:
        # Ray's own reports of use go to its makers over the network: not from here.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        alone: dict[str, Any] = {"num_cpus": jobs, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init(log_to_driver=False, logging_level="ERROR", **({} if os.environ.get("RAY_ADDRESS") else alone))
    try:
        task = ray.remote(run)
        waiting = [task.remote(cell) for cell in cells]
        left = list(waiting)
        while left:
            ready, left = ray.wait(left)
            ray.get(ready)
            told(len(cells) - len(left), len(cells))
        answers: list[Answer] = ray.get(waiting)
        return answers
    finally:
        if ours:
            ray.shutdown()
