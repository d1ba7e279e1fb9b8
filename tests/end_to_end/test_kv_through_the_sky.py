"""Values through real processes and sockets: whole, through faults, past a dead host, with the index and without."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.in_process import skymemory
from tests.settings_file import settings_file

COMMAND = [sys.executable, "-m", "skymemory"]
BIG_BYTES = 6_000_000


class Sky:
    """The command with a run directory and a working folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.environment = {**os.environ, "SKYMEMORY_RUN_DIR": str(self.run_dir)}

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *words], env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=280
        )

    def up(self, *words: str, settings: str = "") -> None:
        where = ("--base-port", "auto", "--run-dir", str(self.run_dir))
        with settings_file(settings) as more:
            code, _, err = skymemory("constellation", "up", *where, *words, *more)
        assert code == 0, err

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=280,
        )


@pytest.fixture
def sky(tmp_path: Path) -> Iterator[Sky]:
    made = Sky(tmp_path)
    yield made
    skymemory("constellation", "down", "--run-dir", str(made.run_dir))


@pytest.fixture(scope="module")
def big() -> bytes:
    return os.urandom(BIG_BYTES)


@pytest.mark.slow
@pytest.mark.seeded
def test_one_process_puts_another_gets_with_the_index_and_without(sky: Sky, big: bytes) -> None:
    sky.up("--delay", "real")
    (sky.folder / "big.bin").write_bytes(big)
    put = sky("kv", "put", "big.bin", "--json")
    assert put.returncode == 0, put.stderr
    assert json.loads(put.stdout)["bytes"] == BIG_BYTES
    got = sky("kv", "get", "big.bin", "-o", "copy.bin")
    assert got.returncode == 0, got.stderr
    copy = sky.folder / "copy.bin"
    assert copy.read_bytes() == big
    for options in (
        ["--store", f"constellation://{sky.run_dir}?{how}"]
        for how in ("index=no", "access=gateway", "index=no&access=gateway")
    ):
        copy.unlink()
        code, _, err = skymemory("kv", "get", "big.bin", "-o", str(copy), *options)
        assert code == 0 and copy.read_bytes() == big, err
    assert sky("constellation", "rotate", "--slots", "2", "--planes", "1").returncode == 0
    plan = json.loads((sky.run_dir / "constellation.json").read_text("utf-8"))
    assert (plan["pushed_slot_moves"], plan["pushed_plane_moves"]) == (2, 1)  # for hosts that start later
    status = json.loads(sky("constellation", "status", "--json").stdout)
    assert status["delay_error_p99_us"] > 0  # how far it is off says more of the machine than of us
    got = sky("kv", "get", "big.bin", "-o", "copy.bin", "--store", "constellation?index=no")
    assert got.returncode == 0, got.stderr
    assert (sky.folder / "copy.bin").read_bytes() == big
    assert [entry["key"] for entry in json.loads(sky("kv", "list", "--json").stdout)] == ["big.bin"]
    assert sky("kv", "delete", "big.bin").returncode == 0
    gone = sky("kv", "get", "big.bin", "-o", "copy.bin")
    assert gone.returncode == 1 and "not in the constellation" in gone.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param("loss = 0.01", marks=pytest.mark.slow),
        pytest.param("loss = 0.05", marks=pytest.mark.slow),
        "loss = '5%'\nduplicate = '5%'\nreorder = '10%'\nseed = 3",
    ],
)
def test_loss_duplication_and_reordering_change_nothing(sky: Sky, big: bytes, faults: str) -> None:
    sky.up("--delay", "off", settings=f"[faults]\n{faults}")
    (sky.folder / "big.bin").write_bytes(big)
    put = sky("kv", "put", "big.bin", "--json")
    assert put.returncode == 0, put.stderr
    got = sky("kv", "get", "big.bin", "-o", "copy.bin", "--json")
    assert got.returncode == 0, got.stderr
    assert (sky.folder / "copy.bin").read_bytes() == big
    assert json.loads(sky("constellation", "status", "--json").stdout)["faults_injected"] > 0
    assert json.loads(put.stdout)["retransmitted_chunks"] + json.loads(got.stdout)["retransmitted_chunks"] > 0


@pytest.mark.slow
def test_heavy_corruption_never_gives_wrong_bytes(sky: Sky) -> None:
    sky.up("--delay", "off", settings="faults.corrupt = 0.3")
    read = 0
    for number in range(6):
        data = os.urandom(90_000)
        (sky.folder / f"{number}.bin").write_bytes(data)
        if sky("kv", "put", f"{number}.bin").returncode == 0:
            got = sky("kv", "get", f"{number}.bin", "-o", "copy.bin")
            if got.returncode == 0:
                assert (sky.folder / "copy.bin").read_bytes() == data
                read += 1
    assert read > 0, "nothing came through at all: the test says nothing"


@pytest.mark.slow
def test_a_host_killed_between_put_and_get_is_a_miss_within_a_second(sky: Sky) -> None:
    sky.up("--delay", "real")
    (sky.folder / "file.bin").write_bytes(os.urandom(3_000_000))
    assert sky("kv", "put", "file.bin").returncode == 0
    pid = json.loads((sky.run_dir / "host-2.pid").read_text("utf-8"))["pid"]
    os.kill(pid, signal.SIGKILL)
    code = (
        "import time; from skymemory import open_store; from skymemory.store.named_values import get_named\n"
        "store = open_store(); began = time.perf_counter(); found = get_named(store, 'file.bin')\n"
        "print(found.value is None, time.perf_counter() - began)"
    )
    answer = sky.python(code)
    assert answer.returncode == 0, answer.stderr
    missed, seconds = answer.stdout.split()
    assert missed == "True" and float(seconds) < 1.0


@pytest.mark.brief()
def test_no_constellation_and_bad_options_are_reported_in_one_line(sky: Sky) -> None:
    none = sky("kv", "get", "anything")
    assert none.returncode == 1 and "skymemory constellation up" in none.stderr and len(none.stderr.splitlines()) == 1
    absent = sky("kv", "put", "absent.bin")
    assert absent.returncode != 0 and len(absent.stderr.splitlines()) == 1
    sky.up("--hosts", "1", "--delay", "off", settings="memory_per_satellite = '1MiB'")
    (sky.folder / "large.bin").write_bytes(bytes(12 << 20))
    large = sky("kv", "put", "large.bin")
    assert large.returncode == 2 and "at most" in large.stderr


@pytest.mark.brief()
def test_what_a_name_or_a_lifetime_cannot_be_is_refused(sky: Sky) -> None:
    (sky.folder / "note").write_bytes(b"note")
    sky.up("--hosts", "1", "--delay", "off")
    for words in (["put", "note", "--key", ""], ["put", "note", "--ttl", "0s"], ["pin", "note", "--ttl", "0"]):
        refused = sky("kv", *words)
        assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1, words
    both = sky("kv", "pin", "note", "--ttl", "5m", "--off")
    assert both.returncode == 2 and "not allowed with" in both.stderr
    assert sky("kv", "list", "--json").stdout.strip() == "[]"
    name = "two\nlines\x1b[31m ü"
    put = sky("kv", "put", "note", "--key", name)
    listed = sky("kv", "list")
    assert r"two\nlines\x1b[31m ü" in put.stdout and listed.stdout.endswith("  two\\nlines\\x1b[31m ü\n")
    assert json.loads(sky("kv", "list", "--json").stdout)[0]["key"] == name


@pytest.mark.slow
def test_a_sealed_value_says_that_it_wants_its_keys(sky: Sky) -> None:
    pytest.importorskip("cryptography")
    (sky.folder / "note").write_bytes(b"note")
    sky.up("--delay", "off")
    for name in ("mine", "other"):
        assert sky("keys", "new", name).returncode == 0
    assert sky("kv", "put", "note", "--seal", "mine").returncode == 0
    for words, reported in (([], "read it with --seal FILE"), (["--seal", "other"], "does not open with other")):
        without = sky("kv", "get", "note", "-o", "copy", *words)
        assert without.returncode == 1 and reported in without.stderr
    assert sky("kv", "get", "note", "-o", "-", "--seal", "mine").stdout == "note"


@pytest.mark.slow
@pytest.mark.engine
def test_a_prompt_of_one_process_is_served_to_another_and_survives_a_dead_host(sky: Sky) -> None:
    pytest.importorskip("transformers", reason="needs skymemory[hf]")
    sky.up("--delay", "real")
    from tests.end_to_end import shared_prompt  # torch takes seconds: the sky is up by then

    shared_prompt.save_tokenizer(sky.folder)
    getter = subprocess.Popen(
        [sys.executable, "-m", "tests.end_to_end.shared_prompt", str(sky.folder)],
        env=sky.environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        plain = shared_prompt.add(sky.folder, f"constellation://{sky.run_dir}")  # while the other one loads torch
        assert getter.stdout is not None and getter.stdin is not None
        getter.stdin.write(json.dumps(plain) + "\n")
        getter.stdin.flush()
        for _ in range(2):
            cached, _, equal = (getter.stdout.readline() or "0 0 process-ended").split()
            assert int(cached) >= 3 * 128 and equal == "True"
        os.kill(json.loads((sky.run_dir / "host-2.pid").read_text("utf-8"))["pid"], signal.SIGKILL)
        time.sleep(0.2)
        out, errors = getter.communicate("\n", timeout=60)
    finally:
        getter.kill()
        getter.wait()
    assert getter.returncode == 0, errors
    cached, seconds, equal = out.split()
    assert cached == "0" and float(seconds) < 1.0 and equal == "True"
