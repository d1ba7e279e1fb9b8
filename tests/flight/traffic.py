"""Random traffic for one satellite, given to the Python machine and the C machine alike: what they send is compared.

All times are whole 64ths of a second: these are whole microseconds and exact as floating point, so that C, which counts
microseconds, and Python decide alike what is due. Other satellites answer what the machine sends, more or less truly.
"""

from __future__ import annotations

import math
import random
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tests.flight.machine import PARTS, FlightMachine, us
from tests.flight.state import part
from tests.protocol.exchanged import exchanged

from skymemory import native
from skymemory.constellation.torus import RoutingMode, SatelliteId, Torus
from skymemory.errors import InvalidInput
from skymemory.keys import KeyRing, SecretKey
from skymemory.protocol import messages
from skymemory.protocol.auth import MAX_SIGNED_CHUNK_BYTES, Authority
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.messages import Selection
from skymemory.protocol.satellite.checks import Check, CheckResult, pack_checks, pack_found
from skymemory.protocol.satellite.gossip import Notice, Region
from skymemory.protocol.satellite.machine import SatelliteMachine
from skymemory.protocol.satellite.routing import Declaration, LinksBody
from skymemory.protocol.satellite.state import EvictionConfig, SatelliteConfig
from skymemory.protocol.wire import (
    CHUNK_REF_BYTES,
    COMMAND_BYTES,
    FLAG_SETTLED,
    GROUND_SHELL,
    MAX_PACKET_BYTES,
    SKY_BYTES,
    Address,
    ChunkRef,
    LinkEnd,
    Op,
    PlacementTag,
    SegmentBatch,
    SkyHeader,
    Status,
    build_packet,
    bulk_prefix,
    header_start,
    parse_packet,
    single,
)

TICK_S = 1 / 64
_STRATEGIES = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Case:
    """One satellite, and what surrounds it."""

    planes: int = 5
    slots: int = 7
    memory_bytes: int = 12_000
    replacement: str = "lrfu"
    routing: RoutingMode = "greedy"
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    slot_period_s: float = 20.0
    time_scale: float = 1.0
    authority: bool = False
    every_packet: bool = False
    signed_answers: bool = False
    lateness: bool = False
    start_s: float = 0.0
    gaps: tuple[tuple[int, int], ...] = ()
    """Planes and slots without a satellite."""
    most_planes: int = 1
    most_slots: int = 1
    seam: bool = False
    calm: bool = False
    """Little is deleted, so that much is handed over."""
    here: tuple[int, int] | None = None
    """Plane and slot; in the middle by default."""
    centre: tuple[int, int] | None = None
    """Of the box; the satellite itself by default."""
    chunk_bytes: tuple[int, ...] = (16, 64, 200, 512)
    servers: tuple[int, ...] = (1, 2, 4, 9, 10)
    most_chunks: int = 12
    """Of a value, by its length in chunks of full size."""
    links_s: tuple[float, float] = (0.004, 0.002)
    handover: tuple[int, float, float, float] = (32, 0.1, 1.0, 0.002)
    """Window, timeout, grace period, and gap."""
    new_keys: bool = False
    """Keys come and go."""
    bounds: Mapping[str, int] = field(default_factory=dict)
    """Of the pools in C, which must suffice."""
    jumps: bool = False
    """The clock jumps, forwards and back."""

    @classmethod
    def drawn(cls, seed: int) -> Case:
        """Any configuration, drawn over wide ranges; most are at some bound."""
        r = random.Random(seed)
        sizes = (1, 2, 3, 5, 7, 8, 13, 19, 31)
        planes, slots = r.choice(
            (
                (1, 1),
                (1, r.choice(sizes)),
                (2, r.choice(sizes)),
                (r.choice(sizes), 1),
                (r.choice(sizes), r.choice(sizes)),
                (r.choice(sizes), r.choice(sizes)),
                (255, r.choice((1, 2, 7))),
                (7, 251),
            )
        )
        largest = r.choice((16, 200, 2000, 6144, 20_000, MAX_SIGNED_CHUNK_BYTES))
        policies = r.sample(("gossip", "periodic", "migration"), r.randrange(4))
        policies = ["gossip-plane" if each == "gossip" and r.random() < 0.4 else each for each in policies]
        eviction = EvictionConfig.of(
            policies, r.choice((0.5, 5.0, 30.0)), r.choice((1, 1, 2, 3, min(planes * slots, 32), 32))
        )
        eviction = replace(
            eviction,
            pin_share=r.choice((0.0, 0.25, 0.5, 1.0)),
            confirm_s=r.choice((0.25, 2.0)),
            notice_hold_s=r.choice((0.0, 0.0625)),
        )
        start_s = r.choice((0.0, 1_735_689_600.0, 4_294.0, 1_800_000_000.0 - 1_800_000_000.0 % 4_294.967296))
        return cls(
            planes,
            slots,
            r.choice((0, 73, 500, 12_000, 100_000, 12 * largest)),
            r.choice(("lru", "lfuda", "lrfu")),
            r.choice(("greedy", "alternate")),
            eviction,
            r.choice((0.5, 2.5, 20.0, 1000.0)),
            r.choice((0.0, 1.0, 1.0, 4.0)),
            authority=r.random() < 0.4,
            every_packet=r.random() < 0.3,
            signed_answers=seed % 3 == 0,
            lateness=r.random() < 0.3,
            start_s=math.ceil(start_s / TICK_S) * TICK_S,
            calm=r.random() < 0.4,
            here=(r.choice((0, planes // 2, planes - 1)), r.choice((0, slots // 2, slots - 1))),
            centre=(r.randrange(planes), r.randrange(slots)),
            chunk_bytes=(1, largest // 2, largest, largest),
            servers=(1, 2, r.randrange(1, 40), min(planes * slots, 65_535), r.choice((9, 10, 65_535))),
            most_chunks=2 if largest > 6144 else r.choice((3, 12, 40)),
            links_s=r.choice(((0.004, 0.002), (0.003, 0.003), (0.001, 0.0075))),
            handover=(
                r.choice((2, 3, 32)),
                r.choice((0.0625, 0.125, 1.0)),
                r.choice((0.0625, 0.25, 1.0)),
                r.choice((0.0, 0.0, 0.03125)),
            ),
            new_keys=r.random() < 0.5,
            bounds=dict.fromkeys(("questions", "subjects", "asked", "suspects"), 1 << 14),
            jumps=r.random() < 0.3,
        )


class Difference(AssertionError):
    """The two machines did not do the same."""


class Duel:
    """Both machines, and the world around them."""

    def __init__(self, case: Case, seed: int) -> None:
        self.random = random.Random(seed)
        self.case = case
        gaps = frozenset(SatelliteId(*cell) for cell in case.gaps)
        self.torus = Torus(case.planes, case.slots, case.seam, gaps, case.most_slots, case.most_planes)
        self.here = SatelliteId(*(case.here or (case.planes // 2, case.slots // 2)))
        self.sky = sky = SkyMap(self.torus, SatelliteId(*(case.centre or self.here)), *case.links_s)
        clock = MoveClock(
            epoch_s=case.start_s,
            slot_period_s=case.slot_period_s,
            plane_period_s=4.5 * case.slot_period_s,
            time_scale=case.time_scale,
        )
        self.authority = None
        if case.authority:
            ring = KeyRing((SecretKey(3, bytes(range(32))), SecretKey(5, bytes(range(1, 33)), case.start_s + 30.0)))
            self.authority = Authority(ring, case.every_packet, case.signed_answers)
        window, timeout_s, grace_s, gap_s = case.handover
        config = SatelliteConfig(
            self.here,
            case.memory_bytes,
            case.routing,
            handover_window_bursts=window,
            handover_timeout_s=timeout_s,
            handover_grace_s=grace_s,
            handover_gap_s=gap_s,
            replacement=case.replacement,
            eviction=case.eviction,
            authority=self.authority,
        )
        self.now_s = case.start_s
        figures = self._figures
        self.python = SatelliteMachine(config, sky, clock, self.now_s, transport_figures=figures)
        self.c = FlightMachine(config, sky, clock, self.now_s, bounds=case.bounds)
        self.neighbours = [each for each in dict.fromkeys(self.torus.neighbours(self.here)) if each != self.here]
        if not self.neighbours:  # a single satellite: packets by a link that it does not have
            self.neighbours = [self.here]
        self.grounds: dict[int, LinkEnd] = {number: ("127.0.0.1", 4000 + number) for number in (7, 8, 9)}
        self.keys = [self.random.randbytes(32) for _ in range(24)]
        self.values: dict[bytes, tuple[bytes, int, PlacementTag]] = {}
        self.sequence = 0
        self.sent: list[tuple[LinkEnd, bytes]] = []
        """What the machine has sent last, to be answered."""
        self.packets = self.events = 0
        weights = _EVENTS | (_CALM if case.calm else {}) | {"new_keys": case.new_keys, "jump": case.jumps}
        self.weights = list(weights.values())

    def _figures(self) -> dict[str, int]:
        return {"late_us": self.c.lib.shim_late(self.c.it, us(self.now_s))}

    # --- Events ---

    def both(self, name: str, *arguments: object) -> None:
        self.events += 1
        for machine in (self.python, self.c):
            getattr(machine, name)(*arguments, self.now_s)
        self.compare(name)

    def give(self, data: bytes, size: int, source: LinkEnd) -> None:
        self.packets += max(1, -(-len(data) // size)) if size > 0 else 1
        self.both("receive_batch", data, size, source)

    def compare(self, after: str) -> None:
        ours = _packets(self.python.datagrams_to_send(self.now_s))
        theirs = _packets(self.c.datagrams_to_send(self.now_s))
        if ours != theirs:
            raise Difference(f"after {after} at {self.now_s}, event {self.events}: {_first_difference(ours, theirs)}")
        self.sent = (self.sent + ours)[-400:]
        ours_s, theirs_s = self.python.next_timer_s(), self.c.next_timer_s()
        if (ours_s is None) != (theirs_s is None) or (ours_s is not None and abs(ours_s - (theirs_s or 0.0)) > 3e-6):
            raise Difference(f"after {after} at {self.now_s}, event {self.events}: timers {ours_s} and {theirs_s}")
        if self.python.wants_work != self.c.wants_work:
            raise Difference(f"after {after} at {self.now_s}, event {self.events}: work")

    def compare_states(self) -> None:
        for number, name in enumerate(PARTS):
            ours, theirs = part(self.python, name, self.c), self.c.state(number)
            if ours != theirs:
                raise Difference(f"at {self.now_s}, event {self.events}: {name}: {_first_bytes(ours, theirs)}")
        for name in ("outbox_full", "pools_full"):
            if self.c.counters.get(name):
                raise Difference(f"{name}: the pools of this test are meant to suffice")

    def advance(self, ticks: int) -> None:
        """Let time pass; timers are handled at the first tick when they are due."""
        while ticks > 0:
            due_s = self.python.next_timer_s()
            wait = ticks + 1 if due_s is None else max(1, math.ceil((due_s - self.now_s) / TICK_S))
            self.now_s += min(wait, ticks) * TICK_S
            if wait <= ticks:
                self.both("handle_timer")
            ticks -= wait

    # --- Packets ---

    def take_sequence(self) -> int:
        self.sequence = (self.sequence + 1) & 0x3FFF
        return self.sequence

    def signed(self, packet: bytes, payload: bytes = b"") -> bytes:
        if self.authority is None or not self.random.randrange(60):
            return packet + payload
        batch = self.authority.sign(SegmentBatch(packet, len(packet), [payload]), self.now_s)
        if len(payload) >= 5 and not self.random.randrange(30):
            payload = exchanged(payload)
        return bytes(batch.headers) + payload

    def header(
        self, op: Op, source: Address, ground: int = 0, there: Address | None = None, request_id: int | None = None
    ) -> SkyHeader:
        r = self.random
        moves = self.python.moves if r.random() < 0.9 else (r.randrange(-3, 4), r.randrange(-3, 4))
        return SkyHeader(
            op,
            there or Address(*self.here),
            source,
            ground,
            r.randrange(1, 1 << 32) if request_id is None else request_id,
            hop_limit=r.choice((0, 1, 64, 64, 64, 64)),
            timestamp_us=round(self.now_s * 1e6) & 0xFFFFFFFF,
            slot_moves=moves[0],
            plane_moves=moves[1],
        )

    def packet(self, op: Op, body: bytes, source: Address, ground: int = 0, **more: object) -> bytes:
        header = self.header(op, source, ground, **more)  # type: ignore[arg-type]
        return self.signed(build_packet(header, body, self.take_sequence(), self.now_s))

    def ground_source(self) -> tuple[int, Address]:
        """A ground host, by our beam or by another's."""
        r = self.random
        number = r.choice(tuple(self.grounds))
        if r.random() < 0.8:
            return number, Address(*self.here, GROUND_SHELL)
        return number, Address(r.randrange(self.case.planes), r.randrange(self.case.slots), GROUND_SHELL)

    def link_of(self, source: Address, ground: int) -> LinkEnd:
        if source == Address(*self.here, GROUND_SHELL):
            return self.grounds[ground]
        return self.random.choice(self.neighbours)

    def from_ground(self, op: Op, body: bytes) -> None:
        ground, source = self.ground_source()
        packet = self.packet(op, body, source, ground)
        self.give(packet, len(packet), self.link_of(source, ground))

    def from_satellite(self, op: Op, body: bytes, **more: object) -> None:
        source = self.random.choice(self.neighbours)
        packet = self.packet(op, body, Address(*source), **more)  # type: ignore[arg-type]
        self.give(packet, len(packet), source)

    def key(self) -> bytes:
        return self.random.choice(self.keys)

    def value(self, key: bytes, fresh: bool) -> tuple[bytes, int, PlacementTag]:
        """Bytes, chunk size and placement of a value: the one known by this key, or another."""
        r = self.random
        known = self.values.get(key)
        if known is not None and not fresh:
            return known
        chunk_bytes, most = r.choice(self.case.chunk_bytes), self.case.most_chunks
        sizes = (0, 1, chunk_bytes, 3 * chunk_bytes, r.randrange(most * chunk_bytes))
        value = r.randbytes(min(r.choice(sizes), most * chunk_bytes))
        moves = self.python.moves
        if r.random() < 0.3:
            moves = (moves[0] + r.randrange(-3, 2), moves[1] + r.randrange(-2, 2))
        servers = r.choice(self.case.servers)
        tag = PlacementTag(r.choice(_STRATEGIES), servers, 0, *moves, replica=0)
        self.values[key] = value, chunk_bytes, tag
        return self.values[key]

    def chunks(self, key: bytes, fresh: bool) -> list[tuple[bytes, bytes]]:
        """References and payloads of one server's part of a value, some or all of them."""
        r = self.random
        value, chunk_bytes, tag = self.value(key, fresh)
        total = max(1, -(-len(value) // chunk_bytes))
        replica = (
            r.choice((0, 0, 0, r.randrange(1, self.case.eviction.replicas))) if self.case.eviction.replicas > 1 else 0
        )
        server = r.randrange(min(tag.servers, total))
        ours = self.ours(tag, replica)
        if ours is not None and ours < total and r.random() < 0.7:
            server = ours
        found = []
        for index in range(server, total, tag.servers):
            payload = value[index * chunk_bytes : (index + 1) * chunk_bytes]
            its = PlacementTag(tag.strategy, tag.servers, server, tag.slot_moves, tag.plane_moves, replica)
            ref = ChunkRef(key, index, total, len(payload), zlib.crc32(payload), len(value), zlib.crc32(value), its)
            found.append((ref.pack(), payload))
        if r.random() < 0.2:
            found = r.sample(found, r.randrange(1, len(found) + 1))
        return found

    def ours(self, tag: PlacementTag, replica: int) -> int | None:
        """The server of this placement that belongs here now."""
        if tag.servers > self.torus.size:
            return None
        placement = self.sky.placement(tag.strategy, tag.servers)
        try:
            places = [
                placement.locate(server, (tag.slot_moves, tag.plane_moves), self.python.moves, replica)
                for server in range(tag.servers)
            ]
        except InvalidInput:  # a box too small for this copy
            return None
        return places.index(self.here) if self.here in places else None

    def run_of(self, op: Op, chunks: list[tuple[bytes, bytes]], source: Address, ground: int) -> list[bytes]:
        request_id = self.random.randrange(1, 1 << 32)
        return [
            self.signed(
                _sealed_chunk(
                    self.header(op, source, ground, request_id=request_id), ref, payload, self.take_sequence()
                ),
                payload,
            )
            for ref, payload in chunks
        ]

    def give_run(self, packets: list[bytes], source: LinkEnd) -> None:
        """In runs of equal length, as receive offload makes them; now and then one packet of them is damaged."""
        if packets and self.random.random() < 0.04:
            at = self.random.randrange(len(packets))
            spoilt = bytearray(packets[at])
            spoilt[self.random.randrange(len(spoilt))] ^= 0x10
            packets = [*packets[:at], bytes(spoilt), *packets[at + 1 :]]
        while packets:
            size, count = len(packets[0]), 1
            most = MAX_PACKET_BYTES // max(1, size)
            while count < len(packets) and len(packets[count]) == size and count < min(64, most):
                count += 1
            if count < len(packets) and len(packets[count]) < size and count < most:
                count += 1
            self.give(b"".join(packets[:count]), size, source)
            packets = packets[count:]

    # --- What comes ---

    def set(self) -> None:
        ground, source = self.ground_source()
        packets = self.run_of(Op.SET, self.chunks(self.key(), self.random.random() < 0.5), source, ground)
        self.give_run(packets, self.link_of(source, ground))

    def migrate(self) -> None:
        source = self.random.choice(self.neighbours)
        chunks = self.chunks(self.key(), self.random.random() < 0.2)
        self.give_run(self.run_of(Op.MIGRATE, chunks, Address(*source), 0), source)

    def get(self) -> None:
        r, key = self.random, self.key()
        share = self.python.store.shares.get(key)
        if share and r.random() < 0.8:
            indices = sorted(r.sample(sorted(share), r.randrange(1, len(share) + 1)))
            (selection, *_) = Selection.cover(key, indices)
        else:
            first, stride = r.randrange(5), r.randrange(1, 12)
            selection = Selection.of(key, list(range(first, first + stride * r.randrange(1, 9), stride)), stride)
        self.from_ground(Op.GET, selection.pack())

    def some_keys(self, most: int = 6) -> list[bytes]:
        return [self.key() for _ in range(self.random.randrange(1, most))]

    def has(self) -> None:
        send = self.from_ground if self.random.random() < 0.5 else self.from_satellite
        send(Op.HAS, messages.pack_keys(self.some_keys()))

    def evict(self) -> None:
        self.from_ground(Op.EVICT, messages.pack_keys(self.some_keys(3)))

    def settings(self) -> list[tuple[bytes, bytes]]:
        found = []
        for key in self.some_keys(4):
            share = self.python.store.shares.get(key)
            if share:
                ref = next(iter(share.values()))[0]
                found.append((key, ref[52:56] + ref[64:72]))
            else:
                found.append((key, messages.pack_setting(self.random.randrange(1 << 32), 0, 0)))
        return found

    def forget(self) -> None:
        self.from_ground(Op.FORGET, messages.pack_forget(self.settings(), self.random.choice((0.0, 0.5, 4.3, 20.0))))

    def list(self) -> None:
        self.from_ground(
            Op.LIST, messages.pack_list(self.random.choice((bytes(32), self.key())), self.random.choice((1, 5, 90)))
        )

    def ping(self) -> None:
        self.from_ground(Op.PING, b"")

    def advance_box(self) -> None:
        if self.case.time_scale and self.random.random() < 0.7:
            return
        pushed = self.python.neighbours.pushed
        step = self.random.choice(((1, 0), (0, 1), (-1, 0), (0, 0), (20_000, 0)))
        self.from_ground(Op.ADVANCE, messages.pack_moves(pushed[0] + step[0], pushed[1] + step[1]))

    def retain(self) -> None:
        r = self.random
        what = r.choice(tuple(messages.Retain))
        until_s = 0.0 if r.random() < 0.1 else self.now_s + r.choice((-1.0, 0.25, 2.0, 30.0, 100.0))
        send = self.from_ground if r.random() < 0.8 else self.from_satellite
        send(Op.RETAIN, messages.pack_retain(what, max(0.0, until_s), self.some_keys()))

    def notice(self) -> None:
        r = self.random
        region = Region(self.torus.satellite(r.randrange(self.torus.size)), *(r.randrange(3) for _ in range(4)))
        source = r.choice(self.neighbours)
        notice = Notice(
            Address(*source), r.randrange(50), region, r.randrange(6), r.random() < 0.5, tuple(self.settings())
        )
        self.from_satellite(Op.NOTICE, notice.pack())

    def check(self) -> None:
        r, checks = self.random, []
        for key, setting in self.settings():
            share = self.python.store.shares.get(key)
            ref = ChunkRef.unpack(next(iter(share.values()))[0]) if share else None
            servers, chunks = (ref.tag.servers, ref.chunks) if ref else (r.randrange(1, 9), r.randrange(1, 20))
            if r.random() < 0.3:
                servers = chunks
            checks.append(Check(key, setting, servers, r.randrange(min(servers, chunks)), chunks, r.choice((16, 200))))
        self.from_satellite(Op.CHECK, pack_checks(checks))

    def links(self) -> None:
        r = self.random
        declarations = []
        for _ in range(r.choice((0, 1, 1, 3, 12))):
            origin = self.torus.satellite(r.randrange(self.torus.size))
            made_ms = int(self.now_s * 1e3) - r.randrange(-2000, 4000)
            declarations.append(Declaration(origin, r.choice((0, 0, 1, 2, 4, 8, 15)), max(0, made_ms)))
        pushed, pushed_at_ms = self.python.neighbours.pushed, self.python.neighbours.pushed_at_ms
        if r.random() < 0.05:
            pushed, pushed_at_ms = (pushed[0] + r.randrange(-2, 3), pushed[1]), int(self.now_s * 1e3) + r.randrange(9)
        late_s = r.choice((0.0, 0.0, 0.0, 0.3)) if self.case.lateness else 0.0
        body = LinksBody(r.random() < 0.5, pushed, pushed_at_ms, declarations, late_s).pack()
        source = r.choice(self.neighbours)
        packet = self.packet(Op.LINKS, body, Address(*source))
        self.give(packet, len(packet), source if r.random() < 0.95 else r.choice((*self.neighbours, self.grounds[7])))

    def transit(self) -> None:
        r = self.random
        there = Address(r.randrange(self.case.planes + 1), r.randrange(self.case.slots), r.choice((0, 0, GROUND_SHELL)))
        op = r.choice((Op.PING, Op.GET, Op.PONG, Op.DATA, Op.SET))
        source, link = self.ground_source() if r.random() < 0.4 else (0, Address(*r.choice(self.neighbours)))
        ground, its = (source, link)
        body = Selection.of(self.key(), [0, 2], 2).pack() if op is Op.GET else b""
        if op in (Op.DATA, Op.SET):
            packets = self.run_of_transit(op, its, ground, there)
        else:
            header = self.header(op, its, ground or r.choice((0, 7)), there)
            packets = [self.signed(build_packet(header, body, self.take_sequence(), self.now_s))] * r.choice((1, 1, 5))
        came = self.link_of(its, ground) if its.shell else SatelliteId(its.plane, its.slot)
        self.give_run(packets, came)

    def run_of_transit(self, op: Op, source: Address, ground: int, there: Address) -> list[bytes]:
        chunks = self.chunks(self.key(), False)
        header = self.header(op, source, ground or 7, there)
        return [_sealed_chunk(header, ref, payload, self.take_sequence()) + payload for ref, payload in chunks]

    def damaged(self) -> None:
        """A packet of before with something wrong, or noise."""
        r = self.random
        if r.random() < 0.2 or not self.sent:
            data = bytearray(r.randbytes(r.randrange(200)))
        else:
            data = bytearray(r.choice(self.sent)[1])
            # To us: what the machine has sent, turned round.
            start = header_start(memoryview(data))
            data[start + 4 : start + 8] = Address(*self.here).pack().to_bytes(4, "big")
        for _ in range(r.randrange(3)):
            if data:
                data[r.randrange(len(data))] ^= 1 << r.randrange(8)
        if r.random() < 0.3 and data:
            del data[r.randrange(len(data)) :]
        size = r.choice((len(data), len(data), 52, 60, 100, 0))
        self.give(bytes(data), size, r.choice((*self.neighbours, *self.grounds.values())))

    def hostile(self) -> None:
        """Checksums are right, and fields say anything."""
        r = self.random
        op = r.choice((*Op, 0x0E, 0x3F, 0x7F))
        ground, source = self.ground_source()
        packet = bytearray(
            build_packet(
                self.header(Op.PING, source, ground), r.randbytes(r.choice((0, 4, 44, 72, 120))), 1, self.now_s
            )
        )
        packet[6] = packet[COMMAND_BYTES + 1] = int(op)
        for at in (3, 28, 32, 4, 8):
            if not r.randrange(4):
                packet[COMMAND_BYTES + at : COMMAND_BYTES + at + 1] = r.randbytes(1)
            native.seal_headers(packet, len(packet), COMMAND_BYTES)
        self.give(bytes(packet), len(packet), r.choice((*self.neighbours, self.grounds[ground])))

    def answer(self, truly: bool = False) -> None:
        """Answer some of what the machine has sent to other satellites; ``truly``: as one that works well."""
        r = self.random
        if not self.sent:
            return
        _, data = self.sent.pop(r.randrange(max(0, len(self.sent) - 40), len(self.sent)))
        if self.authority is not None and data[0] & 0x10:
            data = _without_mac(data)
        try:
            packet = parse_packet(memoryview(data)) if data[header_start(memoryview(data)) + 1] != Op.MIGRATE else None
            header = SkyHeader.unpack(memoryview(data), header_start(memoryview(data)))
        except Exception:  # a damaged one that was forwarded
            return
        if header.source != Address(*self.here) or header.destination.shell:
            return
        if packet is None and len(data) < COMMAND_BYTES + SKY_BYTES + CHUNK_REF_BYTES:
            return  # not its own: a forged one that was forwarded
        moves = self.python.moves
        if not truly and r.random() < 0.3:
            moves = header.slot_moves + 1, header.plane_moves
        op, body, status, flags = self.answer_to(
            truly, header, packet.body if packet else memoryview(data)[COMMAND_BYTES + SKY_BYTES :]
        )
        if op is None:
            return
        answer = SkyHeader(
            op,
            Address(*self.here),
            header.destination,
            0,
            header.request_id,
            status,
            timestamp_us=header.timestamp_us,
            slot_moves=moves[0],
            plane_moves=moves[1],
            flags=flags,
        )
        whole = build_packet(answer, body, self.take_sequence(), self.now_s)
        if self.authority is not None:  # which signs commands, or all
            whole = bytes(self.authority.sign(single(whole), self.now_s).headers)
        there = SatelliteId(header.destination.plane, header.destination.slot)
        came = there if op is Op.LINKS else r.choice((*self.neighbours, *([there] if there in self.neighbours else [])))
        self.give(whole, len(whole), came)

    def answer_to(self, truly: bool, header: SkyHeader, body: memoryview) -> tuple[Op | None, bytes, Status, int]:
        r = self.random
        flags = FLAG_SETTLED if r.random() < 0.8 else 0
        if header.op is Op.MIGRATE:
            if not truly and r.random() < 0.1:
                return Op.UNREACHABLE, b"", Status.NO_ROUTE, 0
            ref = ChunkRef.unpack(body[:CHUNK_REF_BYTES])
            status = Status.FULL if not truly and r.random() < 0.1 else Status.OK
            rest = range(ref.index % ref.tag.servers, ref.chunks, ref.tag.servers)
            indices = [ref.index] if not truly and r.random() < 0.3 else list(rest)
            return Op.ACK, Selection.cover(ref.key, indices)[0].pack(), status, 0
        if header.op is Op.RETAIN and r.random() < 0.3:
            return Op.UNSUPPORTED, messages.OURS.pack_unsupported(Op.RETAIN), Status.OK, 0
        if header.op is Op.RETAIN:
            return Op.RETAINED, messages.pack_retained([messages.Kept.DONE]), Status.OK, 0
        if header.op is Op.HAS:
            keys = messages.unpack_keys(body)
            found = [self.python.store.presence(key) if r.random() < 0.6 else None for key in keys]
            return Op.PRESENCE, messages.pack_presences(found), Status.OK, 0
        if header.op is Op.CHECK:
            (count,) = struct.unpack_from(">H", body)
            found_each = [r.choice(tuple(CheckResult)) for _ in range(count)]
            return Op.CHECKED, pack_found(found_each), Status.OK, flags
        if header.op is Op.LINKS and r.random() < 0.9:
            pushed = self.python.neighbours.pushed
            return Op.LINKS, LinksBody(False, pushed, self.python.neighbours.pushed_at_ms).pack(), Status.OK, 0
        return None, b"", Status.OK, 0

    def be_late(self) -> None:
        if self.case.lateness:
            late_s = self.random.choice((0.0, 0.0, 0.0, 0.02, 0.1, 0.5, 1.25))
            self.python.lateness.measured(late_s, self.now_s)
            self.c.lib.sky_host_late(self.c.it, us(late_s), us(self.now_s))

    def work(self) -> None:
        if self.python.wants_work:
            self.both("work")

    def wait(self) -> None:
        self.advance(self.random.choice((1, 1, 1, 2, 4, 16, 64)))

    def pile_up(self) -> None:
        """The transport has much to send, or nothing."""
        backlog = self.random.choice((0, 0, 64 << 20, 1 << 30))  # 64 MiB: the bound
        self.python.backlog_bytes = self.c.backlog_bytes = backlog

    def new_keys(self) -> None:
        """The key file changes: a key more, used from soon on, or one less."""
        if self.authority is None:
            return
        ring, r = self.authority.ring, self.random
        if len(ring.keys) < 16 and r.random() < 0.6:
            ring = ring.with_key(r.randbytes(32), self.now_s + r.choice((-5.0, 0.0, 0.5, 20.0)))
        else:
            gone = {r.choice(ring.keys).key_id}
            ring = (
                ring if ring.active(self.now_s).key_id in gone or len(ring.keys) < 2 else ring.without(gone, self.now_s)
            )
        self.authority.ring = ring
        self.c.set_keys(ring)

    def jump(self) -> None:
        """The clock jumps; what is due is done next."""
        step_s = self.random.choice((-0.5, -2.0, -40.0, 0.25, 10.0, 100.0, 4_000.0))
        self.now_s = max(self.case.start_s, self.now_s + step_s)
        self.both("handle_timer")

    def doze(self) -> None:
        """Much time passes."""
        self.advance(self.random.choice((300, 2000, 14_000)))

    def settle(self) -> None:
        """What the machine sends is answered at once, until its handovers come to rest."""
        for _ in range(30):
            while self.sent and self.random.random() < 0.97:
                self.answer(truly=True)
            self.advance(12)

    def step(self) -> None:
        (name,) = self.random.choices(list(_EVENTS), weights=self.weights)
        getattr(self, name)()

    def run(self, steps: int) -> None:
        self.python.neighbours.greet(self.now_s)
        self.c.neighbours.greet(self.now_s)
        self.compare("greet")
        for number in range(steps):
            self.step()
            if number % 50 == 0:
                self.compare_states()
        self.compare_states()


_EVENTS = {
    "set": 20,
    "migrate": 8,
    "get": 14,
    "answer": 22,
    "wait": 14,
    "has": 3,
    "evict": 1,
    "forget": 2,
    "list": 2,
    "ping": 1,
    "advance_box": 1,
    "retain": 6,
    "notice": 2,
    "check": 3,
    "links": 4,
    "transit": 6,
    "damaged": 5,
    "hostile": 4,
    "be_late": 3,
    "work": 4,
    "pile_up": 1,
    "doze": 1,
    "settle": 1,
    "new_keys": 1,
    "jump": 1,
}
_CALM = {"evict": 0, "forget": 0, "notice": 0, "damaged": 1, "hostile": 1, "retain": 2, "migrate": 3}
_CALM |= {"answer": 80, "settle": 6}


def _sealed_chunk(header: SkyHeader, ref: bytes, payload: bytes, sequence: int) -> bytes:
    """Headers and reference of a packet with this payload."""
    prefix = bulk_prefix(header, 0.0)
    return bytes(native.bulk_headers(prefix, ref, sequence, len(prefix) - SKY_BYTES))


def _without_mac(data: bytes) -> bytes:
    try:
        return bytes(native.strip_macs(data, len(data), COMMAND_BYTES, b"\1"))
    except ValueError:
        return data


def _packets(batches: list[tuple[object, LinkEnd]]) -> list[tuple[LinkEnd, bytes]]:
    return [(link, bytes(data)) for batch, link in batches for data in batch.datagrams()]  # type: ignore[attr-defined]


def _named(packet: tuple[LinkEnd, bytes]) -> str:
    link, data = packet
    start = header_start(memoryview(data))
    op = data[start + 1] if len(data) > start + 1 else -1
    name = Op(op).name if op in list(Op) else str(op)
    return f"{name} to {link}: {data.hex()}"


def _first_difference(ours: list[tuple[LinkEnd, bytes]], theirs: list[tuple[LinkEnd, bytes]]) -> str:
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return f"packet {number}:\n  {_named(one)}\n  {_named(other)}"
    longer = ours if len(ours) > len(theirs) else theirs
    which = "Python" if longer is ours else "C"
    return f"{len(ours)} and {len(theirs)} packets; only {which}: {_named(longer[min(len(ours), len(theirs))])}"


def _first_bytes(ours: bytes, theirs: bytes) -> str:
    at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    at -= at % 8
    one, other = ours[at : at + 48].hex(), theirs[at : at + 48].hex()
    return f"{len(ours)} and {len(theirs)} bytes, from {at} on: {one} and {other}"
