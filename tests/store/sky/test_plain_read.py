"""Small values on near satellites take a short way in the client. It ends as the long one would, whatever comes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.contract.store_contract import key, value
from tests.store.conftest import connection, stopped, store_on, udp_sky_and_loop

from skymemory import native
from skymemory.native.twin.runs import Tally
from skymemory.placement.fan_out import FanOut
from skymemory.protocol.client import machine
from skymemory.protocol.client.machine import Finished, PlainRead
from skymemory.protocol.messages import pack_keys
from skymemory.protocol.wire import CHUNK_REF_BYTES, Op
from skymemory.reasons import Miss
from skymemory.store.sky.probing import ask_all
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.plan import Faults

ON_ONE = FanOut({1: 0.0, 10: 0.0}, 0.0)
PROVED_S = 30.0


@pytest.fixture(autouse=True)
def _satellites_of_this_process_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the interpreter with the client, and answer after milliseconds."""
    monkeypatch.setattr(machine, "_PLAIN_ROUND_TRIP_S", 1.0)


def short_ways(store: ConstellationStore) -> list[bool]:
    """Grows with each read that takes the short way: whether it ended there."""
    client, taken = connection(store), list[bool]()
    end_plain_get = client.machine.end_plain_get

    def noted(*given: object) -> Finished | int:
        ended = end_plain_get(*given)  # type: ignore[arg-type]
        taken.append(isinstance(ended, Finished))
        return ended

    client.machine.end_plain_get = noted  # type: ignore[method-assign]
    return taken


def without_short_ways(store: ConstellationStore) -> None:
    connection(store).machine.plain_get = lambda *given: None  # type: ignore[method-assign]


def read(store: ConstellationStore, one: bytes) -> tuple[bytes | None, Miss | None]:
    """The value, or why it is a miss."""
    ticket = store.prepare_load([one])
    (found,) = store.complete_load(ticket)
    assert ticket.report is not None
    return None if found is None else bytes(found), ticket.report.keys[0].reason


@pytest.mark.brief("0", "6144", "6145", "1")
@pytest.mark.parametrize("size", [0, 1, 6143, 6144, 6145, 64 * 6144, 128 * 6144])
def test_a_small_value_of_any_size_ends_on_the_short_way(size: int) -> None:
    with udp_sky_and_loop() as (plan, _):
        store = store_on(plan, SharedIndex(), fan_out=ON_ONE)
        taken = short_ways(store)
        assert store.put_many([(key(1), value(1, size))]) == [True]
        for _ in range(5):
            assert read(store, key(1)) == (value(1, size), None)
        assert len(taken) >= 4, "but for the first, whose round trip is not known"
        store.close()


def test_a_larger_value_or_one_on_several_satellites_takes_the_long_way() -> None:
    with udp_sky_and_loop() as (plan, _):
        for one in (store_on(plan, SharedIndex(), fan_out=ON_ONE), store_on(plan, SharedIndex())):
            taken = short_ways(one)
            size = 128 * 6144 + 1 if one.settings.fan_out else 6145
            assert one.put_many([(key(2), value(2, size))]) == [True]
            assert read(one, key(2)) == read(one, key(2)) == (value(2, size), None)
            assert taken == []
            one.close()


@pytest.mark.brief("1")
@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_network_does_to_packets_a_read_gives_the_value(seed: int) -> None:
    faults = Faults(loss=0.03, duplicate=0.05, reorder=0.05, corrupt=0.03, seed=seed)
    with udp_sky_and_loop(faults=faults) as (plan, _):
        store = store_on(plan, SharedIndex(), fan_out=ON_ONE)
        taken, dice = short_ways(store), random.Random(seed)
        items = [(key(number), value(number, dice.randrange(1, 40 * 6144))) for number in range(8)]
        assert all(store.put_many(items))
        for _ in range(150):
            one, its = dice.choice(items)
            assert read(store, one) == (its, None)
        assert True in taken
        assert False in taken, "some went on as operations"
        open_requests = connection(store).machine._in_flight.by_id.values()
        assert all(request.operation.transfer is None for request in open_requests), "but for pings"
        assert connection(store).machine._peers.inbound.in_flight_bytes == 0
        store.close()


@pytest.mark.brief("0")
@pytest.mark.parametrize("seed", range(3))
def test_what_is_said_to_be_written_is_whole(seed: int) -> None:
    faults = Faults(loss=0.05, duplicate=0.05, reorder=0.05, corrupt=0.02, seed=seed)
    with udp_sky_and_loop(faults=faults) as (plan, _):
        index = SharedIndex()
        store, other = store_on(plan, index, fan_out=ON_ONE), store_on(plan, index, ground=8)
        ended, dice, client = [], random.Random(seed), connection(store).machine
        end_plain_put = client.end_plain_put

        def noted(*given: object) -> Finished | int | None:
            ended.append(end_plain_put(*given))  # type: ignore[arg-type]
            goes_on = type(ended[-1]) is int and ended[-1] in client._operations
            assert not goes_on or ended[-1] in client._keepalive._writes, "announced while it lasts"
            return ended[-1]

        client.end_plain_put = noted  # type: ignore[method-assign]
        for number in range(60):  # each under its own key: a late packet of one write must not meet the next
            its = value(number, dice.randrange(1, dice.choice([1, 2, 100]) * 6144))
            assert store.put_many([(key(number), its)]) == [True]
            got, reason = read(other, key(number))
            assert (got == its, reason) == (True, None), number
        kinds = {type(one) for one in ended}
        assert {Finished, int} <= kinds
        assert client._keepalive._writes == {}
        for one in (store, other):
            one.close()


def test_sound_chunks_that_do_not_make_the_value_they_claim_are_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    value_refs, wrong = native.value_refs, (0xDEADBEEF).to_bytes(4, "big")

    def lying(*how: object) -> tuple[bytearray, int]:
        refs, _ = value_refs(*how)  # type: ignore[arg-type]
        for at in range(0, len(refs), CHUNK_REF_BYTES):
            refs[at + 52 : at + 56] = wrong
        return refs, int.from_bytes(wrong, "big")

    with udp_sky_and_loop() as (plan, _):
        store = store_on(plan, SharedIndex(), fan_out=ON_ONE)
        machine_of, ended = connection(store).machine, list[bool]()
        end_plain_get = machine_of.end_plain_get

        def noted(plain: PlainRead, tallies: Sequence[Tally], now_s: float) -> Finished | int:
            end = end_plain_get(plain, tallies, now_s)
            if sum(tally[3] for tally in tallies) == plain.info.chunks:
                ended.append(isinstance(end, Finished))
            return end

        machine_of.end_plain_get = noted  # type: ignore[method-assign]
        monkeypatch.setattr(native, "value_refs", lying)
        for number in range(100):  # on a busy machine an answer may be late for the short way
            assert store.put_many([(key(number), value(1, 20_000))]) == [True]
            found, reason = read(store, key(number))
            assert found is None and reason in ("corrupt", "timeout", "unreachable", "under way")
            if ended:
                break
        assert ended and not any(ended)
        store.close()


def gone(store: ConstellationStore, other: ConstellationStore) -> None:
    """The satellites have evicted it, without a notice."""
    everyone = [(one, pack_keys([key(1)]), None) for one in connection(other)._satellites]
    assert all(answer.ok for _, answer in ask_all(other._driver, Op.EVICT, everyone))


def replaced(store: ConstellationStore, other: ConstellationStore) -> None:
    assert other.put_many([(key(1), value(9, 30_000))]) == [True]


def nothing(store: ConstellationStore, other: ConstellationStore) -> None:
    pass


def proved(store: ConstellationStore, key: bytes) -> tuple[bytes | None, Miss | None]:
    """What is read once that is sure: a satellite that answers late, as on a busy machine, proves nothing."""
    end_s = time.monotonic() + PROVED_S
    while (found := read(store, key))[1] == "under way":
        assert time.monotonic() < end_s
    return found


@pytest.mark.brief()
@pytest.mark.parametrize("happens", [nothing, gone, replaced])
def test_a_miss_has_the_reason_of_the_long_way(
    happens: Callable[[ConstellationStore, ConstellationStore], None],
) -> None:
    ends = []
    for short in (True, False):
        with udp_sky_and_loop() as (plan, _):
            index = SharedIndex()
            store, other = store_on(plan, index, fan_out=ON_ONE), store_on(plan, None, ground=8, fan_out=ON_ONE)
            other._catalog.bytes_by_servers = dict  # type: ignore[method-assign,assignment]
            assert store.put_many([(key(1), value(1, 20_000))]) == [True]
            assert read(store, key(1)) == (value(1, 20_000), None)
            taken = short_ways(store)
            if not short:
                without_short_ways(store)
            happens(store, other)
            ends.append([proved(store, key(1)), read(store, key(1)), len(index)])
            assert bool(taken) is short
            for one in (store, other):
                one.close()
    assert ends[0] == ends[1]


def test_a_satellite_that_is_silent_for_a_moment_is_waited_for_and_one_that_stays_silent_is_given_up() -> None:
    with udp_sky_and_loop() as (plan, loop):
        store = store_on(plan, SharedIndex(), fan_out=ON_ONE)
        assert store.put_many([(key(1), value(1, 20_000))]) == [True]
        assert read(store, key(1))[0] == read(store, key(1))[0] == value(1, 20_000)
        loop.call_soon_threadsafe(time.sleep, 0.05)
        assert read(store, key(1)) == (value(1, 20_000), None)
        with stopped(loop, connection(store)):
            assert read(store, key(1)) == (None, "timeout")
        assert read(store, key(1)) == (value(1, 20_000), None)
        store.close()


def test_writers_of_small_values_share_what_the_satellite_offers() -> None:
    with udp_sky_and_loop() as (plan, _):
        stores = [store_on(plan, SharedIndex(), ground=ground, fan_out=ON_ONE) for ground in (9, 10, 11)]

        def offered(number: int) -> int:
            """After a write, by the one satellite."""
            assert stores[number].put_many([(key(number), value(number, 6000))]) == [True]
            (window,) = connection(stores[number]).machine._peers._outbound.values()
            return window.limit_bytes

        whole = offered(0)
        # A writer counts for half a second to a second, in which a busy computer may not let all three write.
        rounds = ({whole // offered(number) for number in (0, 1, 2)} for _ in range(50))
        assert {3} in rounds
        for store in stores:
            store.close()


@pytest.mark.brief()
def test_threads_that_read_small_values_get_their_own() -> None:
    with udp_sky_and_loop() as (plan, _):
        store = store_on(plan, SharedIndex(), fan_out=ON_ONE)
        items = [(key(number), value(number, 500 * number + 1)) for number in range(8)]
        assert all(store.put_many(items))

        def many(number: int) -> bool:
            one, its = items[number]
            return all(read(store, one) == (its, None) for _ in range(50))

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(many, range(8)))
        store.close()


def test_a_write_leaves_nothing_of_the_value_before_it_on_other_satellites() -> None:
    with udp_sky_and_loop() as (plan, _):
        index = SharedIndex()
        wide, store = store_on(plan, index), store_on(plan, index, ground=2, fan_out=ON_ONE)
        assert store.put_many([(key(9), value(9, 100))]) == [True], "now the round trip is known"
        assert wide.put_many([(key(1), value(1, 60_000))]) == [True]
        assert store.put_many([(key(1), value(2, 60_000))]) == [True]
        (left,) = store._catalog._prober.settings_in_box([key(1)])[key(1)]
        assert (left.servers, read(store, key(1))) == (1, (value(2, 60_000), None))
        for one in (wide, store):
            one.close()
