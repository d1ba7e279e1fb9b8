"""redis-benchmark and memtier_benchmark, which end at the first error reply."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from tests.store.redis_server.daemons import daemon

pytestmark = pytest.mark.slow

OF_A_CACHE = "ping_inline,ping_mbulk,set,get,incr,mset"
"""Of the default set; the rest is of lists, sets, hashes and sorted sets."""


@pytest.fixture(scope="module", params=["memory://64MiB", "disk"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("values")
    with daemon(request.param if request.param != "disk" else f"disk://{folder}/cache?budget=64MiB") as path:
        yield path


def run(program: str, *options: str) -> str:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    done = subprocess.run([program, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "rror" not in done.stdout + done.stderr, done.stdout[-300:] + done.stderr[-300:]
    return done.stdout


@pytest.mark.parametrize("pipelined", ["1", "16"])
@pytest.mark.parametrize("size", ["3", "40000"])
def test_redis_benchmark(path: str, size: str, pipelined: str) -> None:
    options = ("-c", "20", "-n", "300", "-r", "100", "-d", size, "-P", pipelined, "--csv", "-t", OF_A_CACHE)
    names = [row.split(",")[0] for row in run("redis-benchmark", "-s", path, *options).splitlines()[1:]]
    assert [re.sub(r" \(.*", "", name.strip('"')) for name in names] == [
        "PING_INLINE",
        "PING_MBULK",
        "SET",
        "GET",
        "INCR",
        "MSET",
    ]


@pytest.mark.parametrize(
    "command", ["SETEX key:__rand_int__ 100 v", "GETEX key:__rand_int__ EX 5", "EXISTS key:1 key:2"]
)
def test_redis_benchmark_with_a_command(path: str, command: str) -> None:
    assert "requests per second" in run("redis-benchmark", "-s", path, "-n", "1000", "-r", "50", *command.split())


def test_memtier_benchmark(path: str) -> None:
    options = ("--threads", "2", "--clients", "5", "--requests", "500", "--hide-histogram", "--expiry-range=10-20")
    assert "Totals" in run("memtier_benchmark", "--unix-socket", path, *options)
