"""Handler of NOTICE, eviction gossip: a satellite that evicts part of a block notifies the satellites of its box.

A NOTICE is flooded within a rectangle of satellites; outside, it is forwarded towards the centre. Ground hosts get
GONE. Notices wait a moment, since several satellites evict a block at once.

1. ``gather`` records evictions; the notice is due ``notice_hold_s`` later.
2. ``handle_timer`` decides which values are dead. A chunk evicted where it belongs is lost; elsewhere, or with copies,
   ``LossProofs`` decide.
3. ``_announce`` drops the remaining chunks here and floods the notice.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.protocol.messages import KEY_BYTES, MAX_DEAD_PER_PACKET, Dead, join_dead, pack_dead, split_dead
from skymemory.protocol.satellite.checks import Check, CheckAnswer, CheckResult, Checks, LossProofs, Replicas
from skymemory.protocol.satellite.memory import setting_of
from skymemory.protocol.satellite.state import SatelliteState
from skymemory.protocol.wire import TAG_OFFSET, Address, Buffer, ChunkRef, Op, Packet, microseconds

_NOTICE = struct.Struct(">IIIHHHHBBH")
_GROUND_NOTIFIED = 0x01
_OLDEST_NOTICE_S = 1.0
_REMEMBERED_NOTICES = 4096
_MOST_GROUND_HOSTS = 8


@dataclass(frozen=True, slots=True)
class Region:
    """Rectangle of satellites around ``centre``."""

    centre: SatelliteId
    north: int
    south: int
    west: int
    east: int

    def holds(self, satellite: SatelliteId, torus: Torus) -> bool:
        row = (satellite.plane - self.centre.plane + self.north) % torus.planes
        column = (satellite.slot - self.centre.slot + self.west) % torus.slots_per_plane
        return row <= self.north + self.south and column <= self.west + self.east


@dataclass(frozen=True, slots=True)
class Notice:
    """Body of a NOTICE: values ``dead`` because a chunk was evicted, announced in ``region``; it may cross ``hops``
    more links.
    """

    origin: Address
    number: int
    region: Region
    hops: int
    ground_notified: bool
    dead: tuple[Dead, ...]

    def pack(self) -> bytes:
        area, flags = self.region, _GROUND_NOTIFIED if self.ground_notified else 0
        sides = area.north, area.south, area.west, area.east
        name = self.origin.pack(), self.number, Address(*area.centre).pack()
        head = _NOTICE.pack(*name, *sides, self.hops, flags, len(self.dead))
        return head + join_dead(self.dead)

    @classmethod
    def unpack(cls, body: Buffer) -> Notice:
        if len(body) < _NOTICE.size:
            raise MalformedPacket(f"NOTICE of {len(body)} bytes: expected {_NOTICE.size} and dead values")
        origin, number, centre, north, south, west, east, hops, flags, count = _NOTICE.unpack_from(body)
        dead = tuple(split_dead(body[_NOTICE.size :], count))
        middle = Address.unpack(centre)
        region = Region(SatelliteId(middle.plane, middle.slot), north, south, west, east)
        return cls(Address.unpack(origin), number, region, hops, bool(flags & _GROUND_NOTIFIED), dead)


class Gossip:
    def __init__(self, state: SatelliteState, checks: Checks, proofs: LossProofs, now_s: float) -> None:
        self._here = state.here
        self._config = config = state.config.eviction
        self._sky = state.sky
        self._store = state.store
        self._history = state.history
        self._handover = state.handover
        self._locator = state.locator
        self._outbox = state.outbox
        self._counters = state.counters
        self._checks = checks
        self._proofs = proofs
        self._replicas = Replicas(state) if config.replicas > 1 else None
        self._evicted: dict[bytes, bytes] = {} if state.store.evicted is None else state.store.evicted
        self._due_s = math.inf
        self._notice_number = microseconds(now_s) // 1000 & 0xFFFFFFFF
        self._seen_notices: OrderedDict[tuple[Address, int], None] = OrderedDict()

    # --- Evictions of this satellite ---

    def gather(self, now_s: float) -> None:
        if self._evicted and self._due_s == math.inf:
            self._due_s = now_s + self._config.notice_hold_s

    def next_timer_s(self) -> float:
        return self._due_s

    def handle_timer(self, now_s: float) -> None:
        """Announce, or request a proof of, evictions as losses."""
        if now_s < self._due_s:
            return
        self._due_s = math.inf
        refs = list(self._evicted.values())
        self._evicted.clear()
        if self._replicas is None:
            at_home = [ref for ref in refs if self._locator.home(ref) == self._here]
            self._announce(at_home, now_s)
            here = set(at_home)
            away = [(ref, (ChunkRef.unpack(ref).index,)) for ref in refs if ref not in here]
            self._proofs.ask(away, self._on_proof, now_s)
        else:
            self._ask_about_copies(self._replicas, refs, now_s)

    def _on_proof(self, ref: bytes, lost: bool, now_s: float) -> None:
        if lost:
            self._announce([ref], now_s)

    def _ask_about_copies(self, replicas: Replicas, refs: Sequence[bytes], now_s: float) -> None:
        """Request proofs for values with a share that is whole in no copy; silent satellites count as having theirs."""
        by_key = {ref[:KEY_BYTES]: ref for ref in refs}
        by_place: dict[SatelliteId, list[Check]] = {}
        places_left: dict[Check, int] = {}
        doubtful: list[tuple[bytes, list[int]]] = []

        def doubt(check: Check) -> None:
            missing = replicas.missing(check)
            if missing and (ref := by_key.pop(check.key, None)):
                doubtful.append((ref, missing))

        def on_answer(answer: CheckAnswer, answered_s: float) -> None:
            for check, what in zip(answer.checks, answer.found, strict=True):
                places_left[check] -= what is not CheckResult.WHOLE and answer.same_moves
                if places_left[check] == 0:
                    doubt(check)
            self._request_proofs(doubtful, answered_s)

        for ref in refs:
            for check, satellites in replicas.find_incomplete_shares(
                ref, self._locator.before if self._get_margin() else None
            ):
                places_left[check] = len(satellites)
                if not satellites:
                    doubt(check)
                for place in satellites:
                    by_place.setdefault(place, []).append(check)
        self._request_proofs(doubtful, now_s)
        for place, checks in by_place.items():
            self._checks.ask(place, checks, on_answer, now_s)

    def _request_proofs(self, doubtful: list[tuple[bytes, list[int]]], now_s: float) -> None:
        if doubtful:
            self._proofs.ask(doubtful, self._on_proof, now_s)
            doubtful.clear()

    def _announce(self, refs: Sequence[bytes], now_s: float) -> None:
        """Drop these values' remaining chunks, and notify the satellites that may hold others."""
        by_region: dict[Region, list[Dead]] = {}
        for ref in refs:
            by_region.setdefault(self._get_region(ref), []).append((ref[:KEY_BYTES], setting_of(ref)))
        for region, dead in by_region.items():
            self.purge(dead, now_s)
            for at in range(0, len(dead), MAX_DEAD_PER_PACKET):
                self._flood_notice(region, tuple(dead[at : at + MAX_DEAD_PER_PACKET]), now_s)

    def _flood_notice(self, region: Region, dead: tuple[Dead, ...], now_s: float) -> None:
        self._notice_number = (self._notice_number + 1) & 0xFFFFFFFF
        origin = Address(*self._here)
        self._remember((origin, self._notice_number))
        # Enough to reach the centre and cross the rectangle, plus two.
        torus = self._sky.torus
        hops_to_centre = torus.hops(self._here, torus.living(region.centre))
        hops = min(255, hops_to_centre + region.north + region.south + region.west + region.east + 2)
        notice = Notice(origin, self._notice_number, region, hops, self.notify_ground(dead, now_s), dead)
        self._forward(notice, None, now_s)

    def _get_region(self, ref: bytes) -> Region:
        """Return the rectangle of satellites on which the value's chunks may be."""
        tag = ref[TAG_OFFSET:]
        servers, strategy = int.from_bytes(tag[0:2], "big"), tag[4]
        set_moves = (int.from_bytes(tag[8:12], "big", signed=True), int.from_bytes(tag[12:16], "big", signed=True))
        margin = self._get_margin()
        try:
            placement = self._sky.placement(strategy, servers)
        except InvalidInput:
            return Region(self._here, 0, 0, 0, 0)
        box, centre = placement.box, placement.centre_of(set_moves, self._locator.moves)
        north, south = (0, 0) if self._config.plane_only else (box.north, box.height - 1 - box.north)
        return Region(centre, north + margin, south + margin, box.west + margin, box.width - 1 - box.west + margin)

    def _get_margin(self) -> int:
        """Return the tolerated rows and columns off the box: 1 during a handover."""
        return 0 if self._handover.at_rest else 1

    # --- Notices of others ---

    def receive(self, packet: Packet, now_s: float) -> None:
        """Drop what is dead, notify ground hosts, and forward the notice, once."""
        notice = Notice.unpack(packet.body)
        if packet.header.ground or packet.header.source.shell:
            raise MalformedPacket("NOTICE of a ground host: only satellites know what they evict")
        name = (notice.origin, notice.number)
        if name in self._seen_notices:
            self._counters.add("notices_repeated")
            return
        self._remember(name)
        dead = self.purge(notice.dead, now_s)
        for key, setting in notice.dead:  # already announced: no second notice is needed
            if setting_of(self._evicted.get(key, b"")) == setting:
                del self._evicted[key]
        notified = notice.ground_notified or (bool(dead) and self.notify_ground(dead, now_s))
        source = SatelliteId(packet.header.source.plane, packet.header.source.slot)
        self._forward(replace(notice, ground_notified=notified), source, now_s)

    def _forward(self, notice: Notice, source: SatelliteId | None, now_s: float) -> None:
        """Send a notice on within its region or, from outside, towards its centre; never back to ``source``."""
        if not notice.hops:
            return
        torus, region = self._sky.torus, notice.region
        if region.holds(self._here, torus):
            targets = [neighbour for neighbour in torus.neighbours(self._here) if region.holds(neighbour, torus)]
        else:
            centre = torus.living(region.centre)
            targets = [torus.next_hop(self._here, centre)] if centre in torus else []
        body = replace(notice, hops=notice.hops - 1).pack()
        for target in dict.fromkeys(targets):
            if target not in (source, self._here):
                self._counters.add("notices_sent")
                self._outbox.command(Op.NOTICE, target, notice.number, body, now_s)

    def _remember(self, name: tuple[Address, int]) -> None:
        self._seen_notices[name] = None
        if len(self._seen_notices) > _REMEMBERED_NOTICES:
            self._seen_notices.popitem(last=False)

    # --- Dropping dead values: also for ``Sweep`` ---

    def purge(self, dead: Sequence[Dead], now_s: float) -> list[Dead]:
        """Drop chunks of dead values, unless their key may have been stored again. Return the dropped values."""
        since_s = now_s - _OLDEST_NOTICE_S
        dead = [value for value in dead if not self._history.was_written_since(value[0], since_s)]
        self._counters.add("chunks_purged", self._store.remove_values(dead))
        if self._replicas is not None:
            self._history.dropped(dead)
        return dead

    def notify_ground(self, dead: Sequence[Dead], now_s: float) -> bool:
        """Send GONE to known ground hosts. Return True if there are any."""
        for at in range(0, len(dead), MAX_DEAD_PER_PACKET):
            body = pack_dead(dead[at : at + MAX_DEAD_PER_PACKET])
            if not self._outbox.notify_ground(Op.GONE, body, _MOST_GROUND_HOSTS, now_s):
                return False
        return True
