"""When a constellation behind a cluster helps: `python benchmarks/cluster_sky.py [--json FILE] [--plot FILE]`.

Eight machines that prefill and eight that decode (LLaMA-70B on 8×A800) under the KVCache-centric scheduler, which for
each prompt computes, loads, or does both at once, whichever is soonest. Each prefilling machine has so much DRAM for
KV; behind all of them are, or are not, 81 satellites of Starlink A of 256 GB each, over one ground station for all.
What is computed goes up in the background; what satellite holds which chunk, and how far it is, follows the real
locator as the box moves. `packed`: in the sky, KV is quantized by `cachegen-finest` to 5.1 bits a number
(`benchmarks/codecs.py`); what that takes to compute is not counted. Beside the sky its rival on the ground: an SSD of
2 TB at 6 GB/s in each prefilling machine.

Requests: the conversation trace, arrivals spread over their batches by a seeded draw; without it those of the seeded
generator. `--quick`: their first 10 minutes, one seed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from _bench import print_table, write_json
from skymemory_lab.sim.cluster.cells import CellAnswer, ClusterCell, run_cell
from skymemory_lab.sim.cluster.setup import ClusterSetup, PoolSettings, SkySetup
from skymemory_lab.sim.sweeps import sweep
from skymemory_lab.sim.workload import ConversationSource

TRACE = Path(__file__).parents[2] / "shared/data/traces/conversation_trace.jsonl"
DRAM_TB = (0.1, 0.25, 1.0)
GBIT_S = (1, 10, 100)
PACKED = 5.1 / 16
SSD_TB = 2.0


class Behind(NamedTuple):
    """What is behind the memory of the nodes."""

    gbit_s: int = 0
    """Between ground and satellites; 0: no sky."""
    packing: float = 1.0
    """Bytes in the sky for each byte of KV."""
    ssd_tb: float = 0.0
    """In each node."""

    @property
    def name(self) -> str:
        if self.gbit_s:
            return f"{self.gbit_s} Gbit/s{', packed' if self.packing < 1 else ''}"
        return f"SSD of {self.ssd_tb:g} TB" if self.ssd_tb else "nothing"


BEHIND = [
    Behind(),
    *(Behind(rate) for rate in GBIT_S),
    *(Behind(rate, PACKED) for rate in GBIT_S),
    Behind(ssd_tb=SSD_TB),
]


def cell(dram_tb: float, behind: Behind, rate: float, picky_s: float, source: ConversationSource) -> ClusterCell:
    sky = SkySetup(behind.gbit_s * 1e9 / 8, packing=behind.packing, picky_queued_s=picky_s) if behind.gbit_s else None
    pool = PoolSettings(dram_bytes=dram_tb * 1e12, ssd_bytes=behind.ssd_tb * 1e12, sky=sky)
    setup = ClusterSetup(pool=pool, rate=rate)
    return ClusterCell(source, setup, "kvcache-centric", (("layers", setup.cost.shape.layers),))


def row_of(dram_tb: float, behind: Behind, answers: list[CellAnswer]) -> dict[str, Any]:
    """Means over the seeds."""

    def mean(of: Any) -> float:
        return statistics.mean(of(answer) for answer in answers)

    row: dict[str, Any] = {
        "dram_tb": dram_tb,
        "behind": behind.name,
        **behind._asdict(),
        "ttft_mean_s": mean(lambda one: one.metrics.ttft_s.mean),
        "ttft_mean_s_by_seed": [one.metrics.ttft_s.mean for one in answers],
        "ttft_p50_s": mean(lambda one: one.metrics.ttft_s.p50),
        "ttft_p90_s": mean(lambda one: one.metrics.ttft_s.p90),
        "hit_tokens": mean(lambda one: one.metrics.hits.tokens),
        "hit_tokens_by_source": {
            name: mean(lambda one, name=name: one.metrics.hits.tokens_by_source.get(name, 0.0))
            for name in ("local", "node", "sky")
        },
        "prefill_utilisation": mean(lambda one: one.metrics.prefill_utilisation),
        "completed": mean(lambda one: one.metrics.completed),
    }
    if behind.gbit_s:
        row["pool"] = {
            name: mean(lambda one, name=name: one.pool[name]) for name in answers[0].pool if name.startswith("sky")
        }
        could_bytes = behind.gbit_s * 1e9 / 8 * mean(lambda one: one.metrics.elapsed_s)
        for way in ("up", "down"):
            row[f"{way}_busy"] = row["pool"][f"sky_{way}_bytes"] / could_bytes
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE")
    parser.add_argument("--rate", type=float, default=1.0, help="requests arrive so many times as fast")
    parser.add_argument("--seeds", type=int, default=3, help="draws of the arrivals; figures are means over them")
    parser.add_argument("--picky", type=float, default=SkySetup().picky_queued_s, help="SkySetup.picky_queued_s")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", action="store_true", help="the table too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture (needs matplotlib)")
    options = parser.parse_args()
    trace = options.trace if options.trace.is_file() else None
    if trace is None:
        print(f"there is no trace at {options.trace}: the generator's requests instead", file=sys.stderr)
    sources = [ConversationSource(trace, seed, options.quick) for seed in range(1 if options.quick else options.seeds)]
    wanted = [(dram_tb, behind) for dram_tb in DRAM_TB for behind in BEHIND]
    cells = [cell(*one, options.rate, options.picky, source) for one in wanted for source in sources]
    began_s = time.perf_counter()
    answers = sweep(run_cell, cells, jobs=options.jobs)
    print(f"{len(cells)} runs in {time.perf_counter() - began_s:.0f} s", file=sys.stderr)
    each = len(sources)
    rows = [row_of(*one, answers[at * each : (at + 1) * each]) for at, one in enumerate(wanted)]
    show(rows, f"{sources[0].name}, {options.rate:g}×, mean of {each} seed(s)")
    if options.markdown:
        print("", *markdown(rows), sep="\n")
    write_json(options.json, "cluster_sky", 0, rows)
    if options.plot is not None:
        plot(rows, options.plot, sources[0].name)


def show(rows: list[dict[str, Any]], title: str) -> None:
    without = {row["dram_tb"]: row for row in rows if row["behind"] == "nothing"}
    print_table(
        title,
        [
            "DRAM a node",
            "behind it",
            "TTFT mean s",
            "against nothing",
            "p50 s",
            "p90 s",
            "hits",
            "of the sky",
            "prefill busy",
            "up busy",
            "down busy",
        ],
        [
            [
                f"{row['dram_tb']:g} TB",
                row["behind"],
                f"{row['ttft_mean_s']:.2f}",
                f"{row['ttft_mean_s'] / without[row['dram_tb']]['ttft_mean_s'] - 1:+.0%}",
                f"{row['ttft_p50_s']:.2f}",
                f"{row['ttft_p90_s']:.2f}",
                f"{row['hit_tokens']:.1%}",
                f"{row['hit_tokens_by_source']['sky']:.1%}",
                f"{row['prefill_utilisation']:.0%}",
                f"{row['up_busy']:.0%}" if row["gbit_s"] else "-",
                f"{row['down_busy']:.0%}" if row["gbit_s"] else "-",
            ]
            for row in rows
        ],
    )


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    """The table of docs/benchmarks/cluster.md."""
    lines = [
        "| behind 8 × DRAM | " + " | ".join(f"{size:g} TB: mean, p90, hits" for size in DRAM_TB) + " |",
        "| --- |" + " ---: |" * len(DRAM_TB),
    ]
    for behind in BEHIND:
        cells = [
            f"{row['ttft_mean_s']:.2f} s, {row['ttft_p90_s']:.2f} s, {row['hit_tokens']:.1%}"
            for row in rows
            if row["behind"] == behind.name
        ]
        lines.append(f"| {behind.name} | " + " | ".join(cells) + " |")
    return lines


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(12, 4.2))
    measures = [
        ("ttft_mean_s", "mean TTFT, s"),
        ("ttft_p90_s", "90 % of TTFT below, s"),
        ("hit_tokens", "tokens hit, %"),
    ]
    colours = {0: "black", 1: "tab:red", 10: "tab:orange", 100: "tab:blue"}
    for axes, (measure, label) in zip(panels, measures, strict=True):
        for behind in BEHIND:
            line = [row for row in rows if row["behind"] == behind.name]
            scale = 100 if measure == "hit_tokens" else 1
            axes.plot(
                [row["dram_tb"] for row in line],
                [scale * row[measure] for row in line],
                marker="o",
                markersize=4,
                color="tab:green" if behind.ssd_tb else colours[behind.gbit_s],
                ls=":" if behind.packing < 1 else "-",
                lw=1.4 if behind.gbit_s or behind.ssd_tb else 2.4,
                label=behind.name,
            )
        axes.set_xscale("log")
        axes.set_xticks(DRAM_TB, [f"{size:g}" for size in DRAM_TB])
        axes.minorticks_off()
        axes.set_xlabel("DRAM for KV in each of 8 machines, TB")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.suptitle(f"With and without 81 satellites behind 8P+8D: {title}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"written: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
