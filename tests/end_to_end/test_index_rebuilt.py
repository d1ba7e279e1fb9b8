"""The ground's index is lost, damaged, or never was: processes find what is in the sky all the same, and ask once."""

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

VALUES = """
import hashlib, random
from skymemory import open_store
from skymemory.store.base import Presence
chain = [hashlib.sha256(b'chain %d' % n).digest() for n in range(24)]
small = [hashlib.sha256(b'small %d' % n).digest() for n in range(12)]
value = {key: random.Random(key).randbytes(60_000) for key in chain}
value.update({key: random.Random(key).randbytes(2_000) for key in small})
store = open_store()
"""
PUT = VALUES + "store.prefix(chain); assert all(store.put_many(list(value.items())))"
FIND = VALUES + (
    "import json\n"
    "first = store.prefix(chain); asked = store.stats()['index_probe_packets']\n"
    "right = [got is not None and bytes(got) == value[key] for key, got in zip(chain, store.get_many(chain))]\n"
    "read = store.stats()['index_probe_packets']\n"
    "again = store.prefix(chain), store.stats()['index_probe_packets'] - read\n"
    "beside = store.get_many(small)\n"
    "wrong = sum(got is not None and bytes(got) != value[key] for key, got in zip(small, beside))\n"
    "print(json.dumps({'first': first, 'asked': asked, 'right': sum(right), 'again': again, 'wrong': wrong,\n"
    "    'beside': sum(got is not None for got in beside), 'complete': store.stats()['index_complete']}))"
)


class Sky:
    """A constellation, and programs that use it from a run directory."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"

    def __call__(self, *words: str, run_dir: Path | None = None) -> str:
        if words[0] == "constellation":
            code, out, err = skymemory(*words, "--run-dir", str(run_dir or self.run_dir))
            assert code == 0, err
            return out
        return self._run(["-m", "skymemory", *words], run_dir)

    def python(self, code: str, run_dir: Path | None = None) -> str:
        return self._run(["-c", code], run_dir)

    def find(self, run_dir: Path | None = None) -> dict[str, int]:
        found = json.loads(self.python(FIND, run_dir))
        assert found["wrong"] == 0
        return found

    def _run(self, words: list[str], run_dir: Path | None) -> str:
        environment = {**os.environ, "SKYMEMORY_RUN_DIR": str(run_dir or self.run_dir)}
        answer = subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    @property
    def index(self) -> Path:
        return self.run_dir / "index"

    def status(self) -> dict[str, int]:
        return json.loads(self("constellation", "status", "--json"))["index"]


@pytest.fixture
def sky(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sky]:
    sky = Sky(tmp_path)
    with settings_file(getattr(request, "param", "")) as words:
        sky("constellation", "up", "--base-port", "auto", "--delay", "off", *words)
    yield sky
    sky("constellation", "down")


@pytest.mark.slow
def test_a_deleted_index_is_rebuilt_by_the_next_process(sky: Sky) -> None:
    sky.python(PUT)
    known = sky.find()
    assert (known["first"], known["right"], known["asked"], known["complete"]) == (24, 24, 0, 1)
    assert sky.status() == {"complete": True, "values": 36, "keys_probed": 0, "values_adopted": 0}
    sky.index.unlink()
    found = sky.find()
    assert (found["first"], found["right"], found["beside"], found["complete"]) == (24, 24, 12, 0)
    assert found["asked"] > 0 and found["again"] == [24, 0]
    assert sky.find()["asked"] == 0, "what one process has adopted the others know"
    status = sky.status()
    assert status["values"] == status["values_adopted"] == 36 and not status["complete"]
    assert "incomplete: keys that it lacks are looked up" in sky("constellation", "status")


@pytest.mark.slow
def test_a_damaged_index_is_mended_also_after_the_box_has_moved(sky: Sky) -> None:
    sky.python(PUT)
    sky("constellation", "rotate", "--slots", "2", "--planes", "1")
    journal = bytearray(sky.index.read_bytes())
    journal[200] ^= 4
    sky.index.write_bytes(journal)
    found = sky.find()
    assert (found["first"], found["right"], found["again"], found["complete"]) == (24, 24, [24, 0], 0)
    assert found["asked"] > 0 and sky.find()["asked"] == 0


@pytest.mark.slow
def test_another_computer_finds_it_by_a_plan_and_its_keys(sky: Sky, tmp_path: Path) -> None:
    sky.python(PUT)
    other = tmp_path / "other"
    plan = tmp_path / "sky.json"
    plan.write_bytes((sky.run_dir / "constellation.json").read_bytes())
    keys = tmp_path / "keys"
    keys.write_bytes((sky.run_dir / "keys").read_bytes())
    keys.chmod(0o600)
    sky("constellation", "attach", str(plan), run_dir=other)
    found = sky.find(other)
    assert (found["first"], found["right"], found["again"], found["complete"]) == (24, 24, [24, 0], 0)


@pytest.mark.slow
def test_a_name_is_found_after_the_loss_and_the_command_says_how(sky: Sky, tmp_path: Path) -> None:
    file = tmp_path / "file.bin"
    file.write_bytes(os.urandom(100_000))
    sky("kv", "put", str(file))
    sky.index.unlink()
    got = sky("kv", "get", "file.bin", "-o", str(tmp_path / "copy.bin"))
    assert "located by asking the satellites" in got and (tmp_path / "copy.bin").read_bytes() == file.read_bytes()
    again = json.loads(sky("kv", "get", "file.bin", "-o", str(tmp_path / "copy.bin"), "--json"))
    assert again["keys_probed"] == again["values_adopted"] == 0


@pytest.mark.parametrize("sky", ["servers = 10"], indirect=True, ids=["on ten"])
@pytest.mark.slow
def test_with_a_host_of_satellites_restarted_too_what_survived_is_found(sky: Sky) -> None:
    """Plane 2, the middle of the box, comes back empty: long values lost chunks with it, short ones elsewhere live."""
    sky.python(PUT)
    os.kill(json.loads((sky.run_dir / "host-2.pid").read_text("utf-8"))["pid"], signal.SIGKILL)
    time.sleep(0.2)
    sky("constellation", "revive")
    sky.index.unlink()
    found = sky.find()
    assert found["first"] == 24, "every long value has chunks in the other planes, so it seems to be there"
    assert found["right"] == 0 and found["again"] == [0, 0], "a hole is a miss, and it is not looked for again"
    sky.python(PUT)
    found = sky.find()
    assert (found["first"], found["right"], found["beside"]) == (24, 24, 12)
