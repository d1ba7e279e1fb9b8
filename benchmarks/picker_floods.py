"""What one client of ill will costs the others of an endpoint picker: `python benchmarks/picker_floods.py`.

Nine floods of HTTP/2, one after the other, against `skymemory epp` as a process; beside each a health check every 5 ms
on another connection. A flood whose connection is cut off opens the next one.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import psutil

from _bench import print_table, write_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.end_to_end.envoy import running_picker
from tests.end_to_end.floods import FLOODS, flooded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each flood (default: 5)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with running_picker("--endpoint", "127.0.0.1:9", settings='health.metrics_path = ""') as picker:
        process = psutil.Process(picker.process.pid)
        rows = [flooded(name, picker.port, process, args.seconds) for name in FLOODS]
    print_table(
        f"health checks beside floods of {args.seconds:g} s each",
        ("flood", "checks", "p50 ms", "p99 ms", "most ms", "MiB more", "MiB sent", "connections"),
        [
            (
                row.flood,
                f"{row.checks}",
                f"{row.p50_ms:.2f}",
                f"{row.p99_ms:.2f}",
                f"{row.most_ms:.2f}",
                f"{row.more_mib:.1f}",
                f"{row.sent_mib:.0f}",
                f"{row.connections}",
            )
            for row in rows
        ],
    )
    write_json(args.json, "picker_floods", 0, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
