"""``redis-cli`` against the daemon, in both versions of the protocol."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.store.redis_server.daemons import daemon

pytestmark = pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")

Cli = Callable[..., str]


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    with daemon("memory://64MiB") as path:
        yield path


@pytest.fixture(params=["-2", "-3"])
def cli(path: str, request: pytest.FixtureRequest) -> Cli:
    def ask(*words: str, stdin: str | None = None) -> str:
        command = ["redis-cli", request.param, "-s", path, "--no-raw", *words]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=20)
        assert done.returncode == 0 or done.stdout.startswith("(error)"), done.stderr
        return done.stdout.rstrip("\n")

    return ask


def test_a_session(cli: Cli) -> None:
    assert cli("ping") == "PONG" and cli("ping", "hello") == '"hello"'
    assert cli("set", "a", "one") == "OK" and cli("set", "b", "two words") == "OK"
    assert cli("get", "a") == '"one"' and cli("get", "absent") == "(nil)"
    assert cli("mget", "b", "absent", "a") == '1) "two words"\n2) (nil)\n3) "one"'
    assert cli("strlen", "b") == "(integer) 9"
    assert cli("exists", "a", "absent", "b") == "(integer) 2"
    assert cli("ttl", "a") == "(integer) -1" and cli("ttl", "absent") == "(integer) -2"
    assert cli("set", "c", "for a while", "EX", "100") == "OK" and cli("ttl", "c") == "(integer) 100"
    assert cli("expire", "a", "50") == "(integer) 1" and cli("ttl", "a") == "(integer) 50"
    assert cli("dbsize") == "(integer) 3"
    assert cli("del", "a", "b", "c", "absent") == "(integer) 3" and cli("dbsize") == "(integer) 0"


@pytest.mark.brief()
def test_what_it_cannot_do_is_a_clear_error(cli: Cli) -> None:
    assert cli("flushall").startswith("(error) ERR unknown command 'FLUSHALL', expected one of PING")
    assert cli("get").startswith("(error) ERR wrong number of arguments for 'get' command")
    assert cli("set", "k", "v", "KEEPTTL", "PX", "1").startswith("(error) ERR syntax error")
    assert cli("select", "1").startswith("(error) ERR DB index is out of range")


@pytest.mark.brief()
def test_info(cli: Cli) -> None:
    assert "redis_version:7" in cli("info") and "store:memory" in cli("info")


@pytest.mark.brief()
def test_a_large_value_from_a_pipe(cli: Cli, tmp_path: Path) -> None:
    text = "a line of text " * 200_000
    assert cli("-x", "set", "large", stdin=text) == "OK"
    assert cli("strlen", "large") == f"(integer) {len(text)}" and cli("get", "large") == f'"{text}"'
    assert cli("del", "large") == "(integer) 1"
