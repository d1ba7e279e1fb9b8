"""A miss is no proof of loss: nothing that is somewhere in the sky is forgotten because one read did not find it."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from itertools import combinations

import pytest
from tests.store.conftest import simulated, store_over

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.native import crc32
from skymemory.protocol.client.transfer import Striping, ValueInfo
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.messages import UNSTATED
from skymemory.protocol.satellite.state import SatelliteState
from skymemory.protocol.wire import CHUNK_REF_BYTES, TELEMETRY_BYTES, TELEMETRY_PREFIX_BYTES, Op, SkyHeader, bulk_batch
from skymemory.reasons import Miss
from skymemory.store.base import Presence
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.plan import make_plan
from skymemory.testbed.virtual import VirtualConstellation
from skymemory.transport.faults import FaultInjector
from skymemory.transport.simulated import SimulatedConstellation

KEY = hashlib.sha256(b"a value").digest()
VALUE = random.Random(1).randbytes(20 * 6144)
SLOT_S = 10.0


def moving_sky() -> SimulatedConstellation:
    return simulated(clock=MoveClock(slot_period_s=SLOT_S, plane_period_s=7.3 * SLOT_S, time_scale=1.0))


def read(store: ConstellationStore, key: bytes = KEY) -> tuple[bytes | None, Miss | None]:
    """The value, or why it is a miss."""
    ticket = store.prepare_load([key])
    (found,) = store.complete_load(ticket)
    copied = None if found is None else bytes(found)
    store.release(ticket)
    assert ticket.report is not None
    return copied, ticket.report.keys[0].reason


def fresh_read(sky: SimulatedConstellation, index: SharedIndex, ground: int) -> tuple[bytes | None, Miss | None]:
    """As every command of the command line does: a client is opened for one read."""
    store = store_over(sky, ground, index)
    store.synchronise()
    found = read(store)
    store._driver.close()
    return found


def chunks_in(sky: SimulatedConstellation, key: bytes = KEY) -> int:
    return len({index for machine in sky.satellites.values() for index in machine.store.shares.get(key, {})})


def first_to_leave(sky: SimulatedConstellation) -> SatelliteId:
    """A satellite with chunks of the value which is in the column that leaves the box at the next slot move."""
    moves = sky.clock.moves(sky.now_s)
    placement = sky.sky.placement(3, 10)
    for server in range(10):
        here = placement.locate(server, moves, moves)
        if placement.locate(server, moves, (moves[0] + 1, moves[1])) != here:
            return here
    raise AssertionError("no column leaves")


def isolate(sky: SimulatedConstellation, satellite: SatelliteId) -> None:
    """Its links to its neighbours are down: it hands nothing over."""
    for neighbour in sky.sky.torus.neighbours(satellite):
        sky.cut(satellite, neighbour)


def reconnect(sky: SimulatedConstellation, satellite: SatelliteId) -> None:
    for neighbour in sky.sky.torus.neighbours(satellite):
        sky.mend(satellite, neighbour)


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("moves_later", [1, 3, 9, 23])
def test_a_chunk_that_could_not_follow_the_box_is_found_where_it_was_left(moves_later: int) -> None:
    sky, index = moving_sky(), SharedIndex()
    writer = store_over(sky, 1, index)
    assert writer.put_many([(KEY, VALUE)]) == [True]
    isolate(sky, first_to_leave(sky))
    sky.settle(sky.now_s + moves_later * SLOT_S + 2.0)
    assert fresh_read(sky, index, 2) == (VALUE, None)
    assert chunks_in(sky) == 20


@pytest.mark.brief()
def test_what_was_left_behind_hundreds_of_moves_ago_is_found_there() -> None:
    """The box has not gone round the ring yet, and a look at each of the last 256 moves would not come so far back."""
    sky_map = SkyMap(Torus(3, 400), SatelliteId(1, 200))
    clock = MoveClock(epoch_s=-301.5 * SLOT_S, slot_period_s=SLOT_S, time_scale=1.0)
    sky = SimulatedConstellation(sky_map, 8 << 20, clock, delay_s=lambda a, b: 0.002)
    index = SharedIndex()
    writer = store_over(sky, 1, index)
    driver = writer._driver
    number, info = driver.machine.put(KEY, VALUE, Striping(6144, 3, 10), sky.now_s, (0, 0))
    assert driver.run([number])[number].ok
    writer._catalog.add([info], sky.now_s, {})
    placement, now = sky_map.placement(3, 10), sky.clock.moves(sky.now_s)
    isolate(sky, placement.locate(4, (0, 0), (20, 0)))
    for server in range(10):  # all are where they belong but those of one
        first = sky.satellites[placement.locate(server)].store
        there = placement.locate(server, (0, 0), (20, 0) if server == 4 else now)
        chunks = [(name, chunk) for name, chunk in first.items() if name[1] % 10 == server]
        for name, (ref, payload) in chunks:
            first.remove(name)
            sky.satellites[there].store.put(name, ref, payload)
    assert fresh_read(sky, index, 2) == (VALUE, None)
    assert chunks_in(sky) == 20


def test_what_a_silent_satellite_may_still_have_is_neither_forgotten_nor_deleted() -> None:
    """It stopped with its chunks before the box moved on, and comes back with them: a paused host."""
    sky, index = moving_sky(), SharedIndex()
    writer = store_over(sky, 1, index)
    assert writer.put_many([(KEY, VALUE)]) == [True]
    paused = first_to_leave(sky)
    isolate(sky, paused)
    for ground in range(2, 6):
        sky.cut(paused, ("ground", ground))
    for ground in range(2, 6):
        sky.settle(sky.now_s + SLOT_S)
        found, reason = fresh_read(sky, index, ground)
        assert found is None and reason in ("timeout", "unreachable")
    assert chunks_in(sky) == 20
    reconnect(sky, paused)
    sky.settle(sky.now_s + 3 * SLOT_S)
    assert fresh_read(sky, index, 6) == (VALUE, None)


@pytest.mark.parametrize("indexed", [False, True], ids=["without an index", "with an incomplete one"])
def test_what_only_a_silent_satellite_can_know_is_not_said_to_be_absent(indexed: bool) -> None:
    sky = simulated()
    assert store_over(sky, 1).put_many([(KEY, b"one chunk")]) == [True]
    (holder,) = [here for here, machine in sky.satellites.items() if machine.store.shares.get(KEY)]
    reader = store_over(sky, 2, SharedIndex(born=False) if indexed else None)
    sky.cut(("ground", 2), holder)
    for _ in range(3):
        assert read(reader) == (None, "uncertain")
        assert reader.delete([KEY]) == [None]
    sky.mend(("ground", 2), holder)
    sky.settle(sky.now_s + 5.0)
    assert read(reader) == (b"one chunk", None)
    assert reader.delete([KEY, bytes(32)]) == [True, False]
    assert read(reader) == (None, "absent")


def test_what_another_client_has_set_again_is_read_though_it_was_looked_at_before() -> None:
    sky = simulated()
    one, other = store_over(sky, 1), store_over(sky, 2)
    assert other.put_many([(KEY, VALUE)]) == [True]
    assert one.lookup([KEY]) == [Presence.HIT] and one.prefix([KEY]) == 1
    assert other.put_many([(KEY, b"shorter")]) == [True]
    sky.settle(sky.now_s + 2.0)
    assert read(one) == (b"shorter", None)


def test_a_shorter_value_leaves_nothing_of_the_longer_one_to_be_found_once_it_is_deleted() -> None:
    sky = simulated()
    writer = store_over(sky, 1, SharedIndex())
    assert writer.put_many([(KEY, VALUE)]) == [True]
    assert writer.put_many([(KEY, VALUE[:6000])]) == [True]
    assert read(store_over(sky, 3)) == (VALUE[:6000], None)
    assert writer.delete([KEY]) == [True]
    other = store_over(sky, 2)
    assert other.lookup([KEY]) == [Presence.MISS] and other.prefix([KEY]) == 0 and other.delete([KEY]) == [False]


@pytest.mark.brief()
@pytest.mark.parametrize("known", [False, True], ids=["not known yet", "known to be silent"])
def test_where_the_satellite_of_now_is_dead_the_one_before_is_asked(known: bool) -> None:
    """It died before the move, so that nothing was handed over: all chunks are where they were."""
    sky, index = moving_sky(), SharedIndex()
    assert store_over(sky, 1, index).put_many([(KEY, VALUE)]) == [True]
    placement, moves = sky.sky.placement(3, 10), sky.clock.moves(sky.now_s)
    server = next(s for s in range(10) if placement.locate(s, moves, moves) == first_to_leave(sky))
    dead = placement.locate(server, moves, (moves[0] + 1, moves[1]))
    for other in [*sky.sky.torus.neighbours(dead), *(("ground", ground) for ground in (2, 3))]:
        sky.cut(dead, other)  # type: ignore[arg-type]
    sky.settle(sky.now_s + SLOT_S + 3.0)
    assert placement.locate(server, moves, sky.clock.moves(sky.now_s)) == dead
    reader = store_over(sky, 2, index)
    if known:
        reader._driver.machine._peers.suspects.add(dead, sky.now_s)
    assert read(reader) == (VALUE, None) and chunks_in(sky) == 20
    if known:  # it asks for nothing else before it has these
        (before,) = {here for here, machine in sky.satellites.items() if server in machine.store.shares.get(KEY, {})}
        sky.satellites[before].store.remove_key(KEY)
        served = [machine.counters.get("chunks_served") for machine in sky.satellites.values()]
        assert read(reader)[1] == "unreachable" and chunks_in(sky) == 18
        assert served == [machine.counters.get("chunks_served") for machine in sky.satellites.values()]


def test_satellites_that_do_not_say_that_they_are_settled_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So do those of earlier versions, and all during a handover."""
    monkeypatch.setattr(SatelliteState, "is_settled", lambda self, key, indices, now_s: False)
    sky, index = simulated(), SharedIndex()
    store = store_over(sky, 1, index)
    assert store.put_many([(KEY, VALUE)]) == [True]
    holder = next(machine for machine in sky.satellites.values() if KEY in machine.store.shares)
    lost = {number: holder.store.peek((KEY, number)) for number in holder.store.shares[KEY]}
    holder.store.remove_key(KEY)
    assert fresh_read(sky, index, 2) == (None, "under way")
    assert chunks_in(sky) == 20 - len(lost) and store.lookup([KEY]) == [Presence.HIT]
    for number, chunk in lost.items():
        assert chunk is not None
        holder.store.put((KEY, number), chunk.ref, chunk.payload)
    assert read(store) == (VALUE, None)


@pytest.mark.parametrize("moves_later", [0, 1, 4])
def test_what_is_proved_lost_is_evicted_by_a_fresh_client_too(moves_later: int) -> None:
    sky, index = moving_sky(), SharedIndex()
    store = store_over(sky, 1, index)
    assert store.put_many([(KEY, VALUE)]) == [True]
    sky.settle(sky.now_s + moves_later * SLOT_S + 5.0)
    holder = next(machine for machine in sky.satellites.values() if KEY in machine.store.shares)
    holder.store.remove((KEY, min(holder.store.shares[KEY])))
    assert fresh_read(sky, index, 2) == (None, "missing")
    assert chunks_in(sky) == 0 and store.lookup([KEY]) == [Presence.MISS]


def test_with_copies_what_any_copy_may_have_is_not_lost() -> None:
    sky, index = moving_sky(), SharedIndex()
    writer = store_over(sky, 1, index, replicas=2)
    assert writer.put_many([(KEY, VALUE)]) == [True]
    holders = [here for here, machine in sky.satellites.items() if 4 in machine.store.shares.get(KEY, {})]
    assert len(holders) == 2
    sky.satellites[holders[0]].store.remove((KEY, 4))
    isolate(sky, holders[1])
    sky.cut(holders[1], ("ground", 2))
    reader = store_over(sky, 2, index, replicas=2)
    assert read(reader)[0] is None
    assert index.infos([KEY]) != [None] and chunks_in(sky) == 20
    reconnect(sky, holders[1])
    sky.mend(holders[1], ("ground", 2))
    sky.settle(sky.now_s + 3.0)
    assert read(reader) == (VALUE, None)


def lose_a_chunk(sky: SimulatedConstellation) -> None:
    holder = next(machine for machine in sky.satellites.values() if KEY in machine.store.shares)
    holder.store.remove((KEY, min(holder.store.shares[KEY])))


@pytest.mark.parametrize("value", [VALUE, VALUE[::-1]], ids=["the same bytes", "other bytes"])
def test_what_is_stored_while_its_loss_is_proved_is_not_evicted(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader has proved the value lost, and another client computes it and stores it before it has said so."""
    sky = simulated()
    reader, writer = store_over(sky, 1, SharedIndex()), store_over(sky, 2, SharedIndex())
    assert reader.put_many([(KEY, VALUE)]) == [True]
    sky.settle(sky.now_s + 20.0)
    lose_a_chunk(sky)
    replaced = reader._catalog.replaced

    def then_it_is_stored(infos: list[ValueInfo]) -> set[bytes]:
        found = replaced(infos)
        assert not found and writer.put_many([(KEY, value)]) == [True]
        return found

    monkeypatch.setattr(reader._catalog, "replaced", then_it_is_stored)
    assert read(reader) == (None, "missing")
    assert reader.lookup([KEY]) == [Presence.MISS] and chunks_in(sky) == 20
    assert read(writer) == (value, None)


@pytest.mark.parametrize(("written_ago_s", "left"), [(3.5, 19), (4.0, 19), (5.0, 0)])
def test_what_a_writer_may_still_have_been_at_when_a_reader_looked_stays(written_ago_s: float, left: int) -> None:
    """Its last words may have been lost, and ours take up to 1.3 s."""
    sky = simulated()
    store = store_over(sky, 1, SharedIndex())
    assert store.put_many([(KEY, VALUE)]) == [True]
    sky.settle(sky.now_s + written_ago_s)
    lose_a_chunk(sky)
    assert read(store) == (None, "missing") and chunks_in(sky) == left


def test_satellites_that_forget_keys_only_are_left_what_remains() -> None:
    """Those of an earlier release: what they delete by key may belong to a client that has stored it meanwhile."""
    sky = simulated()
    for machine in sky.satellites.values():
        machine._handlers[Op.FORGET] = lambda packet, now_s, machine=machine: machine._outbox.reply(
            packet.header, Op.UNSUPPORTED, UNSTATED.pack_unsupported(Op.FORGET), now_s
        )
    store = store_over(sky, 1, SharedIndex())
    assert store.put_many([(KEY, VALUE)]) == [True]
    sky.settle(sky.now_s + 20.0)
    lose_a_chunk(sky)
    assert read(store) == (None, "missing")
    assert store.lookup([KEY]) == [Presence.MISS] and chunks_in(sky) == 19
    assert store.put_many([(KEY, VALUE)]) == [True] and read(store) == (VALUE, None)


class Tampering(FaultInjector):
    """The first ``most`` chunks that pass are another payload under a sound checksum: one look is misleading."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.left = most

    def apply(self, data: bytes) -> list[tuple[bytes, float]]:
        if not self.left or len(data) <= TELEMETRY_PREFIX_BYTES or data[TELEMETRY_BYTES + 1] != Op.DATA:
            return [(data, 0.0)]
        self.left -= 1
        header = SkyHeader.unpack(data, TELEMETRY_BYTES)
        ref = bytearray(data[TELEMETRY_PREFIX_BYTES : TELEMETRY_PREFIX_BYTES + CHUNK_REF_BYTES])
        payload = bytes(len(data) - TELEMETRY_PREFIX_BYTES - CHUNK_REF_BYTES)
        ref[44:48] = crc32(payload).to_bytes(4, "big")
        (packet,) = bulk_batch(header, bytes(ref), [payload], 0, 0.0).datagrams()
        return [(packet, 0.0)]


def test_what_looks_corrupt_once_is_looked_at_again() -> None:
    sky, index = simulated(), SharedIndex()
    assert store_over(sky, 1, index).put_many([(KEY, VALUE)]) == [True]
    holder = next(here for here, machine in sky.satellites.items() if KEY in machine.store.shares)
    sky.spoil(holder, ("ground", 2), Tampering(1))
    reader = store_over(sky, 2, index)
    assert read(reader) == (VALUE, None)
    assert reader.stats()["second_looks"] == 1 and chunks_in(sky) == 20


def test_what_is_corrupt_where_it_lies_is_evicted() -> None:
    sky, index = simulated(), SharedIndex()
    store = store_over(sky, 1, index)
    assert store.put_many([(KEY, VALUE)]) == [True]
    holder = next(machine for machine in sky.satellites.values() if KEY in machine.store.shares)
    number = min(holder.store.shares[KEY])
    chunk = holder.store.peek((KEY, number))
    assert chunk is not None
    payload = bytes(len(chunk.payload))
    ref = chunk.ref[:44] + crc32(payload).to_bytes(4, "big") + chunk.ref[48:]
    holder.store.put((KEY, number), ref, payload)
    sky.settle(sky.now_s + 5.0)
    assert read(store) == (None, "corrupt")
    assert chunks_in(sky) == 0


def test_a_chunk_of_another_value_in_the_place_of_one_deletes_neither() -> None:
    """Another computer has stored another value under the key: what we knew is out of date, what it stored is sound."""
    sky = simulated()
    one, other = store_over(sky, 1, SharedIndex()), store_over(sky, 2, SharedIndex())
    assert one.put_many([(KEY, VALUE)]) == [True]
    assert other.put_many([(KEY, VALUE[::-1])]) == [True]
    assert read(one) == (None, "other version")
    assert read(one) == (VALUE[::-1], None) and read(other) == (VALUE[::-1], None)


def test_one_leftover_of_another_value_does_not_cost_the_one_that_is_there() -> None:
    sky, index = simulated(), SharedIndex()
    store = store_over(sky, 1, index)
    assert store.put_many([(KEY, VALUE)]) == [True]
    holder = next(machine for machine in sky.satellites.values() if KEY in machine.store.shares)
    number = min(holder.store.shares[KEY])
    ours = holder.store.peek((KEY, number))
    assert ours is not None
    stray = simulated()
    assert store_over(stray, 1, SharedIndex()).put_many([(KEY, VALUE[::-1])]) == [True]
    theirs = next(chunk for m in stray.satellites.values() if (chunk := m.store.peek((KEY, number))) is not None)
    holder.store.put((KEY, number), theirs.ref, theirs.payload)
    assert read(store) == (None, "other version")
    assert chunks_in(sky) == 20 and store.lookup([KEY]) == [Presence.HIT]
    holder.store.put((KEY, number), ours.ref, ours.payload)
    assert read(store) == (VALUE, None)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_failed_store_of_the_same_bytes_again_leaves_what_is_there(indexed: bool) -> None:
    sky = moving_sky()
    store = store_over(sky, 1, SharedIndex() if indexed else None)
    assert store.put_many([(KEY, VALUE)]) == [True]
    sky.settle(sky.now_s + SLOT_S + 3.0)
    silent = sky.sky.placement(3, 10).locate(0, sky.clock.moves(sky.now_s), sky.clock.moves(sky.now_s))
    sky.cut(silent, ("ground", 1))
    assert store.put_many([(KEY, VALUE)]) == [False]
    sky.mend(silent, ("ground", 1))
    sky.settle(sky.now_s + 3.0)
    assert read(store) == (VALUE, None)


LOSS = {"loss": 0.02}
ALL_FAULTS = {"loss": 0.02, "duplicate": 0.01, "reorder": 0.03, "corrupt": 0.005}


def fresh_reads(
    seed: int, faults: dict[str, float], values: int, reads: int, size: int, per_move: int = 1
) -> tuple[Counter[str], int]:
    """Outcomes of reads by fresh clients just after moves of the box, and how many values are not whole in the end."""
    plan = make_plan("testbed-19x5", time_scale=60.0, epoch_s=0.0, memory_per_satellite_bytes=256 << 20)
    virtual = VirtualConstellation(plan, FaultInjector(**faults, seed=seed))
    index, dice = SharedIndex(), random.Random(seed)
    sky = virtual.simulated
    written = {hashlib.sha256(b"%d" % n).digest(): random.Random(n).randbytes(size) for n in range(values)}
    writer = virtual.store(index=index, ground=1)
    for key, content in written.items():
        assert writer.put_many([(key, content)]) == [True]
    outcomes: Counter[str] = Counter()
    for ground in range(2, 2 + reads):
        next_s = virtual.clock.next_move_s(sky.now_s)
        assert next_s is not None
        if ground % per_move == 0:
            sky.settle(next_s + dice.random() / 2)
        key = dice.choice(list(written))
        store = virtual.store(index=index, ground=ground)
        store.synchronise()
        found, reason = read(store, key)
        assert found in (None, written[key])
        outcomes[reason or "hit"] += 1
        store._driver.close()
    sky.settle(sky.now_s + 5.0)
    return outcomes, sum(chunks_in(sky, key) < -(-size // 6144) for key in written)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "faults"), [(2, LOSS), (3, ALL_FAULTS)], ids=["loss", "all faults"])
def test_fresh_clients_delete_nothing_that_is_intact(seed: int, faults: dict[str, float]) -> None:
    outcomes, lost = fresh_reads(seed, faults, values=20, reads=40, size=600_000)
    assert lost == 0 and outcomes == {"hit": 40}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("faults", [LOSS, ALL_FAULTS], ids=["loss", "all faults"])
def test_fresh_clients_delete_none_of_a_thousand_values(faults: dict[str, float]) -> None:
    outcomes, lost = fresh_reads(4, faults, values=1000, reads=1000, size=61_440, per_move=25)
    assert lost == 0 and outcomes["hit"] >= 0.995 * 1000


def test_a_deletion_is_done_once_all_holders_of_one_servers_share_have_confirmed_it() -> None:
    """Some have confirmed and some are silent, which have a copy of each share: they give it to later readers."""
    sky, servers = simulated(), 4
    writer = store_over(sky, 1, SharedIndex(), servers=servers, replicas=2)
    assert writer.put_many([(KEY, VALUE)]) == [True]
    shares = {
        here: {name[1] % servers for name, _ in machine.store.items() if name[0] == KEY}
        for here, machine in sky.satellites.items()
        if machine.store.shares.get(KEY)
    }
    silent = next(two for two in combinations(shares, 2) if set().union(*map(shares.get, two)) == set(range(servers)))
    for satellite in silent:
        sky.cut(("ground", 1), satellite)
    assert writer.delete([KEY]) == [None]
    assert [here for here in shares if sky.satellites[here].store.shares.get(KEY)] == list(silent)
    for satellite in silent:
        sky.mend(("ground", 1), satellite)
    sky.settle(sky.now_s + 10.0)
    assert read(writer) == (VALUE, None)
    assert writer.delete([KEY]) == [True] and read(writer) == (None, "absent")
