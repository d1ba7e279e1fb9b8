"""The Redis commands over any store that clients need of a cache.

- A key of ``skymemory:`` and 32 bytes is a block's, as ``store.redis`` sends it. The trailer of its value (a mark and a
  CRC) is checked and removed here, and computed again for each reader.
- Any other key is a name, and its value a named value (``store.named_values``).

**EXISTS leases.** LMCache's native client waits forever if the GET after EXISTS misses. So a key with the answer 1 is
leased for ``LEASE_S``, its lifetime, or until the next GET or a write. If the store cannot lease, the value is held in
the daemon's own bounded memory; if that is full, EXISTS answers 0. If a leased GET misses, the connection ends.
"""

from __future__ import annotations

import hmac
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain

from skymemory import __version__
from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.metrics import SharedCounters
from skymemory.reasons import Miss
from skymemory.store.accounting import BudgetedStore
from skymemory.store.base import Buffer, KeyLocks, LoadTicket, Presence, Store
from skymemory.store.disk import DiskStore
from skymemory.store.memory import MemoryStore
from skymemory.store.named_values import Listing, named_payload, unwrap_store
from skymemory.store.redis import TRAILER_BYTES, is_trailer_of, opened, trailer_of
from skymemory.store.redis_server import lifetimes, protocol
from skymemory.store.redis_server.budget import MemoryClaim, SharedBudget
from skymemory.store.redis_server.keys import MAX_PATTERN_BYTES, Key, client_key, pattern_of
from skymemory.store.redis_server.leases import Lease, Leases
from skymemory.store.redis_server.lifetimes import MAX_GIVEN, Lifetimes, Options, options_of
from skymemory.store.redis_server.protocol import LARGE_BYTES, Framed, Reply, Stranger, Word
from skymemory.store.redis_server.transactions import MAX_WATCHED, Transaction, WatchedKeys, Watches

RUN_VALUES, RUN_BYTES = 64, 8 << 20
_REDIS_VERSION = b"7.2.0"  # version by which clients choose commands
_NO_ROOM = "the store has no room, or did not answer: not all is stored"
NO_BYTES = "too many bytes in flight: of this client, or of others that are slow"
_OK = b"+OK\r\n"
_CRLF = b"\r\n"
_FLUSHED_AT_ONCE = 256
_MAX_CLIENT_NAME_BYTES = 1024


class Close(Exception):
    """End of the connection without a reply."""


@dataclass(slots=True, eq=False)
class Session:
    number: int
    authenticated: bool
    claim: MemoryClaim  # its share of the memory budget
    reply: Reply = field(default_factory=Reply)
    name: bytes = b""
    quits: bool = False
    transaction: Transaction | None = None
    watch: WatchedKeys = field(default_factory=WatchedKeys)
    kept: ExitStack | None = None
    """Resources of EXEC's replies, until sent; set while EXEC holds its keys, whose commands then do not wait."""


@dataclass(slots=True)
class Run:
    """GETs or SETs that arrived together, for one store call."""

    verb: bytes
    requests: list[Sequence[Word]] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    size_bytes: int = 0

    def takes(self, verb: bytes) -> bool:
        return verb == self.verb and len(self.keys) < RUN_VALUES and self.size_bytes < RUN_BYTES

    def add(self, key: Key, words: Sequence[Word]) -> None:
        self.requests.append(words)
        self.keys.append(key)
        if self.verb == b"SET":
            value = words[2]
            self.size_bytes += len(value.data) if isinstance(value, Framed) else memoryview(value).nbytes


Pieces = list[Buffer]


class Commands:
    """Commands over ``store``, shared by all connections. Thread-safe. ``password``: for AUTH, if any."""

    def __init__(
        self,
        store: Store,
        *,
        password: bytes | None = None,
        in_flight_bytes: int = 256 << 20,  # being sent and received
        held_bytes: int = 256 << 20,  # of values that EXISTS has leased
        wait_s: float = 30.0,  # for memory and for locked keys
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._password = password
        self._clock = clock
        self._wait_s = wait_s
        self.budget = SharedBudget(in_flight_bytes, wait_s / 2)
        self.lifetimes = Lifetimes(store, clock)
        self.leases = Leases(store, held_bytes, clock, self.lifetimes.all_left_s)
        self.watches = Watches()
        # True if no other process writes to the store.
        self._is_alone = isinstance(unwrap_store(store), MemoryStore | DiskStore)
        # The store, if its values are views of its memory: no wait, lease or release.
        self._memory = store if type(store) is MemoryStore else None
        self._writing = KeyLocks()  # locks of keys being written: a write may be several store calls
        self._strangers_lock, self._listing_lock = threading.Lock(), threading.Lock()
        self.connected = 0
        self.counters = SharedCounters()

    @property
    def asks_password(self) -> bool:
        return self._password is not None

    def on_stranger(self) -> bool:
        with self._strangers_lock:
            self.counters.add("strangers")
            return self.counters.get("strangers") == 1

    def check_inline(self, words: Sequence[Word]) -> None:
        """Raise Stranger for a line that is not a command."""
        if not words:
            return
        verb = _verb(words)
        command = COMMANDS.get(verb)
        if command is None or not command.least <= len(words) - 1 <= command.most:
            raise Stranger("a line that is no command")
        if verb == "CLIENT" and _verb(words[1:]) not in ("SETNAME", "GETNAME", "SETINFO", "ID"):
            raise Stranger("DICT, in which clients say their names so")

    def frame(self, words: Sequence[Word], size_bytes: int, most_bytes: int) -> tuple[bytes, int]:
        """Check a command before its large value is received. Return the header to store with it, and the number of its
        last bytes not to store. Raises Refused or InvalidInput.
        """
        if not words:
            raise Refused(f"unknown command, of {size_bytes} bytes")
        verb = _verb(words)
        command = self._known(verb)
        if len(words) > command.most:
            raise _wrong_number(verb)
        if size_bytes > most_bytes:
            self.counters.add("refused")
            raise Refused(
                f"a value of {size_bytes} bytes: expected at most {most_bytes}, --largest of `skymemory store serve`"
            )
        if len(words) not in command.values:
            raise Refused(f"an argument of {size_bytes} bytes that is no value: expected fewer than {LARGE_BYTES}")
        key = _key(words[-1 if command.values.step > 1 else 1])
        return key.front(size_bytes), 0 if key.name else TRAILER_BYTES

    def _known(self, verb: str) -> Command:
        command = COMMANDS.get(verb)
        if command is None:
            if verb in ("POST", "HOST:"):
                raise Stranger("HTTP")
            raise Refused(f"unknown command '{verb[:64]}', expected one of {', '.join(COMMANDS)}")
        return command

    def call(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        """Execute a command, or queue it after MULTI; yield its replies. Raises Close to end the connection, Stranger
        for another protocol.
        """
        if not words:
            return
        verb, transaction = _verb(words), session.transaction
        self.counters.add("commands")
        try:
            command = self._known(verb)
            # Like Redis, a command with options is queued however many words follow: EXEC answers its error.
            is_counted = transaction is None or command.is_at_once or command.least == command.most
            if len(words) - 1 < command.least or (is_counted and len(words) - 1 > command.most):
                raise _wrong_number(verb)
            if not (session.authenticated or command.needs_no_password):
                raise _no_auth()
            if transaction is None or command.is_at_once:
                transaction = None
                yield from command.run(self, session, words[1:])
            elif command.is_never_queued:
                raise Refused(f"{verb} inside MULTI is not allowed")
            else:
                transaction.add(words)
                yield [b"+QUEUED\r\n"]
        except Stranger:
            raise
        except (Refused, SkyMemoryError) as error:
            if transaction is not None:
                transaction.refuse("previous errors")
                if verb == "EXEC":
                    yield from self.call(session, words[:1])
                    return
            yield [error_reply(error)]

    def run_key(self, session: Session, words: Sequence[Word]) -> tuple[bytes, Key] | None:
        """Return verb and key of a GET or SET that may join a batch (``Run``)."""
        if self._memory is not None or len(words) not in (2, 3):
            return None
        if not session.authenticated or session.transaction is not None:
            return None
        try:
            verb = _bytes(words[0]).upper()
            return (verb, _key(words[1])) if (verb, len(words)) in ((b"GET", 2), (b"SET", 3)) else None
        except (Refused, InvalidInput):
            return None

    def call_run(self, session: Session, run: Run) -> Iterator[Pieces]:
        """Execute a batch; yield the replies."""
        if len(run.requests) == 1:
            yield from self.call(session, run.requests[0])
            return
        if run.verb == b"GET":
            self.counters.add("commands", len(run.requests))
            yield from self._get_run(session, run.keys)
            return
        try:
            replies = self._set_run(session, run)
        except InvalidInput:  # a key is invalid: nothing is stored yet
            for words in run.requests:
                yield from self.call(session, words)
            return
        except (Refused, SkyMemoryError) as error:
            replies = [error_reply(error)] * len(run.requests)
        self.counters.add("commands", len(run.requests))
        yield [*replies]

    def _get_run(self, session: Session, keys: Sequence[Key]) -> Iterator[Pieces]:
        for part in self._parts(keys):
            try:
                yield from self._values(session, part)
            except (Refused, SkyMemoryError) as error:
                yield [error_reply(error)] * len(part)

    def _parts(self, keys: Sequence[Key]) -> Iterator[Sequence[Key]]:
        """Split the keys into parts with values of about ``RUN_BYTES``."""
        try:
            sizes = self._store.sizes([key.stored for key in keys])
        except SkyMemoryError:  # the read will report it
            sizes = [None] * len(keys)
        first = part_bytes = 0
        for number, size in enumerate(sizes, 1):
            part_bytes += size or 0
            if part_bytes >= RUN_BYTES or number - first == RUN_VALUES or number == len(keys):
                yield keys[first:number]
                first, part_bytes = number, 0

    def _set_run(self, session: Session, run: Run) -> list[bytes]:
        """Store a batch's values; return the replies."""
        replies, stored, places = [_OK] * len(run.keys), list[tuple[bytes, Buffer]](), list[int]()
        for place, (key, words) in enumerate(zip(run.keys, run.requests, strict=True)):
            try:
                stored.append((key.stored, _to_store(key, words[2])))
                places.append(place)
            except Refused as refused:
                replies[place] = error_reply(refused)
        with self._written(session, [key for key, _ in stored]):
            results = self._put_lasting(stored)
        for place, is_stored in zip(places, results, strict=True):
            if not is_stored:
                replies[place] = error_reply(Refused(_NO_ROOM, "OOM"))
        return replies

    # --- connections ---

    def _ping(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield [protocol.bulk(_bytes(words[0])) if words else protocol.simple("PONG")]

    def _hello(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        version = _bytes(words[0]) if words else b"%d" % session.reply.version
        if version not in (b"2", b"3"):
            _parse_integer(version)
            raise Refused("unsupported protocol version", "NOPROTO")
        options = [_bytes(word) for word in words[1:]]
        name = session.name
        while options:
            option = options[0].upper()
            if option == b"AUTH" and len(options) >= 3:
                self._check_password(session, options[1], options[2])
                options = options[3:]
            elif option == b"SETNAME" and len(options) >= 2:
                name, options = _client_name(options[1]), options[2:]
            else:
                raise Refused("syntax error in HELLO: expected [2|3 [AUTH user password] [SETNAME name]]")
        if not session.authenticated:
            raise Refused("HELLO must be called with the client already authenticated, or with AUTH", "NOAUTH")
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
        if len(words) == 1 and self._password is None:
            raise Refused("AUTH called without any password configured: start the daemon with --password-file")
        user = _bytes(words[0]) if len(words) == 2 else b"default"
        self._check_password(session, user, _bytes(words[-1]))
        yield [_OK]

    def _check_password(self, session: Session, user: bytes, password: bytes) -> None:
        is_correct = self._password is None or hmac.compare_digest(password, self._password)
        if user != b"default" or not is_correct:
            raise Refused("invalid username-password pair", "WRONGPASS")
        session.authenticated = True

    def _select(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        if _bytes(words[0]) != b"0":
            raise Refused("DB index is out of range: this store has one database, 0")
        yield [_OK]

    def _client(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        subcommand = _bytes(words[0]).upper()
        if subcommand == b"SETNAME" and len(words) == 2:
            session.name = _client_name(_bytes(words[1]))
            yield [_OK]
        elif subcommand == b"SETINFO" and len(words) == 3:
            yield [_OK]
        elif subcommand == b"GETNAME" and len(words) == 1:
            yield [protocol.bulk(session.name) if session.name else session.reply.null()]
        elif subcommand == b"ID" and len(words) == 1:
            yield [protocol.integer(session.number)]
        else:
            raise Refused("CLIENT: expected SETNAME name, GETNAME, SETINFO attribute value or ID")

    def _command(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        if words and _bytes(words[0]).upper() == b"COUNT":
            yield [protocol.integer(len(COMMANDS))]
        else:
            yield [protocol.array(())]  # all known clients accept an empty list

    def _config(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        if _bytes(words[0]).upper() != b"GET":
            raise Refused("CONFIG: only GET; settings are options of `skymemory store serve`")
        settings = {b"save": b"", b"appendonly": b"no", b"databases": b"1"}
        names = {_bytes(word).lower() for word in words[1:]}
        answers = {key: protocol.bulk(value) for key, value in settings.items() if key in names or b"*" in names}
        yield [session.reply.mapping(answers)]

    def _info(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        lines = [
            "# Server",
            f"redis_version:{_REDIS_VERSION.decode()}",
            f"skymemory_version:{__version__}",
            "redis_mode:standalone",
            "# Clients",
            f"connected_clients:{self.connected}",
            f"in_flight_bytes:{self.budget.used_bytes}",
            f"ended_for_room:{self.budget.ended_clients}",
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
        yield from self._values(session, [_key(words[0])])

    def _mget(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        keys = [_key(word) for word in words]
        yield [protocol.array_head(len(keys))]
        for part in self._parts(keys):
            try:
                yield from self._values(session, part)
            except (Refused, SkyMemoryError):
                if session.kept is not None:
                    raise
                raise Close from None  # an array that has begun cannot end with an error

    def _values(self, session: Session, keys: Sequence[Key]) -> Iterator[Pieces]:
        """Yield the replies to GETs. Leases, load and memory are released afterwards (in EXEC, at its end)."""
        stored = [key.stored for key in keys]
        leases: dict[bytes, Lease | None] = {}
        booked_bytes, ticket = 0, None
        try:
            for stored_key in dict.fromkeys(stored):
                leases[stored_key] = self.leases.take(stored_key)
            values: Sequence[memoryview | None] | None = None
            if self._memory is not None and not any(leases.values()):
                values = self._memory.get_now(stored)
                wanted_bytes = sum(value.nbytes for value in dict(zip(stored, values, strict=True)).values() if value)
            else:
                wanted_bytes = sum(size or 0 for size in self._store.sizes(list(leases)))
            self._book(session, wanted_bytes)
            booked_bytes = wanted_bytes
            if values is None:
                ticket = self._store.prepare_load(stored)
                values = self._loaded(ticket, leases)
            pieces: Pieces = []
            for key, value in zip(keys, values, strict=True):
                value_pieces = None if value is None else self._to_client_value(key, value)
                lease = leases[key.stored]
                if value_pieces is None and lease is not None and lease.until_s > self._clock():
                    self.counters.add("lost_leases")
                    raise Close
                self.counters.add("misses" if value_pieces is None else "hits")
                pieces += [session.reply.null()] if value_pieces is None else _bulk_pieces(value_pieces)
            yield pieces
        finally:
            if session.kept is None:
                self._release(session, ticket, leases, booked_bytes)
            else:
                session.kept.callback(self._release, session, ticket, leases, booked_bytes)

    def _release(
        self, session: Session, ticket: LoadTicket | None, leases: dict[bytes, Lease | None], booked_bytes: int
    ) -> None:
        if ticket is not None:
            self._store.release(ticket)
        for lease in filter(None, leases.values()):
            self._store.release(lease.ticket)
        self.budget.give_back(session.claim, booked_bytes)

    def _book(self, session: Session, size_bytes: int) -> None:
        if not self.budget.take(session.claim, size_bytes, self._wait_s if session.kept is None else 0.0):
            self.counters.add("busy")
            raise Refused(NO_BYTES, "BUSY")

    def _loaded(self, ticket: LoadTicket, leases: dict[bytes, Lease | None]) -> list[memoryview | None]:
        leased = {key: lease.value for key, lease in leases.items() if lease is not None and lease.value is not None}
        if len(leased) == len(ticket.keys):
            self._store.release(ticket)
            return [leased[key] for key in ticket.keys]
        return [
            leased.get(key, value) for key, value in zip(ticket.keys, self._store.complete_load(ticket), strict=True)
        ]

    def _to_client_value(self, key: Key, value: memoryview) -> Pieces | None:
        if key.name:
            payload = named_payload(value, key.name)
            return None if isinstance(payload, str) else [payload]
        return [value, trailer_of(key.stored, value)]

    def _set(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        word, value, *option_words = words
        options, key = self._options("set", option_words, _SET_OPTIONS), _key(word)
        if not options.get:
            yield [_OK if self._put(session, [(key, value)], options) else session.reply.null()]
            return
        stored = [(key.stored, _to_store(key, value))]
        yield from self._exchange(session, key, lambda _: self._put_held(stored, options))

    def _options(self, verb: str, words: Sequence[Word], allowed: frozenset[bytes]) -> Options:
        """Parse a command's options; Refused if wrong, or if the store cannot expire values."""
        try:
            options = options_of([_bytes(word) for word in words], allowed, time.time())
        except ValueError as wrong:
            raise Refused(f"{wrong} in '{verb}' command" if "expire" in str(wrong) else str(wrong)) from None
        if options is None:
            raise Refused(f"syntax error: expected of {', '.join(sorted(name.decode() for name in allowed))}")
        if options.ttl_s is not None:
            self._check_lifetimes()
        return options

    def _getset(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        key = _key(words[0])
        stored = [(key.stored, _to_store(key, words[1]))]
        yield from self._exchange(session, key, lambda _: self._put_held(stored, Options()))

    def _getdel(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        key = _key(words[0])
        yield from self._exchange(session, key, lambda has_value: has_value and self._delete_held([key.stored]))

    def _getex(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        options, key = self._options("getex", words[1:], _GETEX_OPTIONS), _key(words[0])

        def change(is_there: bool) -> None:
            if not is_there:
                return
            if options.ttl_s is not None and options.ttl_s <= 0:
                self._delete_held([key.stored])
            elif options.ttl_s is not None and not self._give_lifetime(key.stored, options.ttl_s):
                raise Refused("the store did not promise the lifetime")
            elif options.persist:
                self._persist_held(key.stored)

        yield from self._exchange(session, key, change)

    def _exchange(self, session: Session, key: Key, change: Callable[[bool], object]) -> Iterator[Pieces]:
        """Yield the value before ``change``, which gets True if there is a value; other writers wait."""
        with ExitStack() as reading:
            with self._written(session, [key.stored]):
                pieces = reading.enter_context(self._reading(session, key))
                change(pieces is not None)
            yield [session.reply.null()] if pieces is None else _bulk_pieces(pieces)
            if session.kept is not None:
                session.kept.push(reading.pop_all())

    @contextmanager
    def _reading(self, session: Session, key: Key) -> Iterator[Pieces | None]:
        """Load a value inside ``with``, as the pieces of a reply."""
        (size_bytes,) = self._store.sizes([key.stored])
        self._book(session, size_bytes or 0)
        ticket = None
        try:
            ticket = self._store.prepare_load([key.stored])
            (value,) = self._store.complete_load(ticket)
            yield None if value is None else self._to_client_value(key, value)
        finally:
            if ticket is not None:
                self._store.release(ticket)
            self.budget.give_back(session.claim, size_bytes or 0)

    def _setex(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield self._set_for(session, words, "setex", b"EX")

    def _psetex(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield self._set_for(session, words, "psetex", b"PX")

    def _set_for(self, session: Session, words: Sequence[Word], verb: str, unit: bytes) -> Pieces:
        number = _parse_integer(words[1])  # of SETEX or PSETEX: key, lifetime, value
        if number <= 0:
            raise Refused(f"invalid expire time in '{verb}' command")
        ttl_s = _ttl_of(number, unit)
        self._check_lifetimes()
        self._put(session, [(_key(words[0]), words[2])], Options(ttl_s=ttl_s))
        return [_OK]

    def _setnx(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield [protocol.integer(self._put(session, _pairs(words, "msetnx"), Options(b"NX")))]

    def _mset(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        self._put(session, _pairs(words, "mset"), Options())
        yield [_OK]

    def _incr(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield self._add(session, words[0], 1)

    def _decr(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield self._add(session, words[0], -1)

    def _incrby(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield self._add(session, words[0], _parse_integer(words[1]))

    def _decrby(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        number = _parse_integer(words[1])
        if number == -(1 << 63):
            raise Refused("decrement would overflow")
        yield self._add(session, words[0], -number)

    def _add(self, session: Session, word: Word, by: int) -> Pieces:
        """Add to a value that is a decimal number (INCR and its kin), keeping its lifetime."""
        key = _key(word)
        with self._written(session, [key.stored]):
            with self._reading(session, key) as pieces:
                text = b"".join(piece[: lifetimes.INT64_BYTES + 1] for piece in pieces) if pieces is not None else b"0"
            number = _parse_integer(text) + by
            if not -(1 << 63) <= number < 1 << 63:
                raise Refused("increment or decrement would overflow")
            self._put_held([(key.stored, _to_store(key, b"%d" % number))], Options(keeps=True))
        return [protocol.integer(number)]

    def _put(self, session: Session, items: Sequence[tuple[Key, Word]], options: Options) -> bool:
        stored = [(key.stored, _to_store(key, value)) for key, value in items]
        with self._written(session, [key for key, _ in stored]):
            return self._put_held(stored, options)

    def _put_held(self, stored: Sequence[tuple[bytes, Buffer]], options: Options) -> bool:
        """Store values with locked keys; False if NX or XX forbids it. Refused without room."""
        keys, ttl_s = [key for key, _ in stored], options.ttl_s
        if options.condition:
            wanted = Presence.HIT if options.condition == b"XX" else Presence.MISS
            if self._store.lookup(keys) != [wanted] * len(keys):
                return False
        if ttl_s is not None and ttl_s <= 0:
            self._delete_held(keys)
            return True
        if options.keeps:
            remaining_s = min(map(self.lifetimes.left_s, keys))
            ttl_s = remaining_s if 0 < remaining_s < math.inf else None
        if not all(self._put_lasting(stored)):
            raise Refused(_NO_ROOM, "OOM")
        if ttl_s is not None and not self.lifetimes.give(keys, ttl_s):
            is_deleted = None not in self._store.delete(keys)
            raise Refused(f"the store did not promise the lifetime: {'nothing' if is_deleted else 'it may be'} stored")
        return True

    def _put_lasting(self, stored: Sequence[tuple[bytes, Buffer]]) -> list[bool]:
        """Store values without a lifetime; True per value stored. Marks watched keys."""
        keys = [key for key, _ in stored]
        try:
            if len(stored) == 1 and self._memory is not None and self._memory.put_now(*stored[0]):
                results = [True]
            else:
                results = self._store.put_many(stored)
        finally:
            self.watches.on_write(keys)
        self.counters.add("stored", sum(results))
        self.counters.add("refused", len(results) - sum(results))
        self.lifetimes.end([key for key, is_stored in zip(keys, results, strict=True) if is_stored])
        return results

    @contextmanager
    def _written(self, session: Session, keys: Sequence[bytes]) -> Iterator[None]:
        """Lock ``keys``; end their leases before and after the write, as a new lease may hold the previous value."""
        with self._lock_keys(session, keys):
            try:
                for key in keys:
                    self.leases.end(key)
                yield
            finally:
                for key in keys:
                    self.leases.end(key)

    @contextmanager
    def _lock_keys(self, session: Session, keys: Sequence[bytes]) -> Iterator[None]:
        """Lock keys against other writers; EXEC has done so already."""
        if session.kept is not None:
            yield
            return
        if not self._writing.take(keys, self._wait_s):
            self.counters.add("busy")
            raise Refused("another client has been writing this key for too long", "BUSY")
        try:
            yield
        finally:
            self._writing.give_back(keys)

    def _check_lifetimes(self) -> None:
        if not self.lifetimes.can_be_given:
            raise Refused(f"a {self._store.name} store does not expire values: store it without EX, PX or EXPIRE")
        if self.lifetimes.is_full:
            raise Refused(f"more than {MAX_GIVEN} lifetimes given through this daemon are under way: try again later")

    def _give_lifetime(self, key: bytes, ttl_s: float) -> bool:
        promised = self.lifetimes.give([key], ttl_s)
        if promised:
            self.leases.shorten(key, ttl_s)
            self.watches.on_write([key])
        return promised

    def _exists(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield [protocol.integer(sum(self.leases.begin([_key(word).stored for word in words])))]

    def _strlen(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        key = _key(words[0])
        (size,) = self._store.sizes([key.stored])
        yield [protocol.integer(0 if size is None else size - key.overhead())]

    def _del(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        keys = [_key(word).stored for word in words]
        with self._written(session, keys):
            deleted = self._delete_held(keys)
        yield [protocol.integer(deleted.count(True))]

    def _delete_held(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Delete locked keys and their lifetimes; marks watched keys."""
        try:
            deleted = self._store.delete(keys)
        except BaseException:
            self.watches.on_write(keys)
            raise
        self.watches.on_write([key for key, is_deleted in zip(keys, deleted, strict=True) if is_deleted is not False])
        self.lifetimes.forget(keys)
        return deleted

    def _touch(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        keys = [_key(word).stored for word in words]
        self._store.touch(keys)
        yield [protocol.integer(sum(presence is Presence.HIT for presence in self._store.lookup(keys)))]

    def _expire(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield self._expire_in(session, words, b"EX")

    def _pexpire(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield self._expire_in(session, words, b"PX")

    def _expireat(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield self._expire_in(session, words, b"EXAT")

    def _pexpireat(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield self._expire_in(session, words, b"PXAT")

    def _expire_in(self, session: Session, words: Sequence[Word], unit: bytes) -> Pieces:
        """Set a lifetime (EXPIRE and its kin) under NX, XX, GT and LT."""
        key, ttl_s = _key(words[0]).stored, _ttl_of(_parse_integer(words[1]), unit)
        conditions = {_bytes(word).upper() for word in words[2:]}
        if not any(conditions <= allowed for allowed in _EXPIRE_CONDITIONS):
            raise Refused("syntax error: expected NX, or XX and one of GT and LT")
        with (self._written if ttl_s <= 0 else self._lock_keys)(session, [key]):
            remaining_s = self.lifetimes.left_s(key)
            holds = {
                b"NX": math.isinf(remaining_s),
                b"XX": remaining_s < math.inf,
                b"GT": ttl_s > remaining_s,
                b"LT": ttl_s < remaining_s,
            }
            if not all(holds[condition] for condition in conditions):
                return [protocol.integer(0)]
            if ttl_s <= 0:
                return [protocol.integer(self._delete_held([key]) == [True])]
            self._check_lifetimes()
            return [protocol.integer(self._give_lifetime(key, ttl_s))]

    def _persist(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        key = _key(words[0]).stored
        with self._lock_keys(session, [key]):
            yield [protocol.integer(self._persist_held(key))]

    def _persist_held(self, key: bytes) -> bool:
        return self.lifetimes.left_s(key) < math.inf and self._give_lifetime(key, math.inf)

    def _ttl(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield [protocol.integer(self._get_remaining_lifetime(words[0], 1.0))]

    def _pttl(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield [protocol.integer(self._get_remaining_lifetime(words[0], 1e-3))]

    def _get_remaining_lifetime(self, word: Word, unit_s: float) -> int:
        key = _key(word).stored
        if self._store.lookup([key]) != [Presence.HIT]:
            return -2
        remaining_s = self.lifetimes.left_s(key)
        return -1 if math.isinf(remaining_s) else max(0, math.floor(remaining_s / unit_s + 0.5))  # rounded as in Redis

    def _type(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        is_there = self._store.lookup([_key(words[0]).stored]) == [Presence.HIT]
        yield [protocol.simple("string" if is_there else "none")]

    # --- several commands as one ---

    def _multi(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        if session.transaction is not None:
            raise Refused("MULTI calls can not be nested")
        session.transaction = Transaction()
        yield [_OK]

    def _discard(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        if session.transaction is None:
            raise Refused("DISCARD without MULTI")
        session.transaction = None
        self.watches.end(session.watch)
        yield [_OK]

    def _watch(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        if session.transaction is not None:
            raise Refused("WATCH inside MULTI is not allowed")
        if not self._is_alone:
            raise Refused(
                f"a {self._store.name} store has other writers, whom WATCH would not see: use memory or disk, or MULTI "
                "without WATCH"
            )
        keys = [_key(word).stored for word in words]
        if not self.watches.add(session.watch, keys):
            raise Refused(f"WATCH of more than {MAX_WATCHED} keys")
        for key, presence in zip(keys, self._store.lookup(keys), strict=True):
            session.watch.keys[key] = presence is Presence.HIT
        yield [_OK]

    def _unwatch(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        self.watches.end(session.watch)
        yield [_OK]

    def _exec(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        transaction, session.transaction = session.transaction, None
        if transaction is None:
            raise Refused("EXEC without MULTI")
        try:
            if transaction.abort:
                raise Refused(f"Transaction discarded because of {transaction.abort}.", "EXECABORT")
            keys = list(dict.fromkeys(chain(_keys_of(transaction), session.watch.keys)))
            with ExitStack() as resources:
                with self._lock_keys(session, keys):
                    replies = None  # if a watched key has changed
                    if not self._is_changed(session.watch):
                        session.kept = resources
                        try:
                            replies = self._execute(session, transaction)
                        finally:
                            session.kept = None
                # No key is locked while the client reads its replies.
                if replies is None:
                    yield [session.reply.null_array()]
                else:
                    yield [protocol.array_head(len(transaction.requests)), *replies]
        finally:
            self.watches.end(session.watch)

    def _is_changed(self, watch: WatchedKeys) -> bool:
        if watch.is_changed or not watch.keys:
            return watch.is_changed
        present = [presence is Presence.HIT for presence in self._store.lookup(list(watch.keys))]
        return present != list(watch.keys.values())

    def _execute(self, session: Session, transaction: Transaction) -> Pieces:
        """Execute a transaction's commands; errors become replies."""
        replies: Pieces = []
        closes = False
        for words in transaction.requests:
            try:
                command = COMMANDS[_verb(words)]
                if len(words) - 1 > command.most:
                    raise _wrong_number(_verb(words))
                parts = list(command.run(self, session, words[1:]))
                replies += chain.from_iterable(parts)
            except (Refused, SkyMemoryError) as error:
                replies.append(error_reply(error))
            except Close:  # the other commands are executed nevertheless
                closes = True
        if closes:
            raise Close
        return replies

    # --- the whole store ---

    def _dbsize(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        figures = self._store.stats()
        # Memory and disk: stored values; sky: values in its index.
        entries = figures.get("entries", figures.get("values"))
        if entries is None:
            raise Refused(f"a {self._store.name} store does not count its values")
        yield [protocol.integer(int(entries))]

    def _scan(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        """List all names at once: satellites cannot continue from a cursor."""
        cursor, *option_words = map(_bytes, words)
        if not (not cursor or cursor.removeprefix(b"-").isdigit()):
            raise Refused("invalid cursor")
        options = {b"MATCH": b"*", b"COUNT": b"10", b"TYPE": b"string"}
        for option, value in zip(map(bytes.upper, option_words[::2]), option_words[1::2], strict=False):
            if option not in options:
                raise Refused("syntax error: expected SCAN cursor [MATCH pattern] [COUNT n] [TYPE string]")
            options[option] = value
        if len(option_words) % 2 or _parse_integer(options[b"COUNT"]) < 1:
            raise Refused("syntax error: expected SCAN cursor [MATCH pattern] [COUNT n] [TYPE string]")
        head = protocol.array_head(2) + protocol.bulk(b"0")
        if cursor.strip(b"-0") or options[b"TYPE"].lower() != b"string":
            yield [head, protocol.array(())]
        else:
            yield from self._names(session, options[b"MATCH"], head)

    def _keys(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        yield from self._names(session, _bytes(words[0]))

    def _names(self, session: Session, glob: bytes, head: bytes = b"") -> Iterator[Pieces]:
        """Yield the names that match a pattern, after ``head``."""
        matches = pattern_of(glob)
        if matches is None:
            raise Refused(f"a pattern of {len(glob)} bytes: expected at most {MAX_PATTERN_BYTES}")
        if not self._listing_lock.acquire(timeout=self._wait_s if session.kept is None else 0.0):
            self.counters.add("busy")
            raise Refused("other clients' names are being listed", "BUSY")
        try:
            names = (client_key(value.name) for value in self._listing().names())
            reply = head + protocol.array(protocol.bulk(name) for name in names if matches.match(name))
            self._book(session, len(reply))
        finally:
            self._listing_lock.release()
        try:
            yield [reply]
        finally:
            if session.kept is None:
                self.budget.give_back(session.claim, len(reply))
            else:
                session.kept.callback(self.budget.give_back, session.claim, len(reply))

    def _listing(self) -> Listing:
        store = unwrap_store(self._store)
        if not isinstance(store, Listing):
            raise Refused(f"a {self._store.name} store cannot list names: a constellation, memory and disk can")
        return store

    def _flushdb(self, session: Session, words: Sequence[Word]) -> Iterator[Pieces]:
        if words and _bytes(words[0]).upper() not in (b"ASYNC", b"SYNC"):
            raise Refused("syntax error: FLUSHDB [ASYNC | SYNC]")
        store = unwrap_store(self._store)
        all_keys = (
            store.stored_keys() if isinstance(store, BudgetedStore) else [name.key for name in self._listing().names()]
        )
        unknown = 0
        for at in range(0, len(all_keys), _FLUSHED_AT_ONCE):
            keys = all_keys[at : at + _FLUSHED_AT_ONCE]
            with self._written(session, keys):
                unknown += self._delete_held(keys).count(None)
        if unknown:
            raise Refused(f"{unknown} values may still be there: satellites that may hold them did not answer")
        yield [_OK]


class Refused(Exception):
    def __init__(self, text: str, code: str = "ERR") -> None:
        super().__init__(text)
        self.code = code


def error_reply(error: Refused | SkyMemoryError) -> bytes:
    if isinstance(error, Refused):
        return protocol.error(str(error), error.code)
    return protocol.error(str(error) if isinstance(error, InvalidInput) else f"{type(error).__name__}: {error}")


def _bulk_pieces(pieces: Pieces) -> Pieces:
    size_bytes = sum(memoryview(piece).nbytes for piece in pieces)
    return [protocol.bulk_head(size_bytes), *pieces, _CRLF]


def _wrong_number(verb: str) -> Refused:
    return Refused(f"wrong number of arguments for '{verb.lower()}' command")


def _no_auth() -> Refused:
    return Refused("Authentication required.", "NOAUTH")


def _client_name(name: bytes) -> bytes:
    if len(name) > _MAX_CLIENT_NAME_BYTES or not all(0x21 <= byte <= 0x7E for byte in name):
        raise Refused(
            f"Client names cannot contain spaces, newlines or special characters, or more than {_MAX_CLIENT_NAME_BYTES}"
        )
    return name


def _verb(words: Sequence[Word]) -> str:
    word = words[0]
    return "" if isinstance(word, Framed) else bytes(word[:64]).upper().decode("latin-1")


def _bytes(word: Word) -> bytes:
    if isinstance(word, Framed):
        raise Refused("a key or an option that is larger than any key may be")
    return bytes(word)


def _key(word: Word) -> Key:
    return Key.of(_bytes(word))


def _keys_of(transaction: Transaction) -> Iterator[bytes]:
    for words in transaction.requests:
        keys = COMMANDS[_verb(words)].keys
        for word in words[keys.start : keys.stop : keys.step]:
            with suppress(Refused, InvalidInput):
                yield _key(word).stored


def _pairs(words: Sequence[Word], verb: str) -> list[tuple[Key, Word]]:
    if len(words) % 2:
        raise _wrong_number(verb)
    return [(_key(key), value) for key, value in zip(words[::2], words[1::2], strict=True)]


def _to_store(key: Key, value: Word) -> Buffer:
    """Return a received value as stored: a block's checked, without trailer; others with a header."""
    stored: Buffer | Miss
    if isinstance(value, Framed):
        is_sound = key.name or is_trailer_of(key.stored, value.data, value.trailer)
        stored = value.data if is_sound else Miss.CORRUPT
    elif key.name:
        stored = key.front(memoryview(value).nbytes) + bytes(value)
    else:
        stored = opened(key.stored, value)
    if isinstance(stored, Miss):
        raise Refused("a block's value ends in a mark and a CRC of key and value, as the redis:// store sends it")
    return stored


def _ttl_of(number: int, unit: bytes) -> float:
    try:
        return lifetimes.ttl_of(number, unit, time.time())
    except ValueError as wrong:
        raise Refused(str(wrong)) from None


def _parse_integer(word: Word) -> int:
    try:
        return lifetimes.parse_integer(_bytes(word))
    except ValueError as wrong:
        raise Refused(str(wrong)) from None


_MANY = protocol.MAX_ARGUMENTS
_NONE, _FIRST, _ALL, _EVERY_OTHER = range(0), range(1, 2), range(1, _MANY + 1), range(1, _MANY + 1, 2)
_SECOND, _THIRD, _PAIRS = range(2, 3), range(3, 4), range(2, _MANY + 1, 2)
_GETEX_OPTIONS = lifetimes.LIFETIMES | {b"PERSIST"}
_EXPIRE_CONDITIONS = ({b"NX"}, {b"XX", b"GT"}, {b"XX", b"LT"})
_SET_OPTIONS = lifetimes.LIFETIMES | {b"KEEPTTL", b"NX", b"XX", b"GET"}


@dataclass(frozen=True, slots=True)
class Command:
    """Command of the table: its arguments (for users, least and most) and its method."""

    form: str
    least: int
    most: int
    run: Callable[[Commands, Session, Sequence[Word]], Iterator[Pieces]]
    keys: range = _NONE
    """Positions of keys; the verb's is 0."""
    values: range = _NONE
    """Positions of values, received as they are stored."""
    is_at_once: bool = False  # executed between MULTI and EXEC, not queued
    is_never_queued: bool = False  # refused between MULTI and EXEC
    needs_no_password: bool = False
    differs: str = ""  # difference from Redis, for users


_LASTS = "of satellites it knows lifetimes given through this daemon; refused where the store has none"
_NAMES = "all names at once; blocks have none; patterns of at most 1,024 bytes; not for Redis behind the daemon"
COMMANDS: dict[str, Command] = {
    "PING": Command("[message]", 0, 1, Commands._ping),
    "ECHO": Command("message", 1, 1, Commands._ping),
    "HELLO": Command(
        "[2|3 [AUTH user password] [SETNAME name]]", 0, 6, Commands._hello, is_never_queued=True, needs_no_password=True
    ),
    "AUTH": Command("[user] password", 1, 2, Commands._auth, needs_no_password=True, differs="one user, `default`"),
    "SELECT": Command("index", 1, 1, Commands._select, differs="one database, 0"),
    "CLIENT": Command("SETNAME|GETNAME|SETINFO|ID", 1, 3, Commands._client, differs="no other subcommand"),
    "COMMAND": Command("[COUNT]", 0, _MANY, Commands._command, differs="other subcommands answer an empty list"),
    "CONFIG": Command("GET name …", 2, _MANY, Commands._config, differs="save, appendonly, databases; no SET"),
    "INFO": Command("[section …]", 0, _MANY, Commands._info, differs="all sections, with the store's figures"),
    "QUIT": Command("", 0, 0, Commands._quit, is_at_once=True, needs_no_password=True),
    "GET": Command("key", 1, 1, Commands._get, _FIRST, differs="ends a lease of EXISTS"),
    "MGET": Command("key …", 1, _MANY, Commands._mget, _ALL),
    "GETSET": Command("key value", 2, 2, Commands._getset, _FIRST, _SECOND),
    "GETDEL": Command("key", 1, 1, Commands._getdel, _FIRST),
    "GETEX": Command(
        "key [EX s|PX ms|EXAT s|PXAT ms|PERSIST]",
        1,
        3,
        Commands._getex,
        _FIRST,
        differs=f"{_LASTS}; a wrong lifetime is refused though the key is absent",
    ),
    "STRLEN": Command("key", 1, 1, Commands._strlen, _FIRST),
    "SET": Command(
        "key value [NX|XX] [GET] [EX s|PX ms|EXAT s|PXAT ms|KEEPTTL]",
        2,
        6,
        Commands._set,
        _FIRST,
        _SECOND,
        differs=_LASTS,
    ),
    "SETEX": Command("key s value", 3, 3, Commands._setex, _FIRST, _THIRD, differs=_LASTS),
    "PSETEX": Command("key ms value", 3, 3, Commands._psetex, _FIRST, _THIRD, differs=_LASTS),
    "SETNX": Command("key value", 2, 2, Commands._setnx, _FIRST, _SECOND),
    "MSET": Command("key value …", 2, _MANY, Commands._mset, _EVERY_OTHER, _PAIRS, differs="readers may see a part"),
    "MSETNX": Command("key value …", 2, _MANY, Commands._setnx, _EVERY_OTHER, _PAIRS, differs="readers may see a part"),
    "INCR": Command("key", 1, 1, Commands._incr, _FIRST),
    "DECR": Command("key", 1, 1, Commands._decr, _FIRST),
    "INCRBY": Command("key number", 2, 2, Commands._incrby, _FIRST),
    "DECRBY": Command("key number", 2, 2, Commands._decrby, _FIRST),
    "EXISTS": Command("key …", 1, _MANY, Commands._exists, _ALL, differs="leases the keys for the next GET"),
    "TYPE": Command("key", 1, 1, Commands._type, _FIRST, differs="string or none"),
    "DEL": Command("key …", 1, _MANY, Commands._del, _ALL),
    "UNLINK": Command("key …", 1, _MANY, Commands._del, _ALL),
    "TOUCH": Command("key …", 1, _MANY, Commands._touch, _ALL),
    "EXPIRE": Command("key s [NX|XX] [GT|LT]", 2, _MANY, Commands._expire, _FIRST, differs=_LASTS),
    "PEXPIRE": Command("key ms [NX|XX] [GT|LT]", 2, _MANY, Commands._pexpire, _FIRST, differs=_LASTS),
    "EXPIREAT": Command("key unix-s [NX|XX] [GT|LT]", 2, _MANY, Commands._expireat, _FIRST, differs=_LASTS),
    "PEXPIREAT": Command("key unix-ms [NX|XX] [GT|LT]", 2, _MANY, Commands._pexpireat, _FIRST, differs=_LASTS),
    "PERSIST": Command("key", 1, 1, Commands._persist, _FIRST, differs=_LASTS),
    "TTL": Command("key", 1, 1, Commands._ttl, _FIRST, differs=_LASTS),
    "PTTL": Command("key", 1, 1, Commands._pttl, _FIRST, differs=_LASTS),
    "MULTI": Command("", 0, 0, Commands._multi, is_at_once=True),
    "EXEC": Command(
        "",
        0,
        0,
        Commands._exec,
        is_at_once=True,
        differs="no other client of this daemon writes to its keys meanwhile; readers may see a part",
    ),
    "DISCARD": Command("", 0, 0, Commands._discard, is_at_once=True),
    "WATCH": Command(
        "key …",
        1,
        _MANY,
        Commands._watch,
        _ALL,
        is_at_once=True,
        differs="memory and disk alone: to other stores others write, too",
    ),
    "UNWATCH": Command("", 0, 0, Commands._unwatch),
    "DBSIZE": Command("", 0, 0, Commands._dbsize, differs="blocks and names; not for tiers and Redis"),
    "SCAN": Command("cursor [MATCH pattern] [COUNT n] [TYPE string]", 1, 7, Commands._scan, differs=_NAMES),
    "KEYS": Command("pattern", 1, 1, Commands._keys, differs=_NAMES),
    "FLUSHDB": Command(
        "[ASYNC|SYNC]",
        0,
        1,
        Commands._flushdb,
        is_never_queued=True,
        differs="of memory and disk all, of others what KEYS lists; value by value, so not in MULTI",
    ),
}
