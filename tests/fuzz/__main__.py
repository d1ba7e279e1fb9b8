"""`python -m tests.fuzz --inputs 1000000`: fails with the target, seed and number of the offending input.

First the fuzzers' targets, then every property test with fresh examples (the default run draws the same ones each
time). Without ``--seed`` one is drawn; it is printed, and with it the same inputs come again.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import subprocess
import sys
import time

from tests.fuzz.targets import TARGETS, fuzz

_PROPERTIES = "properties"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="over all targets (default 10^6)")
    parser.add_argument("--seed", type=int, help="default: drawn, and printed")
    parser.add_argument("--only", choices=[*TARGETS, _PROPERTIES], action="append", help="of them (default: all)")
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}; the same inputs again: make fuzz ARGS='--seed {seed}'", flush=True)
    logging.disable()  # what is refused is refused aloud
    for name in TARGETS:
        if options.only is None or name in options.only:
            inputs, began = max(1, round(options.inputs * TARGETS[name][1])), time.monotonic()
            fuzz(name, inputs, seed)
            print(f"{name:10} {inputs:>9,} inputs in {time.monotonic() - began:.1f} s: nothing broke", flush=True)
    if options.only is None or _PROPERTIES in options.only:
        return _fresh_properties(seed)
    return 0


def _fresh_properties(seed: int) -> int:
    """The exit code of pytest. What fails says how it is had again; it belongs into the test as an ``@example``."""
    fresh = ["--hypothesis-profile=fresh", f"--hypothesis-seed={seed}", "-n", "auto", "--dist", "worksteal"]
    return subprocess.run([sys.executable, "-m", "pytest", "-m", "hypothesis and not slow", *fresh]).returncode


if __name__ == "__main__":
    raise SystemExit(main())
