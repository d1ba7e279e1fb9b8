"""Prefetch of expected prompts, and the file with their habits."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skymemory.cache.blocks import TIER_FAILURES
from skymemory.cache.predictor import KEPT_DAYS, Expectation, Habit, Predictor
from skymemory.errors import InvalidInput, LaterFile, cannot_read
from skymemory.files import open_file, write_private
from skymemory.metrics import Counters
from skymemory.store.base import Prefetching, Store, bring_near

_MOST_ATTEMPTS = 3
_SAVE_S = 60.0
_log = logging.getLogger(__name__)


class PrefetchScheduler:
    """Scheduler of prefetches. Call ``record_prompt`` (thread-safe) for every prompt, and ``tick`` more often than
    every ``lead_s``.

    A prompt expected within ``lead_s`` is prefetched, in up to three attempts. Use a separate store: a prefetch may
    take seconds. ``clock``: Unix time.

    ``habits_file`` is read at construction, and written a minute after a sighting, at the end of ``running``, and by
    ``save``, in a single process. An unusable file is renamed to ``<name>.bad``; a later release's stays unchanged.
    """

    def __init__(
        self,
        store: Store | Prefetching,
        predictor: Predictor | None = None,
        *,
        lead_s: float = 600.0,
        clock: Callable[[], float] = time.time,
        counters: Counters | None = None,
        habits_file: Path | None = None,
    ) -> None:
        if lead_s <= 0:
            raise InvalidInput(f"lead_s is {lead_s}: expected more than 0")
        self.counters = counters if counters is not None else Counters()
        self._store = store
        self._predictor = predictor if predictor is not None else Predictor()
        self._lead_s = lead_s
        self._clock = clock
        self._attempts: dict[tuple[bytes, int, float], int] = {}  # by prompt and expected time
        self._lock = threading.Lock()
        self._habits_file = habits_file
        self._unsaved_since_s: float | None = None
        if habits_file is not None and habits_file.exists():
            self._load(habits_file)

    def _load(self, path: Path) -> None:
        try:
            load_habits(self._predictor, path)
        except LaterFile as error:
            self.counters.add("habits_files_later_version_total")
            self._habits_file = None
            _log.warning("%s; it is left alone: habits are learned from scratch and not saved", error)
        except InvalidInput as error:
            self.counters.add("habits_files_refused_total")
            aside = path.with_name(path.name + ".bad")
            try:
                path.replace(aside)
            except OSError as refusal:
                raise InvalidInput(f"{error}; and it cannot be set aside as {aside}: {refusal.strerror}") from error
            _log.warning("%s; renamed to %s, habits are learned from scratch", error, aside)

    def save(self) -> None:
        """Write the habits file. A failure is counted and logged."""
        if self._habits_file is None:
            return
        with self._lock:
            self._unsaved_since_s = None
            try:
                save_habits(self._predictor, self._habits_file)
            except OSError as error:
                self.counters.add("habits_save_failures_total")
                _log.warning("habits cannot be written to %s: %s", self._habits_file, error.strerror)

    def record_prompt(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            now_s = self._clock()
            self._predictor.record_prompt(keys, now_s)
            if self._unsaved_since_s is None:
                self._unsaved_since_s = now_s

    def tick(self) -> int:
        """Prefetch what is due; returns the number of values."""
        now_s = self._clock()
        if self._unsaved_since_s is not None and now_s - self._unsaved_since_s >= _SAVE_S:
            self.save()
        with self._lock:
            expected = self._predictor.expected(now_s, self._lead_s)
        self._attempts = {
            expectation_id: count for expectation_id, count in self._attempts.items() if expectation_id[2] >= now_s
        }
        brought = 0
        for expectation in expected:
            expectation_id = (expectation.keys[0], len(expectation.keys), expectation.at_s)
            attempts = self._attempts.get(expectation_id, 0)
            if attempts < _MOST_ATTEMPTS:
                near = self._prefetch(expectation)
                brought += sum(near)
                self._attempts[expectation_id] = _MOST_ATTEMPTS if all(near) else attempts + 1
        return brought

    @contextmanager
    def running(self, every_s: float = 30.0) -> Iterator[None]:
        """Call ``tick`` in a thread while entered."""
        stopping = threading.Event()

        def tick_on() -> None:
            while not stopping.wait(every_s):
                self.tick()

        thread = threading.Thread(target=tick_on, name="prefetch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
            self.save()

    def _prefetch(self, expectation: Expectation) -> list[bool]:
        """Prefetch a prompt; True for each block near."""
        self.counters.add("prefetches_total")
        try:
            near = bring_near(self._store, expectation.keys, expectation.at_s)
        except TIER_FAILURES:
            self.counters.add("prefetch_failures_total")
            return [False] * len(expectation.keys)
        self.counters.add("prefetched_blocks_total", sum(near))
        self.counters.add("not_prefetched_blocks_total", len(near) - sum(near))
        return near


# --- the habits file: JSON, written atomically, read strictly; private, as it shows which prompts recur when ---


FORMAT_VERSION = 1
MAX_FILE_BYTES = 64 << 20
_MOST_KEY_DIGITS = 128


def save_habits(predictor: Predictor, path: Path) -> None:
    """Replace the file atomically. Raises OSError."""
    content = {
        "version": FORMAT_VERSION,
        "zone": predictor.zone,
        "habits": [
            {
                "time_s": habit.time_s,
                "day": habit.day,
                "first_day": habit.first_day,
                "seen": habit.seen,
                "keys": [key.hex() for key in habit.keys],
            }
            for habit in predictor.habits
        ],
    }
    write_private(path, json.dumps(content), durable=True)


def load_habits(predictor: Predictor, path: Path) -> None:
    """Restore the file's habits into a new predictor. InvalidInput: unreadable, no habits file, or another time zone;
    LaterFile: of a later release.
    """
    zone, habits = read_habits(path)
    if zone != predictor.zone:
        raise InvalidInput(f"{path}: its times are of {_zone(zone)}, not of {_zone(predictor.zone)}; use that zone")
    predictor.restore(habits)


def read_habits(path: Path) -> tuple[str | None, list[Habit]]:
    """Return time zone and habits."""
    try:
        with open_file(path) as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidInput(cannot_read(path, error)) from error
    try:
        content = json.loads(text) if len(text) <= MAX_FILE_BYTES else None
    except (ValueError, RecursionError):
        content = None
    match content:
        case {"version": int(version)} if version > FORMAT_VERSION:
            raise LaterFile(f"{path}: a habits file of version {version}, which a later release wrote")
        case {"version": 1, "zone": None | str() as zone, "habits": list(entries)}:
            return zone, [_habit(entry, f"{path}, habit {number}") for number, entry in enumerate(entries, start=1)]
    raise InvalidInput(f"{path}: not a habits file of version {FORMAT_VERSION}, or damaged")


def _habit(entry: Any, where: str) -> Habit:
    """Parse a habit of the file."""
    match entry:
        case {
            "time_s": int() | float() as time_s,
            "day": int(day),
            "first_day": int(first_day),
            "seen": int(seen_days),
            "keys": [_, *_] as texts,
        }:
            is_valid = math.isfinite(time_s) and abs(day) < 1 << 40 and first_day <= day
            if is_valid and seen_days & 1 and 0 < seen_days < 1 << KEPT_DAYS and all(map(_is_key, texts)):
                return Habit(tuple(bytes.fromhex(text) for text in texts), float(time_s), day, first_day, seen_days)
    raise InvalidInput(f"{where}: expected time_s, day, first_day, seen and keys as this version writes them")


def _is_key(text: Any) -> bool:
    if not isinstance(text, str) or not 0 < len(text) <= _MOST_KEY_DIGITS:
        return False
    try:
        return bool(bytes.fromhex(text))
    except ValueError:
        return False


def _zone(name: str | None) -> str:
    return "UTC" if name is None else name
