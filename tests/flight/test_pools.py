"""Full pools of the satellite in C: nothing that was acknowledged is lost, nothing is proved wrongly, and it recovers.

``FLIGHT_SANITIZE=1`` runs the core with ASan and UBSan (``LD_PRELOAD`` must name the compiler's libasan).
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.flight.machine import BOUNDS, FlightMachine
from tests.flight.test_simulated import CENTRE, check_ledgers, read, write
from tests.flight.traffic import Case, Duel

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.client.transfer import ValueInfo
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.messages import Retain, Selection, pack_presences, pack_retain, unpack_retained
from skymemory.protocol.satellite.checks import CheckResult, pack_found
from skymemory.protocol.satellite.overload import Lateness
from skymemory.protocol.satellite.state import EvictionConfig, SatelliteConfig
from skymemory.protocol.wire import (
    COMMAND_BYTES,
    FLAG_SETTLED,
    SKY_BYTES,
    Address,
    ChunkRef,
    Op,
    PlacementTag,
    SkyHeader,
    Status,
    build_packet,
    header_start,
    parse_packet,
)
from skymemory.transport.simulated import SimulatedConstellation

ALL = EvictionConfig.of(["gossip", "periodic", "migration"], sweep_s=2.0)
COPIES = EvictionConfig.of(["gossip", "periodic", "migration"], sweep_s=2.0, replicas=2)
SMALL = {
    "departures": 6,
    "questions": 1,
    "subjects": 2,
    "asked": 2,
    "suspects": 1,
    "leases": 1,
    "expiries": 1,
    "evicted": 1,
    "conflicts": 1,
    "outbox_bytes": 16384,
    "runs": 3,
    "transfers": 1,
    "ground_hosts": 1,
    "back_offs": 1,
    "postponed_bytes": 65536,
    "chunks": 12,
    "keys": 5,
}


def tight(bounds: Mapping[str, int]) -> Callable[..., FlightMachine]:
    def made(config: SatelliteConfig, sky: SkyMap, clock: MoveClock, now_s: float, lateness: Lateness | None = None):
        return FlightMachine(config, sky, clock, now_s, lateness, bounds=bounds)

    return made


def constellation(bounds: Mapping[str, int], eviction: EvictionConfig, **more: int) -> SimulatedConstellation:
    return SimulatedConstellation(
        SkyMap(Torus(5, 9), CENTRE),
        more.get("memory_bytes", 1 << 20),
        MoveClock(slot_period_s=4.0, plane_period_s=13.0, time_scale=1.0),
        lambda one, other: 0.002,
        machine=tight(bounds),  # type: ignore[arg-type]
        eviction=eviction,
    )


def counted(simulated: SimulatedConstellation, *names: str) -> int:
    return sum(each.counters.get(name) for each in simulated.satellites.values() for name in names)


def refused_for_ever(simulated: SimulatedConstellation) -> int:
    """Keys that were purged, or bytes lost: of these tests none should be."""
    ledgers = [each.store.ledger.figures() for each in simulated.satellites.values()]
    return sum(figures["bytes_lost"] + figures["bytes_evicted"] for figures in ledgers)


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("name", ["departures", "questions", "asked", "subjects", "suspects", "runs", "back_offs"])
def test_values_survive_full_pools(name: str) -> None:
    """Moves and sweeps of a constellation all of whose satellites have one small pool; afterwards all is at home."""
    simulated = constellation({name: SMALL[name]}, ALL)
    client = simulated.connect(ClientConfig(ground=7))
    values: dict[bytes, tuple[bytes, ValueInfo]] = {}
    write(client, values, 12, seed=2)
    dead = SatelliteId(2, 5)
    for _ in range(2):
        simulated.settle(simulated.now_s + 4.0)
        assert read(client, values) == len(values)
    # Moves over a dead satellite: what it should take waits, and what it should hold is asked about.
    simulated.kill(dead)
    simulated.settle(simulated.now_s + 3.0)
    simulated.revive(dead)
    lost = values.keys() - {key for key, value in values.items() if read(client, {key: value})}
    simulated.settle(simulated.now_s + 4.0)
    fresh: dict[bytes, tuple[bytes, ValueInfo]] = {}
    write(client, fresh, 8, seed=3)
    for _ in range(3):
        simulated.settle(simulated.now_s + 4.0)
    kept = {key: value for key, value in values.items() if key not in lost}
    assert read(client, kept | fresh) == len(kept | fresh)
    assert len(kept) >= 1
    check_ledgers(simulated)
    counter = "outbox_full" if name == "runs" else "pools_full"
    if name not in ("back_offs", "suspects"):  # of these all are forgotten, and retries come sooner; those are few here
        assert counted(simulated, counter) > 0
    reported = sum(each.housekeeping()["pools_full"] for each in simulated.satellites.values())
    assert reported == counted(simulated, "pools_full", "outbox_full")


def test_a_full_pool_of_departures_delays_and_loses_nothing() -> None:
    """It counts; when the box rests again every chunk is at home."""
    simulated = constellation({"departures": 4}, EvictionConfig.of(["migration"]))
    client = simulated.connect(ClientConfig(ground=7))
    values: dict[bytes, tuple[bytes, ValueInfo]] = {}
    write(client, values, 16, seed=4)
    for _ in range(3):
        simulated.settle(simulated.now_s + 3.5)
        assert read(client, values) == len(values)
    full = counted(simulated, "pools_full")
    assert full > 0
    assert not refused_for_ever(simulated)
    # A chunk that is left out counts as nothing settled: no satellite is idle then.
    for each in simulated.satellites.values():
        assert not each.handover.idle or each.handover.at_rest or len(each.store) > 0
    assert read(client, values) == len(values)
    check_ledgers(simulated)


class Squeezed(Duel):
    """Random traffic for one satellite in C with small pools: it must stay sound, and keep its account."""

    def __init__(self, case: Case, seed: int, bounds: Mapping[str, int]) -> None:
        super().__init__(case, seed)
        config = SatelliteConfig(
            self.here,
            case.memory_bytes,
            case.routing,
            replacement=case.replacement,
            eviction=case.eviction,
            authority=self.authority,
        )
        clock = MoveClock(case.start_s, case.slot_period_s, 4.5 * case.slot_period_s, case.time_scale)
        self.c = FlightMachine(config, self.sky, clock, self.now_s, bounds=bounds)
        self.python = self.c  # type: ignore[assignment]
        self.promised: dict[bytes, int] = {}

    def both(self, name: str, *arguments: object) -> None:
        self.events += 1
        getattr(self.c, name)(*arguments, self.now_s)
        self.compare(name)

    def compare(self, after: str) -> None:
        sent = [
            (link, bytes(data)) for batch, link in self.c.datagrams_to_send(self.now_s) for data in batch.datagrams()
        ]
        self.sent = (self.sent + sent)[-400:]

    def compare_states(self) -> None:
        figures = self.c.store.ledger.figures()
        came = figures.pop("bytes_set") + figures.pop("bytes_migrated_in")
        assert came == self.c.store.used_bytes + sum(figures.values())
        assert self.c.store.used_bytes <= self.c.store.limit_bytes
        assert figures["bytes_lost"] == 0

    def answer_to(self, truly, header, body):  # type: ignore[no-untyped-def]
        if header.op is Op.HAS:  # nothing is anywhere: all is suspected
            count = int.from_bytes(body[:2], "big")
            return Op.PRESENCE, pack_presences([None] * count), Status.OK, 0
        return super().answer_to(truly, header, body)

    def be_late(self) -> None:
        if self.case.lateness:
            self.c.lib.sky_host_late(self.c.it, self.random.choice((0, 20_000, 500_000)), round(self.now_s * 1e6))

    def answer_handovers(self) -> None:
        """All MIGRATEs are taken, no RETAIN is acknowledged; ``promised`` counts these by key."""
        sent, self.sent = self.sent, []
        for _, data in sent:
            if data[COMMAND_BYTES + 1] == Op.RETAIN and data[0] & 0x10:
                key = bytes(data[-32:])
                self.promised[key] = self.promised.get(key, 0) + 1
            elif data[COMMAND_BYTES + 1] == Op.MIGRATE and data[0] & 0x10:
                self.acknowledge(data, Status.OK)

    def refuse_handovers(self) -> None:
        sent, self.sent = self.sent, []
        for _, data in sent:
            if data[0] & 0x10 and data[COMMAND_BYTES + 1] == Op.MIGRATE:
                self.acknowledge(data, Status.FULL)

    def acknowledge(self, data: bytes, status: Status, by: Address | None = None) -> None:
        header = SkyHeader.unpack(memoryview(data), COMMAND_BYTES)
        ref = ChunkRef.unpack(data[COMMAND_BYTES + SKY_BYTES :][:72])
        answer = SkyHeader(
            Op.ACK,
            Address(*self.here),
            by or header.destination,
            0,
            header.request_id,
            status,
            timestamp_us=header.timestamp_us,
        )
        body = Selection.cover(ref.key, [ref.index])[0].pack()
        self.give(whole := build_packet(answer, body, 1, self.now_s), len(whole), self.neighbours[0])

    def evict(self) -> None:
        if self.random.random() < 0.2:
            super().evict()


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("name", [*SMALL, "all"])
def test_traffic_with_a_full_pool(name: str) -> None:
    bounds = SMALL if name == "all" else {name: SMALL[name]}
    late = name in ("postponed_bytes", "all")
    memory_bytes = 9_000 if name == "evicted" else 40_000
    eviction = ALL if name in ("suspects", "questions", "asked", "subjects") else COPIES
    squeezed = Squeezed(Case(eviction=eviction, memory_bytes=memory_bytes, slot_period_s=3.0, lateness=late), 5, bounds)
    squeezed.run(300)
    if name in ("departures", "questions", "subjects", "asked", "suspects", "chunks", "keys", "all"):
        assert squeezed.c.counters.get("pools_full") > 0


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(20))
def test_long_traffic_with_full_pools(seed: int) -> None:
    """Pools of random sizes."""
    dice = random.Random(seed)
    names = dice.sample(sorted(SMALL), dice.randrange(1, len(SMALL)))
    bounds = {name: SMALL[name] * dice.randrange(1, 4) for name in names}
    case = Case(
        eviction=dice.choice((ALL, COPIES)),
        memory_bytes=dice.choice((12_000, 100_000)),
        slot_period_s=3.0,
        lateness=dice.random() < 0.5,
        authority=dice.random() < 0.3,
        calm=dice.random() < 0.5,
    )
    Squeezed(case, seed, bounds).run(8000)


def alone(**bounds: int) -> Squeezed:
    return Squeezed(Case(time_scale=0.0, memory_bytes=1 << 20), 1, bounds)


def chunks_of(one: Squeezed, key: bytes, count: int, replica: int = 0, moves: int = 0) -> list[tuple[bytes, bytes]]:
    """``count`` chunks of 100 bytes: what belongs here, as the first copy, of a value on two satellites."""
    ours = one.ours(PlacementTag(1, 2, 0, moves, 0, 0), 0)
    assert ours is not None
    value, found = bytes(200 * count), []
    for index in range(ours, 2 * count, 2):
        tag = PlacementTag(1, 2, ours, moves, 0, replica)
        ref = ChunkRef(key, index, 2 * count, 100, zlib.crc32(bytes(100)), len(value), zlib.crc32(value), tag)
        found.append((ref.pack(), bytes(100)))
    return found


def operations(one: Squeezed) -> list[Op]:
    """Of the answers sent last."""
    return [Op(data[header_start(memoryview(data)) + 1]) for _, data in one.sent]


def stored(one: Squeezed, key: bytes, count: int = 1, replica: int = 0, op: Op = Op.SET) -> list[Op]:
    """Sends chunks in one run; the operations of the answers."""
    here = op is Op.SET
    source = Address(*one.here, 0xFF) if here else Address(*one.neighbours[0])
    packets = one.run_of(op, chunks_of(one, key, count, replica), source, 7 if here else 0)
    one.sent = []
    one.give(b"".join(packets), len(packets[0]), one.grounds[7] if here else one.neighbours[0])
    return operations(one)


def test_a_full_table_of_keys_refuses_or_evicts() -> None:
    one = alone(keys=2, chunks=4)
    keys = [bytes([n]) * 32 for n in range(1, 4)]
    assert stored(one, keys[0]) == stored(one, keys[1]) == [Op.ACK]
    assert stored(one, keys[2]) == [Op.ACK]  # one of the others went
    assert len(one.c.store.shares) == 2
    assert keys[2] in one.c.store.shares
    assert stored(one, bytes([9]) * 32, count=5)[-1] is Op.ACK
    assert len(one.c.store) <= 4
    one.compare_states()


def test_what_a_full_pool_of_departures_leaves_out_follows() -> None:
    """Five chunks must leave and two find room: meanwhile nothing is settled; the others leave before the next move."""
    one = Squeezed(Case(slot_period_s=20.0, memory_bytes=1 << 20), 1, {"departures": 2})
    for n in range(1, 6):
        stored(one, bytes([n]) * 32)
    one.advance(64 * 20)  # the box moves
    assert one.c.counters.get("pools_full") > 0
    assert not one.c.handover.idle
    for _ in range(15 * 8):  # the box rests
        one.answer_handovers()
        one.advance(8)
    assert len(one.c.store) == 0
    assert one.c.handover.at_rest
    assert one.c.counters.get("chunks_migrated_out") == 5


def retained(one: Squeezed, what: Retain, keys: list[bytes], ground: int) -> list[int]:
    packet = one.packet(Op.RETAIN, pack_retain(what, one.now_s + 50.0, keys), Address(*one.here, 0xFF), ground)
    one.sent = []
    one.give(packet, len(packet), one.grounds[ground])
    return [int(kept) for _, data in one.sent for kept in unpack_retained(parse_packet(memoryview(data)).body)]


def test_full_leases_and_expiries_are_refused_and_free_again() -> None:
    one = alone(leases=1, expiries=1)
    keys = [bytes([n]) * 32 for n in range(1, 4)]
    for key in keys:
        stored(one, key)
    first = retained(one, Retain.EXPIRE, keys, 7)
    assert len(set(first)) == 2  # one is done, two are not
    assert first[1] == first[2]
    assert list(one.c.store.expiries) == keys[:1]
    retained(one, Retain.LEASE, keys, 7)
    assert len(one.c.store.leases) == 1
    assert one.c.counters.get("leases_refused") == 2
    one.advance(64 * 60)  # they end
    assert not one.c.store.leases
    assert not one.c.store.expiries
    retained(one, Retain.LEASE, keys[1:2], 8)
    assert len(one.c.store.leases) == 1


@pytest.mark.parametrize("what", [Retain.PIN, Retain.EXPIRE, Retain.LEASE])
def test_a_promise_ends_at_its_time_and_not_before(what: Retain) -> None:
    one, key = alone(), bytes([1]) * 32
    promised = {Retain.PIN: one.c.store.pins, Retain.EXPIRE: one.c.store.expiries, Retain.LEASE: one.c.store.leases}
    stored(one, key)
    assert one.now_s * 1000 == int(one.now_s * 1000)  # so its end, in milliseconds on the wire, is a tick
    retained(one, what, [key], 7)
    one.advance(64 * 50 - 1)
    assert key in promised[what]
    one.advance(1)
    assert key not in promised[what]
    one.compare_states()


def replicas_of(one: Squeezed, key: bytes) -> list[int]:
    return [ChunkRef.unpack(chunk.ref).tag.replica for name, chunk in one.c.store.items() if name[0] == key]


@pytest.mark.parametrize(("bounds", "unresolved"), [({}, 0), ({"conflicts": 1}, 39)])
def test_a_run_of_other_copies(bounds: dict[str, int], unresolved: int) -> None:
    """What was here stays, and the copy that came leaves; beyond the pool what came is kept as it is, and leaves."""
    one = Squeezed(Case(time_scale=0.0, memory_bytes=1 << 20, eviction=COPIES), 1, bounds)
    key = bytes([3]) * 32
    stored(one, key, count=40)
    stored(one, key, count=40, replica=1, op=Op.MIGRATE)
    assert sorted(replicas_of(one, key)) == [0] * (40 - unresolved) + [1] * unresolved
    assert one.c.counters.get("pools_full") == unresolved
    assert not one.c.handover.idle


def test_what_a_full_pool_of_evictions_does_not_announce() -> None:
    """One run evicts two keys: one of them is announced, the other counted."""
    one = Squeezed(Case(time_scale=0.0, memory_bytes=4 * 172, eviction=ALL), 1, {"evicted": 1})
    for n in (1, 2):
        stored(one, bytes([n]) * 32, count=2)
    assert one.c.counters.get("pools_full") == 0
    stored(one, bytes([3]) * 32, count=4)
    assert one.c.counters.get("chunks_evicted") == 4
    assert one.c.counters.get("pools_full") > 0
    one.compare_states()


def test_promises_beyond_the_pool_are_sent_once() -> None:
    """Pins of three keys go with their chunks to another satellite: one is repeated until it is acknowledged."""
    one = Squeezed(Case(slot_period_s=2.0, memory_bytes=1 << 20), 1, {"transfers": 1})
    keys = [bytes([n]) * 32 for n in range(1, 4)]
    for key in keys:
        stored(one, key)
    retained(one, Retain.PIN, keys, 7)
    assert sorted(one.c.store.pins) == keys
    one.advance(64 * 3)
    for _ in range(20):
        one.answer_handovers()
        one.advance(4)
    assert one.promised == {key: one.promised[key] for key in keys}  # each was sent
    assert sorted(one.promised.values())[:2] == [1, 1]
    assert max(one.promised.values()) > 1
    assert one.c.counters.get("pools_full") == 2


def test_only_the_satellite_that_was_sent_chunks_takes_them_and_the_promise_once() -> None:
    """Any other may have forged the ACK: satellites sign those to each other with ``every`` alone."""
    one, key = Squeezed(Case(slot_period_s=2.0, memory_bytes=1 << 20), 1, {}), bytes(range(32))
    stored(one, key, count=15)  # two bursts
    retained(one, Retain.PIN, [key], 7)
    for _ in range(64):
        one.advance(4)
        moved = {data[24:28]: data for _, data in one.sent if data[0] & 0x10 and data[COMMAND_BYTES + 1] == Op.MIGRATE}
        if len(moved) == 2:
            break
    there = {SkyHeader.unpack(memoryview(data), COMMAND_BYTES).destination for data in moved.values()}
    stranger = next(address for address in (Address(0, 1), Address(1, 0)) if address not in there)
    for by, promises in ((stranger, []), (None, [*there])):
        one.sent = []
        for data in moved.values():
            one.acknowledge(data, Status.OK, by)
        promised = [data for _, data in one.sent if data[0] & 0x10 and data[COMMAND_BYTES + 1] == Op.RETAIN]
        assert [SkyHeader.unpack(memoryview(data), COMMAND_BYTES).destination for data in promised] == promises
        assert (one.c.counters.get("chunks_migrated_out") > 0) == bool(promises)


@pytest.mark.brief(every=3)
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"replicas": 33}, "replicas"),
        ({"replicas": 0}, "replicas"),
        ({"handover_window_bursts": 1}, "handover window"),
        ({"handover_grace_s": 0.0}, "times"),
        ({"sweep_s": 0.0}, "times"),
        ({"sweep_s": 1e9}, "times"),
        ({"handover_gap_s": -1.0}, "times"),
    ],
)
def test_a_configuration_that_would_not_end_or_not_ask_all_copies_is_refused(
    change: dict[str, float], error: str
) -> None:
    """A cut window has room for two bursts; a copy that waits for another is looked at again after the grace period;
    losses are proved by all copies, now and before a move.
    """
    sky, clock = SkyMap(Torus(5, 7), SatelliteId(2, 3)), MoveClock()

    def began(change: dict[str, float]) -> FlightMachine:
        ours = {name: change[name] for name in ("replicas", "sweep_s") if name in change}
        others = {name: value for name, value in change.items() if name not in ours}
        config = SatelliteConfig(SatelliteId(2, 3), 1000, eviction=EvictionConfig(**ours), **others)  # type: ignore[arg-type]
        return FlightMachine(config, sky, clock, 0.0)

    began({"replicas": 32, "handover_window_bursts": 2, "handover_grace_s": 1e-6, "sweep_s": 1e-6})
    with pytest.raises(ValueError, match=error):
        began(change)


def test_the_ground_host_heard_longest_ago_is_forgotten() -> None:
    one = alone(ground_hosts=2)
    for ground in (7, 8, 9):
        packet = one.packet(Op.PING, b"", Address(*one.here, 0xFF), ground)
        one.give(packet, len(packet), one.grounds[ground])
        assert operations(one)[-1] is Op.PONG
    assert one.c.value(21) == 2


def test_a_ground_host_is_answered_where_it_was_heard_last() -> None:
    one = alone()
    for ground, link in ((7, 7), (8, 8), (7, 9)):
        packet = one.packet(Op.PING, b"", Address(*one.here, 0xFF), ground)
        one.give(packet, len(packet), one.grounds[link])
        assert one.sent[-1][0] == one.grounds[link]


def test_what_waits_to_be_sent_keeps_its_bytes() -> None:
    """A chunk is read and replaced before its answer was taken: the answer has the bytes that it names."""
    one = alone()
    key = bytes([6]) * 32
    stored(one, key)
    (index,) = one.c.store.indices(key)
    get = one.packet(Op.GET, Selection.of(key, [index], 1).pack(), Address(*one.here, 0xFF), 7)
    other = b"\xa5" * 100
    ref = replace(ChunkRef.unpack(chunks_of(one, key, 1)[0][0]), crc=zlib.crc32(other))
    (setting,) = one.run_of(Op.SET, [(ref.pack(), other)], Address(*one.here, 0xFF), 7)
    for packet in (get, setting, setting):
        one.c.receive_batch(packet, len(packet), one.grounds[7], one.now_s)
    one.sent = []
    one.compare("three packets")
    (data,) = [data for _, data in one.sent if data[17] == Op.DATA]
    assert data[-100:] == bytes(100)
    assert one.c.store.peek((key, index)).payload == other  # type: ignore[union-attr]


class Doubting(Squeezed):
    """A satellite that has half of its chunks of a value, and asks whether the others are anywhere."""

    def __init__(self, bounds: Mapping[str, int]) -> None:
        super().__init__(Case(time_scale=0.0, memory_bytes=1 << 20, eviction=ALL), 1, bounds)
        self.key = bytes([7]) * 32
        chunks = chunks_of(self, self.key, 2, moves=-3)  # it may have been left on the way
        (packet,) = self.run_of(Op.SET, chunks[:1], Address(*self.here, 0xFF), 7)
        self.give(packet, len(packet), self.grounds[7])
        self.checks = 0

    def answer_checks(self, flags: int) -> None:
        """Nothing is anywhere; ``flags`` say whether that is settled."""
        sent, self.sent = self.sent, []
        for _, data in sent:
            if not (data[0] & 0x10 and data[COMMAND_BYTES + 1] == Op.CHECK):
                continue
            self.checks += 1
            header = SkyHeader.unpack(memoryview(data), COMMAND_BYTES)
            (count,) = struct.unpack_from(">H", data, COMMAND_BYTES + SKY_BYTES)
            there, ours, asked = header.destination, Address(*self.here), header.timestamp_us
            answer = SkyHeader(Op.CHECKED, ours, there, 0, header.request_id, timestamp_us=asked, flags=flags)
            whole = build_packet(answer, pack_found([CheckResult.LACKING] * count), 1, self.now_s)
            self.give(whole, len(whole), self.neighbours[0])

    def go_on(self, ticks: int, flags: int | None) -> None:
        for _ in range(ticks):
            self.advance(1)
            if flags is not None:
                self.answer_checks(flags)


def test_a_loss_is_proved_by_settled_answers_of_all() -> None:
    one = Doubting({})
    one.go_on(64 * 12, 0)
    assert one.checks > 0
    assert len(one.c.store) == 1
    one.go_on(64 * 12, FLAG_SETTLED)
    assert len(one.c.store) == 0


@pytest.mark.parametrize("name", ["asked", "questions", "subjects"])
def test_no_loss_is_proved_while_a_pool_is_full(name: str) -> None:
    """Where not every place can be asked the value stays, whatever the others answer."""
    one = Doubting({name: 1})
    if name != "subjects":
        one.go_on(64 * 30, FLAG_SETTLED)
        assert one.c.counters.get("pools_full") > 0
        assert len(one.c.store) == 1
    else:  # one chunk that is lost suffices
        one.go_on(64 * 30, FLAG_SETTLED)
        assert len(one.c.store) == 0


def test_a_suspicion_is_confirmed_four_times_at_most() -> None:
    """Answers that settle nothing: then the suspicion ends, until a sweep finds the gap again."""
    one = Doubting({})
    rounds: list[float] = []
    while len(rounds) < 5 and one.now_s < 60.0:
        before = one.checks
        one.go_on(1, 0)
        if one.checks > before and (not rounds or one.now_s - rounds[-1] > 0.5):
            rounds.append(one.now_s)
    between = [later - earlier for earlier, later in pairwise(rounds)]
    confirm_s = one.case.eviction.confirm_s
    assert between[:3] == pytest.approx([confirm_s] * 3, abs=0.1)
    assert between[3] > 1.5 * confirm_s


def test_postponed_packets_beyond_the_bound_are_dropped_and_counted() -> None:
    """Background packets of a late host: those that came last are kept, and stored when it is on time again."""
    one = Squeezed(Case(time_scale=0.0, memory_bytes=1 << 20, lateness=True), 1, {"postponed_bytes": 65536})
    for _ in range(20):
        one.now_s += 1 / 64
        one.c.lib.sky_host_late(one.c.it, 500_000, round(one.now_s * 1e6))
    assert one.c.lib.sky_is_late(one.c.it, round(one.now_s * 1e6))
    for n in range(1, 9):
        assert not stored(one, bytes([n]) * 32, count=100, op=Op.MIGRATE)
    assert one.c.value(22) > 0
    assert not len(one.c.store)
    while one.c.wants_work:
        one.both("work")
    assert len(one.c.store) + one.c.value(22) == 800
    one.compare_states()


def test_back_offs_beyond_the_pool_are_forgotten() -> None:
    """Two satellites refuse: only the latest is remembered, so that the other is asked again sooner."""
    one = Squeezed(Case(slot_period_s=2.0, memory_bytes=1 << 20), 1, {"back_offs": 1})
    for n in range(1, 6):
        stored(one, bytes([n]) * 32)
    one.advance(64 * 3)
    one.refuse_handovers()
    assert one.c.value(23) == 1
    assert len(one.c.store) == 5


def test_a_full_outbox_drops_packets_and_counts_them() -> None:
    """Answers that find no room are as if a link had lost them: asked again, they come."""
    one = alone(outbox_bytes=16384)
    key = bytes([5]) * 32
    stored(one, key, count=200)
    indices = one.c.store.indices(key)
    (selection, *_) = Selection.cover(key, indices)
    packet = one.packet(Op.GET, selection.pack(), Address(*one.here, 0xFF), 7)
    one.sent = []
    one.give(packet, len(packet), one.grounds[7])
    first = operations(one)
    assert Op.MISS not in first
    assert first.count(Op.DATA) + one.c.counters.get("outbox_full") == 200
    assert 0 < one.c.counters.get("outbox_full") < 200
    (selection, *_) = Selection.cover(key, indices[-50:])
    packet = one.packet(Op.GET, selection.pack(), Address(*one.here, 0xFF), 7)
    one.sent = []
    one.give(packet, len(packet), one.grounds[7])
    assert operations(one).count(Op.DATA) == 50


def test_a_seed_moves_the_buckets_and_keeps_the_behaviour() -> None:
    found = set()
    for seed in (0, 1, 1 << 40):
        one = alone(hash_seed=seed)
        stored(one, bytes(range(32)), count=3)
        indices = one.c.store.indices(bytes(range(32)))
        assert len(indices) == 3
        found.add(tuple(one.c.lib.shim_bucket(one.c.it, bytes(range(32)), n) for n in indices))
    assert len(found) == 3


def test_satellites_that_share_memory_use_it_by_turns() -> None:
    one = alone()
    assert one.c.lib.shim_shared(one.c.settings) == 1


def test_chains_stay_short_for_keys_that_collide_without_a_secret() -> None:
    """Keys, and numbers of chunks, that lie in one bucket for who multiplies and shifts."""
    one = alone(hash_seed=77)
    for n in range(600):
        key = bytearray(32)
        key[0] = (n & 1) << 7
        key[8:12] = (n << 20 & 0xFFFFFFFF).to_bytes(4, "big")
        key[31] = n >> 8
        stored(one, bytes(key))
    assert one.c.lib.shim_longest_chain(one.c.it) <= 8


def test_bounds_are_named() -> None:
    assert set(SMALL) < set(BOUNDS)
