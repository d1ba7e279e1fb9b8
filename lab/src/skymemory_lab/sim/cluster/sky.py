"""The constellation as a tier of the simulated pool: blocks in chunks over all servers of a moving box.

Eviction is LRU, children before parents. Moves cost no hits (copy, switch, delete), but each handover must pass an
inter-satellite link before the next move, which limits a box's capacity.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from skymemory.conductor.cost_model import CostModel, Medium
from skymemory.conductor.prefix_index.approximate import Blocks
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.placement.locate import Moves, Placement, server_moves
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.testbed.connect import clock_of, shell_of, sky_of
from skymemory.testbed.plan import Ground, make_plan
from skymemory_lab.sim.cluster.pool import SKY_TIER, ClusterPool, Far, NetworkDirection, PrefixCache, transfer_s
from skymemory_lab.sim.cluster.setup import PoolSettings, SkySetup


class SkyPool(ClusterPool):
    """A pool with the constellation as a tier of all nodes."""

    def __init__(self, names: Sequence[str], cost: CostModel, settings: PoolSettings) -> None:
        super().__init__(names, cost, settings)
        self.sky = SkyTier(settings.sky or SkySetup(), self.block_bytes)

    def far(self, blocks: Blocks) -> list[Far]:
        offer = self.sky.offer(blocks.tolist(), self._now_s)
        return [] if offer is None else [offer]

    def _fetch(
        self, node: int, ids: Sequence[int], begin: int, end: int, source: str, now_s: float
    ) -> tuple[int, float]:
        if source != SKY_TIER:
            return super()._fetch(node, ids, begin, end, source, now_s)
        count, done_s = self.sky.read(ids, begin, end, self._in[node], now_s)
        return count, done_s + self._late_s() if count else done_s

    def stored(self, node: int, ids: Sequence[int], now_s: float) -> None:
        super().stored(node, ids, now_s)
        if ids:
            self.sky.write(ids, self._out[node], now_s)

    def figures(self) -> dict[str, float]:
        return {**super().figures(), **self.sky.figures()}


class SkyTier:
    """The constellation tier. ``block_bytes`` are bytes of KV before packing."""

    def __init__(self, setup: SkySetup, block_bytes: float) -> None:
        self._setup = setup
        self._block_bytes = block_bytes * setup.packing
        self.geometry = SkyGeometry(setup)
        per_satellite = setup.memory_bytes_per_satellite
        # Leaving columns hand all their chunks over within one slot's move, so a satellite holds at most what a link
        # carries in that time.
        if self.geometry.placement.migrates:
            per_satellite = min(per_satellite, setup.isl_bytes_per_s * self.geometry.slot_period_s)
        capacity = int(per_satellite * setup.servers // self._block_bytes)
        if capacity < 1:
            raise InvalidInput(f"{setup.servers} satellites of {per_satellite:g} bytes each are smaller than a block")
        self._here = PrefixCache(capacity)
        # Time from which each block is readable, and the moves at its write.
        self._set: dict[int, tuple[float, Moves]] = {}
        self._set_at: Counter[Moves] = Counter()
        self._offered: set[int] = set()  # all blocks ever offered
        self._moves = self.geometry.moves(0.0)
        self.up, self.down = (
            NetworkDirection("sky up", setup.bytes_per_s),
            NetworkDirection("sky down", setup.bytes_per_s),
        )
        self._evicted = self._skipped = self._handovers = 0
        self._handed_bytes = self._longest_handover_s = 0.0

    @property
    def capacity_blocks(self) -> int:
        return self._here.capacity

    def __len__(self) -> int:
        return len(self._here)

    def leading(self, ids: Sequence[int], now_s: float) -> int:
        entries = self._set
        for at, block in enumerate(ids):
            entry = entries.get(block)
            if entry is None or entry[0] > now_s:
                return at
        return len(ids)

    def offer(self, ids: Sequence[int], now_s: float) -> Far | None:
        """Return the leading blocks held; None if there are none or they are out of reach."""
        self.fly(now_s)
        readable = self.leading(ids, now_s)
        if not readable:
            return None
        latency_s = self._round_trip_s(ids[:readable], now_s) + self.down.queue_s(now_s)
        if latency_s == math.inf:
            return None
        return Far(SKY_TIER, readable, Medium(SKY_TIER, self.kv_bytes_per_s, latency_s))

    @property
    def kv_bytes_per_s(self) -> float:
        return self._setup.bytes_per_s / self._setup.packing

    def _round_trip_s(self, ids: Sequence[int], now_s: float) -> float:
        settings = {self._set[block][1] for block in ids}
        return max((self.geometry.round_trip_s(set_moves, now_s) for set_moves in settings), default=0.0)

    def read(self, ids: Sequence[int], begin: int, end: int, into: NetworkDirection, now_s: float) -> tuple[int, float]:
        """Read blocks ``begin`` to ``end`` as far as they are held; return their number and the end.

        It takes the round trip to the farthest server, plus the bytes over the shared downlink.
        """
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

    def write(self, ids: Sequence[int], out: NetworkDirection, now_s: float) -> None:
        """Write a chain's missing blocks as far as the uplink's queue allows.

        A busy uplink writes only blocks offered before: most are never requested again.
        """
        self.fly(now_s)
        stored = next((at for at, block in enumerate(ids) if block not in self._set), len(ids))
        latency_s = self.geometry.round_trip_s(self._moves, now_s)
        if latency_s == math.inf:
            self._skipped += len(ids) - stored
            return
        # Nothing waits for writes, so nothing else would bound the queue. Above ``picky_queued_s`` new blocks must have
        # been offered before, and the queue never exceeds ``most_queued_s`` by more than one block.
        queue_s = self.up.queue_s(now_s)
        room_s, picky = self._setup.most_queued_s - queue_s, queue_s > self._setup.picky_queued_s
        most = 1 + int(room_s * self._setup.bytes_per_s // self._block_bytes) if room_s >= 0 else 0
        wanted = (
            next((at for at in range(stored, len(ids)) if ids[at] not in self._offered), len(ids))
            if picky
            else len(ids)
        )
        self._offered.update(ids)
        end = min(wanted, stored + most, self._here.capacity)
        self._skipped += len(ids) - max(stored, end)
        new_blocks = ids[stored:end]
        if new_blocks:
            sent_s = transfer_s((out, self.up), len(new_blocks) * self._block_bytes, now_s)
            entry = sent_s + latency_s, self._moves
            self._set.update(dict.fromkeys(new_blocks, entry))
            self._set_at[self._moves] += len(new_blocks)
        for block in self._here.use(ids[: max(stored, end)]):
            self._set_at[self._set.pop(block)[1]] -= 1
            self._evicted += 1

    def fly(self, now_s: float) -> None:
        """Move the box, and account for the chunks that satellites hand over."""
        moves = self.geometry.moves(now_s)
        if moves == self._moves:
            return
        before, self._moves = self._moves, moves
        placement, sent = self.geometry.placement, Counter[object]()
        each_bytes = self._block_bytes / self._setup.servers
        # Counted by the moves at their write, not by block: blocks written between the same two moves lie on the same
        # satellites.
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


class SkyGeometry:
    """The moving box above a preset's ground station, from the epoch on."""

    def __init__(self, setup: SkySetup) -> None:
        self.plan = make_plan(
            setup.preset,
            servers=setup.servers,
            strategy=setup.strategy,
            access=setup.access,
            time_scale=1.0,
            ground=Ground(gateway=setup.gateway),
        )
        self._clock, self._sky = clock_of(self.plan), sky_of(self.plan)
        self._strategy = STRATEGY_CODES[self.plan.strategy]  # type: ignore[index]
        shell = shell_of(self.plan)
        self.slot_period_s = shell.period_s / shell.slots_per_plane
        self._shell = shell
        self._step_s = setup.geometry_s
        self._step: tuple[Moves, int] | None = None
        self._look_s = 0.0
        self._moves: Moves = (0, 0)
        self._moves_until_s = -math.inf
        self._centre = self.plan.centre
        self._seen: tuple[SatelliteId, ...] = ()
        self._beam_s = 0.0
        self._one_way: dict[SatelliteId, float] = {}
        self._round_trips: dict[Moves, float] = {}

    @property
    def placement(self) -> Placement:
        return self._sky.placement(self._strategy, self.plan.servers)

    def moves(self, now_s: float) -> Moves:
        """Return the box's moves since the epoch. Calls come in order of time."""
        if now_s >= self._moves_until_s:
            self._moves = self._clock.moves(now_s)
            next_s = self._clock.next_move_s(now_s)
            self._moves_until_s = math.inf if next_s is None else next_s
        return self._moves

    def servers_at(self, set_moves: Moves, now_s: float) -> tuple[SatelliteId, ...]:
        return self._sky.servers_at(self._strategy, self.plan.servers, set_moves, self.moves(now_s))

    def round_trip_s(self, set_moves: Moves, now_s: float) -> float:
        """Return the round trip to the farthest server of values written at ``set_moves``; infinite if out of reach."""
        # Link lengths change by a few kilometres per second, so they are computed once per ``geometry_s`` and after
        # each move.
        step = self.moves(now_s), math.floor(now_s / self._step_s)
        if step != self._step:
            self._recompute_links(step, now_s)
        round_trip_s = self._round_trips.get(set_moves)
        if round_trip_s is None:
            round_trip_s = 2 * max(self._one_way_s(satellite) for satellite in self.servers_at(set_moves, now_s))
            self._round_trips[set_moves] = round_trip_s
        return round_trip_s

    def _recompute_links(self, step: tuple[Moves, int], now_s: float) -> None:
        self._step, self._look_s = step, now_s
        self._one_way.clear()
        self._round_trips.clear()
        self._centre = self._sky.centre_at(step[0])
        sight = self._sky.sight
        assert sight is not None
        if self.plan.access == "onboard":
            self._seen, self._beam_s = (self._centre,), 0.0
            return
        self._seen = sight.in_sight(self._centre, now_s)
        self._beam_s = self._beam_to(self._seen[0]) if self._seen else math.inf

    def _beam_to(self, satellite: SatelliteId) -> float:
        assert self._sky.sight is not None
        return self._sky.sight.one_way_s(satellite, self._centre, self._look_s)

    def _one_way_s(self, satellite: SatelliteId) -> float:
        # Return the light time by its own beam, or by the gateway's beam and inter-satellite links.
        one_way_s = self._one_way.get(satellite)
        if one_way_s is None:
            access = self.plan.access
            if access == "ideal" or (access == "hybrid" and satellite in self._seen):
                one_way_s = self._beam_to(satellite)
            elif self._beam_s == math.inf:
                one_way_s = math.inf
            else:
                gateway = self._seen[0]
                hops = self.plan.torus.delta(gateway, satellite)
                one_way_s = self._beam_s + self._shell.path_one_way_s(gateway.plane, *hops)
            self._one_way[satellite] = one_way_s
        return one_way_s
