"""The same bytes to a real Redis and to the daemon: the same replies, but for the text of errors."""

from __future__ import annotations

import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.redis_server.daemons import Elsewhere, request, serving, until

from skymemory.store.redis_server.commands import COMMANDS
from skymemory.store.redis_server.inline import words_of

pytestmark = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")

ALL = b"that was all\r\n"
Paths = tuple[str, str]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paths]:
    """Sockets of Redis and of the daemon."""
    import tempfile

    folder = Path(tempfile.mkdtemp())
    command = ["redis-server", "--port", "0", "--unixsocket", str(folder / "redis.sock"), "--save", "", "--dir"]
    with subprocess.Popen([*command, str(folder)], stdout=subprocess.DEVNULL) as process:
        try:
            until(lambda: accepts(folder / "redis.sock"))
            with Elsewhere(1 << 24) as store, serving(store, folder) as (path, _, _):
                yield str(folder / "redis.sock"), path
        finally:
            process.terminate()
            process.wait(60)
            shutil.rmtree(folder)


def accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


def answers(path: str, *packets: bytes) -> bytes:
    """All replies, until the server ends the connection or answers the last of the packets, a PING."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(path)
        said = bytearray()
        try:
            for packet in packets:
                sock.sendall(packet)
            sock.sendall(request(b"DISCARD") + request(b"PING", b"that was all"))
            while not said.endswith(ALL):
                part = sock.recv(1 << 16)
                if not part:
                    break
                said += part
        except ConnectionError:
            pass
        return bytes(said)


def without_texts(said: bytes) -> bytes:
    """Of errors only the code counts, and lifetimes are compared in tens."""
    said = re.sub(rb"(?m)^(-[A-Z]+)[^\r]*", rb"\1", said)
    return re.sub(rb"(?m)^:([0-9]{2,})\r", lambda found: b":%d\r" % round(int(found[1]), -1), said)


def compare(both: Paths, *packets: bytes) -> None:
    cleared = request(b"FLUSHDB")
    theirs, ours = (without_texts(answers(path, cleared, *packets)) for path in both)
    if theirs.endswith(ALL):
        assert ours == theirs, packets
    else:  # Redis closes with bytes of the client unread, which may cost it replies that were sent before
        assert not ours.endswith(ALL), packets


def line(text: str) -> bytes:
    return request(*(word.encode() for word in text.split()))


NOW_S = int(time.time())
CASES = [
    "PING; PING hello; ECHO hello; ECHO; PING a b; SELECT 0; CLIENT SETNAME me; CLIENT GETNAME",
    "SET a 1; GET a; GET b; STRLEN a; STRLEN b; TYPE a; TYPE b; EXISTS a a b; DEL a a b; GET a",
    "SETNX a 1; SETNX a 2; GET a; MSETNX a 1 b 2; GET b; MSETNX b 1 c 2; MGET a b c; MSETNX a",
    "SET a 1 NX; SET a 2 NX; SET a 3 XX; SET b 1 XX; MGET a b; SET a 4 GET; SET b 5 GET; SET b 6 GET XX; GET b",
    "SET a 1 NX GET; SET a 2 NX GET; GET a; SET a 1 NX XX; SET a 1 EX; SET a 1 EX 0; SET a 1 EX -1; SET a 1 EX x",
    "SET a 1 EX 100; TTL a; SET a 2 KEEPTTL; TTL a; SET a 3; TTL a; SET a 4 PX 100000; TTL a; SET a 1 EX 5 KEEPTTL",
    f"SET a 1 EXAT {NOW_S + 1000}; PERSIST a; PERSIST a; TTL a; SET a 1 PXAT 1; GET a; SET a 1 EXAT {NOW_S - 5}; GET a",
    "SETEX a 100 v; TTL a; PSETEX a 100000 v; TTL a; SETEX a 0 v; PSETEX a -1 v; SETEX a x v; SETEX a 1; GET a",
    "SET a 1; PTTL a; PTTL b; TTL b; PEXPIRE a 100000; TTL a; PEXPIRE b 1000; EXPIRE a 0; GET a; PEXPIRE b -1",
    f"SET a 1; EXPIREAT a {NOW_S + 10000}; PERSIST a; PEXPIREAT a 5; GET a; EXPIREAT b {NOW_S + 5}; EXPIREAT a",
    "SET a 1; EXPIRE a 100 XX; TTL a; EXPIRE a 100 GT; TTL a; EXPIRE a 100 LT; TTL a; EXPIRE a 50 NX; EXPIRE a 50 GT",
    "SET a 1 EX 100; EXPIRE a 50 GT; EXPIRE a 50 LT; TTL a; EXPIRE a 70 GT; TTL a; EXPIRE a 90 XX; TTL a; EXPIRE a 9 Y",
    "SET a 1; GETSET a 2; GETSET b 3; GETDEL a; GETDEL a; GETEX b; GETEX b EX 100; TTL b; GETEX b PERSIST; TTL b",
    "SET a 1; GETEX a PXAT 1; GET a; GETEX b EX 100; SET a 1; GETEX a EX 0; GETEX a EX; GETEX a FOO",
    "INCR a; INCR a; DECR a; INCRBY a 10; DECRBY a 5; GET a; SET a x; INCR a; INCRBY b x; INCRBY b 1.5; GET b",
    "SET a 9223372036854775807; INCR a; DECR a; SET a -9223372036854775808; DECR a; INCR a; SET a 9223372036854775808",
    "SET a 9223372036854775808; INCR a; SET a 01; INCR a; SET a +1; INCR a; SET a -0; INCR a",
    "SET a 1 EX 100; INCR a; TTL a; GETSET a 5; TTL a; DECRBY c -9223372036854775808; INCRBY c -9223372036854775808",
    "SET a -1; DECRBY a -9223372036854775808; SET a 1; DECRBY a 9223372036854775807; GET a; INCRBY a -0; INCRBY a 007",
    "SET a 1 EX 100 EX 200; TTL a; SET a 1 EX 100 PX 200; GETEX a PERSIST PERSIST; TTL a; SET a 2 KEEPTTL KEEPTTL",
    "MULTI; SET a 2; SET k v EX 100 EX 200; EXEC; TTL k; MULTI; SET a 3; GETEX a x y z; PING x y; EXPIRE a; GET a b",
    "MULTI; SET a 3; GETEX a x y z w; SET a 1 2 3 4 5 6 7 8 9; PING x y; EXEC; GET a; MULTI; GETDEL a b; EXEC; GET a",
    "SET a 1; PEXPIRE a 9223372036854775; TTL a; PEXPIREAT a 9223372036854775807; SET a 1; EXPIRE a 9223372036854775",
    "SET a 1; EXPIRE a 9223372036854776; EXPIRE a 9223372036854775807; EXPIRE a -9223372036854775808; GET a",
    "SET a 1; EXPIRE a 9223372036854775808; EXPIRE a 1e3; EXPIRE a 010; PSETEX a 9223372036854775 v; GET a; TTL a",
    "SETEX a 9223372036854775 v; SETEX a 9223372036854776 v; SET a 1 EX 9223372036854776; SET a 1 PX 99999999999999999",
    "GET a; SCAN -1; SCAN 0 COUNT -1; SCAN 0 COUNT 9223372036854775808",
    "MSET a 1 b 2 a 3; MGET a b; MSET a; MSET a 1 b; TOUCH a b c; UNLINK a b; DBSIZE; TTL a",
    "MULTI; SET a 1; INCR a; GET a; EXEC; GET a; EXEC; MULTI; SET a 5; DISCARD; GET a; DISCARD; MULTI; EXEC",
    "MULTI; MULTI; SET a 1; WATCH a; LPUSHX; SET b 1; EXEC; EXISTS a b; MULTI; GET; EXEC; MULTI; SET a x; INCR a; EXEC",
    "WATCH a; SET a 1; MULTI; SET b 1; EXEC; EXISTS b; WATCH a; UNWATCH; SET a 2; MULTI; SET b 1; EXEC; EXISTS b",
    "WATCH a b; DEL a; MULTI; INCR c; EXEC; WATCH c; MULTI; INCR c; EXEC; WATCH a; SET a 1; MULTI; DISCARD",
    "MULTI; PING; ECHO x; MGET a b; TYPE a; EXISTS a; TTL a; UNWATCH; KEYS *; SETNX a 1; GETDEL a; EXEC",
    "SET a 1; KEYS a; KEYS b; KEYS [ab]; SCAN 0; SCAN 0 MATCH x*; DBSIZE; FLUSHDB; DBSIZE; FLUSHDB ASYNC; FLUSHDB NOW",
    "SET a 1; SCAN; SCAN x; SCAN 0 MATCH; SCAN 0 FOO b; SCAN 0 COUNT 0; SCAN 0 COUNT x",
    "SET a 1; SCAN 0 COUNT 50 MATCH a; SCAN 0 TYPE list; SCAN 0 TYPE string MATCH b",
    "SET a 1 PX 1400; TTL a; SET a 1 PX 1900; TTL a; SET a 1 PX 400; TTL a; WATCH b; EXPIRE b 10; MULTI; SET a 2; EXEC",
    "AUTH default x; AUTH other x; AUTH x; MULTI; EXEC x; EXEC; MULTI; SET a 2; EXEC x; GET a; CLIENT SETNAME \x80b",
    "GET; GET a b; SET a; TTL; EXPIRE a; PERSIST; NOSUCH a; KEYS; MULTI a; DISCARD a; WATCH; UNWATCH a; SETNX a",
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_the_replies_are_those_of_redis(both: Paths, case: str) -> None:
    compare(both, *(line(step) for step in case.split("; ")))
    compare(both, b"".join(line(step) for step in case.split("; ")))  # in one packet


NOT_COMPARED = {"HELLO", "QUIT", "COMMAND", "CONFIG", "INFO"}
"""Their replies are about the server."""


def test_every_command_is_compared() -> None:
    asked = {step.split()[0] for case in CASES for step in case.split("; ")}
    assert COMMANDS.keys() - asked == NOT_COMPARED


WORD = st.text("ab \"'\\xnt41\t", max_size=12)


@settings(max_examples=150, deadline=None)
@given(text=st.lists(WORD, min_size=1, max_size=3).map(" ".join))
def test_inline_words_are_those_of_redis(both: Paths, text: str) -> None:
    for line in (b"MGET k " + text.encode(), b'MGET k "' + text.encode() + b'"', b"EXISTS k '" + text.encode() + b"'"):
        if b"" not in (words_of(line) or ()):  # a key is not empty here
            compare(both, b"SET a 1\r\n" + line + b"\r\n")


@pytest.mark.parametrize(
    "text",
    [
        rb'SET k "a\x41\n\t\r\a\b\q\"\\"',
        rb"SET k 'it\'s \n \x41'",
        rb'SET k ""',
        rb"SET k ''",
        rb'SET k a"b"',
        rb'SET k "a"b',
        rb'SET k "a',
        rb"SET k 'a",
        rb'SET k "\x4"',
        rb'"SET" "k" v',
        b'SET k "\xff\x00"'.replace(b"\x00", rb"\x00"),
    ],
)
def test_quoting_of_inline_commands(both: Paths, text: bytes) -> None:
    compare(both, text + b"\r\nGET k\r\n")


@settings(max_examples=150, deadline=None)
@given(
    pattern=st.text("ab*?[]^-\\", max_size=8),
    names=st.lists(st.text("ab*[]^-\\", min_size=1, max_size=6), min_size=1, max_size=4, unique=True),
)
def test_patterns_match_what_they_match_in_redis(both: Paths, pattern: str, names: list[str]) -> None:
    for name in names:
        compare(both, request(b"SET", name.encode(), b"v") + request(b"KEYS", pattern.encode()))


def test_random_sessions(both: Paths) -> None:
    """Of commands that are known, with arguments that are often wrong; in one packet and in several."""
    rng = random.Random(47)
    verbs = [b"SET", b"GET", b"DEL", b"INCR", b"DECRBY", b"GETSET", b"GETDEL", b"SETNX", b"SETEX", b"PSETEX", b"MSET"]
    verbs += [b"MSETNX", b"MGET", b"EXPIRE", b"PERSIST", b"TTL", b"TYPE", b"EXISTS", b"STRLEN", b"WATCH", b"ECHO"]
    words = ["a", "b", "a", "b", "100", "7000", "NX", "XX", "GET", "EX", "KEEPTTL", "PERSIST", "x", "-3"]
    alone = [b"MULTI", b"EXEC", b"DISCARD", b"UNWATCH", b"DBSIZE"]

    def step() -> bytes:
        if rng.random() < 0.2:
            return request(rng.choice(alone))
        count = rng.choice([0, 1, 1, 2, 2, 3, 4])
        return request(rng.choice(verbs), *(rng.choice(words).encode() for _ in range(count)))

    for number in range(150):
        steps = [step() for _ in range(40)]
        compare(both, *(steps if number % 2 else [b"".join(steps)]))
