"""What a later release wrote: a miss with its own reason, kept as it is; an error only for a whole store of its format.

Values, payloads, records and files of a later version are made by changing the version (and the checksum with it) of
what this release writes.
"""

from __future__ import annotations

import json
import logging
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from tests.cache.test_manager import LAYOUT, Engine, context, load
from tests.store.real_redis import RedisServer
from tests.store.sky.test_shared_index import INFO, add, key
from tests.store.test_sealed import sealed

from skymemory.cache.blocks import BlockCache
from skymemory.cache.prefetching import PrefetchScheduler
from skymemory.cache.tiers.store import TieredStore, TierSettings
from skymemory.errors import InvalidInput, LaterFile, LaterVersion
from skymemory.index.journal import Record, RecordOp, decode_records, encode_record
from skymemory.kv.codec.cachegen import CacheGen
from skymemory.kv.value import ValueHeader, block_name, is_sound_block, unpack_header, unpack_value
from skymemory.native import crc32
from skymemory.reasons import Miss
from skymemory.store.base import Presence, Store
from skymemory.store.disk import DiskStore
from skymemory.store.memory import MemoryStore
from skymemory.store.named_values import get_named, named_key, put_named
from skymemory.store.redis import NAMESPACE, RedisStore
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.testbed.key_file import from_json as read_keys
from skymemory.testbed.plan_file import from_json as read_plan

TOKENS = np.arange(16)


def later(value: bytes, version: int = 2) -> bytes:
    """The same value with a header of a later version, its checksum right."""
    changed = bytearray(value)
    changed[4] = version
    name_bytes = int.from_bytes(changed[40:42], "little")
    changed[60:64] = bytes(4)
    changed[60:64] = crc32(changed[: 64 + name_bytes]).to_bytes(4, "little")
    return bytes(changed)


def saved(store: Store) -> tuple[BlockCache, list[bytes], list[bytes]]:
    """A cache that reads all codecs with the four blocks of TOKENS in ``store``, their hashes and values."""
    cache = BlockCache(context(lossless=False), LAYOUT, store, readable=[CacheGen()])
    hashes = cache.hashes(TOKENS)
    assert cache.save(hashes, range(4), Engine(TOKENS))[0] == 4
    values = store.get_many(hashes)
    return cache, hashes, [bytes(value) for value in values if value is not None]


def replaced(store: Store, at: bytes, value: bytes) -> None:
    assert store.put_many([(at, value)]) == [True]


@pytest.mark.parametrize("change", ["version", "version alone", "dtype", "reserved"])
def test_a_block_with_a_later_header_is_a_miss_and_stays(change: str) -> None:
    store = MemoryStore(1 << 20)
    cache, hashes, values = saved(store)
    wrong = bytearray(values[2])
    if change == "version alone":  # whatever a later version checks, and how
        wrong[4] = 7
    elif change == "version":
        wrong = bytearray(later(values[2]))
    else:
        wrong[6 if change == "dtype" else 59] = 9
        wrong[60:64] = bytes(4)
        wrong[60:64] = crc32(wrong[:128]).to_bytes(4, "little")
    replaced(store, hashes[2], bytes(wrong))
    result, engine = load(cache, np.append(TOKENS, 99))
    assert result.loaded_blocks == 2 and engine.right(result)
    assert result.failed_blocks[Miss.LATER_VERSION] == 1
    assert cache.counters.get("failed_blocks_total", Miss.LATER_VERSION) == 1
    assert cache.missing(hashes) == []  # so it is not stored again, over what a later release can read
    (kept,) = store.get_many([hashes[2]])
    assert kept == bytes(wrong)


def test_a_block_with_a_later_header_passes_through_tiers_and_is_deleted_in_none() -> None:
    near, far = MemoryStore(1 << 20, name="near"), MemoryStore(1 << 20, name="far")
    _, hashes, values = saved(far)
    replaced(far, hashes[1], later(values[1]))
    tiers = TieredStore([(near, TierSettings(local=True)), (far, TierSettings(verify=is_sound_block))])
    result, _ = load(BlockCache(context(lossless=False), LAYOUT, tiers), np.append(TOKENS, 99))
    assert result.loaded_blocks == 1 and result.failed_blocks[Miss.LATER_VERSION] == 1
    assert far.get_many([hashes[1]]) == [later(values[1])]
    assert tiers.stats().get("tier_corrupt_total{far}", 0) == 0
    tiers.close()


def test_a_payload_of_a_later_codec_is_a_miss_and_stays() -> None:
    store = MemoryStore(1 << 20)
    cache, hashes, _ = saved(store)
    payload = b"CGEN\3 and whatever a later release makes of it" + bytes(100)
    name = block_name(hashes[1], crc32(payload))
    header = ValueHeader(CacheGen.codec_id, LAYOUT.block_bytes, len(payload), LAYOUT, name)
    replaced(store, hashes[1], header.pack() + payload)
    result, _ = load(cache, np.append(TOKENS, 99))
    assert result.loaded_blocks == 1 and result.failed_blocks[Miss.LATER_VERSION] == 1
    assert store.lookup([hashes[1]]) == [Presence.HIT]


def test_a_named_value_of_a_later_version_is_a_miss_that_says_so() -> None:
    store = MemoryStore(1 << 20)
    put_named(store, "greeting", b"hello")
    (value,) = store.get_many([named_key("greeting")])
    assert value is not None
    replaced(store, named_key("greeting"), later(bytes(value)))
    outcome = get_named(store, "greeting")
    assert (outcome.ok, outcome.reason) == (False, Miss.LATER_VERSION)
    assert store.lookup([named_key("greeting")]) == [Presence.HIT]


def test_versions_before_the_first_are_no_later_ones() -> None:
    with pytest.raises(ValueError, match="version 0") as error:
        unpack_header(later(ValueHeader(0, 0, 0).pack(), version=0))
    assert not isinstance(error.value, LaterVersion)
    with pytest.raises(LaterVersion, match="version 2"):
        unpack_value(later(ValueHeader(0, 0, 0).pack()))


def test_a_sealed_value_of_a_later_version_is_a_miss_and_stays() -> None:
    below = MemoryStore(1 << 20)
    store = sealed(below)
    cache, hashes, _ = saved(store)
    (value,) = below.get_many([hashes[1]])
    assert value is not None
    changed = bytes(value[:4]) + b"\2" + bytes(value[5:])
    replaced(below, hashes[1], changed)
    result, _ = load(cache, np.append(TOKENS, 99))
    assert result.loaded_blocks == 1 and result.failed_blocks[Miss.LATER_VERSION] == 1
    assert below.get_many([hashes[1]]) == [changed]
    assert store.stats()["values_not_authentic"] == 0 and store.stats()["values_later_version"] >= 1


def test_a_redis_value_of_a_later_version_is_a_miss_and_stays(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    try:
        import redis

        store = RedisStore(server.url)
        store.put_many([(key(1), b"hello")])
        raw = redis.Redis.from_url(server.url)
        name = NAMESPACE + key(1)
        whole = bytes(raw.get(name))  # type: ignore[arg-type]
        changed = whole[:-8] + b"SKV2" + whole[-4:]
        raw.set(name, changed)
        ticket = store.prepare_load([key(1)])
        assert store.complete_load(ticket) == [None]
        assert ticket.report is not None and ticket.report.keys[0].reason == Miss.LATER_VERSION
        assert raw.get(name) == changed
        assert sum(count for name, count in store.stats().items() if Miss.LATER_VERSION in name) == 1
        assert store.put_many([(key(0), b"other"), (key(1), b"older"), (key(2), b"third")]) == [True, False, True]
        assert raw.get(name) == changed, "what is of a later version is not written over"
        assert store.get_many([key(0), key(2)]) == [b"other", b"third"]
        assert store.delete([key(1)]) == [True] and store.put_many([(key(1), b"older")]) == [True]
        store.close()
    finally:
        server.stop()


# --- the journal of an index ---


def framed(op: int, body: bytes, version: int = 1) -> bytes:
    blank = struct.pack("<BBHII", 0x5B, op, version, len(body), 0)
    return blank[:8] + struct.pack("<I", zlib.crc32(blank + body)) + body


@pytest.mark.parametrize("strange", [framed(1, b"another form", 3), framed(99, b"another kind")])
def test_a_record_that_is_not_known_is_passed_over_and_stays(tmp_path: Path, strange: bytes) -> None:
    path = tmp_path / "index"
    index = SharedIndex(path, born=True)
    add(index, 1)
    assert index.complete
    with path.open("ab") as file:
        file.write(strange + encode_record(Record(RecordOp.ADD, [key(2)], [INFO])))
    assert index.infos([key(1), key(2)]) == [INFO, INFO]  # by a process that had it open
    add(index, 3)
    fresh = SharedIndex(path)
    assert fresh.infos([key(1), key(2), key(3)]) == [INFO, INFO, INFO]
    # It may have said that something was stored: what the journal does not name may be there.
    assert not index.complete and not fresh.complete
    assert fresh.unknown_records == 1
    assert strange in path.read_bytes()


def test_a_damaged_record_is_still_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "index"
    index = SharedIndex(path, born=True)
    add(index, 1)
    with path.open("ab") as file:
        file.write(framed(1, b"another form", 3)[:-1] + b"!")
    assert index.infos([key(1)]) == [INFO] and not index.complete
    assert b"another" not in path.read_bytes() and index.unknown_records == 0


def test_records_say_what_they_passed_over() -> None:
    data = framed(1, b"x", 3) + encode_record(Record(RecordOp.CLEAR))
    records, taken = decode_records(data)
    assert [record.op for record in records] == [RecordOp.UNKNOWN, RecordOp.CLEAR] and taken == len(data)


# --- a disk store's files ---


def test_a_disk_stores_files_of_a_later_version_stay_and_are_misses(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10_000)
    store.put_many([(key(1), b"a" * 1000), (key(2), b"b" * 1000)])
    store.close()
    path = tmp_path / "values" / key(1).hex()
    path.write_bytes(b"SKYVAL\0\2" + b"what a later release makes of it" * 100)
    before = path.read_bytes()

    store = DiskStore(tmp_path, 10_000)
    assert store.get_many([key(1), key(2)]) == [None, b"b" * 1000]
    ticket = store.prepare_load([key(1)])
    store.complete_load(ticket)
    assert ticket.report is not None and ticket.report.keys[0].reason == Miss.LATER_VERSION
    assert store.put_many([(key(1), b"c" * 1000)]) == [False]  # not over what a later release can read
    assert store.delete([key(1)]) == [False]
    assert store.stats()["later_version"] == 1
    assert store.stats()["torn_total"] == 0
    # It takes room, which is not given to others, and no value is evicted for room that is gone.
    filled = store.put_many([(key(n), b"d" * 1000) for n in range(10, 30)])
    assert sum(filled) >= 6
    store.close()
    assert path.read_bytes() == before
    values = sum(file.stat().st_size for file in (tmp_path / "values").iterdir())
    assert values <= 10_000 + 64 * 20


def test_a_disk_store_full_of_later_values_stores_nothing_and_loses_nothing(tmp_path: Path) -> None:
    DiskStore(tmp_path, 10_000).close()
    path = tmp_path / "values" / key(1).hex()
    path.write_bytes(b"SKYVAL\0\2" + bytes(20_000))
    store = DiskStore(tmp_path, 10_000)
    assert store.put_many([(key(2), b"x")]) == [False]
    store.close()
    assert path.stat().st_size == 20_008


def test_a_disk_store_with_more_later_values_than_its_budget_keeps_no_others(tmp_path: Path) -> None:
    with DiskStore(tmp_path, 10_000) as store:
        assert all(store.put_many([(key(n), bytes(1000)) for n in range(10)]))
    later = tmp_path / "values" / key(1).hex()
    later.write_bytes(b"SKYVAL\0\2" + bytes(2000))
    with DiskStore(tmp_path, 1500) as store:
        assert store.stats()["entries"] == 0 and store.stats()["used_bytes"] == 2008
    assert list((tmp_path / "values").iterdir()) == [later]


def test_a_disk_store_of_a_later_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "values").mkdir()
    (tmp_path / "format").write_text("skymemory disk store 2\n")
    (tmp_path / "values" / key(1).hex()).write_bytes(b"whatever")
    with pytest.raises(InvalidInput, match="later release"):
        DiskStore(tmp_path, 10_000)
    assert (tmp_path / "values" / key(1).hex()).read_bytes() == b"whatever"


# --- habits and prefix indices: learnt again, never written over ---


def test_habits_of_a_later_version_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "habits.json"
    text = json.dumps({"version": 2, "zones": ["x"], "habits": {}})
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        scheduler = PrefetchScheduler(MemoryStore(1 << 10), habits_file=path)
    assert "later release" in caplog.text
    scheduler.record_prompt([key(1)])
    scheduler.save()
    assert path.read_text() == text and list(tmp_path.iterdir()) == [path]
    assert scheduler.counters.get("habits_files_later_version_total") == 1


@pytest.mark.parametrize("read", [read_plan, read_keys])
def test_a_plan_and_keys_of_a_later_version_are_refused_and_say_which_release(read) -> None:
    with pytest.raises(LaterFile, match=r"version 2.*a later release wrote it"):
        read('{"version": 2, "keys": [], "whatever": {}}', "here")
