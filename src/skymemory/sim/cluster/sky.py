"""The constellation as a tier of the pool: blocks in chunks over the servers of a box that flies.

A read takes the way there and back to the farthest server that has chunks of it, and its bytes over the one way down
that all nodes share; a write its bytes over the way up, in the background. A block is cut into so many chunks that each
server has some. What is there goes by LRU, never a parent before its child. When the box moves, leaving columns hand
their chunks over: a reader finds a chunk in the old place or the new (copy, switch, delete), so moves cost no hit, but
the bytes must pass a link between satellites before the next move, which limits how much a box can hold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from skymemory.conductor.cost_model.transfer import Medium
from skymemory.errors import InvalidInput
from skymemory.placement.locate import Moves
from skymemory.placement.migration import server_moves
from skymemory.sim.cluster.links import Link, transfer_s
from skymemory.sim.cluster.pool_base import SKY_TIER, Far
from skymemory.sim.cluster.pool_settings import SkySetup
from skymemory.sim.cluster.sky_geometry import SkyGeometry
from skymemory.sim.prefix_cache import PrefixCache


class SkyTier:
    """``block_bytes`` of KV; in the sky they are packed.

    Raises:
        InvalidInput: the box cannot hold one block, or what ``SkyGeometry`` raises.
    """

    def __init__(self, setup: SkySetup, block_bytes: float) -> None:
        self._setup = setup
        self._block_bytes = block_bytes * setup.packing
        self.geometry = SkyGeometry(setup)
        per_satellite = setup.memory_bytes_per_satellite
        if self.geometry.placement.migrates:
            per_satellite = min(per_satellite, setup.isl_bytes_per_s * self.geometry.slot_period_s)
        capacity = int(per_satellite * setup.servers // self._block_bytes)
        if capacity < 1:
            raise InvalidInput(f"{setup.servers} satellites of {per_satellite:g} bytes each hold no block")
        self._here = PrefixCache(capacity)
        self._set: dict[int, tuple[float, Moves]] = {}
        """Of each block, from when on it can be read, and the moves at its setting."""
        self._set_at: Counter[Moves] = Counter()
        self._offered: set[int] = set()
        """Every block that ever was: the tiers' own admission (``store.admission``) remembers the latest only."""
        self._moves = self.geometry.moves(0.0)
        self.up, self.down = Link("sky up", setup.bytes_per_s), Link("sky down", setup.bytes_per_s)
        self._evicted = self._skipped = self._handovers = 0
        self._handed_bytes = self._longest_handover_s = 0.0

    @property
    def capacity_blocks(self) -> int:
        return self._here.capacity

    def __len__(self) -> int:
        return len(self._here)

    def leading(self, ids: Sequence[int], now_s: float) -> int:
        """How many of the first blocks can be read now."""
        here = self._set
        for at, block in enumerate(ids):
            found = here.get(block)
            if found is None or found[0] > now_s:
                return at
        return len(ids)

    def offer(self, ids: Sequence[int], now_s: float) -> Far | None:
        """What it has of a prompt and the way there as busy as it is; None for nothing, or nobody in reach."""
        self.fly(now_s)
        held = self.leading(ids, now_s)
        if not held:
            return None
        latency_s = self._round_trip_s(ids[:held], now_s) + self.down.queue_s(now_s)
        if latency_s == math.inf:
            return None
        return Far(SKY_TIER, held, Medium(SKY_TIER, self.kv_bytes_per_s, latency_s))

    @property
    def kv_bytes_per_s(self) -> float:
        """Of KV, as it is unpacked."""
        return self._setup.bytes_per_s / self._setup.packing

    def _round_trip_s(self, ids: Sequence[int], now_s: float) -> float:
        settings = {self._set[block][1] for block in ids}
        return max((self.geometry.round_trip_s(set_moves, now_s) for set_moves in settings), default=0.0)

    def read(self, ids: Sequence[int], begin: int, end: int, into: Link, now_s: float) -> tuple[int, float]:
        """Blocks ``begin`` to ``end`` of a prompt through ``into``: how many come, and when the last has come."""
        self.fly(now_s)
        end = min(end, self.leading(ids, now_s))
        if end <= begin:
            return 0, now_s
        latency_s = self._round_trip_s(ids[begin:end], now_s)
        if latency_s == math.inf:
            return 0, now_s
        self._here.use(ids[:end])
        size_bytes = (end - begin) * self._block_bytes
        return end - begin, transfer_s((self.down, into), size_bytes, now_s, latency_s)

    def write(self, ids: Sequence[int], out: Link, now_s: float) -> None:
        """What it lacks of a chain goes up, from the root on, as much as the way up takes before it is too busy.

        When that is not idle either, only what is offered again: most blocks are never wanted a second time.
        """
        self.fly(now_s)
        held = next((at for at, block in enumerate(ids) if block not in self._set), len(ids))
        latency_s = self.geometry.round_trip_s(self._moves, now_s)
        if latency_s == math.inf:
            self._skipped += len(ids) - held
            return
        queue_s = self.up.queue_s(now_s)
        room_s, picky = self._setup.most_queued_s - queue_s, queue_s > self._setup.picky_queued_s
        most = 1 + int(room_s * self._setup.bytes_per_s // self._block_bytes) if room_s >= 0 else 0
        wanted = (
            next((at for at in range(held, len(ids)) if ids[at] not in self._offered), len(ids)) if picky else len(ids)
        )
        self._offered.update(ids)
        end = min(wanted, held + most, self._here.capacity)
        self._skipped += len(ids) - max(held, end)
        fresh = ids[held:end]
        if fresh:
            sent_s = transfer_s((out, self.up), len(fresh) * self._block_bytes, now_s)
            entry = sent_s + latency_s, self._moves
            self._set.update(dict.fromkeys(fresh, entry))
            self._set_at[self._moves] += len(fresh)
        for block in self._here.use(ids[: max(held, end)]):
            self._set_at[self._set.pop(block)[1]] -= 1
            self._evicted += 1

    def fly(self, now_s: float) -> None:
        """The box as it is now: what was handed over on the way here is counted."""
        moves = self.geometry.moves(now_s)
        if moves == self._moves:
            return
        before, self._moves = self._moves, moves
        placement, sent = self.geometry.placement, Counter[object]()
        each_bytes = self._block_bytes / self._setup.servers
        for set_moves, blocks in self._set_at.items():
            if blocks:
                for handover in server_moves(placement, set_moves, before, moves):
                    sent[handover.source] += blocks
        self._handovers += 1
        self._handed_bytes += sum(sent.values()) * each_bytes
        longest_s = max(sent.values(), default=0) * each_bytes / self._setup.isl_bytes_per_s
        self._longest_handover_s = max(self._longest_handover_s, longest_s)

    def figures(self) -> Mapping[str, float]:
        return {
            "sky_up_bytes": self.up.carried_bytes,
            "sky_down_bytes": self.down.carried_bytes,
            "sky_blocks": len(self._here),
            "sky_capacity_blocks": self._here.capacity,
            "sky_evicted_blocks": self._evicted,
            "sky_unwritten_blocks": self._skipped,
            "sky_box_moves": self._handovers,
            "sky_handover_bytes": self._handed_bytes,
            "sky_longest_handover_s": self._longest_handover_s,
        }
