"""Satellites in C as processes with real sockets, beside those in Python and alone."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.store_contract import StoreContract, Tier
from tests.flight.daemon import build

from skymemory.constellation.presets import preset_named
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import GroundHost
from skymemory.errors import InvalidInput
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.protocol.satellite.state import EvictionConfig
from skymemory.store.sky.store import ConstellationStore
from skymemory.testbed import control
from skymemory.testbed.connect import clock_of, open_constellation, sky_of
from skymemory.testbed.flight import Choice, kinds_for, kinds_of, share_text
from skymemory.testbed.key_file import new_keys, new_secret, read_keys, write_keys
from skymemory.testbed.plan import MemoryPolicy, local_hosts, make_plan
from skymemory.testbed.run_directory import RunDirectory
from skymemory.testbed.supervisor import inspect, revive, start_on_free_ports, stop

PRESET = "testbed-19x5"
LOST = SatelliteId(2, 9)


@pytest.fixture(scope="session")
def daemon() -> Path:
    """The daemon that tests start: the sanitized one where `make test-flight` names it."""
    chosen = os.environ.get("SKYMEMORY_FLIGHT")
    return Path(chosen) if chosen else build() / "skymemory-flight"


@pytest.fixture
def up(daemon: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RunDirectory]]:
    """Starts a constellation, which is stopped afterwards. All hosts live until then, and no daemon may have said more
    than that it listens: ASan and UBSan report in its log.
    """
    monkeypatch.setenv("SKYMEMORY_FLIGHT", str(daemon))
    directory = RunDirectory(tmp_path / "run")

    def start(satellite: Choice, hosts: int = 2, preset: str = PRESET, **plan: Any) -> RunDirectory:
        plan = {"delay_scale": 0.0, "memory_per_satellite_bytes": 8 << 20, **plan}
        if plan.get("auth"):
            plan["keys_file"] = str(directory.keys_path)
        shares = local_hosts(preset, hosts, 26_000)
        start_on_free_ports(
            directory,
            lambda ports: make_plan(preset, hosts=local_hosts(preset, hosts, ports), **plan),
            preset_named(preset).torus.size,
            kinds=kinds_of(satellite, shares),
        )
        return directory

    yield start
    logs = {path.stem: path.read_text() for path in directory.path.glob("*.log")}
    died = set(directory.recorded_hosts()) - set(directory.living())
    _, killed = stop(directory)
    assert not died
    assert killed == 0
    for host, log in logs.items():
        assert "ERROR" not in log and "runtime error" not in log, f"{host}: {log}"


def values(count: int, size: int, seed: int = 1) -> dict[bytes, bytes]:
    draw = random.Random(seed)
    return {hashlib.sha256(b"%d %d" % (seed, one)).digest(): draw.randbytes(size) for one in range(count)}


def put(store: ConstellationStore, these: dict[bytes, bytes]) -> None:
    assert store.put_many(list(these.items())) == [True] * len(these)


def check(store: ConstellationStore, these: dict[bytes, bytes]) -> None:
    assert [bytes(found) if found is not None else None for found in store.get_many(list(these))] == list(
        these.values()
    )


def ledger_balances(found: control.Housekeeping) -> bool:
    came = found["bytes_set"] + found["bytes_migrated_in"]
    gone = ("replaced", "evicted", "deleted", "migrated_out")
    return came == found["memory_used_bytes"] + sum(found[f"bytes_{how}"] for how in gone) + found["bytes_lost"]


@pytest.mark.brief()
def test_half_a_constellation_in_c(up: Callable[..., RunDirectory]) -> None:
    """It stores and reads, moves, loses a satellite in C and one in Python, and both come back empty."""
    directory = up("mixed", auth="answers")
    plan = directory.read_plan()
    assert [(state.state, state.kind) for state in inspect(directory)] == [("running", "python"), ("running", "c")]
    kept = values(4, 200_000)
    with open_constellation(directory.path) as store:
        put(store, kept)
        check(store, kept)
        report = control.rotate(plan, 1, 0)
        assert report.complete and report.acknowledged == 95 and report.chunks_migrated > 0
        check(store, kept)
        both = {SatelliteId(4, 9), SatelliteId(0, 9)}  # by contiguous planes: one of either host
        control.disable(directory, both)
        answers = control.ping_all(plan, control.Silence(0.3, off=both))
        assert {one for one, found in answers.items() if found is None} == both
        control.enable(directory, None)
        answers = control.ping_all(plan)
        assert all(answers.values())
        assert all(ledger_balances(found) for found in answers.values() if found)
        assert {answers[one]["pushed_slot_moves"] for one in both if answers[one]} == {1}
        check(store, kept)


@pytest.mark.brief()
def test_a_daemon_that_was_killed_comes_back_as_one(up: Callable[..., RunDirectory]) -> None:
    directory = up("mixed")
    directory.living()["host-1"].send_signal(signal.SIGKILL)
    while directory.living().get("host-1") is not None:
        time.sleep(0.01)
    assert [state.state for state in inspect(directory)] == ["running", "dead"]
    assert revive(directory) == ["host-1"]
    assert [(state.state, state.kind) for state in inspect(directory)] == [("running", "python"), ("running", "c")]
    kept = values(2, 100_000)
    with open_constellation(directory.path) as store:
        put(store, kept)
        check(store, kept)


@pytest.mark.slow
@pytest.mark.parametrize("auth", ["on", "answers", "every"])
def test_keys_are_followed(up: Callable[..., RunDirectory], auth: str) -> None:
    """A new key is used by clients once daemons know it, and an old one ends."""
    directory = up("c", auth=auth)
    kept = values(2, 100_000)
    with open_constellation(directory.path) as store:
        put(store, kept)
    ring = read_keys(directory.keys_path)
    write_keys(ring.with_key(new_secret(), time.time()), directory.keys_path)
    time.sleep(1.0)
    with open_constellation(directory.path) as store:
        check(store, kept)
    ring = read_keys(directory.keys_path)
    write_keys(ring.without({ring.keys[0].key_id}, time.time() + 1e6), directory.keys_path)
    time.sleep(1.0)
    with open_constellation(directory.path) as store:
        check(store, kept)
    other = directory.path / "other.keys"
    new_keys(other)
    os.replace(other, directory.keys_path)
    time.sleep(1.0)
    with open_constellation(directory.path) as store:
        check(store, kept)


@pytest.mark.slow
@pytest.mark.parametrize("satellite", ["c", "mixed"])
def test_delays_are_kept(up: Callable[..., RunDirectory], satellite: Choice) -> None:
    """No read is faster than light, and none takes much longer where nothing else happens."""
    directory = up(satellite, delay_scale=3.0)
    kept = values(1, 20_000)
    with open_constellation(directory.path) as store:
        put(store, kept)
        (key,) = kept
        least_s = min(_timed(lambda: store.get_many([key])) for _ in range(20))
    # The satellite overhead is 550 km up: 11 ms there and back at three times the delay.
    assert 0.011 <= least_s < 0.030
    worst_us = max(found["delay_error_p99_us"] for found in control.ping_all(directory.read_plan()).values() if found)
    assert worst_us > 0


@pytest.mark.slow
@pytest.mark.seeded
@pytest.mark.parametrize("satellite", ["c", "mixed", "python"])
def test_real_orbits(up: Callable[..., RunDirectory], satellite: Choice) -> None:
    """Beams are as long as the orbits say, for the plan's host and for one on the other side of the Earth; what is
    stored stays while the box moves and links pass behind the Earth.
    """
    scale, far = 5.0, GroundHost(-40.0, 105.0)
    now_s = time.time()
    directory = up(satellite, preset="starlink-b", access="ideal", delay_scale=scale, time_scale=5.0, epoch_s=now_s)
    plan = directory.read_plan()
    kept, others = values(3, 100_000), values(2, 60_000, seed=2)
    clock, sky = clock_of(plan), sky_of(plan)
    placement = sky.placement(STRATEGY_CODES[plan.strategy], plan.servers)  # type: ignore[index]

    def least_s(place: GroundHost | None) -> float:
        """For light there and back, to the satellites of the box as of now."""
        at_s = time.time()
        moves, sky_s, sight = clock.moves(at_s), clock.sky_s(at_s), plan.sight(place)
        beams_s = [sight.one_way_s(each, sky.centre_at(moves), sky_s) for each in placement.box_satellites(moves)]
        return 2 * scale * min(beams_s)

    with open_constellation(directory.path) as store, open_constellation(directory.path, ground=far) as other:
        put(store, kept)
        put(other, others)
        (key, *_) = kept
        for reader, place in ((store, None), (other, far)):
            for _ in range(3):
                bound_s = 0.95 * least_s(place)  # the satellites fly on meanwhile
                assert _timed(lambda reader=reader: reader.get_many([key])) >= bound_s
        assert least_s(far) > 3 * least_s(None)
        moves = clock.moves(time.time())
        deadline_s = time.monotonic() + 120.0
        while clock.moves(time.time()) == moves and time.monotonic() < deadline_s:
            check(store, kept)
            check(other, others)
        check(store, kept)
        check(other, others)
    answers = control.ping_all(plan)
    assert all(found is not None and ledger_balances(found) for found in answers.values())


def _timed(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


@pytest.mark.slow
class TestContractInC(StoreContract):
    satellite: Choice = "c"
    can = frozenset({"limit"})

    @pytest.fixture
    def tier(self, up: Callable[..., RunDirectory]) -> Iterator[Tier]:
        directory = up(self.satellite)
        store = open_constellation(directory.path)
        yield Tier(
            store,
            most_bytes=store.settings.largest_value_bytes,
            pins=False,
            leases=False,
            another=lambda: open_constellation(directory.path),
        )
        store.close()


class TestContractInBoth(TestContractInC):
    satellite: Choice = "mixed"


@pytest.mark.slow
@pytest.mark.parametrize("satellite", ["c", "mixed"])
def test_the_motion_demo(daemon: Path, satellite: Choice) -> None:
    """No wrong byte, and no value lost but those that the killed process held alone."""
    done = subprocess.run(
        [sys.executable, "-m", "skymemory", "demo", "motion", "--json", "--seconds", "20", "--satellite", satellite],
        env={**os.environ, "SKYMEMORY_FLIGHT": str(daemon)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["sound"] and report["wrong"] == 0 and report["readable_at_end"] == report["values"]
    assert all(row["right"] > 0 and row["wrong"] == 0 for row in report["reads"])


# --- What needs no daemon ---


def test_every_second_host_of_a_mix() -> None:
    hosts = local_hosts(PRESET, 5, 26_000)
    assert kinds_of("mixed", hosts) == {"host-1": "c", "host-3": "c"}
    assert kinds_of("c", hosts) == {host.name: "c" for host in hosts} and kinds_of("python", hosts) == {}


def test_more_replicas_than_it_can_ask_about_are_refused(daemon: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYMEMORY_FLIGHT", str(daemon))
    hosts = local_hosts("starlink-a", 2, 26_000)
    plan = make_plan("starlink-a", hosts=hosts, servers=64, replicas=33)
    with pytest.raises(InvalidInput, match="at most 32 replicas"):
        kinds_for("mixed", plan)
    with pytest.raises(InvalidInput, match="at most 32 replicas"):
        share_text(plan, plan.hosts[1])


def test_the_share_says_all_of_the_plan() -> None:
    plan = make_plan(
        time_scale=60.0, epoch_s=1.8e9, replicas=2, memory_policy=MemoryPolicy("gossip,periodic", "lfuda", 12.5)
    )
    lines = [line.split() for line in share_text(plan, plan.hosts[1]).splitlines()]
    found = {words[0]: words[1:] for words in lines}
    eviction = EvictionConfig()
    assert found["eviction"] == ["1", "0", "1", "0"] and found["replacement"] == ["lfuda"]
    assert found["sweep-us"] == ["12500000"] and found["replicas"] == ["2"]
    assert found["confirm-us"] == [str(round(eviction.confirm_s * 1e6))]
    mine = [words for words in lines if words[0] == "satellite"]
    assert [int(words[1]) for words in mine] == [1] * 19
    assert len([words for words in lines if words[0] == "peer"]) == 95 - 19
    delays = {(int(words[1]), int(words[2])): float(words[3]) for words in lines if words[0] == "beam-s"}
    assert delays[0, 0] == min(delays.values()) and len(delays) == 95
    assert delays[1, 0] == delays[4, 0] and delays[0, 1] == delays[0, 18]


@pytest.mark.brief(every=5)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("skymemory-flight 2\n", "line 1"),
        ("skymemory-flight 1\nname a\n", "satellite"),
        ("skymemory-flight 1\nmemory-bytes 12 13\n", "line 2 .memory-bytes."),
        ("skymemory-flight 1\nno-such 12\n", "line 2 .no-such."),
        ("skymemory-flight 1\ntorus 0 5\n", "line 2"),
        ("skymemory-flight 1\ntorus 2 5\ngap 1 3\nsatellite 1 3 127.0.0.1 5000\n", "line 4 .satellite."),
        ("skymemory-flight 1\ntorus 2 5\nplane-orbit 0 0.5 0.1\n", "line 3 .plane-orbit."),
        ("skymemory-flight 1\ntorus 2 5\norbit 7e6 0.9 nan 1e-6 6.3 0 0\n", "line 3 .orbit."),
        ("skymemory-flight 1\nknot 5 1 1\nknot 5 2 2\n", "line 3 .knot."),
        ("skymemory-flight 1\nclock track 0 1 0.1 0.1\n", "line 2 .clock."),
        ("skymemory-flight 1\nwaypoint 0 91 0\n", "line 2 .waypoint."),
        ("skymemory-flight 1\nelevation 30 0.5\nelevation 25 1\n", "line 3 .elevation."),
        ("skymemory-flight 1\ntorus 2 5\nlink-outage 0 1 7 1\n", "line 3 .link-outage."),
        ("skymemory-flight 1\ntorus 1 2\nsatellite 0 5 127.0.0.1 5000\n", "line 3"),
        ("skymemory-flight 1\ntorus 1 2\nsatellite 0 1 localhost 5000\n", "line 3"),
        ("skymemory-flight 1\ntorus 1 2\nsatellite 0 1 [::1] 5000\n", "line 3"),
        ("skymemory-flight 1\ntorus 1 2\nsatellite 0 1 fe80::1%lo 5000\n", "line 3"),
        ("skymemory-flight 1\ntorus 1 2\nsatellite 0 0 ::1 5000\npeer 0 1 10.0.0.1 5000\n", "line 4 .peer."),
    ],
)
def test_a_wrong_configuration_is_named(daemon: Path, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "share"
    path.write_text(text)
    done = subprocess.run([daemon, "satellite", "--config", path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.search(says, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "expected `satellite` first"),
        ("satellite", "expected --config FILE"),
        ("satellite --config", "has no value"),
        ("satellite --confg share", "unknown option"),
        ("satellite --config share --supervisor-fd 3x", "number of an open socket"),
    ],
)
def test_a_wrong_command_line_is_named(daemon: Path, words: str, says: str) -> None:
    done = subprocess.run([daemon, *words.split()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "") and says in done.stderr and "usage:" in done.stderr


def test_help_is_no_error(daemon: Path) -> None:
    done = subprocess.run([daemon, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage:") and done.stderr == ""
