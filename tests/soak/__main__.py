"""`python -m tests.soak`: 30 days in virtual time, or with ``--real`` minutes over processes that are killed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.soak.host import HostSoak
from tests.soak.overload import CAUSES, OverloadSoak
from tests.soak.terms import Setting
from tests.soak.virtual import VirtualSoak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=30.0, help="of virtual time (default 30)")
    parser.add_argument("--operations", type=int, default=1_000_000, help="on values of 1 to 4 chunks (default 10^6)")
    parser.add_argument("--full-blocks", type=int, default=2_000, help="operations on 480 chunks (default 2,000)")
    parser.add_argument("--real", action="store_true", help="real UDP: processes, killed and started again")
    parser.add_argument(
        "--cause", choices=[*sorted(CAUSES), "all"], help="with --real: overload it so, and watch it heal"
    )
    parser.add_argument("--runs", type=int, default=1, help="with --cause (default 1)")
    parser.add_argument("--minutes", type=float, default=10.0, help="with --real (default 10)")
    parser.add_argument("--replicas", type=int, default=1, help="copies of each chunk, in virtual time (default 1)")
    parser.add_argument(
        "--satellite", choices=["python", "c", "mixed"], default="python", help="with --real (default python)"
    )
    parser.add_argument(
        "--host", action="store_true", help="a host arena: 200 kills and stops of clients, 20 of owners"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.satellite != "python":
        os.environ["SATELLITES"] = options.satellite
        from tests.flight.real import install

        install()
    if options.host:
        return _host(options.seed, options.json)
    if options.cause is not None:
        causes = sorted(CAUSES) if options.cause == "all" else [options.cause]
        return _overload(causes, options.runs, options.seed, options.json)
    if options.real:
        from tests.soak.real import RealSoak

        outcome = RealSoak(options.minutes * 60, options.seed).run(_report)
    else:
        setting = Setting(
            options.days, options.operations, options.full_blocks, options.seed, replicas=options.replicas
        )
        outcome = VirtualSoak(setting).run(_report)
    others = {"days", "operations", "full_blocks", "replicas"} if options.real else {"minutes"}
    row: dict[str, Any] = {
        **{name: value for name, value in vars(options).items() if name not in others | {"json"}},
        "seconds": round(outcome.seconds, 1),
        "slot_moves": outcome.moves[0],
        "plane_moves": outcome.moves[1],
        "wrong": outcome.wrong,
        "open_books": outcome.open_books,
        **outcome.books,
        **dict(sorted(outcome.counted.items())),
    }
    for name, value in row.items():
        print(f"{name:32} {value:,}" if isinstance(value, int | float) else f"{name:32} {value or 'none'}")
    if options.json is not None:
        options.json.write_text(json.dumps(row, indent=1) + "\n", "utf-8")
    return 1 if outcome.wrong or outcome.open_books else 0


def _overload(causes: list[str], runs: int, seed: int, json_path: Path | None) -> int:
    """Each run by itself; all have to hold."""
    outcomes: list[dict[str, Any]] = []
    for cause in causes:
        for run in range(runs):
            soak = OverloadSoak(cause, seed + run)
            verdict = soak.run(_report)
            outcomes.append(
                {
                    "cause": cause,
                    "seed": seed + run,
                    **asdict(verdict),
                    "holds": verdict.holds,
                    "rows": [asdict(row) for row in soak.watched.rows],
                }
            )
            print(
                f"{cause}, run {run + 1}: {verdict.answer:.0%} answer, {verdict.hits:.0%} of {verdict.reads} reads "
                f"hit, {verdict.wrong} wrong, processor {verdict.cores:.2f} times {verdict.healthy_cores:.2f} cores, "
                f"{verdict.forced} killed: {'holds' if verdict.holds else 'DOES NOT HOLD'}",
                flush=True,
            )
            if json_path is not None:
                json_path.write_text(json.dumps(outcomes) + "\n", "utf-8")
    return 0 if all(outcome["holds"] for outcome in outcomes) else 1


def _host(seed: int, json_path: Path | None) -> int:
    outcome = HostSoak(seed=seed).run(_report)
    row = {**asdict(outcome), "holds": outcome.is_sound}
    for name, value in row.items():
        print(f"{name:32} {value}")
    if json_path is not None:
        json_path.write_text(json.dumps(row, indent=1) + "\n", "utf-8")
    return 0 if outcome.is_sound else 1


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
