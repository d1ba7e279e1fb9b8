"""libFuzzer on the satellite in C, with ASan and UBSan: `make flight-fuzz`, or `python -m tests.flight.fuzz [OPTIONS]`.

Seeds are the golden packets of tests/vectors, and for a whole machine stories of every kind of event. Every target runs
for --seconds, or for --inputs inputs; what it finds that reaches new code is kept in build/flight-fuzz for the next.
The exit code is 1 if one fails, and the input that it failed at is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "flight-fuzz"
VECTORS = ROOT / "tests" / "vectors"
TARGETS = ("packet", "machine")
_MOST_BYTES = {"packet": 2048, "machine": 400}
_EVENTS = 32
_STORIES_OF_AN_EVENT = 8


def golden() -> list[bytes]:
    """The packets of the vectors."""
    found = [bytes.fromhex(one["hex"].replace(" ", "")) for one in json.loads((VECTORS / "wire.json").read_text())]
    return [packet for packet in found if len(packet) < 4096]


def stories() -> Iterator[bytes]:
    """For each kind of event some inputs of the machine, as flight/fuzz/machine.c reads them.

    Any configuration, values of four keys, the event between timers and true answers, once more, and another.
    """
    draw = random.Random(1)
    timers, answers = bytes([22, 3]), bytes([27, 3])

    def event(kind: int) -> bytes:
        return bytes([kind + _EVENTS * draw.randrange(8), draw.randrange(256)]) + draw.randbytes(6)

    def values() -> bytes:
        """By a SET of all chunks of each."""
        return b"".join(bytes([0, 0, 0x0F, 0x28 + key]) + draw.randbytes(3) for key in range(4))

    for kind in range(_EVENTS):
        for _ in range(_STORIES_OF_AN_EVENT):
            once, again = event(kind), event(kind)
            story = [values(), once, timers, answers, again, values(), event(draw.randrange(_EVENTS)), timers]
            yield draw.randbytes(5) + b"".join(story)


def run(target: str, options: list[str]) -> tuple[int, int, str]:
    """Exit code, inputs tried, and what it said last."""
    corpus = BUILD / f"corpus-{target}"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(golden() if target == "packet" else stories()):
        (corpus / f"seed-{number}").write_bytes(seed)
    words = [str(BUILD / target), str(corpus), f"-max_len={_MOST_BYTES[target]}", f"-artifact_prefix={BUILD}/{target}-"]
    # Without entropic scheduling, whose accounts cost a quarter of the time of the larger target.
    done = subprocess.run(
        [*words, "-entropic=0", "-print_final_stats=1", *options], capture_output=True, text=True, check=False
    )
    tried = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
    return done.returncode, int(tried[1]) if tried else 0, done.stderr[-3000:]


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the satellite in C.")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: 60)")
    parser.add_argument("--inputs", type=int, help="for each target, instead of a time")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations (default: 1)")
    parser.add_argument("--only", choices=TARGETS)
    args = parser.parse_args()
    if shutil.which("clang") is None:
        sys.stdout.write("skipped: libFuzzer needs clang, which is not here\n")
        return 0
    subprocess.run(["make", "-s", "-j2", "-C", str(ROOT / "flight"), "fuzz"], check=True)
    bound = [f"-runs={args.inputs}"] if args.inputs else [f"-max_total_time={args.seconds}"]
    failed = 0
    for target in TARGETS if args.only is None else (args.only,):
        code, tried, said = run(target, [*bound, f"-seed={args.seed}"])
        sys.stdout.write(f"{target}: {tried:,} inputs, {'sound' if code == 0 else f'FAILED ({code})'}\n")
        if code != 0:
            sys.stdout.write(said)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
