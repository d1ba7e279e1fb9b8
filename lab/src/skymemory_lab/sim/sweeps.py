"""Runs of a function over many cells: in sequence, in processes, or on Ray, with equal results.

The function must depend on its cell alone, seeds included. Both must be picklable.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import islice
from multiprocessing import active_children, get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal, TypeVar, get_args

from skymemory.errors import InvalidInput, SkyMemoryError, missing_extra
from skymemory.forks import interrupts_held

Cell = TypeVar("Cell")
Answer = TypeVar("Answer")
Way = Literal["sequence", "processes", "ray"]
WAYS: tuple[Way, ...] = get_args(Way)
Progress = Callable[[int, int], None]
"""Callback with the numbers of cells done and of all cells."""
Keep = Callable[[int, Any], None]
"""Callback in this process with a cell's number and answer."""
_AGAIN_S = 0.2


def sweep(
    run: Callable[[Cell], Answer],
    cells: Sequence[Cell],
    way: Way = "processes",
    jobs: int | None = None,
    progress: Progress = lambda done, of: None,
    keep: Keep = lambda number, answer: None,
) -> list[Answer]:
    """Return ``run`` of each cell, in order. ``jobs`` run in parallel; None: one per core.

    Raises:
        InvalidInput: unknown way, or no jobs.
        MissingExtra: Ray is not installed.
        SkyMemoryError: worker processes are killed, or there is no Ray cluster at RAY_ADDRESS.
        Exception: the first error of ``run``; waiting cells are cancelled.
    """
    if way not in WAYS:
        raise InvalidInput(f"way {way!r}: expected one of {', '.join(WAYS)}")
    if jobs is not None and jobs < 1:
        raise InvalidInput(f"jobs {jobs}: expected at least 1")
    if way == "ray":
        return _on_ray(run, cells, jobs, progress, keep)
    jobs = min(jobs or os.cpu_count() or 1, max(1, len(cells)))
    if way == "sequence" or jobs == 1:
        answers = []
        for number, cell in enumerate(cells):
            answers.append(run(cell))
            keep(number, answers[-1])
            progress(number + 1, len(cells))
        return answers
    # Spawned, not forked: a fork would copy threads' locks (BLAS, sockets) in any state.
    before = set(active_children())
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            with interrupts_held():
                futures = {pool.submit(_run_in_worker, run, cell): number for number, cell in enumerate(cells)}
            for done, future in enumerate(as_completed(futures), 1):
                keep(futures[future], future.result())
                progress(done, len(cells))
        except BrokenProcessPool as error:  # most often the kernel's out-of-memory killer
            raise SkyMemoryError(f"one of {jobs} worker processes was killed: run fewer in parallel") from error
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            if not isinstance(error, Exception):  # a signal that the workers may not have received
                _interrupt(set(active_children()) - before)
            raise
        return [future.result() for future in futures]


def _interrupt(workers: Collection[BaseProcess]) -> None:
    """Send SIGINT until the workers end: a signal just before a blocking system call goes unnoticed."""
    while alive := [worker for worker in workers if worker.is_alive()]:
        for worker in alive:
            if worker.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGINT)
        wait([worker.sentinel for worker in alive], _AGAIN_S)


_is_interrupted = False


def _run_in_worker(run: Callable[[Cell], Answer], cell: Cell) -> Answer:
    """Run the cell with SIGINT as an error of its own.

    Else it would print a traceback, or leave half an answer in the pipe, and the parent waiting forever.
    """
    global _is_interrupted
    try:
        if _is_interrupted:
            raise KeyboardInterrupt
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return run(cell)
    except KeyboardInterrupt:
        _is_interrupted = True
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


def _on_ray(
    run: Callable[[Cell], Answer], cells: Sequence[Cell], jobs: int | None, progress: Progress, keep: Keep
) -> list[Answer]:
    """Run on the cluster of RAY_ADDRESS, or on a local Ray instance for this call alone."""
    try:
        import ray
    except ImportError as error:
        raise missing_extra("a sweep on Ray", "ray", "ray") from error
    ours = not ray.is_initialized()
    if ours:
        # Ray would report its usage over the network.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = os.environ.get("RAY_ADDRESS")
        how: dict[str, Any] = {"address": address}
        if not address:  # not a Ray instance of other users on this machine
            local_jobs = jobs or os.cpu_count() or 1
            how = {
                "address": "local",
                "num_cpus": local_jobs,
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",
            }
        try:
            ray.init(log_to_driver=False, logging_level="ERROR", **how)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = f"no Ray cluster at RAY_ADDRESS={address}" if address else "Ray does not start here"
            raise SkyMemoryError(f"{where}: {error}") from error
    waiting: dict[Any, int] = {}
    try:
        task = ray.remote(run)
        answers: dict[int, Answer] = {}
        most = jobs or len(cells)
        numbers = iter(range(len(cells)))
        while len(answers) < len(cells):
            for number in islice(numbers, most - len(waiting)):
                waiting[task.remote(cells[number])] = number
            for ready in ray.wait(list(waiting))[0]:
                number = waiting.pop(ready)
                answers[number] = ray.get(ready)
                keep(number, answers[number])
                progress(len(answers), len(cells))
        return [answers[number] for number in range(len(cells))]
    except ray.exceptions.RayTaskError as error:
        # The text of the error itself is the worker's whole traceback.
        raise (error.cause if isinstance(error.cause, Exception) else error) from error
    except ray.exceptions.RayError as error:
        raise SkyMemoryError(f"Ray gave a cell up: {str(error).splitlines()[0]}: run fewer in parallel") from error
    finally:
        if ours:  # shutting down ends the tasks on all nodes
            ray.shutdown()
        else:
            for task_ref in waiting:
                ray.cancel(task_ref, force=True)
