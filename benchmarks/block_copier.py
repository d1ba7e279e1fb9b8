"""GB/s of the CUDA block copier, beside plain copies of the same bytes between pinned memory and the device.

    python benchmarks/block_copier.py

Needs torch and a CUDA device, nothing of vLLM. The shape is Llama-3.1-8B's: 32 layers, 8 heads of 128, bfloat16, blocks
of 16 tokens, values of 128. Plain copies move one contiguous tensor by ``copy_(non_blocking=True)``, which is
cudaMemcpyAsync; the copier gathers and scatters scattered blocks as well.

``arena_rows`` measures copies from and into a host arena; `benchmarks/accelerator.py --host-tier` calls it.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from skymemory.cache.blocks import BlockCache, LoadTally, Part, Parts, PhaseClock
from skymemory.engine.page_locked import LockedMemory
from skymemory.engine.vllm.copier import Mark, PartCopier, copier_of, device_of
from skymemory.engine.vllm.plan import Save, WorkerOutcome
from skymemory.engine.vllm.worker import Saver
from skymemory.kv.block import OpaqueLayout
from skymemory.kv.context import CacheContext
from skymemory.kv.value import PAYLOAD_AT
from skymemory.store.host.client import HostStore

LAYERS, HEADS, TOKENS, WIDTH, BLOCKS, VALUE_BLOCKS = 32, 8, 16, 256, 1024, 8
ORDERS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "BLHNC": (1, 0, 2, 3, 4), "BHLNC": (1, 2, 0, 3, 4)}
"""Of layer, block, head, token and content (keys beside values) in memory, as in vLLM 0.32."""


def caches_in(order: tuple[int, ...]) -> dict[str, Any]:
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, WIDTH)
    raw = torch.zeros([shape[at] for at in order], dtype=torch.bfloat16, device="cuda")
    logical = raw.permute([order.index(at) for at in range(5)])
    return {f"layers.{at}": logical[at] for at in range(LAYERS)}


def gb_per_s(size_bytes: int, repeats: int, work: Callable[[], object]) -> float:
    """Median over ``repeats``, after one round that touches all memory."""
    took_s = []
    for _ in range(repeats + 1):
        synchronize()
        began_s = time.perf_counter()
        work()
        synchronize()
        took_s.append(time.perf_counter() - began_s)
    return size_bytes / statistics.median(took_s[1:]) / 1e9


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class ArenaCopies:
    """Values in a host arena, and blocks of a cache on ``place`` that they are copied from and into."""

    def __init__(self, store: HostStore, locked: LockedMemory, place: str, size_bytes: int, values: int) -> None:
        self.store, self.values, self.locked = store, values, locked
        count = 2 * values * VALUE_BLOCKS + 1
        shape = (count, LAYERS, size_bytes // LAYERS // VALUE_BLOCKS)
        self.blocks = torch.randint(0, 256, shape, dtype=torch.uint8, device=place)
        caches = {f"layers.{at}": self.blocks[:, at] for at in range(LAYERS)}
        self.copier = PartCopier([copier_of(caches, count, VALUE_BLOCKS, memory=locked)])
        self.staging = PartCopier([copier_of(caches, count, VALUE_BLOCKS)])
        self.size_bytes = self.copier.block_bytes * VALUE_BLOCKS
        drawn = torch.randperm(count - 1)[: 2 * values * VALUE_BLOCKS].reshape(2, values, VALUE_BLOCKS) + 1
        self.sources, self.targets = drawn.tolist()
        layout = OpaqueLayout("benchmark", 16 * VALUE_BLOCKS, self.size_bytes)
        context = CacheContext("m", "w", "token ids", "uint8", layout.describe(), block_tokens=16 * VALUE_BLOCKS)
        self.cache = BlockCache(context, layout, store)
        self.saver = Saver(Parts([Part(self.cache)]), 4 << 30)
        self.saver.use_rooms(locked)
        self._names = itertools.count()
        self.keys: list[bytes] = []
        self._written: list[tuple[Mark, memoryview]] = []

    def save(self) -> float:
        """Save all values as the connector does; return the seconds from the copy to the last value stored."""
        self.store.delete(self.keys)
        self.keys = [hashlib.sha256(b"%d %d" % (self.size_bytes, next(self._names))).digest() for _ in self.sources]
        saves = [Save(0, key, 0, None, (tuple(blocks),)) for key, blocks in zip(self.keys, self.sources, strict=True)]
        self.saver.reserve(saves, 0)
        time.sleep(0.05)  # the model computes
        began_s = time.perf_counter()
        self.saver.save(saves, [self.copier], 0)
        self.saver.wait(30)
        seconds = time.perf_counter() - began_s
        outcome = WorkerOutcome()
        self.saver.report(outcome)
        if outcome.counts.get("saved_in_place") != self.values:
            raise SystemExit(f"not all of {self.values} values were saved in place: {outcome.counts}")
        return seconds

    def place(self, index: int, block: memoryview) -> None:
        mark = self.copier.write([self.targets[index]], block, 0, VALUE_BLOCKS, self.after)
        self._written.append((mark, block))

    def load(self) -> None:
        """Load all values as the connector does, each compared with its checksum."""
        tally, self.after = LoadTally(), self.copier.mark()
        self.cache.load_found(self.keys, self, tally, PhaseClock({}), None)
        for mark, _ in self._written:
            mark.wait()
        self._written.clear()
        if tally.failed or tally.size_bytes < self.values * self.size_bytes:
            raise SystemExit(f"not all values were loaded: {tally}")

    def wrong_bytes(self) -> int:
        """Return how many bytes differ in the arena, and in other blocks after a load."""
        self.save()
        wrong = 0
        for blocks, value in zip(self.sources, self.store.get_many(self.keys), strict=True):
            expected = self.blocks[blocks].movedim(0, 1).contiguous().flatten().cpu()
            if value is None or len(value) != PAYLOAD_AT + self.size_bytes:
                raise SystemExit("a value that was saved is not in the arena")
            got = torch.frombuffer(bytearray(value[PAYLOAD_AT:]), dtype=torch.uint8)
            wrong += int((got != expected).sum())
        self.load()
        sources, targets = (self.blocks[torch.tensor(some).flatten()] for some in (self.sources, self.targets))
        return wrong + int((sources != targets).sum())

    def copies(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield the copies alone, by name: the copier's, through its staging, and plain."""
        views = [view[PAYLOAD_AT:] for view in self.store.get_many(self.keys) if view is not None]
        whole = torch.empty(self.size_bytes, dtype=torch.uint8, device=self.blocks.device)

        def write(copier: PartCopier) -> list[Mark]:
            after = copier.mark()
            pairs = zip(self.targets, views, strict=True)
            return [copier.write([blocks], view, 0, VALUE_BLOCKS, after) for blocks, view in pairs]

        def plain() -> None:
            for view in views:
                with self.locked.parts(view) as parts:
                    for target, part in zip(whole.split([len(part) for part in parts]), parts, strict=True):
                        target.copy_(part, non_blocking=True)

        yield "load, copies", lambda: write(self.copier)
        yield "load, copies by staging", lambda: write(self.staging)
        yield "load, plain", plain
        ticket = self.store.prepare_rooms([(bytes(28) + at.to_bytes(4), self.size_bytes) for at in range(self.values)])
        rooms = [room for room in ticket.rooms if room is not None]

        def read() -> None:
            for blocks, room in zip(self.sources, rooms, strict=True):
                self.copier.read([blocks], room)

        yield "save, copies", read
        rooms.clear()
        ticket.rooms = [None] * self.values
        self.store.complete_store(ticket)


def arena_rows(
    store: HostStore, place: str, sizes: list[int], values: int, repeats: int
) -> Iterator[dict[str, object]]:
    """Yield GB/s by size and way, after a comparison of all bytes; SystemExit if one is wrong."""
    locked = LockedMemory(store, device_of(torch.device(place, 0) if place == "cuda" else torch.device(place)))
    began_s = time.perf_counter()
    if not locked.wait(60):
        raise SystemExit("the arena could not be page-locked")
    yield {"way": "page-locking", "bytes": len(store.memory), "seconds": time.perf_counter() - began_s}
    for size_bytes in sizes:
        copies = ArenaCopies(store, locked, place, size_bytes, values)
        total = copies.size_bytes * values
        if wrong := copies.wrong_bytes():
            raise SystemExit(f"{wrong} of {total} bytes are wrong, with values of {copies.size_bytes} bytes")
        label = {"size_bytes": copies.size_bytes, "values": values}
        yield {**label, "way": "trial", "wrong_bytes": 0}
        save_s = statistics.median(copies.save() for _ in range(repeats))
        yield {**label, "way": "save, whole", "gb_per_s": total / save_s / 1e9}
        yield {**label, "way": "load, whole", "gb_per_s": gb_per_s(total, repeats, copies.load)}
        for way, work in copies.copies():
            yield {**label, "way": way, "gb_per_s": gb_per_s(total, repeats, work)}
        store.delete(copies.keys)
        copies.saver.close(1.0)
    locked.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=32, help="values of each round")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no CUDA device: nothing was measured")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.values} values a round")
    for name, order in ORDERS.items():
        print(f"{name}: {figures(caches_in(order), options.values, options.repeats)}", flush=True)


def figures(caches: dict[str, Any], values: int, repeats: int) -> str:
    copier = copier_of(caches, BLOCKS, VALUE_BLOCKS)
    value_bytes = copier.block_bytes * VALUE_BLOCKS
    outs: list[memoryview] = []
    while len(outs) < values:
        outs += copier.buffers(value_bytes)
    places = torch.randperm(BLOCKS)[: VALUE_BLOCKS * values].reshape(-1, VALUE_BLOCKS).tolist()
    device = torch.empty(values, value_bytes, dtype=torch.uint8, device="cuda")
    hosts = [torch.frombuffer(out, dtype=torch.uint8) for out in outs[:values]]

    def read() -> None:
        for blocks, out in zip(places, outs, strict=False):
            copier.read(blocks, out)

    def write() -> None:
        after = copier.mark()
        for blocks, out in zip(places, outs, strict=False):
            copier.write(blocks, out, 0, VALUE_BLOCKS, after)

    def plain_read() -> None:
        for host, row in zip(hosts, device, strict=True):
            host.copy_(row, non_blocking=True)

    def plain_write() -> None:
        for host, row in zip(hosts, device, strict=True):
            row.copy_(host, non_blocking=True)

    total = value_bytes * values
    ours, plain, in_ours, in_plain = (gb_per_s(total, repeats, work) for work in (read, plain_read, write, plain_write))
    return (
        f"values of {value_bytes >> 20} MiB, read {ours:.1f} GB/s (plain {plain:.1f}), write {in_ours:.1f} GB/s "
        f"(plain {in_plain:.1f}; the copier's host copies into pinned memory first)"
    )


if __name__ == "__main__":
    main()
