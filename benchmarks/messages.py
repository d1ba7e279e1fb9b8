"""Messages and bytes of a set, a get, a miss and a rotation beside the least possible: `python benchmarks/messages.py`.

The machines that fly, over virtual time, so the counts are exact. A message is a datagram on one link; on its way over
several satellites it counts once per link. The least possible:

- set: every chunk goes to its satellite once, every satellite answers once;
- get: every satellite is asked once, every chunk comes once;
- miss: nothing where the index knows; otherwise one satellite is asked once and answers once;
- rotation: every chunk whose server has changed place crosses the links between the two places once, and the satellite
  that gave is answered once.

Least bytes are those of the values alone for chunks, and of the smallest packet that says it for the rest.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
from pathlib import Path
from typing import Any

from _bench import print_table, write_json
from skymemory.constellation.presets import preset_named
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.wire import COMMAND_PREFIX_BYTES, TELEMETRY_PREFIX_BYTES
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore, SkySettings
from skymemory.transport.simulated import SimulatedConstellation

SLOT_PERIOD_S = 1000.0
LINK_S = 0.004
SELECTION_BYTES = 44 + 6
"""Body of a GET or ACK for 48 chunks."""
ASK_BYTES, ANSWER_BYTES = COMMAND_PREFIX_BYTES + SELECTION_BYTES, TELEMETRY_PREFIX_BYTES + SELECTION_BYTES
HAS_BYTES, PRESENCE_BYTES = COMMAND_PREFIX_BYTES + 4 + 32, TELEMETRY_PREFIX_BYTES + 4 + 40


class Counted:
    """A constellation, a store in it, and what either says since the last look."""

    def __init__(self, preset: str, access: str, folder: Path) -> None:
        chosen = preset_named(preset)
        self.torus = chosen.torus
        self.sky = SkyMap(chosen.torus, chosen.centre)
        clock = MoveClock(slot_period_s=SLOT_PERIOD_S, time_scale=1.0)
        self.sim = SimulatedConstellation(self.sky, 64 << 20, clock, delay_s=lambda a, b: LINK_S)
        self.access = access
        self.settings = SkySettings(chosen.strategy, chosen.servers)
        self.store = self.connect(SharedIndex(folder / f"{access}.index", born=True))
        self._before = (0, 0)

    def connect(self, index: SharedIndex | None) -> ConstellationStore:
        config = ClientConfig(7 if index is not None else 8, access=self.access, expected_rtt_s=6 * LINK_S)  # type: ignore[arg-type]
        return ConstellationStore(self.sim.connect(config), self.sky, self.settings, index=index)

    def spent(self) -> tuple[int, int]:
        self.sim.flush()
        now = (self.sim.datagrams_sent, self.sim.bytes_sent)
        before, self._before = self._before, now
        return now[0] - before[0], now[1] - before[1]

    def links(self, chunks: int, moves: tuple[int, int] = (0, 0)) -> list[tuple[int, int]]:
        """Per server: its chunks, and the links between it and the ground."""
        placement = self.store._sky.placement(3, self.settings.servers)
        centre = self.sky.centre_at(moves)
        return [
            (
                len(range(server, chunks, self.settings.servers)),
                1 if self.access == "los" else 1 + self.torus.hops(centre, satellite),
            )
            for server, satellite in enumerate(placement.locate_all((0, 0), moves))
        ]


def rows_of(preset: str, access: str, value: bytes, folder: Path) -> list[dict[str, Any]]:
    world = Counted(preset, access, folder)
    chunk_bytes = world.settings.chunk_bytes
    chunks = -(-len(value) // chunk_bytes)
    key, other = (hashlib.sha256(name).digest() for name in (b"there", b"elsewhere"))
    servers = world.links(chunks)
    per_chunk = sum(count * links for count, links in servers)
    per_server = sum(links for _, links in servers)
    value_on_links = len(value) * per_chunk // chunks
    rows: list[dict[str, Any]] = []

    def row(verb: str, least_messages: int, least_bytes: int) -> None:
        messages, size = world.spent()
        rows.append(
            {
                "access": access,
                "verb": verb,
                "messages": messages,
                "least_messages": least_messages,
                "bytes": size,
                "least_bytes": least_bytes,
            }
        )

    stored = world.store.put_many([(key, value)])
    row(f"set, {chunks} chunks", per_chunk + per_server, value_on_links + per_server * ANSWER_BYTES)
    found = world.store.get_many([key])
    row(f"get, {chunks} chunks", per_chunk + per_server, value_on_links + per_server * ASK_BYTES)
    missed = world.store.get_many([other])
    row("miss, index at hand", 0, 0)
    blind = world.connect(None)
    missed += blind.get_many([other])
    row("miss, index lost", 2, HAS_BYTES + PRESENCE_BYTES)
    found += blind.get_many([key])
    row(
        "get, index lost",
        per_chunk + per_server + 2,
        value_on_links + per_server * ASK_BYTES + HAS_BYTES + PRESENCE_BYTES,
    )
    world.sim.settle(SLOT_PERIOD_S + 20.0)
    placement = world.sky.placement(3, world.settings.servers)
    old, new = (placement.locate_all((0, 0), moves) for moves in ((0, 0), (1, 0)))
    hops = [(count, world.torus.hops(a, b)) for (count, _), a, b in zip(servers, old, new, strict=True) if a != b]
    moved = sum(count for count, _ in hops)
    answers = sum(distance for _, distance in hops)
    row(
        f"rotation, {moved} chunks move",
        sum(count * distance for count, distance in hops) + answers,
        chunk_bytes * sum(count * distance for count, distance in hops) + answers * ANSWER_BYTES,
    )
    found += world.store.get_many([key])
    moved_links = world.links(chunks, (1, 0))
    row(
        "get after the rotation",
        sum((count + 1) * links for count, links in moved_links),
        sum(count * links for count, links in moved_links) * len(value) // chunks
        + sum(links for _, links in moved_links) * ASK_BYTES,
    )
    if stored != [True] or any(one != value for one in found) or any(one is not None for one in missed):
        raise SystemExit("a value was lost or altered, or one that never was came back")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="testbed-19x5")
    parser.add_argument("--value-bytes", type=int, default=480 * 6144)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    value = random.Random(options.seed).randbytes(options.value_bytes)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for access in ("los", "gateway") for row in rows_of(options.preset, access, value, Path(folder))]
    print_table(
        f"{options.value_bytes} bytes on {options.preset}: messages and bytes on all links",
        ("what", "messages", "least", "x", "bytes", "least", "x"),
        [
            (
                f"{row['access']}: {row['verb']}",
                row["messages"],
                row["least_messages"],
                f"{row['messages'] / row['least_messages']:.2f}" if row["least_messages"] else "-",
                row["bytes"],
                row["least_bytes"],
                f"{row['bytes'] / row['least_bytes']:.3f}" if row["least_bytes"] else "-",
            )
            for row in rows
        ],
    )
    write_json(options.json, "messages", options.seed, rows)


if __name__ == "__main__":
    main()
