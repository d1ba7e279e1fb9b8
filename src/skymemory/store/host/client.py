"""Client of a host arena: values are read where they lie and written where they stay; only control passes the socket.

Loads need no answer of the owner, so they go on while it is stopped, restarted or gone. Stores need two.
"""

from __future__ import annotations

import json
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from skymemory import native
from skymemory.errors import InvalidInput, MissingExtra, SkyMemoryError, ValueTooLarge
from skymemory.forks import Owner
from skymemory.metrics import Counters
from skymemory.reasons import Miss
from skymemory.store.accounting import size_of
from skymemory.store.base import (
    Buffer,
    KeyReport,
    LoadReport,
    LoadTicket,
    Places,
    Presence,
    RemoteStore,
    StoreTicket,
    check_ttl,
)
from skymemory.store.host import messages
from skymemory.store.host.arena import SOCKET, default_folder, map_read, map_write, own_folder, reader_of
from skymemory.store.host.layout import instance_of, values_bytes_of
from skymemory.store.host.messages import BELOW, HELLO, MAX_BYTES, MOST_ITEMS, VERSION, WELCOME, HostOp, HostStatus
from skymemory.store.host.owner import reason_of

_RETRY_S = 1.0
"""Time between attempts to reach an owner that is gone."""
_LOOK_S, _LOOK_TIMEOUT_S = 0.5, 0.01
"""Time between checks whether the owner has gone."""
_NOTHING = memoryview(b"")
_POPULATED_BYTES, _POPULATE_END_S = 16 << 20, 1.0
_TO_BE_WOKEN = 2
_FULL_S, _FULL_LOOK_S = 0.002, 20e-6
"""Longest wait for the owner to empty a slot."""


@dataclass(slots=True, eq=False)
class Mapping:
    """Arena mapped here, kept mapped by values in use."""

    instance: bytes
    number: int
    reader: native.HostReader
    values_bytes: int
    memory: memoryview


@dataclass(slots=True)
class _Reserved:
    """Room that the owner gave out for one message's items."""

    number: int
    grant: int
    items: list[int]
    """Positions in the ticket."""
    offsets: list[int | None]
    sizes: list[int]
    is_for_all: bool
    """True if the owner stores the values in all tiers: they may change, so it must order them."""


@dataclass(slots=True)
class _StoreState:
    mapping: Mapping
    parts: list[_Reserved] = field(default_factory=list)


class HostStore(RemoteStore):
    """Store of values in shared memory that another process of this computer owns.

    ``folder`` is the owner's. ``timeout_s`` limits the wait for an answer, ``fetch_s`` the wait for farther tiers.

    Raises:
        InvalidInput: another release, or another user's.
        SkyMemoryError: no owner answers there.
        MissingExtra: without the compiled helper.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "host",
        timeout_s: float = 2.0,
        fetch_s: float = 10.0,
        read_bytes_per_s: float = 10e9,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not native.NATIVE:
            raise MissingExtra(
                "the host store needs the compiled helper: install a wheel, or a C compiler and build it"
            )
        super().__init__(name, clock)
        self._folder = folder
        self._timeout_s = timeout_s
        self._read_bytes_per_s = read_bytes_per_s
        self._counters = Counters()
        self._lock = threading.RLock()
        """Lock of the socket: one message at a time."""
        self._sock: socket.socket | None = None
        self._idle_below: list[socket.socket] = []
        """Connections for questions that may wait for farther tiers, one for each question at a time."""
        self._has_below = False
        self._fetch_s = fetch_s
        self._retry_s = self._look_s = -math.inf
        self._mapped: Mapping | None = None
        self._mapped = self._attach()
        self._owner = Owner(f"the {name} store", self._let_go)

    @property
    def _mapping(self) -> Mapping:
        if self._mapped is None:
            raise InvalidInput(f"the {self._name} store is closed: open a new one")
        return self._mapped

    # --- the owner ---

    def _attach(self, before: Mapping | None = None, timeout_s: float | None = None) -> Mapping:
        """Connect, and map the arena unless it is mapped already."""
        own_folder(self._folder, make=False)
        path = self._folder / SOCKET
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(timeout_s or self._timeout_s)
            sock.connect(str(path))
            if before is None:
                sock.send(HELLO.pack(HostOp.HELLO, VERSION, 0, bytes(16)))
            else:
                before.reader.renew()  # the owner may give our room to others from now on
                sock.send(HELLO.pack(HostOp.HELLO, VERSION, before.number, before.instance))
            number, instance, values_bytes, has_below = WELCOME.unpack(_opened(sock.recv(MAX_BYTES)))
            mapping = before
            if before is None or before.instance != instance or before.number != number:
                mapping = self._map(number, instance, values_bytes)
        except (OSError, ValueError, struct.error) as error:
            sock.close()
            if isinstance(error, SkyMemoryError):
                raise
            is_default = self._folder == default_folder()
            if not isinstance(error, OSError):
                raise InvalidInput(f"host arena {self._folder}: its owner is of another release ({error})") from error
            raise SkyMemoryError(
                f"host arena {self._folder}: no owner answers ({error.strerror or error}): start one there with "
                f"`skymemory store serve 'host://SIZE{'' if is_default else f'?at={self._folder}'}'`"
            ) from error
        except BaseException:
            sock.close()
            raise
        sock.settimeout(self._timeout_s)
        self._sock = sock
        self._has_below = bool(has_below)
        assert mapping is not None
        return mapping

    def _map(self, number: int, instance: bytes, values_bytes: int) -> Mapping:
        directory = map_read(self._folder / "directory")
        values = map_write(self._folder / "values", values_bytes)
        if values_bytes_of(directory) != values_bytes or instance_of(directory) != instance:
            raise OSError("the arena has just been replaced")
        reader = reader_of(directory, values, self._folder / "pages" / f"{number}")
        mapping = Mapping(instance, number, reader, values_bytes, memoryview(values))
        self._populating = threading.Thread(target=self._populate, args=(mapping,), name="host-map", daemon=True)
        self._populating.start()
        return mapping

    def _populate(self, mapping: Mapping) -> None:
        """Map all pages: the first touch of a page costs several times what filling it does."""
        for begin in range(0, mapping.values_bytes, _POPULATED_BYTES):
            if self._closed or not mapping.reader.populate(begin, min(_POPULATED_BYTES, mapping.values_bytes - begin)):
                return

    def _let_go(self) -> None:
        """Close a forked child's copies of the descriptors."""
        for sock in (self._sock, *self._idle_below):
            if sock is not None:
                sock.close()
        if self._mapped is not None:
            self._mapped.reader.let_go()

    def _follow_owner(self) -> Mapping:
        """Return the mapping to read by; attach again if the owner has gone."""
        now_s = self._clock()
        if now_s >= self._look_s + _LOOK_S and self._lock.acquire(blocking=False):
            try:
                if self._sock is not None and _is_ended(self._sock):
                    self._drop()
                if self._sock is None:
                    self._reconnect(_LOOK_TIMEOUT_S)
            finally:
                self._look_s = self._clock()
                self._lock.release()
        return self._mapping

    def _drop(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _reconnect(self, timeout_s: float | None = None) -> bool:
        if self._clock() < self._retry_s:
            return False
        try:
            self._mapped = self._attach(self._mapping, timeout_s)
        except SkyMemoryError:
            self._counters.add("unreachable")
            return False
        finally:
            self._retry_s = self._clock() + _RETRY_S
        self._counters.add("reconnects")
        return True

    @contextmanager
    def _connected(self) -> Iterator[bool]:
        """Hold the socket; yield False if the owner does not answer."""
        with self._lock:
            yield self._sock is not None or self._reconnect()

    def _ask(self, message: bytes) -> memoryview | None:
        """Return the answer; None if none comes, after which the owner counts as gone. The lock is held."""
        if self._sock is None and not self._reconnect():
            return None
        assert self._sock is not None
        try:
            self._sock.send(message)
            answer = self._sock.recv(MAX_BYTES)
            if not answer:
                raise ConnectionError("the owner has ended")
        except OSError:
            self._counters.add("unanswered")
            self._drop()
            return None
        return _opened(answer)

    def _ask_all(self, op: HostOp, keys: Sequence[bytes], seconds: float | None = None) -> Iterator[memoryview | None]:
        with self._lock:
            for at in range(0, len(keys), MOST_ITEMS):
                yield self._ask(messages.pack_keys(op, keys[at : at + MOST_ITEMS], seconds))

    # --- farther tiers of the owner ---

    def _ask_below(
        self, op: HostOp, keys: Sequence[bytes], timeout_s: float, seconds: float | None = None
    ) -> Iterator[memoryview | None]:
        """Yield the answers about ``keys``, in parts of ``MOST_ITEMS``; None for those not answered in time."""
        until_s = time.monotonic() + timeout_s
        for at in range(0, len(keys), MOST_ITEMS):
            yield self._ask_one_below(messages.pack_keys(op, keys[at : at + MOST_ITEMS], seconds), until_s)

    def _ask_one_below(self, message: bytes, until_s: float) -> memoryview | None:
        sock = None
        try:
            with suppress(IndexError):
                sock = self._idle_below.pop()
            sock = sock or self._connect_below()
            sock.settimeout(max(until_s - time.monotonic(), 0.001))
            sock.send(message)
            answer = _opened(sock.recv(MAX_BYTES))
        except (OSError, SkyMemoryError):
            self._counters.add("unanswered")
            if sock is not None:
                sock.close()
            return None
        self._idle_below.append(sock)
        return answer

    def _connect_below(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(self._timeout_s)
            sock.connect(str(self._folder / SOCKET))
            sock.send(BELOW.pack(HostOp.BELOW, VERSION))
            _opened(sock.recv(MAX_BYTES))
        except BaseException:
            sock.close()
            raise
        return sock

    # --- reading ---

    @property
    def leases(self) -> bool:
        return not self._has_below

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        keys = self._check(keys)
        pending = self._pending()
        sizes = self._follow_owner().reader.sizes(keys)
        presence = [
            Presence.HIT if size is not None else Presence.PENDING if key in pending else Presence.MISS
            for key, size in zip(keys, sizes, strict=True)
        ]
        far = [at for at, state in enumerate(presence) if state is Presence.MISS] if self._has_below else []
        answers = self._ask_below(HostOp.LOOKUP, [keys[at] for at in far], self._timeout_s) if far else iter(())
        for number, answer in enumerate(answers):
            for at, state in zip(far[number * MOST_ITEMS :], answer or b"", strict=False):
                presence[at] = Presence(state)
        return presence

    def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        keys = self._check(keys)
        sizes = self._follow_owner().reader.sizes(keys)
        far = [at for at, size in enumerate(sizes) if size is None] if self._has_below else []
        answers = self._ask_below(HostOp.SIZES, [keys[at] for at in far], self._timeout_s) if far else iter(())
        for number, answer in enumerate(answers):
            for at, size in zip(far[number * MOST_ITEMS :], messages.unpack_sizes(answer or _NOTHING), strict=False):
                sizes[at] = size
        return sizes

    def prefix(self, keys: Sequence[bytes]) -> int:
        keys = self._check(keys)
        count = self._follow_owner().reader.prefix(keys)
        if count == len(keys) or not self._has_below:
            return count
        states = self.lookup(keys[count:])
        return count + next((at for at, state in enumerate(states) if state is not Presence.HIT), len(states))

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        ticket = super().prepare_load(keys)
        ticket.state = self._follow_owner().reader.hold(ticket.keys)
        return ticket

    def _fetch(self, keys: Sequence[bytes], held: list[native.HostView | Literal[False] | None]) -> None:
        """Let the owner copy absent values into the arena, and hold each part of them."""
        absent = [at for at, view in enumerate(held) if view is None] if self._has_below else []
        for number, _ in enumerate(self._ask_below(HostOp.FETCH, [keys[at] for at in absent], self._fetch_s)):
            part = absent[number * MOST_ITEMS :][:MOST_ITEMS]
            for at, view in zip(part, self._mapping.reader.hold([keys[at] for at in part]), strict=True):
                held[at] = view

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        self._check(())
        self._loads.take(ticket)
        started_s = self._clock()
        held, ticket.state = ticket.state, None
        assert isinstance(held, list)
        self._fetch(ticket.keys, held)
        values: list[memoryview | None] = []
        reasons: list[Miss | None] = []
        for key, view in zip(ticket.keys, held, strict=True):
            reason = reason_of(view)
            if view and not view.checked and not view.is_sound():
                reason = Miss.CORRUPT
                self._counters.add("corrupt")
                self._verdicts(HostOp.DELETE, [key])  # in the arena alone: farther tiers may have it whole
            values.append(memoryview(view) if view and reason is None else None)
            reasons.append(reason)
        seconds = self._clock() - started_s
        ticket.report = LoadReport(
            tuple(
                KeyReport(reason=reason) if value is None else KeyReport(self._name, value.nbytes, seconds)
                for value, reason in zip(values, reasons, strict=True)
            ),
            seconds,
        )
        misses = values.count(None)
        self._counters.add("hits", len(values) - misses)
        self._counters.add("misses", misses)
        return values

    def release(self, ticket: LoadTicket) -> None:
        self._loads.discard(ticket)
        ticket.state = None

    # --- writing ---

    def put_many(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> list[bool]:
        """Store blocks in slots, if they have room for them, else by two messages. Other processes see what is in slots
        once the owner has entered it, so named values, which may change, never go there.
        """
        ticket, _ = self._store_ticket(items, places)
        reader, done, must_wake = self._follow_owner().reader, [False] * len(ticket.items), False
        before: bytes | None = None
        for at, ((key, value), place) in enumerate(zip(ticket.items, ticket.places, strict=True)):
            if place is not None:
                kind, depth, parent = messages.words_of(place)
                posted = reader.store(key, value, kind, depth, parent or before)
                if posted < 0:
                    self._wake()
                    until_s = time.monotonic() + _FULL_S
                    while posted < 0 and time.monotonic() < until_s:
                        time.sleep(_FULL_LOOK_S)
                        posted = reader.store(key, value, kind, depth, parent or before)
                done[at] = posted > 0
                must_wake = must_wake or posted == _TO_BE_WOKEN
            before = key
        if must_wake:
            self._wake()
        self._counters.add("stored", done.count(True))
        rest = [at for at, ok in enumerate(done) if not ok]
        if rest:
            by_two = super().put_many([ticket.items[at] for at in rest], [ticket.places[at] for at in rest])
            for at, ok in zip(rest, by_two, strict=True):
                done[at] = ok
        return done

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        ticket, now_s = self._store_ticket(items, places)
        ticket.state = self._reserve(ticket)
        self._stores.add(ticket, now_s)
        return ticket

    def _wake(self) -> None:
        """Let the owner look into slots."""
        if (sock := self._sock) is not None:
            with suppress(OSError):  # full: it is awake; or it has ended, and the next one looks into slots
                sock.send(bytes([HostOp.POSTED]), socket.MSG_DONTWAIT)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._mapping.values_bytes:
            raise ValueTooLarge(
                f"a value of {size_bytes} bytes does not fit the {self._name} store's arena of "
                f"{self._mapping.values_bytes} bytes: raise its owner's budget, or store smaller values"
            )

    def _reserve(self, ticket: StoreTicket) -> _StoreState:
        places = ticket.places
        with self._connected():
            state = _StoreState(self._mapping)
            sized = [(key, size_of(value)) for key, value in ticket.items]
            for_all = [at for at, place in enumerate(places) if place is None] if self._has_below else []
            others = [at for at, place in enumerate(places) if place is not None or not self._has_below]
            for positions, is_for_all in ((others, False), (for_all, True)):
                for begin in range(0, len(positions), MOST_ITEMS):
                    part = positions[begin : begin + MOST_ITEMS]
                    grant = state.mapping.reader.grant
                    answer = self._ask(messages.pack_reserve([sized[at] for at in part], [places[at] for at in part]))
                    if answer is None or self._mapping is not state.mapping:
                        return state
                    number, offsets = messages.unpack_reserved(answer)
                    sizes = [sized[at][1] for at in part]
                    state.parts.append(_Reserved(number, grant, part, offsets, sizes, is_for_all))
            return state

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        self._check(())
        self._stores.take(ticket)
        started_s = self._clock()
        state = ticket.state
        assert isinstance(state, _StoreState)
        done = [False] * len(ticket.items)
        unanswered = set(range(len(done)))
        for part in state.parts:
            values = [ticket.items[at][1] for at in part.items]
            crcs = (
                [_crc_of_room(ticket, at) for at in part.items]
                if ticket.rooms
                else [
                    None
                    if offset is None or size_of(value) != size
                    else state.mapping.reader.write(offset, value, part.grant)
                    for offset, size, value in zip(part.offsets, part.sizes, values, strict=True)
                ]
            )
            answer = self._commit(state.mapping, part, crcs)
            if answer is None:
                break
            unanswered.difference_update(part.items)
            for at, verdict in zip(part.items, messages.unpack_verdicts(answer), strict=True):
                done[at] = verdict is True
        ticket.unanswered = frozenset(ticket.items[at][0] for at in unanswered)
        ticket.rooms = []
        self._counters.add("stored", done.count(True))
        self._counters.add("refused", done.count(False))
        ticket.seconds = self._clock() - started_s
        return done

    def _commit(self, mapping: Mapping, part: _Reserved, crcs: list[int | None]) -> memoryview | None:
        with self._lock:
            # Room of another owner or connection is void: it was given back.
            if self._sock is None or self._mapping is not mapping or mapping.reader.grant != part.grant:
                return None
            if not part.is_for_all:
                return self._ask(messages.pack_commit(part.number, crcs))
        return self._ask_one_below(
            messages.pack_put(mapping.number, part.number, crcs), time.monotonic() + self._fetch_s
        )

    # --- writing in place ---

    @property
    def memory(self) -> memoryview:
        return self._mapping.memory

    def prepare_rooms(self, sizes: Sequence[tuple[bytes, int]], places: Places = ()) -> StoreTicket:
        for _, size in sizes:
            self._check_size(size)
        memory = self._follow_owner().memory
        ticket, now_s = self._store_ticket([(key, memory[:size]) for key, size in sizes], places)
        ticket.state = state = self._reserve(ticket)
        ticket.rooms = [None] * len(sizes)
        for part in state.parts:
            for at, offset, size in zip(part.items, part.offsets, part.sizes, strict=True):
                room = None if offset is None else state.mapping.reader.room(offset, size, part.grant)
                ticket.rooms[at] = None if room is None else memoryview(room)
        self._stores.add(ticket, now_s)
        return ticket

    # --- other calls ---

    def touch(self, keys: Sequence[bytes]) -> None:
        list(self._ask_all(HostOp.TOUCH, self._check(keys)))

    def _verdicts(self, op: HostOp, keys: Sequence[bytes], seconds: float | None = None) -> list[bool | None]:
        done: list[bool | None] = []
        for at, answer in enumerate(self._ask_all(op, keys, seconds)):
            count = min(MOST_ITEMS, len(keys) - at * MOST_ITEMS)
            done += [None] * count if answer is None else messages.unpack_verdicts(answer)
        return done

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        return [verdict is True for verdict in self._verdicts(HostOp.PIN, self._check(keys), check_ttl(ttl_s))]

    def expire(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Expire values, despite leases and pins."""
        return [verdict is True for verdict in self._verdicts(HostOp.EXPIRE, self._check(keys), check_ttl(ttl_s))]

    def left_s(self, keys: Sequence[bytes]) -> list[float]:
        keys = self._check(keys)
        left: list[float] = []
        for at, answer in enumerate(self._ask_all(HostOp.LEFT, keys)):
            count = min(MOST_ITEMS, len(keys) - at * MOST_ITEMS)
            left += [math.inf] * count if answer is None else messages.unpack_answer_seconds(answer)
        return left

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        keys = self._check(keys)
        if not self._has_below:
            return self._verdicts(HostOp.DELETE, keys)
        done: list[bool | None] = []
        for at, answer in enumerate(self._ask_below(HostOp.DELETE, keys, self._fetch_s)):
            count = min(MOST_ITEMS, len(keys) - at * MOST_ITEMS)
            done += [None] * count if answer is None else messages.unpack_verdicts(answer)
        return done

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        keys = self._check(keys)
        sizes = self._mapping.reader.sizes(keys)
        far = [key for key, size in zip(keys, sizes, strict=True) if size is None]
        seconds = sum(size for size in sizes if size is not None) / self._read_bytes_per_s
        if not far or not self._has_below:
            return math.inf if far else seconds
        for answer in self._ask_below(HostOp.ESTIMATE, far, self._timeout_s, now_s):
            seconds += math.inf if answer is None else messages.unpack_answer_seconds(answer)[0]
        return seconds

    @contextmanager
    def at_once(self) -> Iterator[bool]:
        """Yield True without farther tiers: calls then ask no process."""
        yield not self._has_below

    def load_now(self, ticket: LoadTicket) -> list[memoryview | None] | None:
        if self._has_below and isinstance(ticket.state, list) and None in ticket.state:
            return None
        return self.complete_load(ticket)

    def stats(self) -> dict[str, int | float]:
        if self._owner.elsewhere:
            self._owner.check()
        with self._lock:
            answer = self._ask(bytes([HostOp.STATS])) if not self._closed else None
        owner = {} if answer is None else json.loads(bytes(answer))
        return {
            **owner,
            **{f"{name}_total": value for name, value in self._counters.as_dict().items()},
            "held_values": 0 if self._mapped is None else self._mapped.reader.held,
            "open_leases": len(self._loads) + len(self._stores),
        }

    def close(self) -> None:
        if self._owner.elsewhere or self._closed:
            return
        with self._lock:
            self._closed = True
            self._drop()
            while self._idle_below:
                self._idle_below.pop().close()
            self._loads.clear()
            self._stores.clear()
            self._mapped = None  # unmapped with the last view
        self._populating.join(_POPULATE_END_S)


def _crc_of_room(ticket: StoreTicket, at: int) -> int | None:
    room = ticket.rooms[at]
    return room.obj.crc(ticket.crcs.get(at)) if room is not None and isinstance(room.obj, native.HostRoom) else None


def _opened(answer: bytes) -> memoryview:
    """Return the answer's body, or raise what the owner refuses."""
    if not answer:
        raise ConnectionError("the owner has ended")
    status, body = answer[0], memoryview(answer)[1:]
    if status == HostStatus.OK:
        return body
    words = bytes(body).decode(errors="replace")
    if status == HostStatus.TOO_LARGE:
        raise ValueTooLarge(words)
    if status == HostStatus.INVALID:
        raise InvalidInput(words)
    raise ConnectionError("an answer of another protocol")


def _is_ended(sock: socket.socket) -> bool:
    """Return True if the peer has closed: nothing is sent to us without a question."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
