"""What it costs to read blocks from the page cache into memory that begins between two cache lines.

Eight blocks of 2.95 MB, read and summed by the disk store (`store.disk`), in memory that begins that many bytes after
a cache line; processor time of the reading thread, so that other work on the machine counts for little. `malloc` gives
memory of this size 16 bytes behind a page; `store.base.BufferPool` begins at a line.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from _bench import print_table, write_json
from skymemory.store.base import ALIGNED, BufferPool
from skymemory.store.disk import DiskStore

BLOCKS, BLOCK_BYTES = 8, 2_949_248
OFFSETS = (0, 16, 32, 48)


def room_at(offset: int) -> np.ndarray:
    """Memory for all blocks that begins ``offset`` bytes behind a cache line, touched."""
    room = np.empty(BLOCKS * BLOCK_BYTES + 2 * ALIGNED, dtype=np.uint8)
    room.fill(1)
    begin = -room.ctypes.data % ALIGNED + offset
    return room[begin : begin + BLOCKS * BLOCK_BYTES]


def read_s(store: DiskStore, keys: list[bytes], room: np.ndarray) -> float:
    store._buffers = BufferPool()
    store._buffers.give_back(room)
    began_s = time.thread_time()
    ticket = store.prepare_load(keys)
    if any(value is None for value in store.complete_load(ticket)):
        raise SystemExit(f"a block was not there: {ticket.report}")
    seconds = time.thread_time() - began_s
    store.release(ticket)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    dice = np.random.default_rng(7)
    items = [(number.to_bytes(4, "big") * 8, dice.bytes(BLOCK_BYTES)) for number in range(BLOCKS)]
    seconds: dict[int, list[float]] = {offset: [] for offset in OFFSETS}
    with tempfile.TemporaryDirectory(prefix="skymemory-alignment-") as folder:
        store = DiskStore(Path(folder) / "store", 1 << 30)
        store.put_many(items)
        rooms = {offset: room_at(offset) for offset in OFFSETS}
        for _ in range(options.rounds):
            for offset, room in rooms.items():
                seconds[offset].append(read_s(store, [key for key, _ in items], room))
        store.close()
    rows = [
        {"offset_bytes": offset, "median_s": statistics.median(found), "least_s": min(found)}
        for offset, found in seconds.items()
    ]
    print_table(
        f"{BLOCKS} blocks of {BLOCK_BYTES / 1e6:.2f} MB from the page cache; {options.rounds} rounds",
        ["bytes behind a line", "processor time, µs", "least, µs"],
        [[str(row["offset_bytes"]), f"{row['median_s'] * 1e6:,.0f}", f"{row['least_s'] * 1e6:,.0f}"] for row in rows],
    )
    write_json(options.json, "alignment", 1, rows)


if __name__ == "__main__":
    main()
