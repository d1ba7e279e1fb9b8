"""Eviction gossip: who evicts part of a block tells the other satellites of its box, and the ground hosts it knows.

A NOTICE is flooded link by link within a rectangle of satellites, each of which passes it on once; a satellite outside
the rectangle passes it on towards its centre. Several evict the same block at the same time, since they hold the same
blocks in the same order: so notices wait a moment, and who meanwhile hears of a key has nothing left to tell of it.

A chunk that is evicted where it belongs is gone. One that is evicted elsewhere may have been handed over before, and
where values have copies another has it: then the satellite tells only what is proved lost (``proofs``). With copies it
asks first, with one question for many values, who has a share whole; the last one to evict always finds out.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.metrics import Counters
from skymemory.protocol.clock import SkyMap
from skymemory.protocol.messages import KEY_BYTES, Buffer, Packet
from skymemory.protocol.satellite.config import EvictionConfig
from skymemory.protocol.satellite.locator import Whereabouts
from skymemory.protocol.satellite.memory import ChunkStore
from skymemory.protocol.satellite.outbox import Departures
from skymemory.protocol.satellite.repair import Answer, Check, Checks, Copies, Found
from skymemory.protocol.satellite.sweep import Proofs
from skymemory.protocol.satellite.tombstones import (
    MAX_DEAD_PER_PACKET,
    Dead,
    Latecomers,
    drop,
    join_dead,
    pack_dead,
    setting_of,
    split_dead,
)
from skymemory.protocol.wire import TAG_OFFSET, Address, ChunkRef, Op

_NOTICE = struct.Struct(">IIIHHHHBBH")
_TOLD = 0x01
_UNDER_WAY_S = 1.0
"""A notice is that old at most: it is held back for 0.05 s and crosses the box. A writer's word of a key comes each
half second while it is at it, so what it still writes is younger, too.
"""
_REMEMBERED_NOTICES = 4096
_GROUND_HOSTS_TOLD = 8
"""The ground hosts heard of last; each gets a packet for every notice."""


@dataclass(frozen=True, slots=True)
class Region:
    """Satellites around ``centre``, so many rows and columns to each side."""

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
    """``origin`` and ``number`` name it; ``hops`` links are left; ``told``: the origin's ground hosts know already."""

    origin: Address
    number: int
    region: Region
    hops: int
    told: bool
    dead: tuple[Dead, ...]

    def pack(self) -> bytes:
        area = self.region
        head = _NOTICE.pack(
            self.origin.pack(),
            self.number,
            Address(*area.centre).pack(),
            area.north,
            area.south,
            area.west,
            area.east,
            self.hops,
            _TOLD if self.told else 0,
            len(self.dead),
        )
        return head + join_dead(self.dead)

    @classmethod
    def unpack(cls, body: Buffer) -> Notice:
        if len(body) < _NOTICE.size:
            raise MalformedPacket(f"NOTICE of {len(body)} bytes: expected {_NOTICE.size} and what is dead")
        origin, number, centre, north, south, west, east, hops, flags, count = _NOTICE.unpack_from(body)
        dead = tuple(split_dead(body[_NOTICE.size :], count))
        middle = Address.unpack(centre)
        region = Region(SatelliteId(middle.plane, middle.slot), north, south, west, east)
        return cls(Address.unpack(origin), number, region, hops, bool(flags & _TOLD), dead)


class Notices:
    """What one satellite tells and hears. ``margin`` says by how many rows and columns a box may just be off."""

    def __init__(
        self,
        here: SatelliteId,
        config: EvictionConfig,
        store: ChunkStore,
        whereabouts: Whereabouts,
        sky: SkyMap,
        departures: Departures,
        counters: Counters,
        checks: Checks,
        proofs: Proofs,
        latecomers: Latecomers,
        margin: Callable[[], int],
        now_s: float,
    ) -> None:
        self._copies = Copies(here, config.replicas, store, whereabouts, sky) if config.replicas > 1 else None
        self._checks = checks
        self._proofs = proofs
        self._latecomers = latecomers
        self._here = here
        self._config = config
        self._store = store
        self._whereabouts = whereabouts
        self._sky = sky
        self._departures = departures
        self._counters = counters
        self._margin = margin
        self._evicted: dict[bytes, bytes] = {}
        if config.gossip:
            store.evicted = self._evicted
        self._due_s = math.inf
        self._number = int(now_s * 1000) & 0xFFFFFFFF
        """Whoever comes back empty must not repeat the numbers that others remember of it."""
        self._seen: OrderedDict[tuple[Address, int], None] = OrderedDict()

    @property
    def due_s(self) -> float:
        """When ``send_due`` has something to say; infinite: not known."""
        return self._due_s

    def gather(self, now_s: float) -> None:
        """To be called when something may have been evicted."""
        if self._evicted and self._due_s == math.inf:
            self._due_s = now_s + self._config.notice_hold_s

    def send_due(self, now_s: float) -> None:
        """Tell of what was evicted and not stored again since, and drop what is left of it here."""
        if now_s < self._due_s:
            return
        self._due_s = math.inf
        refs = list(self._evicted.values())
        self._evicted.clear()
        if self._copies is None:
            at_home = [ref for ref in refs if self._whereabouts.home(ref) == self._here]
            self._tell(at_home, now_s)
            away = [(ref, (ChunkRef.unpack(ref).index,)) for ref in refs if ref not in at_home]
            self._proofs.ask(away, self._proved, now_s)
        else:
            self._ask_others(self._copies, refs, now_s)

    def _proved(self, ref: bytes, lost: bool, now_s: float) -> None:
        if lost:
            self._tell([ref], now_s)

    def _ask_others(self, copies: Copies, refs: Sequence[bytes], now_s: float) -> None:
        """Have those proved lost of which some share is whole in no copy; who does not answer is taken to have his."""
        by_key = {ref[:KEY_BYTES]: ref for ref in refs}
        by_place: dict[SatelliteId, list[Check]] = {}
        left: dict[Check, int] = {}
        doubtful: list[tuple[bytes, list[int]]] = []

        def doubt(check: Check) -> None:
            missing = copies.missing(check)
            if missing and (ref := by_key.pop(check.key, None)):
                doubtful.append((ref, missing))

        def heard(answer: Answer, heard_s: float) -> None:
            for check, what in zip(answer.checks, answer.found, strict=True):
                left[check] -= what is not Found.WHOLE and answer.same_moves
                if left[check] == 0:
                    doubt(check)
            self._prove(doubtful, heard_s)

        for ref in refs:
            for check, others in copies.gone(ref, self._whereabouts.before if self._margin() else None):
                left[check] = len(others)
                if not others:
                    doubt(check)
                for place in others:
                    by_place.setdefault(place, []).append(check)
        self._prove(doubtful, now_s)
        for place, checks in by_place.items():
            self._checks.ask(place, checks, heard, now_s)

    def _prove(self, doubtful: list[tuple[bytes, list[int]]], now_s: float) -> None:
        if doubtful:
            self._proofs.ask(doubtful, self._proved, now_s)
            doubtful.clear()

    def _tell(self, refs: Sequence[bytes], now_s: float) -> None:
        by_region: dict[Region, list[Dead]] = {}
        for ref in refs:
            by_region.setdefault(self._region(ref), []).append((ref[:KEY_BYTES], setting_of(ref)))
        for region, dead in by_region.items():
            self.purge(dead, now_s)
            for at in range(0, len(dead), MAX_DEAD_PER_PACKET):
                self._begin(region, tuple(dead[at : at + MAX_DEAD_PER_PACKET]), now_s)

    def receive(self, packet: Packet, now_s: float) -> None:
        """Drop what is dead, tell our ground hosts unless the origin told its own, and pass it on, once."""
        notice = Notice.unpack(packet.body)
        if packet.header.ground or packet.header.source.shell:
            raise MalformedPacket("NOTICE of a ground host: only satellites know what they evict")
        name = (notice.origin, notice.number)
        if name in self._seen:
            self._counters.add("notices_repeated")
            return
        self._remember(name)
        dead = self.purge(notice.dead, now_s)
        for key, setting in notice.dead:
            if setting_of(self._evicted.get(key, b"")) == setting:
                del self._evicted[key]
        told = notice.told or (bool(dead) and self.tell_ground(dead, now_s))
        source = SatelliteId(packet.header.source.plane, packet.header.source.slot)
        self._pass_on(replace(notice, told=told), source, now_s)

    def tell_ground(self, dead: Sequence[Dead], now_s: float) -> bool:
        """The ground hosts that we know hear that these values are gone; whether there are any."""
        for at in range(0, len(dead), MAX_DEAD_PER_PACKET):
            body = pack_dead(dead[at : at + MAX_DEAD_PER_PACKET])
            if not self._departures.tell_ground(Op.GONE, body, _GROUND_HOSTS_TOLD, now_s):
                return False
        return True

    def purge(self, dead: Sequence[Dead], now_s: float) -> list[Dead]:
        """Drop what we have of these; but not what may have been stored again, at the same moves and with the same
        bytes, since its loss was noticed. Those that are dead for us, too.
        """
        since_s = now_s - _UNDER_WAY_S
        dead = [one for one in dead if not self._latecomers.was_set_since(one[0], since_s)]
        self._counters.add("chunks_purged", drop(self._store, dead))
        if self._copies is not None:
            self._checks.bury(dead)
        return dead

    def _begin(self, region: Region, dead: tuple[Dead, ...], now_s: float) -> None:
        self._number = (self._number + 1) & 0xFFFFFFFF
        origin = Address(*self._here)
        self._remember((origin, self._number))
        away = self._sky.torus.hops(self._here, region.centre)
        hops = min(255, away + region.north + region.south + region.west + region.east + 2)
        notice = Notice(origin, self._number, region, hops, self.tell_ground(dead, now_s), dead)
        self._pass_on(notice, None, now_s)

    def _pass_on(self, notice: Notice, source: SatelliteId | None, now_s: float) -> None:
        if not notice.hops:
            return
        torus, region = self._sky.torus, notice.region
        if region.holds(self._here, torus):
            targets = [other for other in torus.neighbours(self._here) if region.holds(other, torus)]
        else:
            targets = [torus.next_hop(self._here, region.centre)] if region.centre in torus else []
        body = replace(notice, hops=notice.hops - 1).pack()
        for target in dict.fromkeys(targets):
            if target not in (source, self._here):
                self._counters.add("notices_sent")
                self._departures.command(Op.NOTICE, target, notice.number, body, now_s)

    def _region(self, ref: bytes) -> Region:
        """Where the other chunks of an evicted one are: the box of its placement, or one plane of it."""
        tag = ref[TAG_OFFSET:]
        servers, strategy = int.from_bytes(tag[0:2], "big"), tag[4]
        set_moves = (int.from_bytes(tag[8:12], "big", signed=True), int.from_bytes(tag[12:16], "big", signed=True))
        more = self._margin()
        try:
            placement = self._sky.placement(strategy, servers)
        except InvalidInput:
            return Region(self._here, 0, 0, 0, 0)
        box, centre = placement.box, placement.centre_of(set_moves, self._whereabouts.moves)
        north, south = (0, 0) if self._config.plane_only else (box.north, box.height - 1 - box.north)
        return Region(centre, north + more, south + more, box.west + more, box.width - 1 - box.west + more)

    def _remember(self, name: tuple[Address, int]) -> None:
        self._seen[name] = None
        if len(self._seen) > _REMEMBERED_NOTICES:
            self._seen.popitem(last=False)
