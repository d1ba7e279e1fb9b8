"""Who pays for a fault at `skymemory route`: `python benchmarks/hostile.py [--only NAME]` (`make hostile`).

Three scripted engines and the router as processes, and 20 clients that do nothing wrong: half of them keep their
connection, half of their answers are streams. Beside them one cause of trouble after the other, each with a router of
its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

from _bench import print_table, write_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.end_to_end.hostile.trial import CAUSES, Times, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="causes with this in their name")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each cause (default: 8)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chosen = [cause for cause in CAUSES if not args.only or any(word in cause.name for word in args.only)]
    if not chosen:
        parser.error(f"no such cause; expected a part of: {', '.join(cause.name for cause in CAUSES)}")
    began_s, outcomes = time.monotonic(), []
    for number, cause in enumerate(chosen, 1):

        def progress(line: str, number: int = number) -> None:
            print(
                f"{time.monotonic() - began_s:5.0f} s  {number} of {len(chosen)}  {line}", file=sys.stderr, flush=True
            )

        outcomes.append(run(cause, Times(cause_s=args.seconds), progress))
        last = outcomes[-1]
        progress(f"{cause.name}: others {last.others}, attackers {last.attackers}")
    print_table(
        f"others beside each cause, for {args.seconds:g} s",
        ("cause", "who pays", "asked", "200", "p99 ms", "after: 200", "p99 ms", "sends", "at the bad engine", "MiB"),
        [
            (
                row.name,
                row.who_pays,
                f"{row.asked}",
                f"{row.share:.1%}",
                f"{row.p99_s * 1e3:.0f}",
                f"{row.after_share:.1%}",
                f"{row.after_p99_s * 1e3:.0f}",
                f"{row.sends:.2f}, most {row.most_sends}",
                "" if row.at_bad_engine is None else f"{row.at_bad_engine}",
                f"{row.mib:.0f}",
            )
            for row in outcomes
        ],
    )
    write_json(args.json, "hostile", 0, [asdict(row) for row in outcomes])


if __name__ == "__main__":
    main()
