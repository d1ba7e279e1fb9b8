"""The Redis tier: values in a Redis or Valkey server, which evicts as it was configured to (``maxmemory-policy``).

A value is one string: its bytes, then four of a mark and a CRC-32 of key and value. A server that is gone, slow, full
or wrong is a miss or a value not stored, counted; the next call tries again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from skymemory.errors import InvalidInput, ValueTooLarge
from skymemory.forks import Owner
from skymemory.kv.value import LATER_VERSION
from skymemory.native import crc32
from skymemory.store.base import (
    LEASE_S,
    Buffer,
    KeyReport,
    LoadReport,
    LoadTicket,
    Places,
    Presence,
    StoreTicket,
    TwoPhase,
    check_items,
    check_keys,
    check_places,
    check_ttl,
)
from skymemory.store.redis.link import Link, Unreachable, pack
from skymemory.store.tickets import OpenTickets
from skymemory.units import format_size

NAMESPACE = b"skymemory:"
_MARK = b"SKV1"
"""The last byte is the version, a digit."""
_TRAILER_BYTES = 8
_LARGEST_BYTES = (512 << 20) - _TRAILER_BYTES
"""A string in Redis ends at 512 MiB (``proto-max-bulk-len``)."""

_VALUES_AT_ONCE = 8
_QUESTIONS_AT_ONCE = 512
_LEARN_FROM_BYTES = 1 << 20
_MOST_LATER = 1 << 16


class RedisStore(TwoPhase):
    """Values in the server at ``url`` (``redis://host:6379/0``), shared by whoever uses it.

    No call takes longer than ``timeout_s`` and the time of its bytes at ``link.LEAST_BYTES_PER_S``. Nothing can
    be pinned or leased: the server evicts.
    ``clock`` gives seconds, compared only with itself.

    Raises:
        InvalidInput: an address that is none. (A server that is not there is none: its values are misses.)
        MissingExtra: redis-py is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "redis",
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._link = Link(url, timeout_s, clock)
        self._clock = clock
        self._loads: OpenTickets[LoadTicket] = OpenTickets()
        self._stores: OpenTickets[StoreTicket] = OpenTickets()
        self._counters = self._link.counters
        self._later: dict[bytes, None] = {}
        """Keys under which a later release's values were seen: they are not written over."""
        self._bytes_per_s = 1e9
        self._closed = False
        self._owner = Owner(f"the {name} store")

    @property
    def name(self) -> str:
        return self._name

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        sizes = self._sizes(self._check(keys))
        pending = {key for ticket in self._stores.holding(self._clock()) for key, _ in ticket.items}
        return [
            Presence.HIT if size is not None else Presence.PENDING if key in pending else Presence.MISS
            for key, size in zip(keys, sizes, strict=True)
        ]

    def prefix(self, keys: Sequence[bytes]) -> int:
        sizes = self._sizes(self._check(keys))
        return next((i for i, size in enumerate(sizes) if size is None), len(sizes))

    def _sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        """Size of each value in bytes, None where there is none (or nobody to ask)."""
        replies = self._ask_each(b"STRLEN", keys)
        return [
            reply - _TRAILER_BYTES if isinstance(reply, int) and reply >= _TRAILER_BYTES else None for reply in replies
        ]

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        ticket = LoadTicket(self._check(keys), self._clock() + LEASE_S)
        self._loads.add(ticket, self._clock())
        return ticket

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        self._check(())
        self._loads.take(ticket)
        started_s = self._clock()
        unique = list(dict.fromkeys(ticket.keys))
        replies = self._link.ask([pack(b"GET", NAMESPACE + key) for key in unique], _VALUES_AT_ONCE)
        found = {key: _open(key, reply) for key, reply in zip(unique, replies, strict=True)}
        seconds = self._clock() - started_s
        loaded_bytes = 0
        corrupt: list[bytes] = []
        for key, value in found.items():
            self._later.pop(key, None)
            if isinstance(value, memoryview):
                loaded_bytes += value.nbytes
            elif value == "corrupt":
                corrupt.append(key)
            elif value == LATER_VERSION:
                self._later[key] = None
                while len(self._later) > _MOST_LATER:
                    self._later.pop(next(iter(self._later)), None)
            if isinstance(value, str) and value != "absent":
                self._counters.add("failed", label=value)
        self._ask_each(b"DEL", corrupt)
        if loaded_bytes > _LEARN_FROM_BYTES and seconds > 0:
            self._bytes_per_s += (loaded_bytes / seconds - self._bytes_per_s) / 4
        got = [found[key] for key in ticket.keys]
        self._counters.add("hits", sum(isinstance(value, memoryview) for value in got))
        self._counters.add("misses", sum(isinstance(value, str) for value in got))
        ticket.report = LoadReport(
            tuple(
                KeyReport(seconds=seconds, reason=value)
                if isinstance(value, str)
                else KeyReport(self._name, value.nbytes, seconds)
                for value in got
            ),
            seconds,
        )
        return [None if isinstance(value, str) else value for value in got]

    def release(self, ticket: LoadTicket) -> None:
        self._loads.discard(ticket)

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        items = check_items(items)
        self._check(())
        for _, value in items:
            if (size_bytes := memoryview(value).nbytes) > _LARGEST_BYTES:
                raise ValueTooLarge(
                    f"a value of {format_size(size_bytes)} does not fit a string of Redis, at most "
                    f"{format_size(_LARGEST_BYTES)}: store smaller values"
                )
        ticket = StoreTicket(items, self._clock() + LEASE_S, places=check_places(items, places))
        self._stores.add(ticket, self._clock())
        return ticket

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        self._check(())
        started_s = self._clock()
        with self._stores.ending(ticket):
            later = {key for key, _ in ticket.items if key in self._later}
            commands = []
            for key, value in ticket.items:
                if key not in later:
                    data = memoryview(value).cast("B")
                    commands.append(pack(b"SET", NAMESPACE + key, (data, _trailer(key, data))))
            replies = iter(self._link.ask(commands, _VALUES_AT_ONCE))
        stored, unanswered = [], set()
        for key, _ in ticket.items:
            reply = LATER_VERSION if key in later else next(replies)
            stored.append(reply in (b"OK", "OK"))
            if not stored[-1]:
                label = "unreachable" if isinstance(reply, Unreachable) else "refused"
                if isinstance(reply, Unreachable):
                    unanswered.add(key)
                self._counters.add("failed", label=LATER_VERSION if reply == LATER_VERSION else label)
        self._counters.add("stored", sum(stored))
        ticket.seconds, ticket.unanswered = self._clock() - started_s, frozenset(unanswered)
        return stored

    def touch(self, keys: Sequence[bytes]) -> None:
        self._ask_each(b"TOUCH", self._check(keys)[::-1])

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Never: what the server evicts is not ours to say."""
        check_ttl(ttl_s)
        return [False] * len(self._check(keys))

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        replies = self._ask_each(b"DEL", self._check(keys))
        for key in keys:
            self._later.pop(key, None)
        return [reply == 1 if type(reply) is int else None for reply in replies]

    def keeps(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._later for key in self._check(keys)]

    def _ask_each(self, verb: bytes, keys: Sequence[bytes]) -> list[object]:
        replies = self._link.ask([pack(verb, NAMESPACE + key) for key in keys], _QUESTIONS_AT_ONCE)
        unanswered = sum(isinstance(reply, Unreachable) for reply in replies)
        if unanswered:
            self._counters.add("questions_unanswered", unanswered)
        return replies

    def stats(self) -> dict[str, int | float]:
        """What this process saw; the server is not asked."""
        return {
            **{f"{name}_total": value for name, value in self._counters.as_dict().items()},
            "open_leases": len(self._loads) + len(self._stores),
            "read_bytes_per_s": self._bytes_per_s,
        }

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        sizes = self._sizes(self._check(keys))
        return sum(math.inf if size is None else size for size in sizes) / self._bytes_per_s

    def close(self) -> None:
        self._closed = True
        self._link.close()

    def _check(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        self._owner.check()
        if self._closed:
            raise InvalidInput(f"the {self._name} store is closed: open a new one")
        return check_keys(keys)


def _trailer(key: bytes, value: memoryview) -> bytes:
    return _MARK + crc32(value, crc32(key)).to_bytes(4, "little")


def _open(key: bytes, reply: object) -> memoryview | str:
    """The value in a reply, without a copy; or why there is none."""
    if reply is None:
        return "absent"
    if isinstance(reply, Unreachable):
        return "unreachable"
    if not isinstance(reply, bytes):
        return "refused"
    whole = memoryview(reply)
    value, trailer = whole[:-_TRAILER_BYTES], whole[-_TRAILER_BYTES:]
    if len(whole) < _TRAILER_BYTES or trailer != _trailer(key, value):
        later = trailer[:3] == _MARK[:3] and _MARK[3] < trailer[3] <= ord("9")
        return LATER_VERSION if later else "corrupt"
    return value
