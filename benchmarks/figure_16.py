"""Time to compute the 132 points of figure 16: `python benchmarks/figure_16.py`. Goal: under 0.2 s."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from _bench import median_s, print_table, write_json
from skymemory_lab.sim.latency import figure_16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="nothing here is drawn; kept beside the figures")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    began = time.perf_counter()
    points = len(figure_16())
    cold_s = time.perf_counter() - began
    warm_s = median_s(figure_16, 50)
    print_table(
        f"figure 16, {points} points",
        ("", "measured", "goal"),
        [("first time", f"{cold_s * 1e3:.1f} ms", "< 200 ms"), ("again", f"{warm_s * 1e3:.1f} ms", "")],
    )
    write_json(options.json, "figure_16", options.seed, [{"points": points, "cold_s": cold_s, "warm_s": warm_s}])


if __name__ == "__main__":
    main()
