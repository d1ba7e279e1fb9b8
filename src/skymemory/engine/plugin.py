"""Values of other engines' plug-ins in a store: bytes under the engine's names, checked, and limited in time.

A plug-in (``lmcache``, ``sglang``, ``vllm.tier``) adds its engine's interface. Once the store is open nothing raises: a
bad or late value is a miss, a refused value is counted.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import NamedTuple

from skymemory import native
from skymemory.cache.blocks import LOAD_BATCH_BYTES, STORE_BATCH_BYTES, TIER_FAILURES
from skymemory.cache.patience import ending_within, left_s
from skymemory.cache.tiers.store import HierarchySettings, TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.config import duration, filled, known_keys, setting, size, text
from skymemory.errors import InvalidInput, LaterVersion, MalformedPacket, ValueTooLarge
from skymemory.kv.block import key_hash
from skymemory.kv.codec.codec_base import RAW
from skymemory.kv.context import CacheContext
from skymemory.kv.value import ValueHeader, block_name, unpack_value
from skymemory.metrics import SharedCounters
from skymemory.reasons import INVALID, Miss
from skymemory.store.base import Buffer, Presence, Store
from skymemory.testbed.open_store import host_address, how_to_share, kinds_of, open_store

_log = logging.getLogger(__name__)

_THREADS = 8  # number of threads: a lookup must not wait for a slow load
_LOG_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class PluginSettings:
    store: str = setting("store", text, "", "the address of a store")
    weights: str = setting("weights", text, "", "any words that name the weights and how they are quantized")
    kv_dtype: str = setting(
        "kv_dtype", text, "", "the type of keys and values where the engine says only bytes (uint8)"
    )
    ask_deadline_s: float = setting("ask_deadline", duration, 0.5, "how long to wait for an answer whether it is there")
    load_deadline_s: float = setting("load_deadline", duration, 5.0, "how long to wait for values")
    # With the two questions of a save that hangs it stays below the 10 s for which SGLang joins its threads.
    store_deadline_s: float = setting("store_deadline", duration, 8.0, "how long to wait until values are stored")
    queue_bytes: int = setting("queue", size, 256 << 20, "bound on bytes that wait to be stored; more are not stored")

    @classmethod
    def read(cls, table: object, where: str, processes: int) -> PluginSettings:
        """Read and check the table, called ``where`` in errors; refuse a store that ``processes`` cannot share."""
        if not isinstance(table, Mapping):
            raise InvalidInput(f'{where} is {table!r}: expected a table, such as {{"store": …, "weights": …}}')
        settings = filled(cls, table, where)
        for name, example in (("store", "unix:///run/sky.sock"), ("weights", "a revision of the model")):
            if not getattr(settings, name):
                says = known_keys(cls)[name].metadata["says"]
                raise InvalidInput(f"{where}: {name} is missing: expected {says}, such as {example}")
        kinds = kinds_of(settings.store)
        if processes > 1 and (host_address(settings.store) or "disk" in kinds or set(kinds) <= {"memory"}):
            raise InvalidInput(
                f"{where}: store {settings.store!r} belongs to one process, and here are {processes}: "
                f"{how_to_share(settings.store)}"
            )
        return settings

    def type_of(self, dtype: object, where: str) -> str:
        """Return the context's description of a data type. Raises InvalidInput for plain bytes without a
        ``kv_dtype``.
        """
        if str(dtype).rpartition(".")[2] == "uint8" and not self.kv_dtype:
            raise InvalidInput(
                f"{where}: kv_dtype is missing: the engine keeps its cache as bytes (uint8), expected what they are, "
                "such as fp8_e4m3"
            )
        return f"{dtype} {self.kv_dtype}".rstrip()


class SavedValues(NamedTuple):
    """Result by value: stored now, and written by this call."""

    done: list[bool]
    written: list[bool]


class PluginStore:
    """Values of one ``context`` in the store, each of ``value_bytes`` at most. Thread-safe."""

    def __init__(
        self,
        settings: PluginSettings,
        context: CacheContext,
        value_bytes: int,
        store: Store | None = None,
        log: logging.Logger = _log,
    ) -> None:
        deadlines = TierSettings(
            ask_deadline_s=settings.ask_deadline_s,
            load_deadline_s=settings.load_deadline_s,
            store_deadline_s=settings.store_deadline_s,
            threads=_THREADS,
        )
        opened = open_store(settings.store) if store is None else store
        self._said = ""
        self._store = TieredStore([(opened, deadlines)], HierarchySettings(load_deadline_s=settings.load_deadline_s))
        self._load_deadline_s, self._store_deadline_s = settings.load_deadline_s, settings.store_deadline_s
        self._digest = context.digest()
        self.value_bytes = max(1, value_bytes)
        self._queue_bytes = settings.queue_bytes
        self._queued_bytes = 0
        self._lock = Lock()
        self._logger = log
        self._logged_s = time.monotonic()
        self.counters = SharedCounters()

    def with_context(self, context: CacheContext, value_bytes: int) -> PluginStore:
        """Return the values of another context in the same store and counters."""
        other = copy(self)
        other._digest, other.value_bytes = context.digest(), max(1, value_bytes)
        return other

    def key(self, name: str) -> bytes:
        return key_hash(self._digest, name)

    def present(self, names: Sequence[str]) -> list[bool]:
        try:
            return [state is Presence.HIT for state in self._store.lookup([self.key(name) for name in names])]
        except Exception as error:
            self._failed(error)
            return [False] * len(names)

    def prefix(self, names: Sequence[str]) -> int:
        return next((at for at, is_present in enumerate(self.present(names)) if not is_present), len(names))

    def load(
        self, names: Sequence[str], place: Callable[[int, memoryview], bool], *, is_prefix: bool = True
    ) -> list[bool]:
        """Load values, all by one deadline; returns for each if it was loaded.

        ``place`` copies value ``at`` before it returns; False: no room. ``is_prefix``: only a beginning is of use, so
        loading stops after a batch with a miss.
        """
        return [not reason for reason in self.load_or_say_why(names, place, is_prefix=is_prefix)]

    def load_or_say_why(
        self, names: Sequence[str], place: Callable[[int, memoryview], bool], *, is_prefix: bool = True
    ) -> list[Miss | None]:
        reasons: list[Miss | None] = []
        batch = max(1, LOAD_BATCH_BYTES // self.value_bytes)
        ends_s = time.monotonic() + self._load_deadline_s
        while len(reasons) < len(names) and not (is_prefix and any(reasons)):
            # The first batch has the store's own deadlines, which allow for a busy computer.
            with _until(ends_s if reasons else math.inf):
                if not left_s():
                    break
                reasons += self._load(names[len(reasons) : len(reasons) + batch], len(reasons), place)
        why = Miss.BEHIND_MISS if is_prefix and any(reasons) else Miss.DEADLINE
        if not_tried := len(names) - len(reasons):
            self.counters.add("misses_total", not_tried, why)
        self._log()
        return reasons + [why] * not_tried

    def _load(self, names: Sequence[str], first: int, place: Callable[[int, memoryview], bool]) -> list[Miss | None]:
        # Load a batch of ``names``, the first of which is value ``first`` for ``place``; return reasons of misses.
        keys = [self.key(name) for name in names]
        reasons: list[Miss | None] = [Miss.UNREACHABLE] * len(keys)
        ticket = None
        try:
            ticket = self._store.prepare_load(keys)
            values = self._store.complete_load(ticket)
            reports = ticket.report.keys if ticket.report is not None else ()
            for at, (key, value) in enumerate(zip(keys, values, strict=True)):
                if value is None:
                    reason = reports[at].reason if reports else Miss.ABSENT
                    reasons[at] = reason if reason is not Miss.ABSENT or left_s() else Miss.DEADLINE
                    continue
                payload = _payload(key, value)
                if isinstance(payload, Miss):
                    reasons[at] = payload
                    continue
                reasons[at] = None if place(first + at, payload) else Miss.NO_ROOM
                self.counters.add("loaded_bytes_total", payload.nbytes if not reasons[at] else 0)
        except Exception as error:
            self._failed(error)
        finally:
            if ticket is not None:
                self._store.release(ticket)
        wrong = [key for key, reason in zip(keys, reasons, strict=True) if reason in INVALID]
        if wrong:  # present values are not stored again, so they would stay wrong
            self.delete(wrong)
        for reason in reasons:
            self.counters.add("misses_total" if reason else "hits_total", 1, reason or "")
        return reasons

    def save(self, names: Sequence[str], read: Callable[[int], Sequence[Buffer]]) -> SavedValues:
        """Store absent values, all by one deadline; ``read`` returns the pieces of value ``at``."""
        ends_s = time.monotonic() + self._store_deadline_s
        was_present = self.present(names)
        done = list(was_present)
        self.counters.add("present_total", sum(done))
        missing = [at for at, is_there in enumerate(done) if not is_there]
        batch = max(1, STORE_BATCH_BYTES // self.value_bytes)
        for start in range(0, len(missing), batch):
            part = missing[start : start + batch]
            # The first batch has the store's own deadlines.
            with _until(ends_s if start else math.inf):
                if not left_s():
                    self.counters.add("refused_total", len(missing) - start, Miss.DEADLINE)
                    break
                for at, stored in zip(
                    part, self._put([(self.key(names[at]), partial(read, at)) for at in part]), strict=True
                ):
                    done[at] = stored
        self._log()
        return SavedValues(done, [is_done and not was for is_done, was in zip(done, was_present, strict=True)])

    def _put(self, values: Sequence[tuple[bytes, Callable[[], Sequence[Buffer]]]]) -> list[bool]:
        # Store a batch of keys, each with a reader of its value's pieces; return for each if it is stored.
        reason = Miss.NOT_TAKEN
        stored = [False] * len(values)
        try:
            items = [(key, _framed(key, read())) for key, read in values]
            ticket = self._store.prepare_store(items)
            stored = self._store.complete_store(ticket)
            if not all(stored) and ticket.reason and ticket.reason != self._said:
                self._said = ticket.reason
                self._logger.warning("values are not stored: %s", ticket.reason)
            self.counters.add(
                "stored_bytes_total", sum(len(value) for (_, value), ok in zip(items, stored, strict=True) if ok)
            )
        except ValueTooLarge as error:
            reason = Miss.TOO_LARGE
            self._logger.warning("a value is not stored: %s", error)
        except Exception as error:
            self._failed(error)
        self.counters.add("stored_total", sum(stored))
        if refused := len(stored) - sum(stored):
            self.counters.add("refused_total", refused, reason)
        return stored

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Delete values; returns for each if it was present, None if unknown."""
        try:
            return list(self._store.delete(keys))
        except Exception as error:
            self._failed(error)
            return [None] * len(keys)

    def queue(self, size_bytes: int) -> bool:
        """Reserve ``size_bytes`` of the save queue until ``dequeue``; False if full."""
        with self._lock:
            room = self._queued_bytes + size_bytes <= self._queue_bytes
            if room:
                self._queued_bytes += size_bytes
        if not room:
            self.counters.add("refused_total", 1, Miss.QUEUE_FULL)
        return room

    def dequeue(self, size_bytes: int) -> None:
        with self._lock:
            self._queued_bytes -= size_bytes

    def close(self) -> None:
        self._log(last=True)
        self._store.close()

    def _failed(self, error: Exception) -> None:
        self.counters.add("failures_total", 1, type(error).__name__)
        if isinstance(error, TIER_FAILURES):
            self._logger.warning("the store failed, which is a miss: %s", error)
        else:  # a fault of this plug-in; the engine goes on without a cache
            self._logger.exception("a fault of the plug-in, which is a miss")

    def _log(self, last: bool = False) -> None:
        now_s = time.monotonic()
        with self._lock:
            if not last and now_s - self._logged_s < _LOG_EVERY_S:
                return
            self._logged_s = now_s
        counts = ", ".join(f"{name} {count}" for name, count in self.counters.as_dict().items())
        self._logger.info("SkyMemory: %s", counts or "not used")


GONE = INVALID | {Miss.ABSENT}
"""Reasons after which the value is not in the store."""


def _until(ends_s: float) -> AbstractContextManager[None]:
    """Limit a batch to its call's deadline ``ends_s``."""
    return ending_within(ends_s - time.monotonic())


def warn_untested(engine: str, version: str, tested: str) -> None:
    if version.split(".")[:2] != tested.split(".")[:2]:
        _log.warning("%s %s was not tested with this plug-in, %s was", engine, version, tested)


def _framed(key: bytes, pieces: Sequence[Buffer]) -> bytes:
    crc = size_bytes = 0
    for piece in pieces:
        crc = native.crc32(piece, crc)
        size_bytes += memoryview(piece).nbytes
    return b"".join((ValueHeader(RAW.codec_id, size_bytes, size_bytes, name=block_name(key, crc)).pack(), *pieces))


def _payload(key: bytes, value: memoryview) -> memoryview | Miss:
    # Return the payload of a value after all checks, or the reason why it is of no use.
    try:
        header, payload = unpack_value(value)
    except LaterVersion:
        return Miss.LATER_VERSION
    except MalformedPacket:
        return Miss.CORRUPT
    if header.codec_id != RAW.codec_id or header.layout is not None or header.raw_bytes != payload.nbytes:
        return Miss.FOREIGN
    if header.name != block_name(key, native.crc32(payload)):
        return Miss.CORRUPT if header.name[:-8] == block_name(key, 0)[:-8] else Miss.FOREIGN
    return payload
