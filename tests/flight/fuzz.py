"""libFuzzer on the satellite in C, with ASan and UBSan: `make flight-fuzz`, or `python -m tests.flight.fuzz [OPTIONS]`.

Seeds are the golden packets of tests/vectors. Every target runs for --seconds, or for --inputs inputs; what it finds
that reaches new code is kept in build/flight-fuzz, so that the next run goes on from there. The exit code is 1 if one
fails, and the input that it failed at is printed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "flight-fuzz"
VECTORS = ROOT / "tests" / "vectors"
TARGETS = ("packet", "machine")
_MOST_BYTES = {"packet": 2048, "machine": 2048}
_CONFIGURATION = bytes([50, 0x00, 0xBC, 64])
"""Of the machine: its move period, flags, memory; see flight/fuzz/machine.c."""
_SMALL_POOLS = bytes([50, 0x02, 0xFC, 64])


def golden() -> list[bytes]:
    """The packets of the vectors."""
    found = [bytes.fromhex(one["hex"].replace(" ", "")) for one in json.loads((VECTORS / "wire.json").read_text())]
    return [packet for packet in found if len(packet) < 4096]


def seeds(target: str) -> list[bytes]:
    packets = golden()
    if target == "packet":
        return packets
    # An event is its kind, the time that passes, and here the length of a packet; each after some others, with a timer.
    events = [bytes([kind, 5]) + len(one).to_bytes(2, "big") + one for one in packets for kind in (0x00, 0x10, 0x08)]
    after = b"\x0f\x01"
    alone = [each + event + after for each in (_CONFIGURATION, _SMALL_POOLS) for event in events]
    return [*alone, _CONFIGURATION + b"".join(events[:24]) + b"\x09\x01\x0f\xff\x0f\xff"]


def run(target: str, options: list[str]) -> tuple[int, int, str]:
    """Exit code, inputs tried, and what it said last."""
    corpus = BUILD / f"corpus-{target}"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(target)):
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
