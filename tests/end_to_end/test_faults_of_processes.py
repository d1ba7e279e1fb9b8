"""Satellites disabled, planes gone, host processes killed and started again: with real processes and sockets."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.in_process import skymemory

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.wire import Op
from skymemory.store.base import Presence
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed.connect import client_of, expected_round_trip_s, open_constellation
from skymemory.testbed.control import ping_all, rotate
from skymemory.testbed.plan import ConstellationPlan
from skymemory.testbed.plan_file import load_plan, save_plan

VALUE = os.urandom(300_000)
KEY = hashlib.sha256(b"faults").digest()


class Sky:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def __call__(self, *words: str) -> str:
        code, out, err = skymemory("constellation", *words, "--run-dir", str(self.run_dir))
        assert code == 0, err
        return out

    @property
    def plan(self):
        return load_plan(self.run_dir / "constellation.json")

    def kill(self, *hosts: int) -> None:
        """They are dead when this returns: on a busy machine a signal takes its time."""
        pids = [json.loads((self.run_dir / f"host-{host}.pid").read_text("utf-8"))["pid"] for host in hosts]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        until_s = time.monotonic() + 30
        while any(map(lives, pids)):
            assert time.monotonic() < until_s
            time.sleep(0.01)

    def silent(self) -> set[SatelliteId]:
        """Those that do not answer, by two looks that agree: on a busy machine one look finds more."""
        looks: list[set[SatelliteId]] = []
        for wait_s in (0.3, 0.3, 1.0, 3.0):
            looks.append({satellite for satellite, answer in ping_all(self.plan, wait_s).items() if answer is None})
            if not looks[-1] or looks[-1] in looks[:-1]:
                break
        return set.intersection(*looks)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def gets_that_miss(store: ConstellationStore, count: int, pause_s: float) -> tuple[list[float], list[float]]:
    """Of so many: what each cost of this thread's processor, and how long it took, both ascending."""
    cost_s, took_s = [], []
    for _ in range(count):
        began_s, began_cost_s = time.perf_counter(), time.thread_time()
        assert store.get_many([KEY]) == [None]
        cost_s.append(time.thread_time() - began_cost_s)
        took_s.append(time.perf_counter() - began_s)
        time.sleep(pause_s)
    return sorted(cost_s), sorted(took_s)


@pytest.fixture
def sky(tmp_path: Path) -> Iterator[Sky]:
    sky = Sky(tmp_path / "run")
    sky("up", "--base-port", "auto", "--delay", "off")
    yield sky
    sky("down")


@pytest.fixture
def store(sky: Sky) -> Iterator[ConstellationStore]:
    store = open_constellation(sky.run_dir)
    yield store
    store.close()


def plane(number: int) -> set[SatelliteId]:
    return {SatelliteId(number, slot) for slot in range(19)}


@pytest.mark.slow
def test_disabled_satellites_are_dead_and_come_back_empty(sky: Sky, store: ConstellationStore) -> None:
    assert store.put_many([(KEY, VALUE)]) == [True]
    assert sky("disable", "2,9", "1,3") == "2 satellites are disabled\n"
    assert sky.silent() == {SatelliteId(2, 9), SatelliteId(1, 3)}
    assert store.get_many([KEY]) == [None]
    sky("disable", "--plane", "4")
    assert sky.silent() == {SatelliteId(2, 9), SatelliteId(1, 3)} | plane(4)
    assert sky("enable", "--plane", "4", "2,9") == "1 satellite is disabled\n"
    answers = ping_all(sky.plan, 0.3)
    assert {satellite for satellite, answer in answers.items() if answer is None} == {SatelliteId(1, 3)}
    assert answers[SatelliteId(2, 9)]["chunks_held"] == 0
    sky("enable", "--all")
    assert not sky.silent()
    heal(store)
    assert store.get_many([KEY]) == [None] and store.put_many([(KEY, VALUE)]) == [True]
    assert bytes(store.get_many([KEY])[0]) == VALUE


@pytest.mark.slow
def test_one_whose_port_is_taken_for_a_moment_comes_back_all_the_same(sky: Sky) -> None:
    victim = SatelliteId(2, 9)
    sky("disable", "2,9")
    address = next(
        address for host in sky.plan.hosts for satellite, address in sky.plan.addresses_of(host) if satellite == victim
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(address)

        def close_once_it_was_tried() -> None:
            until_s = time.monotonic() + 30
            while "trying again" not in log.read_text("utf-8") and time.monotonic() < until_s:
                time.sleep(0.02)
            other.close()

        log = sky.run_dir / "host-2.log"
        closing = threading.Thread(target=close_once_it_was_tried)
        closing.start()
        assert sky("enable", "2,9") == "no satellite is disabled\n"
        closing.join(30)
    assert not sky.silent()
    assert log.read_text("utf-8").count("trying again") == 1 and "Address already in use" in log.read_text("utf-8")


def test_what_is_no_satellite_is_refused(sky: Sky) -> None:
    for words in (["2,19"], ["5,0"], ["2"], ["--plane", "5"], []):
        with pytest.raises(AssertionError, match=r"satellite|plane"):
            sky("disable", *words)
    assert not (sky.run_dir / "outages.json").exists()


@pytest.mark.slow
@pytest.mark.seeded
def test_packets_go_round_what_is_disabled(sky: Sky) -> None:
    """From the gateway (2, 9) to (4, 9), both ways closed but one."""
    plan = sky.plan
    client = client_of(plan, "gateway", expected_round_trip_s(plan, "gateway"), 2.0)
    try:

        def ping(satellite: SatelliteId) -> bool:
            number = client.machine.ask(Op.PING, b"", satellite, client.now_s())
            return client.run([number])[number].ok

        assert ping(SatelliteId(4, 9))
        sky("disable", "--plane", "3")
        assert ping(SatelliteId(4, 9)) and ping(SatelliteId(4, 12))
        assert not ping(SatelliteId(3, 9))
        sky("enable", "--all")
        assert ping(SatelliteId(3, 9)) and ping(SatelliteId(4, 9))
    finally:
        client.close()


@pytest.mark.slow
def test_killed_hosts_are_started_again_and_learn_what_they_missed(sky: Sky, store: ConstellationStore) -> None:
    assert store.put_many([(KEY, VALUE)]) == [True]
    sky("disable", "0,7")
    before = sky.plan
    sky.kill(0, 4)
    time.sleep(0.2)
    assert rotate(before, 2, 1).moves_after == (2, 1)
    save_plan(before, sky.run_dir / "constellation.json")  # as on a computer that has not got the new file
    assert sky("revive") == "started again, empty: host-0, host-4\n"
    assert sky("revive") == "no host process is dead\n"
    until_s = time.monotonic() + 30  # on a busy computer those just started answer late
    while (silent := sky.silent()) != {SatelliteId(0, 7)} and time.monotonic() < until_s:
        time.sleep(0.05)
    assert silent == {SatelliteId(0, 7)}
    sky("enable", "--all")
    answers = ping_all(sky.plan, 0.3).values()
    assert {(answer["pushed_slot_moves"], answer["pushed_plane_moves"]) for answer in answers} == {(2, 1)}
    assert bytes(store.get_many([KEY])[0]) == VALUE  # planes 1 to 3 hold it, wherever it is by now


@pytest.mark.slow
def test_idle_satellites_cost_nothing_even_with_a_plane_dead(sky: Sky) -> None:
    def used_ticks() -> int:
        pids = [json.loads(path.read_text("utf-8"))["pid"] for path in sky.run_dir.glob("*.pid")]
        stats = [Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split() for pid in pids]
        return sum(int(stat[11]) + int(stat[12]) for stat in stats)

    plan = sky.plan
    client = client_of(plan, "gateway", 0.0, 0.8)
    sky("disable", "--plane", "3")
    for satellite in (SatelliteId(4, 9), SatelliteId(4, 12)):
        number = client.machine.ask(Op.PING, b"", satellite, client.now_s())
        client.run([number])
    client.close()
    _await_end_of_flood(plan)
    before, begun_s = used_ticks(), time.monotonic()
    time.sleep(3.0)
    share = (used_ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - begun_s)
    assert share < 0.05, "of one core"


def _await_end_of_flood(plan: ConstellationPlan) -> None:
    """Each of the 38 neighbours of a dead plane says so to every other, once, as soon as it knows: about 280 packets
    each, part of a second of a core in all. Then there is silence but for a question to each of the dead every 8 s.
    """
    received = 0
    for _ in range(40):
        before = received
        received = sum(answer["packets_received"] for answer in ping_all(plan, 0.3).values() if answer is not None)
        if received - before < 3 * plan.torus.size:
            return
        time.sleep(0.5)
    raise AssertionError("satellites still send each other news of the dead plane after 20 s")


def heal(store: ConstellationStore) -> float:
    """Seconds until no satellite is suspected any more, without a request to the store."""
    begun_s = time.monotonic()
    while store._driver.machine.probing and time.monotonic() < begun_s + 10.0:
        time.sleep(0.02)
    assert not store._driver.machine.probing
    return time.monotonic() - begun_s


@pytest.mark.slow
def test_with_a_plane_of_the_box_dead_a_miss_costs_milliseconds_and_it_heals_without_a_call(
    sky: Sky, store: ConstellationStore
) -> None:
    assert store.put_many([(KEY, VALUE)]) == [True]
    before = {thread.name for thread in threading.enumerate()}
    sky.kill(2)
    time.sleep(0.1)
    begun_s = time.monotonic()
    assert store.get_many([KEY]) == [None]
    assert time.monotonic() - begun_s < 5.0
    assert store.lookup([KEY]) == [Presence.HIT], "who is silent may come back: it is not evicted"
    cost_s, took_s = gets_that_miss(store, 300, 0.01)
    assert cost_s[285] < 0.005, "of the processor"
    assert took_s[150] < 0.1, (
        "no satellite is waited for; beside other programs a thread waits for its turn now and then"
    )
    assert store.stats()["breaker_open"] == 0
    sky("revive")
    assert heal(store) < 9
    assert store.put_many([(KEY, VALUE)]) == [True] and bytes(store.get_many([KEY])[0]) == VALUE
    until_s = time.monotonic() + 30
    while {thread.name for thread in threading.enumerate()} != before and time.monotonic() < until_s:
        time.sleep(0.02)
    assert {thread.name for thread in threading.enumerate()} == before, "the thread that healed has ended"


@pytest.mark.slow
def test_with_all_hosts_killed_a_get_costs_milliseconds_and_it_heals(sky: Sky, store: ConstellationStore) -> None:
    assert store.put_many([(KEY, VALUE)]) == [True]
    sky.kill(0, 1, 2, 3, 4)
    time.sleep(0.1)
    begun_s = time.monotonic()
    assert store.get_many([KEY]) == [None]
    assert time.monotonic() - begun_s < 5.0
    assert store.stats()["breaker_open"] == 1
    cost_s, took_s = gets_that_miss(store, 200, 0.005)
    assert cost_s[190] < 0.005 and took_s[100] < 0.1
    assert store.put_many([(KEY, VALUE)]) == [False] and store.names() == []
    sky("revive")
    heal(store)
    assert store.stats()["breaker_open"] == 0 and store.stats()["client_breaker_opened"] == 1
    assert store.put_many([(KEY, VALUE)]) == [True] and bytes(store.get_many([KEY])[0]) == VALUE


@pytest.mark.slow
def test_a_dead_host_costs_a_listing_one_wait_and_does_not_open_the_breaker(
    sky: Sky, store: ConstellationStore
) -> None:
    sky.kill(2)
    begun_s = time.monotonic()
    assert store.names() == []
    assert time.monotonic() - begun_s < 8.0, "one wait for all 19, not one for each"
    took_s = []
    for _ in range(5):
        begun_s = time.monotonic()
        store.names()
        took_s.append(time.monotonic() - begun_s)
    assert min(took_s) < 0.7, "less than one wait"
    for _ in range(3):
        store.put_many([(KEY, VALUE)])
    assert store.stats()["breaker_open"] == 0 and store.stats().get("client_breaker_opened", 0) == 0


@pytest.mark.slow
def test_with_two_copies_a_dead_plane_is_no_miss(tmp_path: Path) -> None:
    sky = Sky(tmp_path / "run")
    sky("up", "--base-port", "auto", "--delay", "off", "--replicas", "2")
    store = open_constellation(sky.run_dir)
    try:
        assert store.put_many([(KEY, VALUE)]) == [True]
        sky("disable", "--plane", "1")
        assert bytes(store.get_many([KEY])[0]) == VALUE
        sky.kill(2)
        sky("enable", "--all")
        ticket = store.prepare_load([KEY])
        store.complete_load(ticket)  # plane 1 is empty and plane 2 dead: a hit or an honest miss
        assert store.put_many([(KEY, VALUE)]) == [True] and bytes(store.get_many([KEY])[0]) == VALUE
        assert store.delete([KEY]) == [True] and store.get_many([KEY]) == [None]
    finally:
        store.close()
        sky("down")
