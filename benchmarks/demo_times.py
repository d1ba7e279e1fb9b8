"""How long each demo takes, beside what it promised: ``python benchmarks/demo_times.py [--demo NAME]``.

Each demo runs with its output in a pipe, under each condition: with all instructions of the processor, with AVX2 alone,
on one core, and beside a busy program on each core. Recorded: its estimate and how long it took, the first line, and
the longest time without a line. A run replaces that of the same processor, demo and condition in the file; others stay.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _bench import print_table, processor, write_json

FILE = Path(__file__).parents[1] / "docs" / "benchmarks" / "demo_times.json"
DEMOS: dict[str, tuple[str, ...]] = {
    "table 3": (),
    "table 3, quick": ("--quick",),
    "motion": ("motion",),
    "cells": ("cells",),
    "cake": ("cake",),
    "cake, quick": ("cake", "--quick"),
    "route": ("route",),
    "route, quick": ("route", "--quick"),
    "conductor": ("conductor",),
    "conductor, quick": ("conductor", "--quick"),
    "disagg": ("disagg", "--engine", "own"),
    "vllm": ("vllm",),
}
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
CONDITIONS = ("all instructions", "AVX2 only", "one core", "beside a busy program")
LIMIT_S = 900.0
_ESTIMATE = re.compile(r"estimate: about (\d+) (s|minutes)")
_TOOK = re.compile(r"took (\d+) s \(estimated (\d+) s\)")
_LINEAR = """
import time, torch
for dtype in (torch.float32, torch.bfloat16):
    linear, given = torch.nn.Linear(2048, 2048, bias=False, dtype=dtype), torch.ones(524, 2048, dtype=dtype)
    times = []
    with torch.inference_mode():
        for _ in range(6):
            began_s = time.perf_counter()
            linear(given)
            times.append(time.perf_counter() - began_s)
    print(min(times) * 1e3)
"""
"""Milliseconds of a linear of TinyLlama's width at the paper's prompt, in float32 and in bfloat16."""


@contextmanager
def busy(programs: int) -> Iterator[None]:
    started = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(programs)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def condition_of(name: str) -> tuple[list[str], dict[str, str], int]:
    """Words before the command, its environment, and busy programs beside it."""
    words = ["taskset", "-c", str(min(os.sched_getaffinity(0)))] if name == "one core" else []
    programs = len(os.sched_getaffinity(0)) if name == "beside a busy program" else 0
    return words, {**os.environ, "PYTHONUNBUFFERED": "1", **(AVX2 if name == "AVX2 only" else {})}, programs


def linear_ms(condition: str) -> list[float]:
    words, environment, programs = condition_of(condition)
    with busy(programs):
        done = subprocess.run(
            [*words, sys.executable, "-c", _LINEAR], env=environment, capture_output=True, text=True, check=True
        )
    return [float(word) for word in done.stdout.split()]


def run(demo: str, condition: str) -> dict[str, Any]:
    """One run."""
    words, environment, programs = condition_of(condition)
    command = [*words, sys.executable, "-m", "skymemory", "demo", *DEMOS[demo]]
    with busy(programs):
        began_s = last_s = time.monotonic()
        first_s, silence_s, text = 0.0, 0.0, b""
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        try:
            while piece := os.read(process.stdout.fileno(), 1 << 16):
                now_s = time.monotonic()
                first_s = first_s or now_s - began_s
                silence_s, last_s = max(silence_s, now_s - last_s), now_s
                text += piece
                if now_s - began_s > LIMIT_S:
                    raise SystemExit(f"{demo}, {condition}: not ended after {LIMIT_S:g} s; ended:\n{text.decode()}")
        finally:
            process.terminate()
            code = process.wait()
    printed = text.decode("utf-8", "replace")
    estimate, took = _ESTIMATE.search(printed), _TOOK.search(printed)
    if code or not estimate or not took:
        print(printed, file=sys.stderr)
        raise SystemExit(f"{demo}, {condition}: exit code {code}; expected an estimate and what it took")
    return {
        "demo": demo,
        "condition": condition,
        "estimate_s": float(took[2]),
        "first_printed_s": int(estimate[1]) * (60 if estimate[2] == "minutes" else 1),
        "seconds": time.monotonic() - began_s,
        "first_line_s": first_s,
        "longest_silence_s": max(silence_s, 0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", action="append", choices=DEMOS, help="only this one (default: all but vllm)")
    parser.add_argument("--condition", action="append", choices=CONDITIONS, help="only this one (default: all)")
    parser.add_argument("--json", type=Path, default=FILE, metavar="FILE", help=f"(default: {FILE.name} of the docs)")
    args = parser.parse_args()
    demos = args.demo or [demo for demo in DEMOS if demo != "vllm"]
    known = json.loads(args.json.read_text("utf-8"))["rows"] if args.json.exists() else []
    rows = {(row["demo"], row["processor"], row["condition"]): row for row in known}
    here = re.sub(r"^an? ", "", processor())
    for condition in args.condition or CONDITIONS:
        if condition == "AVX2 only" and here.endswith("with AVX2"):
            print("AVX2 only: these are all instructions of this processor", file=sys.stderr)
            continue
        float32_ms, bfloat16_ms = linear_ms(condition)
        for demo in demos:
            row = {**run(demo, condition), "processor": here, "cores": len(os.sched_getaffinity(0))}
            row |= {"float32_ms": float32_ms, "bfloat16_ms": bfloat16_ms}
            rows[demo, here, condition] = row
            print(f"{demo}, {condition}: {row['seconds']:.0f} s, estimated {row['estimate_s']:.0f}", file=sys.stderr)
            # After each: a run of hours that is ended keeps what it measured.
            ordered = [rows[key] for key in sorted(rows, key=lambda key: ([*DEMOS].index(key[0]), *key[1:]))]
            write_json(args.json, "demo_times", 0, ordered)
    print_table(
        "demos",
        ("demo", "processor", "condition", "estimate s", "took s", "of it", "first line s", "silence s"),
        [
            (
                row["demo"],
                row["processor"],
                row["condition"],
                f"{row['estimate_s']:.0f}",
                f"{row['seconds']:.0f}",
                f"{row['seconds'] / row['estimate_s']:.2f}",
                f"{row['first_line_s']:.1f}",
                f"{row['longest_silence_s']:.1f}",
            )
            for row in rows.values()
        ],
    )


if __name__ == "__main__":
    main()
