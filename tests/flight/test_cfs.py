"""The app of NASA's cFS: built against the real tree and flown, with its commands over the software bus.

Needs CFS_ROOT, a tree of cFS with its submodules (docs/guide/flight.md); without it all but one test are skipped.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.flight.test_daemon import check, ledger_balances, put, values

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.auth import Authority
from skymemory.protocol.messages import pack_keys
from skymemory.protocol.wire import COMMAND_BYTES, Address, Op, SegmentBatch, SkyHeader, build_packet, sealed
from skymemory.testbed import control
from skymemory.testbed.connect import open_constellation
from skymemory.testbed.flight import share_text
from skymemory.testbed.key_file import new_keys, new_secret, read_keys, write_keys
from skymemory.testbed.plan import ConstellationPlan, local_hosts, make_plan
from skymemory.testbed.plan_file import save_plan
from skymemory.testbed.run_directory import RunDirectory, free_ports
from skymemory.testbed.supervisor import attach, stop
from tools import operator_definitions

spp = pytest.importorskip("space_packet_parser")

ROOT = Path(__file__).resolve().parents[2]
PRESET = "testbed-19x5"
BUILD = ROOT / "build" / "flight-cfs"
CI_LAB, TO_LAB = ("127.0.0.1", 1234), ("127.0.0.1", 1235)
UNPRIVILEGED = 65534
PACKET, APP, ES, TO = 0x18C0, 0x18C1, 0x1806, 0x1880
HERE = SatelliteId(2, 9)
"""Of host-2 of five, and of the only host of one."""
PATIENCE_S = 120.0


@pytest.mark.brief()
def test_without_a_tree_the_build_says_that_it_is_skipped() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CFS_ROOT"}
    done = subprocess.run([ROOT / "flight/cfs/build"], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("skipped: ") and "CFS_ROOT" in done.stdout


def command(mid: int, code: int, payload: bytes = b"") -> bytes:
    return struct.pack(">HHHBB", mid, 0xC000, len(payload) + 1, code, 0) + payload


def packet(op: Op, body: bytes = b"", there: SatelliteId = HERE, sequence: int = 0) -> bytes:
    header = SkyHeader(op, Address(*there), Address(*there, 0xFF), 0x77, 5, credit=256)
    return build_packet(header, body, sequence, 0.0)


class Mission:
    """cFE with the app, beside the other hosts in Python: a folder for each, and the ground's two sockets."""

    def __init__(self, exe: Path, folder: Path, **plan: Any) -> None:
        self.folder, self.directory = folder / "cpu1", RunDirectory(folder / "run")
        shutil.copytree(exe, self.folder)
        hosts = plan.pop("hosts", 5)
        plan = {"delay_scale": 0.0, "memory_per_satellite_bytes": 8 << 20, **plan}
        self.keys = folder / "keys.json"
        if plan.get("auth", "off") != "off":
            new_keys(self.keys)
            plan["keys_file"] = str(self.keys)
        self.plan: ConstellationPlan = make_plan(hosts=local_hosts(PRESET, hosts, free_ports(95)), **plan)
        attach(self.directory, self.plan)
        host = self.plan.hosts[2 if hosts == 5 else 0]
        (self.folder / "cf" / "skymemory.conf").write_text(share_text(self.plan, host))
        self.give_keys()
        self.log = self.folder / "log"
        self.ground = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.ground.bind(TO_LAB)
        self.ground.settimeout(1.0)
        self.definition = spp.load_xtce(operator_definitions.FOLDER / operator_definitions.XTCE_NAME)
        self.host, self.plan_path = host, folder / "plan.json"
        save_plan(self.plan, self.plan_path)
        self.core: subprocess.Popen[bytes] | None = None
        self.others: list[subprocess.Popen[bytes]] = []

    def begin(self) -> None:
        self.others = [
            subprocess.Popen(
                [sys.executable, "-m", "skymemory", "satellite", "--plan", self.plan_path, "--host", one.name],
                stdout=subprocess.DEVNULL,
            )
            for one in self.plan.hosts
            if one is not self.host
        ]
        self.start()

    def give_keys(self) -> None:
        if self.keys.exists():
            on_board = self.folder / "cf" / "skymemory.keys"
            shutil.copy(self.keys, on_board.with_suffix(".new"))
            self._own(on_board.with_suffix(".new"))
            on_board.with_suffix(".new").replace(on_board)

    def _own(self, path: Path) -> None:
        path.chmod(0o700 if path.is_dir() else 0o600)
        if os.geteuid() == 0:
            os.chown(path, UNPRIVILEGED, UNPRIVILEGED)

    def start(self) -> None:
        """Not as root: OSAL cuts the depths of queues to what the system allows for others only."""
        for path in (self.folder, self.folder / "cf"):
            self._own(path)
        user = {"user": UNPRIVILEGED, "group": UNPRIVILEGED, "extra_groups": []} if os.geteuid() == 0 else {}
        said = self.says("SKYMEMORY: .* satellites listen")
        with self.log.open("ab") as out:
            self.core = subprocess.Popen(
                ["./core-cpu1"], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, **user
            )
        self.wait(lambda: self.says("SKYMEMORY: .* satellites listen") > said)
        self.wait(lambda: self.says("SCH Lab Initialized") > 0)
        self.wait(self._all_answer)
        self.enable_downlink()

    def _all_answer(self) -> bool:
        return all(control.ping_all(self.plan).values())

    def enable_downlink(self) -> None:
        """Until telemetry comes: CI_LAB drops what it does not take in time."""
        self.send(command(TO, 6, b"127.0.0.1".ljust(16, b"\0")))
        self.housekeeping()

    def send(self, *packets: bytes) -> None:
        for one in packets:
            self.ground.sendto(one, CI_LAB)

    def says(self, pattern: str) -> int:
        return len(re.findall(pattern, self.log.read_text(errors="replace"))) if self.log.exists() else 0

    def wait(self, holds: Callable[[], Any]) -> Any:
        deadline_s = time.monotonic() + PATIENCE_S
        while not (found := holds()):
            assert time.monotonic() < deadline_s, self.log.read_text(errors="replace")[-3000:]
            time.sleep(0.05)
        return found

    def telemetry(self, apid: int, op: Op | None = None) -> dict[str, int]:
        """The next packet of an APID, as an operator's parser reads it."""

        def got() -> dict[str, int] | None:
            try:
                data = self.ground.recv(65_536)
            except TimeoutError:
                self.send(command(TO, 6, b"127.0.0.1".ljust(16, b"\0")))
                return None
            if int.from_bytes(data[:2], "big") != 0x0800 + apid or (op is not None and data[17] != op):
                return None
            found = self.definition.parse_bytes(data, root_container_name="CCSDSPacket")
            return {name: int(value) for name, value in found.items()}

        return dict(self.wait(got))

    def housekeeping(self) -> dict[str, int]:
        """Of the app, not older than this call: what waits in the socket goes first."""
        self.ground.setblocking(False)
        try:
            while True:
                self.ground.recv(65_536)
        except BlockingIOError:
            self.ground.settimeout(1.0)
        self.telemetry(0x0C1)
        return self.telemetry(0x0C1)

    def counters(self) -> tuple[int, int]:
        found = self.housekeeping()
        return found["command_counter"], found["command_error_counter"]

    def counts(self, accepted: int, rejected: int) -> None:
        self.wait(lambda: self.counters() == (accepted, rejected))

    def _process(self) -> Path:
        assert self.core is not None
        return Path("/proc") / str(self.core.pid)

    def descriptors(self) -> tuple[int, int]:
        """Sockets, queues and files of the process, and its tasks."""
        process = self._process()
        return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))

    def memory_mib(self) -> float:
        status = (self._process() / "status").read_text()
        return int(re.findall(r"VmSize:\s+(\d+)", status)[0]) / 1024

    def power_on_reset(self) -> None:
        """Ends the process; the shared memory of the reset goes with it."""
        self.send(command(ES, 2, struct.pack("<H", 2)))
        assert self.core is not None
        self.core.wait(PATIENCE_S)

    def end(self) -> None:
        try:
            if self.core is not None and self.core.poll() is None:
                self.power_on_reset()
        finally:
            self.ground.close()
            for one in filter(None, (self.core, *self.others)):
                if one.poll() is None:
                    one.terminate()
                one.wait(PATIENCE_S)
            stop(self.directory)


@pytest.fixture(scope="session")
def mission_build() -> Path:
    if not os.environ.get("CFS_ROOT"):
        pytest.skip("needs CFS_ROOT: a tree of NASA's cFS with its submodules (docs/guide/flight.md)")
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [ROOT / "flight/cfs/build"],
            capture_output=True,
            text=True,
            env={**os.environ, "CFS_BUILD": str(BUILD)},
            check=False,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not re.findall(r"skymemory\S*: warning: .*", done.stdout + done.stderr)
    return BUILD / "build" / "exe" / "cpu1"


@pytest.fixture
def fly(mission_build: Path) -> Iterator[Callable[..., Mission]]:
    """Starts a mission; one at a time, because CI_LAB and TO_LAB have fixed ports."""
    flown: list[Mission] = []
    folder = Path(tempfile.mkdtemp(prefix="skymemory-cfs-"))
    folder.chmod(0o755)
    with (BUILD / ".flying").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def start(**plan: Any) -> Mission:
            flown.append(Mission(mission_build, folder, **plan))
            flown[-1].begin()
            return flown[-1]

        try:
            yield start
        finally:
            for one in flown:
                one.end()
            shutil.rmtree(folder)


def some_values() -> dict[bytes, bytes]:
    return {**values(1, 1, 1), **values(2, 98_304, 2), **values(1, 3_000_000, 3)}


@pytest.mark.parametrize("auth", ["off", "on", "answers", "every"])
def test_values_come_back_after_moves(fly: Callable[..., Mission], auth: str) -> None:
    """Also one of 21 MB, larger than what a satellite holds; by the store that wrote and by another."""
    mission = fly(auth=auth)
    kept = {**some_values(), **values(1, 21_000_000, 4)}
    with open_constellation(mission.directory.path) as store, open_constellation(mission.directory.path) as other:
        put(store, kept)
        check(store, kept)
        check(other, kept)
        for _ in range(2):
            report = control.rotate(mission.plan, 1, 0)
            assert report.complete and report.acknowledged == 95 and report.chunks_migrated > 0
        check(store, kept)
        check(other, kept)
    found = mission.housekeeping()
    assert found["satellites"] == 19

    def agrees() -> bool:
        """Copies of chunks that were handed over go a moment later."""
        answers, found = control.ping_all(mission.plan), mission.housekeeping()
        assert all(one and ledger_balances(one) for one in answers.values())
        mine = [one for satellite, one in answers.items() if satellite.plane == 2 and one]
        chunks, used = (sum(one[name] for one in mine) for name in ("chunks_held", "memory_used_bytes"))
        return chunks > 0 and (chunks, used) == (found["all_chunks_held"], found["all_memory_used_bytes"])

    mission.wait(agrees)
    assert found["all_packets_rejected"] == 0


def test_packets_without_their_mac_are_refused(fly: Callable[..., Mission]) -> None:
    """On links and on the bus; new keys are followed."""
    mission = fly(auth="on")
    authority, other = Authority(read_keys(mission.keys)), Authority(read_keys(mission.keys))

    def signed(data: bytes, by: Authority) -> bytes:
        return bytes(by.sign(SegmentBatch(data, len(data)), time.time()).headers)

    def refused() -> int:
        found = control.ping_all(mission.plan)[HERE]
        assert found is not None
        return found["packets_refused"]

    wrong = bytearray(signed(packet(Op.PING), authority))
    wrong[-1] ^= 1
    sound = sealed(bytes(wrong), COMMAND_BYTES)
    address = mission.plan.addresses()[HERE]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.sendto(packet(Op.EVICT, pack_keys([bytes(32)])), address)
        mission.wait(lambda: refused() == 1)
        here.sendto(sound, address)
        mission.wait(lambda: refused() == 2)
    assert mission.counters() == (0, 0)
    mission.send(packet(Op.PING), sound)
    mission.counts(0, 2)
    assert mission.says("packet rejected: not authentic") == 2
    once = signed(packet(Op.PING), authority)
    mission.send(once)
    mission.counts(1, 2)
    assert mission.telemetry(0x0C0, Op.PONG)["field_count"] > 40  # the app's own requests are signed, too
    mission.send(once)
    mission.counts(1, 3)
    assert mission.says("packet rejected: a replay") == 1

    write_keys(read_keys(mission.keys).with_key(new_secret(), time.time()), mission.keys)
    mission.give_keys()
    mission.wait(lambda: mission.says(r"SKYMEMORY: 2 keys") == 1)
    other.ring = read_keys(mission.keys)
    mission.send(signed(packet(Op.PING, sequence=1), other))
    mission.counts(2, 3)
    (mission.folder / "cf" / "skymemory.keys").chmod(0o644)
    (mission.folder / "cf" / "skymemory.keys").write_text("{}\n")
    mission.wait(lambda: mission.says("readable by others.*; the keys stay") == 1)
    mission.send(signed(packet(Op.PING, sequence=2), other))
    mission.counts(3, 3)


def test_commands_over_the_bus(fly: Callable[..., Mission]) -> None:
    """By CI_LAB in and by TO_LAB out: what is valid and what is not is counted, and said."""
    mission = fly()
    mission.counts(0, 0)
    mission.send(command(APP, 0))
    mission.counts(1, 0)
    assert mission.says("SKYMEMORY: NOOP, wire format 1, 19 satellites") == 1
    mission.send(command(APP, 0, b"\0\0"), command(APP, 1, b"\0"), command(APP, 9), command(0x18C2, 0, b"\0"))
    mission.counts(1, 4)
    assert mission.says("SKYMEMORY: command of 10 bytes, expected 8") == 1
    assert mission.says("SKYMEMORY: command of 9 bytes, expected 8") == 2
    assert mission.says("SKYMEMORY: unknown command code 9") == 1

    mission.send(packet(Op.PING))
    mission.counts(2, 4)
    damaged = bytearray(packet(Op.PING))
    damaged[33] ^= 1
    mission.send(bytes(damaged), packet(Op.PING, there=SatelliteId(0, 0)), command(PACKET, 6))
    mission.counts(2, 7)
    assert mission.says("packet rejected: malformed") == 1
    assert mission.says("packet rejected: for no satellite here") == 1
    assert mission.says("packet rejected: too short or too long") == 1
    unknown = bytearray(packet(Op.PING))
    unknown[9] = 0x3F
    mission.send(sealed(bytes(unknown), COMMAND_BYTES))
    mission.counts(2, 8)
    assert mission.says("packet rejected: not supported") == 1

    kept = {bytes(range(32)): random.Random(3).randbytes(98_304)}
    with open_constellation(mission.directory.path) as store:
        put(store, kept)
        answers = control.ping_all(mission.plan)
        holds = [one for one, found in answers.items() if one.plane == 2 and found and found["chunks_held"]]
        assert holds
        mission.send(*(packet(Op.EVICT, pack_keys(list(kept)), there=one) for one in holds))
        mission.counts(2 + len(holds), 8)
        answer = control.ping_all(mission.plan)
        assert not any(answer[one]["chunks_held"] for one in holds if answer[one])
        assert store.get_many(list(kept)) == [None]

    seen = set()
    mission.wait(lambda: seen.add(mission.telemetry(0x0C0, Op.PONG)["source"]) or len(seen) == 19)
    assert seen == {2 << 12 | slot for slot in range(19)}
    mission.send(command(APP, 1))
    mission.counts(0, 0)
    assert mission.says("SKYMEMORY: RESET") == 1


def test_the_app_and_the_system_start_again(fly: Callable[..., Mission]) -> None:
    """Empty, with no more sockets, tasks and memory than before, by ES commands; the other hosts stay."""
    mission = fly(auth="on")
    kept = some_values()
    before = mission.descriptors(), mission.memory_mib()
    with open_constellation(mission.directory.path) as store:
        for again in range(1, 4):
            put(store, kept)
            check(store, kept)
            assert mission.housekeeping()["all_chunks_held"] > 0
            mission.send(command(ES, 6, b"SKYMEMORY".ljust(20, b"\0")))
            mission.wait(lambda done=again: mission.says("satellites listen") == 1 + done)
            mission.wait(mission._all_answer)
            assert mission.housekeeping()["all_chunks_held"] == 0
            assert (mission.descriptors(), again) == (before[0], again)
        assert mission.memory_mib() < before[1] + 100  # satellites have 19 times 8 MiB and more at each start
        assert mission.says("CFE_ES.*Restart Application SKYMEMORY Completed|CFE_ES.*SKYMEMORY.*Completed") == 3
        assert mission.says("(?i)clean ?up failed|failed to delete|app killed|_ERR") == 0
        mission.power_on_reset()
        mission.start()
        assert mission.housekeeping()["all_chunks_held"] == 0
        put(store, kept)
        check(store, kept)


def test_a_whole_constellation_in_one_app(fly: Callable[..., Mission]) -> None:
    mission = fly(hosts=1, auth="on")
    kept = some_values()
    with open_constellation(mission.directory.path) as store:
        put(store, kept)
        control.rotate(mission.plan, 1, 0)
        check(store, kept)
    assert mission.housekeeping()["satellites"] == 95
