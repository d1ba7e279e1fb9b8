"""A daily workload with and without prediction, beside migrating everything: `python benchmarks/prediction.py`.

The machines that fly, over virtual time: 15 planes of 15 satellites at 550 km with their real periods and link lengths,
one ground host that reaches all of them through the satellite overhead. A set of documents is asked about once a day,
each at its own time give or take a few minutes and not on every day; other prompts come once. Three ways to keep them:

- *follow*: every value migrates with the box (``rotation_hop``);
- *parked*: no value moves (``hop``); a read fetches it from wherever its satellites have flown;
- *parked, predicted*: the same, and the scheduler has what it expects copied to the satellites overhead then.

Bytes are counted per link crossed: those between satellites, and the beam to the ground.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _bench import print_table, write_json
from skymemory.cache.predictor import DAY_S
from skymemory.cache.prefetching import PrefetchScheduler
from skymemory.constellation.presets import Preset, preset_named
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import plane_move_period_s, slot_move_period_s
from skymemory.metrics import percentile
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.wire import SegmentBatch
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore, SkySettings
from skymemory.transport.simulated import Node, SimulatedConstellation

PRESET = "paper-15x15"
SCHEMES = {"follow": "rotation_hop", "parked": "hop", "parked, predicted": "hop"}
DOCUMENTS, BLOCKS, BLOCK_BYTES = 12, 2, 10 * 6144
ONCE_A_DAY = 6
SKIPPED, JITTER_S = 0.1, 240.0
LEARNING_DAYS = 3
"""Not counted in the table."""
TICK_S = 60.0
LEAD_S = 600.0
NEAR_HOPS = 3
"""As far from the satellite overhead as the corner of the box is."""

_COMMAND = 0x10
_GROUND_AT = 12


class Sky(SimulatedConstellation):
    """Counts bytes by link and purpose; what satellites say to each other on their own account is migration."""

    def __init__(self, preset: Preset) -> None:
        shell, torus = preset.shell, preset.torus
        self.torus = torus
        self.purpose = ""
        self.isl_bytes: Counter[str] = Counter()
        self.beam_bytes: Counter[str] = Counter()
        slot_s, plane_s = shell.isl_one_way_s("slot"), shell.isl_one_way_s("plane")
        beam_s = shell.slant_one_way_s(0, 0)

        def delay_s(sender: Node, receiver: Node) -> float:
            if not (isinstance(sender, SatelliteId) and isinstance(receiver, SatelliteId)):
                return beam_s
            return slot_s if sender.plane == receiver.plane else plane_s

        clock = MoveClock(0.0, slot_move_period_s(shell), plane_move_period_s(shell), 1.0)
        super().__init__(SkyMap(torus, preset.centre, slot_s, plane_s), 64 << 20, clock, delay_s)

    def _send(self, batch: SegmentBatch, sender: Node, receiver: Node) -> None:
        before = self.bytes_sent
        first = next(iter(batch.datagrams()))
        at = (8 if first[0] & _COMMAND else 16) + _GROUND_AT
        purpose = self.purpose if any(first[at : at + 4]) else "migration"
        super()._send(batch, sender, receiver)
        between = isinstance(sender, SatelliteId) and isinstance(receiver, SatelliteId)
        (self.isl_bytes if between else self.beam_bytes)[purpose] += self.bytes_sent - before

    @contextmanager
    def doing(self, purpose: str) -> Iterator[None]:
        self.purpose = purpose
        yield
        self.purpose = ""


def requests(days: int, seed: int) -> list[tuple[float, str]]:
    """``(time, prompt)``, in order."""
    dice = random.Random(seed)
    times = [dice.uniform(0, DAY_S) for _ in range(DOCUMENTS)]
    found = []
    for day in range(days):
        for number, time_s in enumerate(times):
            if dice.random() >= SKIPPED:
                found.append((max(0.0, day * DAY_S + dice.gauss(time_s, JITTER_S)), f"document {number}"))
        found += [(day * DAY_S + dice.uniform(0, DAY_S), f"once {day}.{number}") for number in range(ONCE_A_DAY)]
    return sorted(found)


def blocks_of(prompt: str, seed: int) -> list[tuple[bytes, bytes]]:
    dice = random.Random(f"{seed} {prompt}")
    keys = [hashlib.sha256(f"{prompt} {number}".encode()).digest() for number in range(BLOCKS)]
    return [(key, dice.randbytes(BLOCK_BYTES)) for key in keys]


def run(scheme: str, days: int, seed: int) -> dict[str, Any]:
    preset = preset_named(PRESET)
    sky = Sky(preset)
    driver = sky.connect(ClientConfig(7, access="gateway", expected_rtt_s=0.05))
    store = ConstellationStore(driver, sky.sky, SkySettings(SCHEMES[scheme], preset.servers), index=SharedIndex())
    scheduler = PrefetchScheduler(store, lead_s=LEAD_S, clock=driver.now_s) if scheme == "parked, predicted" else None
    seconds: list[float] = []
    tally: Counter[str] = Counter()
    events = requests(days, seed)
    heapq.heapify(events)
    started = [Counter[str](), Counter[str]()]
    began_s = LEARNING_DAYS * DAY_S
    tick_s = 0.0
    while tick_s < days * DAY_S:
        if tick_s <= began_s < tick_s + TICK_S:
            started = [sky.isl_bytes.copy(), sky.beam_bytes.copy()]
        while events and events[0][0] < tick_s + TICK_S:
            time_s, prompt = heapq.heappop(events)
            sky.settle(max(time_s, sky.now_s))
            ask(sky, store, prompt, seed, scheduler, seconds, tally, time_s >= began_s)
        tick_s += TICK_S
        sky.settle(max(tick_s, sky.now_s))
        if scheduler is not None:
            with sky.doing("prefetch"):
                brought = scheduler.tick()
            tally["prefetched"] += brought * (tick_s >= began_s)
    counted_days = days - LEARNING_DAYS
    isl = {name: (sky.isl_bytes[name] - started[0][name]) / counted_days for name in ("migration", "prefetch", "read")}
    beam = {name: (sky.beam_bytes[name] - started[1][name]) / counted_days for name in ("prefetch", "read")}
    return {
        "scheme": scheme,
        "days": counted_days,
        "reads": tally["reads"],
        "right": tally["right"],
        "near": tally["near"],
        "mean_s": statistics.mean(seconds),
        "p50_s": percentile(seconds, 50),
        "p99_s": percentile(seconds, 99),
        "prefetched_values": tally["prefetched"],
        "isl_bytes_a_day": isl,
        "beam_bytes_a_day": beam,
    }


def ask(
    sky: Sky,
    store: ConstellationStore,
    prompt: str,
    seed: int,
    scheduler: PrefetchScheduler | None,
    seconds: list[float],
    tally: Counter[str],
    counts: bool,
) -> None:
    """One request: its blocks read if they are there, else computed and stored."""
    items = blocks_of(prompt, seed)
    keys = [key for key, _ in items]
    if scheduler is not None:
        scheduler.record_prompt(keys)
    if store.prefix(keys) == len(keys):
        began_s = sky.now_s
        near = hops_away(sky, store, keys) <= NEAR_HOPS
        with sky.doing("read"):
            values = store.get_many(keys)
        if counts:
            seconds.append(sky.now_s - began_s)
            tally["reads"] += 1
            tally["near"] += near
            tally["right"] += all(view == value for view, (_, value) in zip(values, items, strict=True))
    else:
        with sky.doing("store"):
            store.put_many(items)


def hops_away(sky: Sky, store: ConstellationStore, keys: list[bytes]) -> int:
    """Links between the satellite overhead and the farthest that a read of these will ask."""
    moves = sky.clock.moves(sky.now_s)
    centre = sky.sky.centre_at(moves)
    infos = store._catalog.find(keys).values()
    places = {
        satellite
        for info in infos
        for satellite in sky.sky.servers_at(info.strategy, info.servers, info.set_moves, moves)[: info.chunks]
    }
    return max(sky.torus.hops(centre, satellite) for satellite in places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=8, help=f"the first {LEARNING_DAYS} are not counted")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = [run(scheme, options.days, options.seed) for scheme in SCHEMES]
    header = [
        "kept",
        "reads",
        "right",
        "near",
        "mean ms",
        "p50 ms",
        "p99 ms",
        "migrated MB",
        "prefetched MB",
        "read MB",
    ]
    print_table(
        f"{DOCUMENTS} documents asked for daily, {ONCE_A_DAY} prompts a day that come once; MB a day over links "
        f"between satellites, {rows[0]['days']} days",
        [*header, "all MB", "beam MB"],
        [
            [
                row["scheme"],
                f"{row['reads']}",
                f"{row['right']}",
                f"{row['near']}",
                f"{row['mean_s'] * 1e3:.0f}",
                f"{row['p50_s'] * 1e3:.0f}",
                f"{row['p99_s'] * 1e3:.0f}",
                *(f"{size / 1e6:.1f}" for size in row["isl_bytes_a_day"].values()),
                f"{sum(row['isl_bytes_a_day'].values()) / 1e6:.1f}",
                f"{sum(row['beam_bytes_a_day'].values()) / 1e6:.1f}",
            ]
            for row in rows
        ],
    )
    write_json(options.json, "prediction", options.seed, rows)


if __name__ == "__main__":
    main()
