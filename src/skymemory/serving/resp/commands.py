"""The commands of the Redis protocol over any store: what ``redis-cli``, redis-py, LMCache and others ask of a cache.

Two kinds of keys:

- ``skymemory:`` and 32 bytes is a block's key, as ``store.redis`` sends it. Its value lies in the store as every other
  door of SkyMemory stores it, without the trailer (a mark and a CRC) that ``store.redis`` puts behind it: the trailer
  is checked and taken off here, and made again for each reader. So blocks stored through the daemon, by transformers
  or in the sky are the same blocks.
- Any other key is a name, and its value a named value (``store.named``), as ``skymemory kv`` stores it.

**EXISTS leases.** Clients ask EXISTS and then GET; LMCache's native client waits without end on a GET that misses. So a
key for which EXISTS said 1 is leased for ``LEASE_S`` or until the next GET. A store that leases nothing itself (Redis;
satellites lease part of their memory) is read at once: the value is held in the daemon's own bounded memory, and where
that is full EXISTS says 0. A leased GET that misses all the same ends the connection; it never says nil. Only a SET, a
DEL or an EXPIRE of 0 end a lease before: what a client deletes is gone.
"""

from __future__ import annotations

import hmac
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache

from skymemory import __version__
from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.kv.codec.base import RAW
from skymemory.kv.value import ValueHeader
from skymemory.metrics import SharedCounters
from skymemory.serving.resp import protocol
from skymemory.serving.resp.protocol import Framed, Reply, Word
from skymemory.store.accounting import Deadlines
from skymemory.store.base import KEY_BYTES, Buffer, Expiring, KeyLocks, LoadTicket, Presence, Store
from skymemory.store.memory import MemoryStore
from skymemory.store.named import Listing, bare, named_key, named_payload
from skymemory.store.redis import NAMESPACE, TRAILER_BYTES, is_trailer_of, opened, trailer_of

LEASE_S = 30.0
RUN_VALUES, RUN_BYTES = 64, 8 << 20
"""Largest number of requests, and bytes of values, in one call of the store (``Run``)."""
_MAX_LEASES = 1 << 16
_MAX_LIFETIMES = 1 << 16
"""That TTL reports."""
_BRIEF_BYTES = 64 << 10
"""Smaller values never wait for room: slow clients of large values hold up no quick one of small values."""
_ODD_NAME = "\0bytes:"
"""In front of the name of a key that is not text."""
_REDIS_VERSION = b"7.2.0"
"""Clients choose by it what they may ask."""
_NO_ROOM = "the store has no room, or did not answer: not all is stored"
_OK = b"+OK\r\n"
_CRLF = b"\r\n"


class Close(Exception):
    """The connection ends without another word."""


@dataclass(slots=True, eq=False)
class Session:
    """One connection's state."""

    number: int
    authenticated: bool
    reply: Reply = field(default_factory=Reply)
    name: bytes = b""
    quits: bool = False


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the protocol as the store knows it. ``name`` is empty for a block's key."""

    stored: bytes
    name: str = ""

    @classmethod
    def of(cls, given: Word) -> Key:
        return _key_of(_bytes(given))

    @classmethod
    def of_bytes(cls, key: bytes) -> Key:
        if key.startswith(NAMESPACE) and len(key) == len(NAMESPACE) + KEY_BYTES:
            return cls(key[len(NAMESPACE) :])
        try:
            name = key.decode()
        except UnicodeDecodeError:
            return cls(named_key(odd := _ODD_NAME + key.decode("latin-1")), odd)
        if name.startswith(_ODD_NAME):
            raise InvalidInput("a key that begins with \\0bytes: is the name of another key here: use another")
        return cls(named_key(name), name)

    def overhead(self) -> int:
        """Bytes that the stored value has more than the client's (a block's: fewer)."""
        return ValueHeader(RAW.codec_id, 0, 0, name=self.name).header_bytes if self.name else -TRAILER_BYTES

    def front(self, size_bytes: int) -> bytes:
        """What is stored in front of ``size_bytes`` bytes of a client's value."""
        return ValueHeader(RAW.codec_id, size_bytes, size_bytes, name=self.name).pack() if self.name else b""


_key_of = lru_cache(256)(Key.of_bytes)
"""A SET asks before its value comes and after, and a GET follows an EXISTS: a digest each."""


@dataclass(slots=True)
class Run:
    """GETs, or plain SETs, that a client sent without waiting for replies: one call of the store, in which a
    constellation is asked for all at once, not value by value.
    """

    verb: bytes
    requests: list[Sequence[Word]] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    size_bytes: int = 0
    """Of the values set."""

    def takes(self, verb: bytes) -> bool:
        """Whether a request may be the next of this run."""
        return verb == self.verb and len(self.keys) < RUN_VALUES and self.size_bytes < RUN_BYTES

    def add(self, key: Key, words: Sequence[Word]) -> None:
        self.requests.append(words)
        self.keys.append(key)
        if self.verb == b"SET":
            value = words[2]
            self.size_bytes += len(value.data) if isinstance(value, Framed) else memoryview(value).nbytes


class ByteBudget:
    """Bytes in flight over all connections. What is larger than the whole budget is admitted alone, and up to
    ``_BRIEF_BYTES`` at any time.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._freed = threading.Condition()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def take(self, size_bytes: int, timeout_s: float) -> bool:
        """Waits for room; False where none came within ``timeout_s``."""
        with self._freed:
            fits = self._fits(size_bytes) or self._freed.wait_for(lambda: self._fits(size_bytes), timeout_s)
            self._used_bytes += size_bytes if fits else 0
            return fits

    def _fits(self, size_bytes: int) -> bool:
        if size_bytes <= _BRIEF_BYTES or not self._used_bytes:
            return True
        return self._used_bytes + size_bytes <= self._limit_bytes

    def give_back(self, size_bytes: int) -> None:
        if size_bytes:
            with self._freed:
                self._used_bytes -= size_bytes
                self._freed.notify_all()


class Leases:
    """Keys for which EXISTS said 1: a load that has begun, or the value itself. Bounded; thread-safe."""

    def __init__(self, store: Store, held_bytes: int, clock: Callable[[], float]) -> None:
        self._store = store
        self._protects = bare(store).leases
        self._held_bytes, self._used_bytes = held_bytes, 0
        self._clock = clock
        self._leases: dict[bytes, Lease] = {}
        """By stored key, the one that ends first in front."""
        self._beginning: dict[bytes, object] = {}
        """Keys that are being leased now, each with a mark of its last ``begin``; a write takes the mark away."""
        self._lock = threading.Lock()

    def begin(self, keys: Sequence[bytes]) -> list[bool]:
        """Lease those that are there; per key, whether the next GET will find it."""
        there = [presence is Presence.HIT for presence in self._store.lookup(keys)]
        return [yes and self._begin(key) for key, yes in zip(keys, there, strict=True)]

    def _begin(self, key: bytes) -> bool:
        now_s = self._clock()
        with self._lock:
            self._expire(now_s)
            lease = self._leases.get(key)
            if lease is not None and lease.value is not None:
                lease.until_s = now_s + LEASE_S
                self._leases[key] = self._leases.pop(key)  # it is the one that ends last
                return True
            if len(self._leases) >= _MAX_LEASES:
                return False
            mark = self._beginning[key] = object()
        ticket = self._store.prepare_load([key])
        lease = Lease(now_s + LEASE_S, ticket)
        added = False
        try:
            if self._protects:
                # It may have been evicted since the lookup: only what is there now is protected.
                there = self._store.lookup([key]) == [Presence.HIT]
            else:
                (lease.value,) = self._store.complete_load(ticket)
                there = lease.value is not None
            added = there and self._add(key, lease, mark)
            return added
        finally:
            with self._lock:
                if self._beginning.get(key) is mark:
                    del self._beginning[key]
            if not added:
                self._store.release(ticket)

    def _add(self, key: bytes, lease: Lease, mark: object) -> bool:
        size_bytes = 0 if lease.value is None else lease.value.nbytes
        with self._lock:
            # Written or deleted meanwhile: what was read may be the value before.
            fits = self._beginning.get(key) is mark and self._used_bytes + size_bytes <= self._held_bytes
            if fits:
                self._drop(key)
                self._leases[key] = lease
                self._used_bytes += size_bytes
        return fits

    def take(self, key: bytes) -> Lease | None:
        """The lease of ``key``, which ends: the caller completes or releases its ticket."""
        if not self._leases:
            return None
        with self._lock:
            self._expire(self._clock())
            return self._pop(key)

    def end(self, key: bytes) -> None:
        """Another value is stored under ``key``, or none; to be called before and after the store has it."""
        if not self._leases and not self._beginning:
            return
        with self._lock:
            self._beginning.pop(key, None)
            self._drop(key)

    def _expire(self, now_s: float) -> None:
        for key in [key for key, lease in self._first() if lease.until_s <= now_s]:
            self._drop(key)

    def _first(self) -> Iterator[tuple[bytes, Lease]]:
        """The oldest few: enough that all expire over time, without walking all at each call."""
        for number, item in enumerate(self._leases.items()):
            if number == 64:
                return
            yield item

    def _pop(self, key: bytes) -> Lease | None:
        lease = self._leases.pop(key, None)
        if lease is not None and lease.value is not None:
            self._used_bytes -= lease.value.nbytes
        return lease

    def _drop(self, key: bytes) -> None:
        lease = self._pop(key)
        if lease is not None:
            self._store.release(lease.ticket)

    @property
    def held_bytes(self) -> int:
        return self._used_bytes


@dataclass(slots=True, eq=False)
class Lease:
    """``value`` is set where the store protects nothing: then the load has ended, and the ticket keeps its views."""

    until_s: float
    ticket: LoadTicket
    value: memoryview | None = None


Pieces = list[Buffer]
"""Buffers to send one after the other."""


class Commands:
    """The commands over ``store``, shared by all connections; every call may come from any thread.

    ``password``: what AUTH must give (and ``user``, where it names one); None: no AUTH.
    """

    def __init__(
        self,
        store: Store,
        *,
        password: bytes | None = None,
        in_flight_bytes: int = 256 << 20,
        held_bytes: int = 256 << 20,
        wait_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._password = password
        self._clock = clock
        self._wait_s = wait_s
        self.budget = ByteBudget(in_flight_bytes)
        self.leases = Leases(store, held_bytes, clock)
        inner: object = bare(store)
        self._expiring = inner if isinstance(inner, Expiring) else None
        self._memory = store if type(store) is MemoryStore else None
        """Its values are views of what it holds: nothing to wait for, to lease or to give back."""
        self._deadlines = Deadlines()
        """Of lifetimes given here, for TTL; the store ends them."""
        self._deadlines_lock = threading.Lock()
        self._writing = KeyLocks()
        """A write may be several calls of the store: a lookup for NX, the value, its lifetime."""
        self.connected = 0
        """Connections now; the server counts them."""
        self.counters = SharedCounters()

    @property
    def asks_password(self) -> bool:
        return self._password is not None

    def frame(self, words: Sequence[Word], size_bytes: int) -> tuple[bytes, int]:
        """What is stored in front of the value of ``size_bytes`` that is the next word, and how many of its last bytes
        are not stored: so that it is received into its place and never copied. Nothing and 0 for any other word.
        """
        verb = _bytes(words[0]).upper() if words else b""
        value = (verb == b"SET" and len(words) == 2) or (verb == b"MSET" and len(words) % 2 == 0)
        if not value:
            return b"", 0
        key = Key.of(words[-1])
        return key.front(size_bytes), 0 if key.name else TRAILER_BYTES

    def call(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        """Replies to one request, in parts: what holds a part's memory is given back when the next is asked for.

        Raises:
            Close: the connection ends.
        """
        if not words:
            return
        verb = _bytes(words[0]).upper().decode("latin-1")
        self.counters.add("commands")
        try:
            known = _COMMANDS.get(verb)
            if known is None:
                raise _Refused(f"unknown command '{verb[:64]}', expected one of {', '.join(_COMMANDS)}")
            least, most, run = known
            if not least <= len(words) - 1 <= most:
                raise _Refused(f"wrong number of arguments for '{verb.lower()}' command")
            if not session.authenticated and verb not in ("AUTH", "HELLO", "QUIT"):
                raise _Refused("Authentication required.", "NOAUTH")
            yield from run(self, session, words[1:])
        except (_Refused, SkyMemoryError) as error:
            yield [_said(error)]

    def run_key(self, session: Session, words: Sequence[Word]) -> tuple[bytes, Key] | None:
        """Verb and key of a request that may be part of a ``Run``; None for any other."""
        if self._memory is not None or not session.authenticated or len(words) not in (2, 3):
            return None
        try:
            verb = _bytes(words[0]).upper()
            return (verb, Key.of(words[1])) if (verb, len(words)) in ((b"GET", 2), (b"SET", 3)) else None
        except (_Refused, InvalidInput):
            return None

    def call_run(self, session: Session, run: Run) -> Iterator[Pieces]:
        """As ``call`` for each of the requests."""
        if len(run.requests) == 1:
            yield from self.call(session, run.requests[0])
            return
        if run.verb == b"GET":
            self.counters.add("commands", len(run.requests))
            yield from self._get_run(session, run.keys)
            return
        try:
            replies = self._set_run(run)
        except InvalidInput:  # one of them: nothing is stored yet
            for words in run.requests:
                yield from self.call(session, words)
            return
        except (_Refused, SkyMemoryError) as error:
            replies = [_said(error)] * len(run.requests)
        self.counters.add("commands", len(run.requests))
        yield [*replies]

    def _get_run(self, session: Session, keys: Sequence[Key]) -> Iterator[Pieces]:
        for part in self._parts(keys):
            try:
                yield from self._values(session, part)
            except (_Refused, SkyMemoryError) as error:
                yield [_said(error)] * len(part)

    def _parts(self, keys: Sequence[Key]) -> Iterator[Sequence[Key]]:
        """What is read and sent at once."""
        try:
            sizes = self._store.sizes([key.stored for key in keys])
        except SkyMemoryError:  # reading says it
            sizes = [None] * len(keys)
        first = part_bytes = 0
        for number, size in enumerate(sizes, 1):
            part_bytes += size or 0
            if part_bytes >= RUN_BYTES or number - first == RUN_VALUES or number == len(keys):
                yield keys[first:number]
                first, part_bytes = number, 0

    def _set_run(self, run: Run) -> list[bytes]:
        """The replies."""
        replies, stored, places = [_OK] * len(run.keys), list[tuple[bytes, Buffer]](), list[int]()
        for place, (key, words) in enumerate(zip(run.keys, run.requests, strict=True)):
            try:
                stored.append((key.stored, _to_store(key, words[2])))
                places.append(place)
            except _Refused as refused:
                replies[place] = _said(refused)
        with self._written([key for key, _ in stored]):
            done = self._put_lasting(stored)
        for place, one in zip(places, done, strict=True):
            if not one:
                replies[place] = _said(_Refused(_NO_ROOM, "OOM"))
        return replies

    # --- connections ---

    def _ping(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield [protocol.bulk(_bytes(words[0])) if words else protocol.simple("PONG")]

    def _hello(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        version = _bytes(words[0]) if words else b"%d" % session.reply.version
        if version not in (b"2", b"3"):
            raise _Refused("unsupported protocol version", "NOPROTO")
        rest = [_bytes(word) for word in words[1:]]
        name = session.name
        while rest:
            what = rest[0].upper()
            if what == b"AUTH" and len(rest) >= 3:
                self._check_password(session, rest[1], rest[2])
                rest = rest[3:]
            elif what == b"SETNAME" and len(rest) >= 2:
                name, rest = rest[1], rest[2:]
            else:
                raise _Refused("syntax error in HELLO: expected [2|3 [AUTH user password] [SETNAME name]]")
        if not session.authenticated:
            raise _Refused("HELLO must be called with the client already authenticated, or with AUTH", "NOAUTH")
        session.name, session.reply.version = name, int(version)
        facts = {
            b"server": protocol.bulk(b"redis"),  # clients look for this word
            b"version": protocol.bulk(_REDIS_VERSION),
            b"proto": protocol.integer(session.reply.version),
            b"id": protocol.integer(session.number),
            b"mode": protocol.bulk(b"standalone"),
            b"role": protocol.bulk(b"master"),
            b"modules": protocol.array(()),
        }
        yield [session.reply.mapping(facts)]

    def _auth(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        user = _bytes(words[0]) if len(words) == 2 else b"default"
        self._check_password(session, user, _bytes(words[-1]))
        yield [_OK]

    def _check_password(self, session: Session, user: bytes, password: bytes) -> None:
        if self._password is None:
            raise _Refused("AUTH called without any password configured: start the daemon with --password-file")
        if user != b"default" or not hmac.compare_digest(password, self._password):
            raise _Refused("invalid username-password pair", "WRONGPASS")
        session.authenticated = True

    def _select(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        if _bytes(words[0]) != b"0":
            raise _Refused("DB index is out of range: this store has one database, 0")
        yield [_OK]

    def _client(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        what = _bytes(words[0]).upper()
        if what == b"SETNAME" and len(words) == 2:
            session.name = _bytes(words[1])
            yield [_OK]
        elif what == b"SETINFO" and len(words) == 3:
            yield [_OK]
        elif what == b"GETNAME" and len(words) == 1:
            yield [protocol.bulk(session.name) if session.name else session.reply.null()]
        elif what == b"ID" and len(words) == 1:
            yield [protocol.integer(session.number)]
        else:
            raise _Refused("CLIENT: expected SETNAME name, GETNAME, SETINFO attribute value or ID")

    def _command(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        """What a client asks at its start; an empty list is a valid answer for all that we know of."""
        if words and _bytes(words[0]).upper() == b"COUNT":
            yield [protocol.integer(len(_COMMANDS))]
        else:
            yield [protocol.array(())]

    def _config(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        """GET of what benchmarks ask for; nothing can be set."""
        if _bytes(words[0]).upper() != b"GET":
            raise _Refused("CONFIG: only GET; settings are options of `skymemory store serve`")
        known = {b"save": b"", b"appendonly": b"no", b"databases": b"1"}
        asked = {_bytes(word).lower() for word in words[1:]}
        found = {key: protocol.bulk(value) for key, value in known.items() if key in asked or b"*" in asked}
        yield [session.reply.mapping(found)]

    def _info(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        lines = [
            "# Server",
            f"redis_version:{_REDIS_VERSION.decode()}",
            f"skymemory_version:{__version__}",
            "redis_mode:standalone",
            "# Clients",
            f"connected_clients:{self.connected}",
            f"in_flight_bytes:{self.budget.used_bytes}",
            f"leased_bytes:{self.leases.held_bytes}",
            "# Stats",
            *(f"{name}:{count}" for name, count in self.counters.as_dict().items()),
            "# Store",
            f"store:{self._store.name}",
            *(f"{name}:{value}" for name, value in self._store.stats().items()),
        ]
        yield [protocol.bulk("\r\n".join(lines).encode() + _CRLF)]

    def _quit(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        session.quits = True
        yield [_OK]

    # --- values ---

    def _get(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield from self._values(session, [Key.of(words[0])])

    def _mget(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        keys = [Key.of(word) for word in words]
        yield [protocol.array_head(len(keys))]
        for part in self._parts(keys):
            try:
                yield from self._values(session, part)
            except (_Refused, SkyMemoryError):
                raise Close from None  # an array that has begun cannot end in an error

    def _values(self, session: Session, keys: Sequence[Key]) -> Iterator[Pieces]:
        stored = [key.stored for key in keys]
        leases: dict[bytes, Lease | None] = {}
        booked_bytes, ticket = 0, None
        try:
            for one in dict.fromkeys(stored):
                leases[one] = self.leases.take(one)
            values: Sequence[memoryview | None] | None = None
            if self._memory is not None and not any(leases.values()):
                values = self._memory.get_now(stored)
                wanted_bytes = sum(value.nbytes for value in dict(zip(stored, values, strict=True)).values() if value)
            else:
                wanted_bytes = sum(size or 0 for size in self._store.sizes(list(leases)))
            if not self.budget.take(wanted_bytes, self._wait_s):
                self.counters.add("busy")
                raise _Refused("too many bytes in flight: other clients read slowly", "BUSY")
            booked_bytes = wanted_bytes
            if values is None:
                ticket = self._store.prepare_load(stored)
                values = self._loaded(ticket, leases)
            pieces: Pieces = []
            for key, value in zip(keys, values, strict=True):
                shown = None if value is None else self._shown(key, value)
                if shown is None and leases[key.stored] is not None:
                    self.counters.add("lost_leases")
                    raise Close
                self.counters.add("misses" if shown is None else "hits")
                pieces += [session.reply.null()] if shown is None else _bulk_pieces(shown)
            yield pieces
        finally:
            if ticket is not None:
                self._store.release(ticket)
            for lease in filter(None, leases.values()):
                self._store.release(lease.ticket)
            self.budget.give_back(booked_bytes)

    def _loaded(self, ticket: LoadTicket, leases: dict[bytes, Lease | None]) -> list[memoryview | None]:
        """The values of a load; one that a lease holds is not read again."""
        held = {key: lease.value for key, lease in leases.items() if lease is not None and lease.value is not None}
        if len(held) == len(ticket.keys):
            self._store.release(ticket)
            return [held[key] for key in ticket.keys]
        return [held.get(key, value) for key, value in zip(ticket.keys, self._store.complete_load(ticket), strict=True)]

    def _shown(self, key: Key, value: memoryview) -> Pieces | None:
        """A stored value as the client gave it; None where it is not what its key says."""
        if key.name:
            payload = named_payload(value, key.name)
            return None if isinstance(payload, str) else [payload]
        return [value, trailer_of(key.stored, value)]

    def _set(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        key, value, *options = words
        only_new, ttl_s = _set_options([_bytes(option).upper() for option in options])
        done = self._put([(Key.of(key), value)], ttl_s, only_new=only_new)
        yield [_OK if done else session.reply.null()]

    def _mset(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        if len(words) % 2:
            raise _Refused("wrong number of arguments for 'mset' command")
        self._put([(Key.of(key), value) for key, value in zip(words[::2], words[1::2], strict=True)], None)
        yield [_OK]

    def _put(self, items: Sequence[tuple[Key, Word]], ttl_s: float | None, *, only_new: bool = False) -> bool:
        """Stores ``items``, with their lifetime or not at all; False where ``only_new`` found one."""
        self._check_ttl(ttl_s)
        stored = [(key.stored, _to_store(key, value)) for key, value in items]
        keys = [key for key, _ in stored]
        with self._written(keys):
            if only_new and self._store.lookup(keys) != [Presence.MISS] * len(keys):
                return False
            if not all(self._put_lasting(stored)):
                raise _Refused(_NO_ROOM, "OOM")
            if ttl_s is not None and not self._expire_after(keys, ttl_s):
                gone = None not in self._store.delete(keys)
                raise _Refused(f"the store did not promise the lifetime: {'nothing' if gone else 'it may be'} stored")
        return True

    def _put_lasting(self, stored: Sequence[tuple[bytes, Buffer]]) -> list[bool]:
        """Stores them without lifetimes: those of the values before end."""
        if len(stored) == 1 and self._memory is not None and self._memory.put_now(*stored[0]):
            done = [True]
        else:
            done = self._store.put_many(stored)
        self.counters.add("stored", sum(done))
        self.counters.add("refused", len(done) - sum(done))
        mortal = [key for (key, _), one in zip(stored, done, strict=True) if one and self._deadlines.of(key) < math.inf]
        if mortal:
            self._expire_after(mortal, math.inf)
        return done

    @contextmanager
    def _written(self, keys: Sequence[bytes]) -> Iterator[None]:
        """Holds ``keys`` against other writers, and ends their leases: those of before, and those that read what was
        there while it was written.
        """
        if not self._writing.take(keys, self._wait_s):
            self.counters.add("busy")
            raise _Refused("another client has been writing this key for too long", "BUSY")
        try:
            for key in keys:
                self.leases.end(key)
            yield
        finally:
            for key in keys:
                self.leases.end(key)
            self._writing.give_back(keys)

    def _check_ttl(self, ttl_s: float | None) -> None:
        if ttl_s is not None and self._expiring is None:
            raise _Refused(f"a {self._store.name} store does not expire values: store it without EX, PX or EXPIRE")

    def _expire_after(self, keys: Sequence[bytes], ttl_s: float) -> bool:
        """Whether the store promises that all end in ``ttl_s``."""
        now_s = self._clock()
        promised = self._expiring is not None and all(self._expiring.expire(keys, ttl_s))
        with self._deadlines_lock:
            self._deadlines.ended(now_s)  # which forgets them
            for key in keys:
                self._deadlines.give(key, now_s + ttl_s if promised else math.inf)
            while len(self._deadlines) > _MAX_LIFETIMES:
                self._deadlines.forget_oldest()
        return promised

    def _exists(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield [protocol.integer(sum(self.leases.begin([Key.of(word).stored for word in words])))]

    def _strlen(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        key = Key.of(words[0])
        (size,) = self._store.sizes([key.stored])
        yield [protocol.integer(0 if size is None else size - key.overhead())]

    def _del(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield [protocol.integer(self._delete([Key.of(word).stored for word in words]))]

    def _delete(self, keys: Sequence[bytes]) -> int:
        """How many were there and are gone."""
        with self._written(keys):
            gone = self._store.delete(keys)
            with self._deadlines_lock:
                for key in keys:
                    self._deadlines.forget(key)
        return sum(one is True for one in gone)

    def _touch(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        keys = [Key.of(word).stored for word in words]
        self._store.touch(keys)
        yield [protocol.integer(sum(one is Presence.HIT for one in self._store.lookup(keys)))]

    def _expire(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        key, ttl_s = Key.of(words[0]).stored, _whole(words[1])
        if ttl_s <= 0:
            yield [protocol.integer(self._delete([key]))]
            return
        self._check_ttl(ttl_s)
        yield [protocol.integer(int(self._expire_after([key], ttl_s)))]

    def _ttl(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        """-2: no such key; -1: no lifetime that was given here."""
        key = Key.of(words[0]).stored
        if self._store.lookup([key]) != [Presence.HIT]:
            yield [protocol.integer(-2)]
            return
        left_s = self._deadlines.of(key) - self._clock()
        yield [protocol.integer(-1 if math.isinf(left_s) else max(0, math.ceil(left_s)))]

    # --- the whole store ---

    def _dbsize(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        figures = self._store.stats()
        entries = figures.get("entries", figures.get("values"))  # what is here; of the sky, what its index knows
        if entries is None:
            raise _Refused(f"a {self._store.name} store does not count its values")
        yield [protocol.integer(int(entries))]

    def _scan(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        """All names in one answer, with the cursor 0: a listing of satellites has no position to go on from. Blocks
        have no names.
        """
        store = bare(self._store)
        if not isinstance(store, Listing):
            raise _Refused(f"a {self._store.name} store cannot list names: a constellation, memory and disk can")
        pattern = b"*"
        options = [_bytes(word) for word in words[1:]]
        for option, value in zip(options[::2], options[1::2], strict=False):
            pattern = value if option.upper() == b"MATCH" else pattern
        names = [_client_key(one.name) for one in store.names()] if _bytes(words[0]) == b"0" else []
        found = [name for name in names if fnmatchcase(name.decode("latin-1"), pattern.decode("latin-1"))]
        yield [protocol.array([protocol.bulk(b"0"), protocol.array(map(protocol.bulk, found))])]


class _Refused(Exception):
    """An error reply, with its code."""

    def __init__(self, text: str, code: str = "ERR") -> None:
        super().__init__(text)
        self.code = code


def _said(error: _Refused | SkyMemoryError) -> bytes:
    """The error reply."""
    if isinstance(error, _Refused):
        return protocol.error(str(error), error.code)
    return protocol.error(str(error) if isinstance(error, InvalidInput) else f"{type(error).__name__}: {error}")


def _bulk_pieces(shown: Pieces) -> Pieces:
    size_bytes = sum(memoryview(piece).nbytes for piece in shown)
    return [protocol.bulk_head(size_bytes), *shown, _CRLF]


def _bytes(word: Word) -> bytes:
    if isinstance(word, Framed):
        raise _Refused("a key or an option that is larger than any key may be")
    return bytes(word)


def _client_key(name: str) -> bytes:
    """The key by which a client knows a named value."""
    odd = name.startswith(_ODD_NAME)
    return name.removeprefix(_ODD_NAME).encode("latin-1") if odd else name.encode()


def _to_store(key: Key, value: Word) -> Buffer:
    """A client's value as it is stored."""
    found: Buffer | str
    if isinstance(value, Framed):
        sound = key.name or is_trailer_of(key.stored, value.data, value.trailer)
        found = value.data if sound else "corrupt"
    elif key.name:
        found = key.front(memoryview(value).nbytes) + bytes(value)
    else:
        found = opened(key.stored, value)
    if isinstance(found, str):
        raise _Refused("a block's value ends in a mark and a CRC of key and value, as the redis:// store sends it")
    return found


def _set_options(options: Sequence[bytes]) -> tuple[bool, float | None]:
    """Whether only a new key is set, and the lifetime."""
    only_new, ttl_s = False, None
    rest = list(options)
    while rest:
        option = rest.pop(0)
        if option == b"NX" and not only_new:
            only_new = True
        elif option in (b"EX", b"PX") and rest and ttl_s is None:
            ttl_s = _whole(rest.pop(0)) / (1 if option == b"EX" else 1000)
            if ttl_s <= 0:
                raise _Refused("invalid expire time in 'set' command")
        else:
            raise _Refused("syntax error: SET key value [NX] [EX seconds | PX milliseconds]")
    return only_new, ttl_s


def _whole(word: Word) -> int:
    text = _bytes(word)
    if not (text.removeprefix(b"-").isdigit() and len(text) <= 15):
        raise _Refused("value is not an integer or out of range")
    return int(text)


_MANY = protocol.MAX_ARGUMENTS
_COMMANDS: dict[str, tuple[int, int, Callable[[Commands, Session, Sequence[Word]], Iterator[Pieces]]]] = {
    "PING": (0, 1, Commands._ping),
    "HELLO": (0, 6, Commands._hello),
    "AUTH": (1, 2, Commands._auth),
    "SELECT": (1, 1, Commands._select),
    "CLIENT": (1, 3, Commands._client),
    "COMMAND": (0, _MANY, Commands._command),
    "CONFIG": (2, _MANY, Commands._config),
    "INFO": (0, _MANY, Commands._info),
    "QUIT": (0, 0, Commands._quit),
    "GET": (1, 1, Commands._get),
    "MGET": (1, _MANY, Commands._mget),
    "SET": (2, 5, Commands._set),
    "MSET": (2, _MANY, Commands._mset),
    "EXISTS": (1, _MANY, Commands._exists),
    "STRLEN": (1, 1, Commands._strlen),
    "DEL": (1, _MANY, Commands._del),
    "UNLINK": (1, _MANY, Commands._del),
    "TOUCH": (1, _MANY, Commands._touch),
    "EXPIRE": (2, 2, Commands._expire),
    "TTL": (1, 1, Commands._ttl),
    "DBSIZE": (0, 0, Commands._dbsize),
    "SCAN": (1, 7, Commands._scan),
}
"""By name: the least and the most arguments, and what runs it."""
