"""What plug-ins of other engines keep in a store: checked values under salted keys, misses for all that is wrong."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from skymemory.cache.patience import ending_within, recompute_cost
from skymemory.engine.plugin import PluginSettings, PluginStore, _framed, warn_untested
from skymemory.errors import InvalidInput
from skymemory.kv.context import CacheContext
from skymemory.kv.value import PAYLOAD_AT
from skymemory.store.base import LoadTicket, Presence, StoreTicket
from skymemory.store.host.client import HostStore
from skymemory.store.host.server import ServedArena
from skymemory.store.memory import MemoryStore

CONTEXT = CacheContext("m", "w", "t", "float32", "l", adapter="a", block_tokens=16)
SETTINGS = PluginSettings(store="memory", weights="1", ask_deadline_s=0.2, load_deadline_s=0.3, store_deadline_s=0.3)
NAMES = [f"page {at}" for at in range(5)]


class Slow(MemoryStore):
    """Does not answer until it is released."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.released = threading.Event()

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        self.released.wait(30)
        return super().lookup(keys)

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        self.released.wait(30)
        return super().prepare_load(keys)


@pytest.fixture
def memory() -> Iterator[MemoryStore]:
    with MemoryStore(1 << 20) as store:
        yield store


@pytest.fixture
def values(memory: MemoryStore) -> Iterator[PluginStore]:
    values = PluginStore(SETTINGS, CONTEXT, 1000, memory)
    yield values
    values.close()


def data(at: int) -> bytes:
    return bytes([at]) * (900 + at)


def pieces(at: int) -> list[memoryview]:
    view = memoryview(data(at))
    return [view[:7], view[7:7], view[7:]]


def loaded(values: PluginStore, names: Sequence[str] = NAMES) -> list[bytes | None]:
    found: dict[int, bytes] = {}

    def place(at: int, value: memoryview) -> bool:
        found[at] = bytes(value)
        return True

    done = values.load(names, place)
    assert done == [at in found for at in range(len(names))]
    return [found.get(at) for at in range(len(names))]


def test_what_is_saved_is_loaded(values: PluginStore) -> None:
    assert loaded(values) == [None] * 5 and values.prefix(NAMES) == 0
    assert values.save(NAMES[:3], pieces).done == [True] * 3
    assert values.present(NAMES) == [True] * 3 + [False] * 2 and values.prefix(NAMES) == 3
    assert loaded(values) == [data(0), data(1), data(2), None, None]
    assert values.counters.as_dict() == {
        "hits_total": 3,
        "loaded_bytes_total": sum(len(data(at)) for at in range(3)),
        "misses_total{absent}": 7,
        "present_total": 0,
        "stored_total": 3,
        "stored_bytes_total": sum(128 + len(data(at)) for at in range(3)),
    }


def test_what_is_there_is_not_read_again(values: PluginStore) -> None:
    values.save(NAMES[:2], pieces)
    read: list[int] = []
    assert values.save(NAMES[:3], lambda at: [read.append(at) or data(at)]).done == [True] * 3  # type: ignore[func-returns-value,list-item]
    assert read == [2] and values.counters.get("present_total") == 2


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("place", [4, *range(0, 128 + 901, 9)])
def test_any_flipped_byte_is_a_miss_and_is_forgotten(values: PluginStore, memory: MemoryStore, place: int) -> None:
    values.save(NAMES[:3], pieces)
    key = values.key(NAMES[1])
    (value,) = memory.get_many([key])
    assert value is not None
    wrong = bytearray(value)
    wrong[place] ^= 4
    memory.put_many([(key, wrong)])
    assert loaded(values, NAMES[:3]) == [data(0), None, data(2)]
    later = place == 4  # the version: not ours to delete
    assert values.present(NAMES[:3]) == [True, later, True]
    assert values.counters.total("misses_total") == 1


@pytest.mark.parametrize("cut", [0, 1, 64, 127, 128, 500, 1028])
def test_a_cut_value_is_a_miss(values: PluginStore, memory: MemoryStore, cut: int) -> None:
    values.save(NAMES[:2], pieces)
    key = values.key(NAMES[1])
    (value,) = memory.get_many([key])
    assert value is not None and len(value) == 1029
    memory.put_many([(key, bytes(value[:cut]))])
    assert loaded(values, NAMES[:2]) == [data(0), None] and values.counters.get("misses_total", "corrupt") == 1


def test_a_sound_value_under_another_key_is_foreign(values: PluginStore, memory: MemoryStore) -> None:
    values.save(NAMES, pieces)
    (value,) = memory.get_many([values.key(NAMES[1])])
    assert value is not None
    memory.put_many([(values.key(NAMES[2]), bytes(value))])
    assert loaded(values, NAMES)[2] is None and values.counters.get("misses_total", "foreign") == 1


def test_every_field_of_the_context_separates(values: PluginStore, memory: MemoryStore) -> None:
    values.save(NAMES, pieces)
    for field in fields(CacheContext):
        now = getattr(CONTEXT, field.name)
        changes = {bool: lambda now: not now, int: lambda now: now + 1, bytes: lambda now: b"x"}
        other = changes.get(type(now), str.upper)(now)
        others = PluginStore(SETTINGS, replace(CONTEXT, **{field.name: other}), 1000, memory)
        assert others.present(NAMES) == [False] * 5, field.name


def test_a_value_without_a_place_is_a_miss_and_stays(values: PluginStore) -> None:
    values.save(NAMES, pieces)
    assert values.load(NAMES, lambda at, value: at != 1) == [True, False, True, True, True]
    assert values.counters.get("misses_total", "no room") == 1 and values.prefix(NAMES) == 5


def test_behind_a_batch_with_a_miss_nothing_is_loaded(memory: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymemory.engine.plugin.LOAD_BATCH_BYTES", 2000)
    values = PluginStore(replace(SETTINGS, load_deadline_s=30.0), CONTEXT, 1000, memory)
    values.save([NAMES[at] for at in (0, 1, 3, 4)], pieces)
    assert [one is not None for one in loaded(values)] == [True, True, False, True, False]
    assert values.counters.get("misses_total", "behind a miss") == 1


def test_a_store_that_hangs_costs_its_deadlines_once() -> None:
    with Slow() as slow:
        values = PluginStore(SETTINGS, CONTEXT, 1000, slow)
        began_s = time.monotonic()
        for _ in range(20):
            assert values.present(NAMES) == [False] * 5
            assert loaded(values) == [None] * 5
            values.save(NAMES, pieces)
        assert time.monotonic() - began_s < 5
        assert values.counters.get("misses_total", "unreachable") == 100
        slow.released.set()


class Paced(MemoryStore):
    """Each load and store takes 0.2 s, which is in time."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.pace_s, self.begun = 0.0, 0

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        self.begun += 1
        time.sleep(self.pace_s)
        return super().complete_load(ticket)

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        self.begun += 1
        time.sleep(self.pace_s)
        return super().complete_store(ticket)


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PluginStore, Paced]]:
    """A value is a batch."""
    for name in ("LOAD_BATCH_BYTES", "STORE_BATCH_BYTES"):
        monkeypatch.setattr(f"skymemory.engine.plugin.{name}", 1000)
    store = Paced()
    values = PluginStore(SETTINGS, CONTEXT, 1000, store)
    for at, name in enumerate(NAMES):
        key = values.key(name)
        assert store.put_many([(key, _framed(key, pieces(at)))]) == [True]
    store.pace_s, store.begun = 0.2, 0
    yield values, store
    values.close()


@pytest.mark.parametrize("is_prefix", [True, False])
def test_a_load_of_many_batches_ends_by_one_deadline(paced: tuple[PluginStore, Paced], is_prefix: bool) -> None:
    """0.3 s of all five, of which each would take 0.2 s."""
    values, store = paced
    reasons = values.load_or_say_why(NAMES, lambda at, value: True, is_prefix=is_prefix)
    assert store.begun <= 2 and set(reasons[2:]) <= {"deadline", "behind a miss"}
    assert is_prefix or reasons[2:] == ["deadline"] * 3
    assert values.counters.get("hits_total") == reasons.count(None) <= 2


def test_a_save_of_many_batches_ends_by_one_deadline(paced: tuple[PluginStore, Paced]) -> None:
    values, store = paced
    saved = values.save([f"new {name}" for name in NAMES], pieces)
    assert store.begun <= 2 and saved.done[2:] == [False] * 3
    assert values.counters.get("refused_total", "deadline") >= 3


def test_calls_within_a_deadline_share_it(paced: tuple[PluginStore, Paced]) -> None:
    """As of SGLang's pools: one that takes all of the time leaves none to the next, and no wait is longer than that."""
    values, store = paced
    tier = values._store.tiers[0]
    assert tier.deadline_s("store") == SETTINGS.store_deadline_s
    with ending_within(0.1):
        assert tier.deadline_s("store") <= 0.1
        with ending_within(60.0), recompute_cost(60.0):
            assert max(map(tier.deadline_s, ("ask", "load", "store"))) <= 0.1
        time.sleep(0.1)
        assert tier.deadline_s("load") == 0.0
        assert values.load_or_say_why(NAMES, lambda at, value: True) == ["deadline"] * 5
        assert values.save(["new"], pieces).done == [False] and not store.begun
    assert tier.deadline_s("store") == SETTINGS.store_deadline_s


def test_a_value_that_fits_nowhere_is_counted(memory: MemoryStore) -> None:
    values = PluginStore(SETTINGS, CONTEXT, 2 << 20, memory)
    assert values.save(NAMES[:1], lambda at: [bytes(2 << 20)]).done == [False]
    assert values.counters.get("refused_total", "too large") == 1


def test_a_fault_of_ours_is_a_miss(values: PluginStore) -> None:
    values.save(NAMES, pieces)

    def broken(at: int, value: memoryview) -> bool:
        raise TypeError("a fault")

    assert values.load(NAMES, broken) == [False] * 5
    assert values.save(["new"], lambda at: [None]).done == [False]  # type: ignore[list-item]
    assert values.counters.get("failures_total", "TypeError") == 2


def test_what_waits_to_be_saved_is_bounded(memory: MemoryStore) -> None:
    values = PluginStore(replace(SETTINGS, queue_bytes=1000), CONTEXT, 1000, memory)
    assert values.queue(600) and not values.queue(600) and values.queue(400)
    assert values.counters.get("refused_total", "queue full") == 1
    values.dequeue(600)
    assert values.queue(600)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"weights": "1"}, "store is missing"),
        ({"store": "memory"}, "weights is missing"),
        ({"store": "memory", "weights": "1", "queu": 1}, "did you mean 'queue'"),
        ({"store": "memory", "weights": "1", "ask_deadline": "soon"}, "ask_deadline"),
        ("unix:///s", "expected a table"),
    ],
)
def test_wrong_settings_are_refused(table: object, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as raised:
        PluginSettings.read(table, "here", 1)
    assert str(raised.value).startswith("here")


@pytest.mark.parametrize(
    ("address", "shared"),
    [
        ("memory", False),
        ("memory://1GiB?policy=lru", False),
        ("disk:///d?budget=1GiB", False),
        ("tiers:?tier=memory&tier=disk:///d?budget=1GiB", False),
        ("tiers:?tier=memory&tier=unix:///s&promote=never", True),
        ("host://1GiB", False),
        ("tiers:?tier=host://1GiB&tier=redis://localhost", False),
        ("host:", True),
        ("unix:///s", True),
        ("redis://localhost", True),
        ("constellation", True),
    ],
)
def test_a_store_of_one_process_is_refused_where_several_would_share_it(address: str, shared: bool) -> None:
    table = {"store": address, "weights": "1"}
    assert PluginSettings.read(table, "here", 1).store == address
    if shared:
        PluginSettings.read(table, "here", 2)
    else:
        with pytest.raises(InvalidInput, match="skymemory store serve"):
            PluginSettings.read(table, "here", 2)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("host://1GiB", "serve 'host://1GiB'`, and give host:"),
        ("tiers:?tier=host://1GiB%3Fat=/shm/sky&tier=redis://localhost", "and give host:///shm/sky"),
        ("memory://1GiB", "--listen unix:///run/sky.sock`, and give unix:///run/sky.sock"),
    ],
)
def test_the_error_names_the_address_of_the_daemon(address: str, words: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        PluginSettings.read({"store": address, "weights": "1"}, "here", 2)
    assert str(raised.value).endswith(words)


def test_values_in_shared_memory_are_copied_from_where_they_lie_and_let_go(tmp_path: Path) -> None:
    def address(view: memoryview) -> int:
        return np.frombuffer(view, np.uint8).ctypes.data

    with ServedArena(tmp_path, 1 << 20), HostStore(tmp_path) as client:
        shared = PluginStore(SETTINGS, CONTEXT, 1000, client)
        assert shared.save(NAMES, pieces).done == [True] * 5
        found: list[int] = []

        def place(at: int, value: memoryview) -> bool:
            found.append(address(value))
            return bytes(value) == data(at)

        assert shared.load(NAMES, place) == [True] * 5
        assert client.stats()["held_values"] == 0
        views = client.get_many([shared.key(name) for name in NAMES])
        assert found == [address(view[PAYLOAD_AT:]) for view in views if view is not None]


def test_the_counters_are_logged_by_the_minute_and_at_the_end(
    memory: MemoryStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "an engine's")
    values = PluginStore(SETTINGS, CONTEXT, 1000, memory, log=logging.getLogger("an engine's"))
    values.save(NAMES, pieces)
    assert not caplog.messages
    monkeypatch.setattr("skymemory.engine.plugin._LOG_EVERY_S", 0.0)
    loaded(values)
    values.close()
    assert len(caplog.messages) == 2 and "stored_total 5" in caplog.messages[0] and "hits_total 5" in caplog.messages[1]


def test_a_release_that_was_not_tested_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for version in ("0.5.6", "0.5.9.post1", "0.5.7rc1"):
        warn_untested("LMCache", version, "0.5.6")
    assert not caplog.records
    for version in ("0.6.0", "1.5.6", "unknown"):
        warn_untested("LMCache", version, "0.5.6")
    assert [record.args for record in caplog.records] == [
        ("LMCache", version, "0.5.6") for version in ("0.6.0", "1.5.6", "unknown")
    ]
