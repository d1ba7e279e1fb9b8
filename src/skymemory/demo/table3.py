"""``skymemory demo``: checks the options, starts the constellation, then loads torch and measures."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from skymemory.constellation.presets import DEFAULT_PRESET, preset_named
from skymemory.engine.inputs import check_engine_installed, check_model
from skymemory.errors import InvalidInput
from skymemory.kv.context import DEFAULT_BLOCK_TOKENS as BLOCK_TOKENS
from skymemory.testbed.connect import expected_round_trip_s
from skymemory.testbed.control import confirm_all_answer
from skymemory.testbed.plan import ConstellationPlan, local_hosts, make_plan
from skymemory.testbed.run_directory import RunDirectory, temporary_run_directory
from skymemory.testbed.supervisor import Started, end_children, start_on_free_ports
from skymemory.units import format_duration


@contextmanager
def _constellation(say: Callable[[str], None]) -> Iterator[tuple[ConstellationPlan, RunDirectory]]:
    """The testbed with real delays, in a run directory of its own, its processes on lines to us: gone at the end
    whatever happens.
    """
    with temporary_run_directory() as folder:
        directory = RunDirectory(folder)
        started: Started | None = None
        try:
            started = start_on_free_ports(
                directory,
                # As in the paper: all values on ten satellites.
                lambda ports: make_plan(
                    hosts=local_hosts(DEFAULT_PRESET, 5, ports), servers=preset_named(DEFAULT_PRESET).servers
                ),
                preset_named(DEFAULT_PRESET).torus.size,
                foreground=True,
                confirm=confirm_all_answer,
            )
            plan = started.plan
            say(
                f"constellation up in {started.seconds:.2f} s: {plan.torus.size} satellites in {len(plan.hosts)} "
                f"processes, {plan.servers} servers by {plan.strategy}, "
                f"round trip {format_duration(expected_round_trip_s(plan, 'ideal'))}"
            )
            yield plan, directory
        finally:
            if started is not None:
                end_children(started.children)


def _check_input(args: argparse.Namespace, document: str) -> None:
    """Check the options before anything is started."""
    if args.tokens is not None and args.tokens <= BLOCK_TOKENS:
        raise InvalidInput(f"--tokens {args.tokens}: at least {BLOCK_TOKENS + 1}, a block and a token to compute")
    if args.model is not None:
        check_model(args.model)
    if len(document.encode()) <= BLOCK_TOKENS:  # a token is a byte at least; the exact count takes the tokenizer
        raise InvalidInput(
            f"the document has {len(document.encode())} bytes: too few for at least {BLOCK_TOKENS + 1} tokens, which "
            f"fill a block of {BLOCK_TOKENS} and leave one to compute"
        )
    check_engine_installed()


def run_demo(args: argparse.Namespace, document: str) -> int:
    """Run the demo; exit code 0 if the identity check held and every codec got its tokens from the sky."""
    _check_input(args, document)
    began_s = time.perf_counter()

    def say(words: str) -> None:
        stream = sys.stderr if args.json else sys.stdout
        print(f"[{time.perf_counter() - began_s:5.1f} s] {words}", file=stream, flush=True)

    with _constellation(say) as (plan, directory):
        from transformers.utils import logging as transformers_logging  # takes seconds: the sky is up by then

        from skymemory.demo.table3_measure import check_identity, print_table_3, table_rows

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        identical = check_identity(plan, directory, say, document)
        rows, moved = table_rows(args, plan, directory, say, document)
    sound = identical and bool(rows) and all(row.tokens_from_sky > 0 for row in rows)
    if args.json:
        report = {"identical": identical, "rotation": moved, "rows": [asdict(row) for row in rows]}
        print(json.dumps(report, indent=1))
    else:
        print_table_3(rows)
        verdict = "done" if sound else "FAILED: see above"
        print(f"\n{verdict} in {time.perf_counter() - began_s:.0f} s; the constellation is down again. Try next:")
        print("  skymemory constellation up && skymemory kv put README.md && skymemory kv get README.md -o copy.md")
        print("  skymemory demo --tokens 2048          a longer context: the cache wins by more")
        print("  skymemory layout --rotations 1        where the chunks are, and where they go")
    return 0 if sound else 1
