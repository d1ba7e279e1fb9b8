"""`python -m tests.fuzz --inputs 1000000 --seed 1`: fails with the target, seed and number of the offending input."""

from __future__ import annotations

import argparse
import logging
import time

from tests.fuzz.targets import TARGETS, fuzz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="over all targets (default 10^6)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=TARGETS, action="append", help="of the targets (default: all)")
    options = parser.parse_args()
    logging.disable()  # what is refused is refused aloud
    for name in options.only or TARGETS:
        inputs, began = max(1, round(options.inputs * TARGETS[name][1])), time.monotonic()
        fuzz(name, inputs, options.seed)
        print(f"{name:10} {inputs:>9,} inputs in {time.monotonic() - began:.1f} s: nothing broke", flush=True)


if __name__ == "__main__":
    main()
