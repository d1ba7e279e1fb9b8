"""`python -m tests.mutants`: seeded faults, and whether the tests notice them.

Each fault of ``tests/mutants/faults`` is made in a copy of the tree, and the tests named for it are run. One that makes
them fail, hang or (in C) crash, is killed; one that they pass survives. Before all, every test that is named must pass
without a fault. Exit code 1 where less than ``--least`` of the faults are killed, 2 where the list does not fit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.drawn import drawn
from tests.mutants.faults import BadList, Fault, check, load
from tests.mutants.tree import BadBuild, Tree

_CHECKOUT = Path(__file__).resolve().parents[2]
_LIMIT_S = 240.0
_WITHOUT_FAULT_LIMIT_S = 1800.0
_TESTS_FAILED = 1
_CRASHES = {-code for code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)}
"""Exit codes. Not SIGKILL: that is the machine's want of memory."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``verdict`` is "killed", "hangs" or "crashes" (killed, too), or "survives"."""

    fault: Fault
    verdict: str
    by: str
    """The first test that failed."""
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", action="append", help="faults whose area or name has it")
    parser.add_argument("--sample", type=int, metavar="N", help="N of them, drawn by --seed")
    parser.add_argument("--seed", type=int, default=1, help="of --sample and --drawn")
    parser.add_argument(
        "--drawn", type=int, metavar="N", default=60, help="that are drawn by rule, beside the list (default 60)"
    )
    parser.add_argument("--least", type=float, default=0.9, help="share that must be killed (default 0.9)")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    try:
        faults = [*load(), *drawn(_CHECKOUT, options.drawn, options.seed, options.only or ())]
        check(faults, _CHECKOUT)
    except BadList as error:
        print(error, file=sys.stderr)
        return 2
    if options.only:
        faults = [fault for fault in faults if any(word in f"{fault.area} {fault.name}" for word in options.only)]
    if options.sample is not None:
        faults = random.Random(options.seed).sample(faults, min(options.sample, len(faults)))
    if not faults:
        print("no fault is called so", file=sys.stderr)
        return 2
    began_s = time.monotonic()
    try:
        outcomes = run(faults, max(1, min(options.workers, len(faults))))
    except (BadList, BadBuild) as error:
        print(error, file=sys.stderr)
        return 2
    return report(outcomes, options.least, time.monotonic() - began_s, options.json)


def run(faults: list[Fault], workers: int) -> list[Outcome]:
    """Raises BadList where tests fail without a fault, or a fault is one that no test could overlook."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Tree(_CHECKOUT, Path(folder, str(number))) for number in range(workers)]
        compiles = all(tree.build() for tree in trees)
        if not compiles and any(fault.file.suffix == ".c" for fault in faults):
            print("no C compiler: faults in C are left out", flush=True)
            faults = [fault for fault in faults if fault.file.suffix != ".c"]
        tests = list(dict.fromkeys(test for fault in faults for test in fault.tests))
        code, said = trees[0].test(tests, _WITHOUT_FAULT_LIMIT_S)
        if code != 0:
            raise BadList(f"without any fault the tests do not pass:\n{said[-4000:]}")
        free: SimpleQueue[Tree] = SimpleQueue()
        for tree in trees:
            free.put(tree)

        def one(fault: Fault) -> Outcome:
            tree = free.get()
            try:
                return _try(fault, tree)
            finally:
                free.put(tree)

        with ThreadPoolExecutor(workers) as pool:
            outcomes = list(pool.map(one, faults))
        for tree in trees:
            tree.remove()
    return outcomes


def _try(fault: Fault, tree: Tree) -> Outcome:
    began_s, sound = time.monotonic(), tree.read(fault.file)
    try:
        tree.write(fault.file, fault.applied_to(sound))
        code, said = tree.test(fault.tests, _LIMIT_S)
    except BadBuild as error:
        raise BadList(f"{fault.area}: {fault.name!r} does not compile:\n{error}") from None
    finally:
        tree.write(fault.file, sound)
    crashed = fault.file.suffix == ".c" and code in _CRASHES
    failed = [line.split(" ")[1] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    # A failed test's threads may end pytest badly, and so may its report of the failure.
    if code not in (None, 0, _TESTS_FAILED) and not crashed and not failed and "repr_failure" not in said:
        raise BadList(f"{fault.area}: {fault.name!r}: pytest ends with {code}, so no test ran:\n{said[-2000:]}")
    verdict = "hangs" if code is None else "crashes" if crashed else "killed" if code else "survives"
    outcome = Outcome(fault, verdict, failed[0] if failed else "", time.monotonic() - began_s)
    print(f"{verdict:8} {outcome.seconds:5.1f} s  {fault.area}: {fault.name}", flush=True)
    return outcome


def report(outcomes: list[Outcome], least: float, seconds: float, file: Path | None) -> int:
    survivors = [outcome for outcome in outcomes if outcome.verdict == "survives"]
    areas = dict.fromkeys(outcome.fault.area for outcome in outcomes)
    print(f"\n{'area':14} {'faults':>6} {'killed':>6}")
    for area in areas:
        its = [outcome for outcome in outcomes if outcome.fault.area == area]
        print(f"{area:14} {len(its):6} {sum(outcome.verdict != 'survives' for outcome in its):6}")
    score = 1 - len(survivors) / len(outcomes)
    print(f"{'all':14} {len(outcomes):6} {len(outcomes) - len(survivors):6}   {score:.1%} in {seconds:.0f} s")
    for outcome in survivors:
        fault = outcome.fault
        print(f"\nsurvives: {fault.area}: {fault.name}\n  {fault.file}\n  tests: {' '.join(fault.tests)}")
    if file is not None:
        rows = [
            {"area": o.fault.area, "name": o.fault.name, "file": str(o.fault.file), "verdict": o.verdict, "by": o.by}
            for o in outcomes
        ]
        figures = {"faults": len(outcomes), "killed": len(outcomes) - len(survivors), "seconds": round(seconds)}
        file.write_text(json.dumps({**figures, "outcomes": rows}, indent=1) + "\n", "utf-8")
    return 0 if score >= least else 1


if __name__ == "__main__":
    raise SystemExit(main())
