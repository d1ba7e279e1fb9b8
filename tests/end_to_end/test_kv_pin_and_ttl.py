"""`skymemory kv pin` and `put --ttl` through real processes and sockets, under memory pressure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SIZE_BYTES = 2_000_000


@pytest.fixture
def sky(tmp_path: Path) -> Iterator[object]:
    environment = {**os.environ, "SKYMEMORY_RUN_DIR": str(tmp_path / "run")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "skymemory", *words],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )

    (tmp_path / "sky.toml").write_text(
        "memory_per_satellite = '1MiB'\neviction = 'lazy,gossip,periodic,migration'\n"
        "replacement = 'lfuda'\nsweep = '2s'\n"
    )
    plain = ("--base-port", "auto", "--hosts", "1", "--delay", "off")
    up = run("constellation", "up", *plain, "--settings", "sky.toml")
    assert up.returncode == 0, up.stderr
    yield run
    run("constellation", "down")


@pytest.mark.slow
def test_pinned_stays_expired_goes_and_the_rest_makes_room(sky, tmp_path: Path) -> None:
    data = os.urandom(SIZE_BYTES)
    (tmp_path / "file").write_bytes(data)
    assert sky("kv", "put", "file", "--key", "kept").returncode == 0
    pinned = sky("kv", "pin", "kept", "--ttl", "10m", "--json")
    assert pinned.returncode == 0 and json.loads(pinned.stdout) == {"key": "kept", "pinned": True, "ttl_s": 600.0}
    brief = sky("kv", "put", "file", "--key", "brief", "--ttl", "1.5s", "--json")
    assert brief.returncode == 0 and json.loads(brief.stdout)["ttl_s"] == 1.5
    put_s = time.monotonic()
    listed = {entry["key"] for entry in json.loads(sky("kv", "list", "--json").stdout)}
    assert "kept" in listed and ("brief" in listed or time.monotonic() - put_s > 1.5)
    time.sleep(max(0.0, 1.7 - (time.monotonic() - put_s)))
    gone = sky("kv", "get", "brief", "-o", "copy")
    assert gone.returncode == 1 and "not in the constellation" in gone.stderr
    for number in range(12):
        assert sky("kv", "put", "file", "--key", f"other-{number}").returncode == 0
    got = sky("kv", "get", "kept", "-o", "copy", "--store", "constellation?index=no")
    assert got.returncode == 0 and (tmp_path / "copy").read_bytes() == data
    assert sky("kv", "get", "other-0", "-o", "copy").returncode == 1
    for number in (10, 11):
        refused = sky("kv", "pin", f"other-{number}")
    assert refused.returncode == 1 and "half of its memory" in " ".join(refused.stderr.split())
    absent = sky("kv", "pin", "never-stored")
    assert absent.returncode == 1 and "not in the constellation" in absent.stderr
    assert "may be evicted again" in sky("kv", "pin", "kept", "--off").stdout
    status = json.loads(sky("constellation", "status", "--json").stdout)
    assert status["healthy"] and sum(host["answering"] for host in status["hosts"]) == 95


@pytest.mark.slow
def test_wrong_policies_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for text, expected in (("eviction = 'gosip'", "gossip"), ("eviction = 'periodic'\nsweep = '0s'", "sweep")):
        (tmp_path / "sky.toml").write_text(text)
        words = ("--run-dir", str(tmp_path / "run"), "--settings", str(tmp_path / "sky.toml"))
        answer = subprocess.run(
            [sys.executable, "-m", "skymemory", "constellation", "up", *words],
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert answer.returncode != 0 and expected in answer.stderr
        assert "Traceback" not in answer.stderr
