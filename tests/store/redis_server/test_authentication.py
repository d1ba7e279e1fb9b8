"""Without the password no command is executed, in whatever way it reaches the daemon."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.store.redis_server.daemons import Elsewhere, connected, replies_to, request, serving

from skymemory.store.memory import MemoryStore
from skymemory.store.named_values import NamedValues
from skymemory.store.redis_server.commands import COMMANDS

NO_AUTH = b"-NOAUTH Authentication required.\r\n"
BEFORE_AUTH = {"AUTH", "HELLO", "QUIT"}
WORDS = {"CLIENT": [b"ID"], "SCAN": [b"0"], "CONFIG": [b"GET", b"save"], "KEYS": [b"v?ctim"]}
"""Arguments with which a command does something; of the others the first is a key that is there."""


def words_of(name: str) -> list[bytes]:
    return [name.encode(), *WORDS.get(name, [b"victim", b"1", b"1"][: COMMANDS[name].least])]


def single(words: list[bytes]) -> bytes:
    return request(*words)


def pipelined(words: list[bytes]) -> bytes:
    return request(*words) * 3


def inline(words: list[bytes]) -> bytes:
    return b" ".join(words) + b"\r\n"


def in_multi(words: list[bytes]) -> bytes:
    return request(b"MULTI") + request(*words) + request(b"EXEC")


def after_wrong_password(words: list[bytes]) -> bytes:
    return request(b"AUTH", b"wrong") + request(*words) * 2


def behind_others(words: list[bytes]) -> bytes:
    """In the middle of a run of GETs."""
    return request(b"GET", b"victim") + request(*words) + request(b"GET", b"victim")


WAYS = [single, pipelined, inline, in_multi, after_wrong_password, behind_others]


@pytest.fixture(scope="module", params=[MemoryStore, Elsewhere])
def guarded(request: pytest.FixtureRequest) -> Iterator[tuple[str, MemoryStore]]:
    folder = Path(tempfile.mkdtemp())
    try:
        with request.param(1 << 20) as store, serving(store, folder, password=b"secret") as (path, _, _):
            yield path, store
    finally:
        shutil.rmtree(folder)


def test_three_commands_need_no_password() -> None:
    assert {name for name, command in COMMANDS.items() if command.needs_no_password} == BEFORE_AUTH


NAMES = sorted(COMMANDS.keys() - BEFORE_AUTH)


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("way", WAYS)
def test_no_command_is_executed_without_the_password(
    guarded: tuple[str, MemoryStore], way: Callable[[list[bytes]], bytes]
) -> None:
    path, store = guarded
    values = NamedValues(store)
    values.put("victim", b"5")
    for name in NAMES:
        data = way(words_of(name))
        said = replies_to(path, data)
        count = 1 if way is inline else data.count(b"*")
        refused = b"-WRONGPASS invalid username-password pair\r\n" if way is after_wrong_password else b""
        assert said == refused + NO_AUTH * (count - bool(refused)), (name, said)
        assert values.get("victim") == b"5" and store.stats()["entries"] == 1, name


def test_the_same_commands_are_executed_with_the_password(guarded: tuple[str, MemoryStore]) -> None:
    """So that the case before is about the password."""
    path, store = guarded
    for name in NAMES:
        NamedValues(store).put("victim", b"5")
        with connected(path) as sock:
            sock.sendall(request(b"AUTH", b"secret") + request(*words_of(name)))
            said = sock.makefile("rb")
            assert said.readline() == b"+OK\r\n" and not said.readline().startswith(b"-NOAUTH"), name


@pytest.mark.parametrize("pipelined", [b"GET victim\r\n", request(b"GET", b"victim")])
def test_a_password_in_the_same_packet_opens_what_is_behind_it(
    guarded: tuple[str, MemoryStore], pipelined: bytes
) -> None:
    path, store = guarded
    NamedValues(store).put("victim", b"5")
    said = replies_to(path, pipelined * 2 + request(b"AUTH", b"secret") + pipelined * 2)
    assert said == NO_AUTH * 2 + b"+OK\r\n" + b"$1\r\n5\r\n" * 2
