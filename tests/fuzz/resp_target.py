"""The store daemon's clients, hammered: sound requests, damaged, cut and shuffled, to its parser and its commands."""

from __future__ import annotations

import random

from tests.fuzz.mutations import mutate

from skymemory.errors import InvalidInput
from skymemory.store.memory import MemoryStore
from skymemory.store.redis import NAMESPACE, trailer_of
from skymemory.store.redis_server.budget import MemoryClaim
from skymemory.store.redis_server.commands import Close, Commands, Refused, Session
from skymemory.store.redis_server.protocol import (
    LARGE_BYTES,
    Framed,
    LargeArgument,
    NeedData,
    ProtocolError,
    RequestParser,
)

_KEY = bytes(range(32))
_BLOCK = b"a block's value"


def _packed(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


_SOUND = [
    _packed(b"SET", b"name", b"value"),
    _packed(b"SET", b"name", b"x" * (LARGE_BYTES + 5), b"EX", b"100", b"NX"),
    _packed(b"SET", NAMESPACE + _KEY, _BLOCK + trailer_of(_KEY, memoryview(_BLOCK))),
    _packed(b"MSET", b"a", b"1", b"name", bytes(LARGE_BYTES)),
    _packed(b"GET", b"name"),
    _packed(b"MGET", b"a", b"name", NAMESPACE + _KEY),
    _packed(b"EXISTS", b"name", b"a"),
    _packed(b"STRLEN", b"name"),
    _packed(b"EXPIRE", b"name", b"10"),
    _packed(b"TTL", b"name"),
    _packed(b"HELLO", b"3", b"AUTH", b"default", b"secret", b"SETNAME", b"me"),
    _packed(b"CLIENT", b"SETNAME", b"me"),
    _packed(b"CONFIG", b"GET", b"*"),
    _packed(b"DEL", b"a"),
    b"PING\r\n",
    b"INFO\r\n",
]
_LIFE = 40


class RespTarget:
    """Whatever arrives, only the protocol's own errors, and nothing that was reserved stays reserved."""

    def __init__(self) -> None:
        self._store = MemoryStore(1 << 20)
        self._commands = Commands(self._store, held_bytes=1 << 16, wait_s=0.0)
        self._open()

    def _open(self) -> None:
        self._parser, self._session, self._left = (
            RequestParser(1 << 17),
            Session(1, True, MemoryClaim(lambda: None)),
            _LIFE,
        )

    def __call__(self, dice: random.Random) -> None:
        data = b"".join(dice.choices(_SOUND, k=dice.randint(1, 3)))
        self._parser.feed(mutate(dice, data, _SOUND) if dice.random() < 0.7 else data)
        self._left -= 1
        try:
            self._serve(dice)
        except (ProtocolError, Close):
            self._left = 0
        assert self._commands.budget.used_bytes == 0
        if self._left <= 0 or self._session.quits:
            self._open()

    def _serve(self, dice: random.Random) -> None:
        while True:
            step = self._parser.next()
            if isinstance(step, NeedData):
                return
            if isinstance(step, LargeArgument):
                try:
                    front, end_bytes = self._commands.frame(step.words, step.size_bytes, 1 << 20)
                except (Refused, InvalidInput):  # the server then reads over the value: here it is the last
                    raise Close from None
                value = step.head + bytes(step.size_bytes - len(step.head))
                body, end = value[: step.size_bytes - end_bytes], value[step.size_bytes - end_bytes :]
                self._parser.deliver(Framed(front + body, end) if front or end_bytes else value)
                continue
            for pieces in self._commands.call(self._session, step):
                assert all(memoryview(piece).nbytes <= 1 << 20 for piece in pieces)
