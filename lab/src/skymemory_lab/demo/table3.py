"""``skymemory demo``: checks the options, starts the constellation, then loads torch and measures."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from skymemory.constellation.presets import DEFAULT_PRESET, preset_named
from skymemory.engine.inputs import check_engine_installed, check_model
from skymemory.errors import InvalidInput
from skymemory.installation import command_word
from skymemory.kv.context import DEFAULT_BLOCK_TOKENS as BLOCK_TOKENS
from skymemory.progress import Progress
from skymemory.testbed.connect import expected_round_trip_s
from skymemory.testbed.control import confirm_all_answer
from skymemory.testbed.plan import ConstellationPlan, local_hosts, make_plan
from skymemory.testbed.run_directory import RunDirectory, temporary_run_directory
from skymemory.testbed.supervisor import Started, end_children, start_on_free_ports
from skymemory.text import command_lines, width_of, write
from skymemory.units import format_duration, format_size
from skymemory_lab.demo.estimate import Estimate, TimedRun, format_estimate
from skymemory_lab.demo.resources import free_memory_bytes
from skymemory_lab.demo.sizing import (
    PAPER,
    PLANNED_SHARE,
    PROMISED_S,
    QUICK_PROMISED_S,
    ComputerSpeeds,
    Size,
    choose,
    parts,
    reasons,
    shape_of,
    sizes,
)

_END_S = 1.0
_NEXT = {
    "skymemory constellation up": "",
    "skymemory kv put README.md": "",
    "skymemory kv get README.md -o copy.md": "",
    "skymemory demo --tokens 2048": "a longer context: the cache wins by more",
    "skymemory layout --rotations 1": "where the chunks are, and where they go",
}


@contextmanager
def _constellation(progress: Progress) -> Iterator[tuple[ConstellationPlan, RunDirectory]]:
    with temporary_run_directory() as folder:
        directory = RunDirectory(folder)
        running: Started | None = None
        try:
            with progress.wait("starting the constellation", 2.0):
                running = start_on_free_ports(
                    directory,
                    # As in the paper: all values on ten satellites.
                    lambda ports: make_plan(
                        hosts=local_hosts(DEFAULT_PRESET, 5, ports), servers=preset_named(DEFAULT_PRESET).servers
                    ),
                    preset_named(DEFAULT_PRESET).torus.size,
                    foreground=True,
                    confirm=confirm_all_answer,
                )
            plan = running.plan
            progress.say(
                f"constellation up in {running.seconds:.2f} s: {plan.torus.size} satellites in {len(plan.hosts)} "
                f"processes, {plan.servers} servers by {plan.strategy}, "
                f"round trip {format_duration(expected_round_trip_s(plan, 'ideal'))}"
            )
            yield plan, directory
        finally:
            if running is not None:
                end_children(running.children)


def _check_input(args: argparse.Namespace, document: str) -> None:
    if args.tokens is not None and args.tokens <= BLOCK_TOKENS:
        raise InvalidInput(f"--tokens {args.tokens}: at least {BLOCK_TOKENS + 1}, a block and a token to compute")
    if args.model is not None:
        check_model(args.model)
    if len(document.encode()) <= BLOCK_TOKENS:  # a token is a byte at least; the exact count needs the tokenizer
        raise InvalidInput(
            f"the document has {len(document.encode())} bytes: too few for at least {BLOCK_TOKENS + 1} tokens, which "
            f"fill a block of {BLOCK_TOKENS} and leave one to compute"
        )
    check_engine_installed(args.model)


def run_demo(args: argparse.Namespace, document: str) -> int:
    """Return 0 if the identity check held and every codec got its tokens from the satellites."""
    _check_input(args, document)
    progress = Progress(sys.stderr if args.json else sys.stdout)
    promised_s = QUICK_PROMISED_S if args.quick else PROMISED_S
    chosen = args.model is None and args.tokens is None
    limit = (
        f"in at most {format_estimate(promised_s).removeprefix('about ')}"
        if chosen
        else "of the size that is asked for"
    )
    progress.say(f"table 3, {limit}: first the speed of this computer is measured, which the size depends on")
    with _constellation(progress) as (plan, directory):
        with progress.wait("loading torch and transformers", 6.0):
            from transformers.utils import logging as transformers_logging

            from skymemory_lab.demo.speeds import measure_speeds
            from skymemory_lab.demo.table3_measure import Table3, print_table_3

            transformers_logging.set_verbosity_error()
            transformers_logging.disable_progress_bar()
        with progress.wait("measuring this computer's speed", 2.0):
            speeds = measure_speeds()
        size, words = _size(args, speeds, promised_s, progress)
        run = TimedRun(progress, Estimate(parts(speeds, size), spent_s=progress.seconds + _END_S * speeds.slowdown))
        _say_estimate(progress, run.estimate, size, words, promised_s if chosen else math.inf)
        table = Table3(args, size, plan, directory, run)
        identical = table.check_identity(document)
        rows, moved = table.rows(document)
    is_correct = identical and bool(rows) and all(row.tokens_from_sky > 0 for row in rows)
    if args.json:
        report = {
            "identical": identical,
            "rotation": moved,
            "size": asdict(size),
            "estimate_s": run.estimate.first_s,
            "seconds": progress.seconds,
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(report, indent=1))
    else:
        print_table_3(rows, words)
        verdict = "done" if is_correct else "FAILED: see above"
        print()
        write(f"{verdict}; the constellation is down again; {run.format_took()}. Try next:")
        command = command_word()
        following = {words.replace("skymemory", command, 1): meaning for words, meaning in _NEXT.items()}
        print("\n".join(command_lines(following, width_of())))
    return 0 if is_correct else 1


def _size(
    args: argparse.Namespace, speeds: ComputerSpeeds, promised_s: float, progress: Progress
) -> tuple[Size, list[str]]:
    options = list(sizes(PAPER, quick=args.quick))
    if args.model is not None or args.tokens is not None:
        shape = options[0].shape if args.model is None else shape_of(args.model)
        options = [replace(options[0], shape=shape, tokens=args.tokens or options[0].tokens)]
    planned_s = PLANNED_SHARE * promised_s - progress.seconds
    size, _ = choose(speeds, options, planned_s)
    return size, reasons(speeds, size, quick=args.quick, promised_s=promised_s)


def _say_estimate(progress: Progress, estimate: Estimate, size: Size, words: list[str], promised_s: float) -> None:
    for line in words:
        progress.say(line)
    late = f": more than the {promised_s:.0f} s promised, this computer is too slow or too busy"
    progress.say(f"estimate: {format_estimate(estimate.first_s)} in all{late if estimate.first_s > promised_s else ''}")
    free_bytes = free_memory_bytes()
    if size.needed_bytes > free_bytes:
        progress.say(
            f"needs {format_size(size.needed_bytes)} of memory, and {format_size(free_bytes)} are free: the system may "
            "end it, or swap; a smaller --model, or other programs ended, would help"
        )
