"""LMCache's own clients of Redis, unmodified, over the store daemon: what they store they load, and none hangs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from tests.engines.sides import PYTHON, ROOT, Side

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="the engines could not be installed: see make test-engines"),
]
NUMBERS = list(range(6))
VALUE_BYTES = 4 * 2 * 256 * 4 * 64 * 4


@contextmanager
def daemon(address: str) -> Iterator[int]:
    """The port of a daemon in a process of its own."""
    command = [sys.executable, "-m", "skymemory", "store", "serve", address, "--listen", "tcp://127.0.0.1:0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline().split("127.0.0.1:")[1].split()[0])
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    logs = tmp_path_factory.mktemp("logs")
    both = Side("lmcache_redis_side", logs / "1"), Side("lmcache_redis_side", logs / "2")
    try:
        yield both
    finally:
        for one in both:
            one.close()


@pytest.mark.parametrize("scheme", ["redis", "resp"])
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_what_one_process_stores_another_loads(
    sides: tuple[Side, Side], scheme: str, kind: str, tmp_path: Path
) -> None:
    one, other = sides
    with daemon("memory://256MiB" if kind == "memory" else f"disk://{tmp_path}/cache?budget=256MiB") as port:
        store = f"{scheme}://127.0.0.1:{port}"
        assert other.ask("contains", store, keys=NUMBERS)["contains"] == [False] * len(NUMBERS)
        stored = one.ask("store", store, keys=NUMBERS)
        assert stored["held"] == 0 and stored["bytes"] == VALUE_BYTES
        assert other.ask("contains", store, keys=[*NUMBERS, 99])["contains"] == [True] * len(NUMBERS) + [False]
        found = other.ask("load", store, keys=NUMBERS)
        assert found["loaded"] == found["equal"] == found["together"] == [True] * len(NUMBERS)


@pytest.mark.parametrize("scheme", ["redis", "resp"])
def test_a_flood_between_exists_and_get_hangs_no_client(sides: tuple[Side, Side], scheme: str) -> None:
    """Four values fit. The native client would wait without end for one that is gone: it is leased instead."""
    one, other = sides
    with daemon(f"memory://{4 * VALUE_BYTES + 100_000}") as port:
        store = f"{scheme}://127.0.0.1:{port}"
        client = redis.Redis(port=port)
        one.ask("store", store, keys=[0, 1])
        assert other.ask("contains", store, keys=[0])["contains"] == [True]
        for number in range(12):
            assert client.set(f"flood {number}", bytes(VALUE_BYTES))
        found = other.ask("load", store, keys=[0])
        assert found["equal"] == [True] and found["seconds"] < 20
        if scheme == "resp":  # redis:// asks EXISTS of a small value beside the large one, which is not leased
            assert found["loaded"] == [True]
            assert other.ask("contains", store, keys=[1])["contains"] == [False], "it was not leased"
