"""Daemons in C as a hostile customer meets them: wrong files, taken ports, odd sizes, strange packets, sudden ends."""
# ruff: noqa: F811 - fixtures of test_daemon are named by the arguments that take them

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.flight.test_daemon import check, daemon, put, up, values  # noqa: F401 - fixtures

from skymemory.constellation.torus import SatelliteId
from skymemory.testbed import control
from skymemory.testbed.connect import open_constellation
from skymemory.testbed.flight import share_text
from skymemory.testbed.plan import Faults, local_hosts, make_plan
from skymemory.testbed.run_directory import RunDirectory, free_ports

PRESET = "testbed-19x5"
CENTRE = SatelliteId(2, 9)
FAULTS = Faults(loss=0.02, duplicate=0.02, reorder=0.05, corrupt=0.02, seed=3)
_LISTENS = "satellites listen"


def share(**plan: Any) -> str:
    found = make_plan(
        hosts=local_hosts(PRESET, 1, free_ports(95)),
        **{"delay_scale": 0.0, "memory_per_satellite_bytes": 1 << 20, **plan},
    )
    return share_text(found, found.hosts[0])


def serve(daemon: Path, path: Path, text: bytes | str) -> subprocess.Popen[str]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return subprocess.Popen(
        [daemon, "satellite", "--config", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def said(process: subprocess.Popen[str], patience_s: float = 30.0) -> tuple[int, str]:
    """Its end, and what it said; one that still runs then is asked to end."""
    try:
        out, err = process.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate(timeout=30)
    return process.returncode, out + err


def test_two_daemons_on_one_port(daemon: Path, tmp_path: Path) -> None:
    text = share()
    first = serve(daemon, tmp_path / "first", text)
    try:
        assert first.stdout is not None and _LISTENS in first.stdout.readline()
        code, words = said(serve(daemon, tmp_path / "second", text))
        assert code == 1 and "Address already in use" in words and "port " in words
        assert first.poll() is None
    finally:
        first.terminate()
        code, words = said(first)
    assert (code, words) == (0, "")


@pytest.mark.parametrize("count", [12, pytest.param(150, marks=pytest.mark.slow)])
def test_damaged_configurations_are_refused_or_served(daemon: Path, tmp_path: Path, count: int) -> None:
    """Cut short, bytes changed, lines lost, doubled, swapped: never a crash, and never an end without a reason."""
    draw, sound, served = random.Random(count), share(faults=FAULTS, delay_scale=1.0).encode(), 0
    for number in range(count):
        lines = sound.splitlines(keepends=True)
        how = draw.randrange(5)
        if how == 0:
            text = sound[: draw.randrange(len(sound))]
        elif how == 1:
            damaged = bytearray(sound)
            for _ in range(draw.randint(1, 4)):
                damaged[draw.randrange(min(len(damaged), 1200))] = draw.randrange(256)
            text = bytes(damaged)
        elif how == 2:
            text = draw.randbytes(draw.randrange(4000))
        else:
            for _ in range(draw.randint(1, 3)):
                at, other = draw.randrange(len(lines)), draw.randrange(30)
                if how == 3:
                    lines[at], lines[other] = lines[other], lines[at]
                else:
                    lines[other] = b"" if draw.random() < 0.5 else 2 * lines[other]
            text = b"".join(lines)
        code, words = said(serve(daemon, tmp_path / "share", text), 0.2)
        served += code == 0
        assert code in (0, 1, 2) and "ERROR" not in words and "runtime error" not in words, (number, code, words)
        assert words.strip(), (number, code)
    assert served < count


@pytest.mark.parametrize("text", ["", "\0\0\0", "skymemory-flight 2\n", "satellite 0 0 127.0.0.1 5000\n"])
def test_no_configuration_of_this_release(daemon: Path, tmp_path: Path, text: str) -> None:
    code, words = said(serve(daemon, tmp_path / "share", text))
    assert code == 2 and str(tmp_path / "share") in words


@pytest.mark.parametrize("size", [0, 1, 71, 1 << 10, 1 << 16, 1 << 31, 1 << 36, 1 << 44, 2**63 - 1])
def test_memories_of_any_size(daemon: Path, tmp_path: Path, size: int) -> None:
    """Served, or refused for a reason that names memory."""
    text = share().replace(f"memory-bytes {1 << 20}", f"memory-bytes {size}")
    process = serve(daemon, tmp_path / "share", text)
    assert process.stdout is not None
    first = process.stdout.readline()
    process.terminate()
    code, words = said(process)
    if _LISTENS in first:
        assert (code, words) == (0, "")
    else:
        assert code in (1, 2) and "memory" in (first + words).lower(), (code, first, words)


@pytest.mark.parametrize("chunk", [64, pytest.param(65_375, marks=pytest.mark.slow)])
def test_chunks_of_any_size(up: Callable[..., RunDirectory], chunk: int) -> None:
    directory = up("c", chunk_bytes=chunk)
    kept = values(3, 7 * chunk + 13) | values(2, 1, seed=2)
    with open_constellation(directory.path) as store:
        put(store, kept)
        check(store, kept)
        assert control.rotate(directory.read_plan(), 1, 1).complete
        check(store, kept)


@pytest.mark.parametrize("satellite", ["c", pytest.param("mixed", marks=pytest.mark.slow)])
def test_injected_faults(up: Callable[..., RunDirectory], satellite: Any) -> None:
    """Every kind of them, on every link; reads are right all the same, and `status` counts the faults."""
    directory = up(satellite, faults=FAULTS, delay_scale=0.1)
    plan, kept = directory.read_plan(), values(6, 60_000)
    with open_constellation(directory.path) as store:
        put(store, kept)
        for _ in range(3):
            check(store, kept)
        assert control.rotate(plan, 1, 0).complete
        check(store, kept)
    time.sleep(0.6)  # daemons count for housekeeping twice a second
    answers = control.ping_all(plan, 3.0)
    for plane in range(5):
        assert any(found and found["faults_injected"] > 10 for one, found in answers.items() if one.plane == plane)


@pytest.mark.brief("faults1")
@pytest.mark.parametrize("faults", [None, FAULTS])
def test_strange_datagrams(up: Callable[..., RunDirectory], faults: Faults | None) -> None:
    """Empty, short, long, random, and from one socket to all."""
    directory = up("c", **({"faults": faults} if faults else {}))
    plan, kept, draw = directory.read_plan(), values(2, 50_000), random.Random(5)
    with open_constellation(directory.path) as store:
        put(store, kept)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hostile:
            for address in plan.addresses().values():
                for size in (0, 0, 1, 7, 8, 51, 52, 60, 1400, 65_507):
                    body = draw.randbytes(size)
                    hostile.sendto(body if draw.random() < 0.5 else b"\x18\xc0\xc0\x00" + body[4:], address)
        check(store, kept)
    assert all(control.ping_all(plan, 3.0).values())


@pytest.mark.slow
def test_an_end_amid_a_handover(up: Callable[..., RunDirectory]) -> None:
    """SIGTERM while chunks are on their way: it ends at once and in order; what another host held is still right."""
    directory = up("c", delay_scale=3.0)
    plan, kept = directory.read_plan(), values(10, 200_000)
    with open_constellation(directory.path) as store:
        put(store, kept)
        record = json.loads((directory.path / "host-1.pid").read_text())
        moving = subprocess.Popen(
            [Path(sys.executable).with_name("skymemory"), "constellation", "rotate", "--run-dir", directory.path],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not any(a and a["pushed_slot_moves"] for a in control.ping_all(plan, 0.2).values()):
            pass
        began_s = time.monotonic()
        os.kill(record["pid"], signal.SIGTERM)
        while directory.living().get("host-1") is not None:
            time.sleep(0.005)
            assert time.monotonic() < began_s + 5
        assert not (directory.path / "host-1.pid").exists()
        moving.wait(60)
        for key, found in zip(kept, store.get_many(list(kept)), strict=True):
            assert found is None or bytes(found) == kept[key]
