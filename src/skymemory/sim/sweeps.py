"""Runs a function over many cells: in sequence, in processes, or on Ray, with equal results.

The function must depend on its cell alone (with seeds in it), and both must be picklable: a module's function, frozen
dataclasses. Answers are in the order of the cells.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Literal, TypeVar, get_args

from skymemory.errors import InvalidInput, SkyMemoryError, missing_extra

Cell = TypeVar("Cell")
Answer = TypeVar("Answer")
Way = Literal["sequence", "processes", "ray"]
WAYS: tuple[Way, ...] = get_args(Way)
Progress = Callable[[int, int], None]
"""Called with the number of cells done and of all cells."""


def sweep(
    run: Callable[[Cell], Answer],
    cells: Sequence[Cell],
    way: Way = "processes",
    jobs: int | None = None,
    progress: Progress = lambda done, of: None,
) -> list[Answer]:
    """``run`` of each cell. ``jobs``: in parallel; None: one per core.

    Raises:
        InvalidInput: unknown way, or no jobs.
        MissingExtra: Ray is not installed.
        Exception: the first error of ``run``; cells that have not started are cancelled.
    """
    if way not in WAYS:
        raise InvalidInput(f"way {way!r}: expected one of {', '.join(WAYS)}")
    if jobs is not None and jobs < 1:
        raise InvalidInput(f"jobs {jobs}: expected at least 1")
    jobs = min(jobs or os.cpu_count() or 1, max(1, len(cells)))
    if way == "ray":
        return _on_ray(run, cells, jobs, progress)
    if way == "sequence" or jobs == 1:
        answers = []
        for number, cell in enumerate(cells):
            answers.append(run(cell))
            progress(number + 1, len(cells))
        return answers
    # Spawned, not forked: a fork would copy threads' locks (BLAS, sockets) in whatever state they are.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(run, cell) for cell in cells]
        try:
            for number, future in enumerate(as_completed(futures)):
                future.result()
                progress(number + 1, len(cells))
        except BrokenProcessPool as error:  # most often the kernel's out-of-memory killer
            raise SkyMemoryError(f"one of {jobs} worker processes was killed: run fewer in parallel") from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]


def has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


def _on_ray(run: Callable[[Cell], Answer], cells: Sequence[Cell], jobs: int, progress: Progress) -> list[Answer]:
    """On the cluster of RAY_ADDRESS or a running one; else on a local one for this call."""
    try:
        import ray
    except ImportError as error:
        raise missing_extra("--way ray", "ray", "ray") from error
    ours = not ray.is_initialized()
    if ours:
        # Ray would report its usage over the network.
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
            progress(len(cells) - len(left), len(cells))
        answers: list[Answer] = ray.get(waiting)
        return answers
    finally:
        if ours:
            ray.shutdown()
