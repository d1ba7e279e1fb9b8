"""Batches of events in every shape that engines gave them, and bytes that are none."""

from __future__ import annotations

import random
import time
import tracemalloc
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory import native
from skymemory.conductor.prefix_index.events import AllCleared, BlocksRemoved, BlocksStored
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import seed
from skymemory.router.engines.wire import MAX_MESSAGE_BYTES, MalformedEvents, decode, sequence_of

pack = msgspec.msgpack.encode
NAME, PARENT = b"n" * 32, b"p" * 32
TOKENS = [5, 6, 7, 70_000]
VLLM = bytes.fromhex(
    "93cb3ff8000000000000968ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920b0cb170617265"
    "6e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f72615f6964c0"
    "a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c0c0a967726f75705f69647800b26b76"
    "5f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e8aa474797065ab426c6f636b53746f726564ac"
    "626c6f636b5f686173686573910cb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647390aa626c6f636b"
    "5f73697a6500a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c0a967726f75705f69647800a86c"
    "6f63616c697479a54c4f43414c8ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573910bb1706172"
    "656e745f626c6f636b5f68617368c0a9746f6b656e5f69647390aa626c6f636b5f73697a6500a76c6f72615f6964c0a66d65"
    "6469756da753544f52414745a96c6f72615f6e616d65c0a967726f75705f69647800a86c6f63616c697479a652454d4f5445"
    "a96f776e657273686970a2667384a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573910ca66d65"
    "6469756da3475055a967726f75705f6964780086a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865"
    "73910ba66d656469756da753544f52414745a967726f75705f69647800a86c6f63616c697479a652454d4f5445a96f776e65"
    "7273686970a2667381a474797065b0416c6c426c6f636b73436c656172656400"
)
"""Encoded by the structs of vLLM 0.32 (``vllm/distributed/kv_events.py``), filled as its offloading connector does
(``kv_connector/v1/offloading/events.py``): a name in the host's memory, and in a remote store of which it says so."""
LMCACHE = bytes.fromhex(
    "93cb3ff80000000000009288a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cd0385b1706172"
    "656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f6964"
    "c0a66d656469756da3637075a96c6f72615f6e616d65c088a474797065ab426c6f636b53746f726564ac626c6f636b5f6861"
    "7368657391cd0386b1706172656e745f626c6f636b5f68617368cd0385a9746f6b656e5f6964739405060708aa626c6f636b"
    "5f73697a6504a76c6f72615f6964c0a66d656469756da3637075a96c6f72615f6e616d65c000"
)
"""By the same structs, filled as its LMCache connector does (``kv_connector/v1/lmcache_connector.py``) from LMCache's
``CacheStoreEvent`` (``lmcache/v1/cache_engine.py``): a chunk and the next, of twice the engine's block size."""


@pytest.mark.parametrize(
    "row",
    [
        [],  # vLLM 0.9, SGLang 0.4: ends with the number of the adapter
        ["GPU"],
        ["GPU", None],
        ["GPU", None, None],
        ["GPU", None, [None, None], 0],
        ["GPU", None, [None, None], 0, "full_attention", None, "of a version to come", {"more": 1}],
    ],
)
def test_older_and_newer_engines_report_the_same(row: list[Any]) -> None:
    stored = ["BlockStored", [NAME, 9], PARENT, TOKENS, 2, None, *row]
    removed = ["BlockRemoved", [NAME], *row[:1]]
    decoded = decode(4, pack([1.5, [stored, removed, ["AllBlocksCleared"]], 0][: 3 if row else 2]))
    first, second, third = decoded.batch.events
    assert isinstance(first, BlocksStored) and (decoded.batch.sequence, decoded.unknown, decoded.unusable) == (4, 0, 0)
    assert (first.hashes, first.parent, first.tokens) == ([NAME, 9], PARENT, TOKENS)
    assert (first.block_tokens, first.medium, first.adapter, first.group) == (2, "GPU", "", 0)
    assert second == BlocksRemoved([NAME]) and third == AllCleared()


def test_structs_written_as_maps_are_read() -> None:
    stored = {
        "type": "BlockStored",
        "block_hashes": [NAME],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": 3,
        "medium": "CPU",
        "lora_name": "sql",
        "extra_keys": [["sql", "salt"]],
        "group_idx": 1,
        "kv_cache_spec_kind": "full_attention",
    }
    batch = {"ts": 1.0, "events": [stored, {"type": "BlockRemoved", "block_hashes": [NAME], "medium": "CPU"}]}
    batch["events"].append({"type": "AllBlocksCleared"})  # type: ignore[attr-defined]
    assert decode(0, pack({**batch, "data_parallel_rank": 0})).batch.events == [
        BlocksStored([NAME], None, [1, 2], 2, "CPU", "sql", [["sql", "salt"]], 1),
        BlocksRemoved([NAME], "CPU"),
        AllCleared(),
    ]


def test_media_behind_the_gpus_memory_are_reported_by_name_or_in_chunks() -> None:
    decoded = decode(7, VLLM)
    assert decoded.unusable == decoded.unknown == 0
    assert decoded.batch.events == [
        BlocksStored([11, 12], None, [1, 2, 3, 4], 2, "GPU", extra_keys=[None, None]),
        BlocksStored([12], None, (), 0, "CPU"),
        BlocksStored([11], None, (), 0, "REMOTE"),
        BlocksRemoved([12]),
        BlocksRemoved([11], "REMOTE"),
        AllCleared(),
    ]
    assert decode(8, LMCACHE).batch.events == [
        BlocksStored([901], None, [1, 2, 3, 4], 4, "cpu"),
        BlocksStored([902], 901, [5, 6, 7, 8], 4, "cpu"),
    ]
    rows = [["BlockStored", [12], None, [], 0, None, "CPU", None, None, 0, None, None, "REMOTE"]]
    rows.append(["BlockRemoved", [12], "CPU", 0, "REMOTE"])
    assert decode(9, pack([1.0, rows])).batch.events == [
        BlocksStored([12], None, (), 0, "REMOTE"),
        BlocksRemoved([12], "REMOTE"),
    ]


def test_what_two_connectors_publish_is_found_where_it_is() -> None:
    index = PreciseIndex(2)
    prompt = native.chain_hashes(np.arange(1, 9, dtype="<u4").tobytes(), 8, seed("m", "", ""))
    for slot, payload in enumerate((VLLM, LMCACHE)):
        index.follow(slot, "m")
        for event in decode(0, payload).batch.events[:5]:
            index.take(slot, event)
    assert index.match(prompt, [0, 1]) == [2, 4]
    assert index.weighted(prompt, [0, 1]) == pytest.approx([1 + 0.8, 4 * 0.8])


def test_engines_that_only_number_their_adapters() -> None:
    (event,) = decode(0, pack([1.0, [["BlockStored", [1], None, [1], 1, 7]]])).batch.events
    assert isinstance(event, BlocksStored) and event.adapter == "#7"


def test_events_of_a_new_kind_are_counted_and_the_others_read() -> None:
    decoded = decode(0, pack([1.0, [["BlockMoved", 1, {"x": 2}], ["BlockRemoved", [1]], {"type": "Moved"}]]))
    assert decoded.unknown == 2 and decoded.batch.events == [BlocksRemoved([1])]


@pytest.mark.parametrize(
    "stored",
    [
        ["BlockStored", [1, 2], None, [1, 2, 3], 2, None],
        ["BlockStored", [1], None, [-1], 1, None],
        ["BlockStored", [1], None, [1 << 32], 1, None],
        ["BlockStored", [1], None, [], 0, None],
        ["BlockStored", [1], None, [1], 1, None, "GPU", None, [None, None]],
    ],
)
def test_blocks_whose_tokens_are_not_all_reported_are_left_out(stored: list[Any]) -> None:
    decoded = decode(0, pack([1.0, [stored, ["BlockRemoved", [1]]]]))
    assert decoded.unusable == 1 and decoded.batch.events == [BlocksRemoved([1])]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        pack([]),
        pack([1.0]),
        pack({"ts": 1.0}),
        pack([1.0, [1]]),
        pack([1.0, [[]]]),
        pack([1.0, [["BlockStored", [1]]]]),
        pack([1.0, [["BlockRemoved", ["text"]]]]),
        pack([1.0, [["BlockStored", [1], None, ["one"], 1, None]]]),
        pack([1.0, [["BlockRemoved", [1]]]])[:-1],
        pack([1.0, []]) + b"\x00",
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedEvents):
        decode(0, payload)


@pytest.mark.parametrize("frames", [[], [b"", b""], [b"", b"1234567", b""], [b"", bytes(8), b"", b""]])
def test_frames_that_are_no_message_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(MalformedEvents):
        sequence_of(frames)


def test_hostile_sizes_cost_no_more_than_their_bytes() -> None:
    most = MAX_MESSAGE_BYTES - 32
    size = most.to_bytes(4, "big")
    hostile = [
        b"\xdd\xff\xff\xff\xff",
        b"\x92\x01\xdd\xff\xff\xff\xff",
        b"\x92\x01\xdd" + size + b"\x90" * most,
        b"\x92\x01\x91\xdd" + size + b"\x90" * most,
        b"\x92\x01\x91\x96\xabBlockStored\xdd" + size + b"\x01" * most,
        b"\x92\x01\x91\x92\xacBlockRemoved\xdf" + size,
    ]
    began = time.process_time()
    for payload in hostile:
        with suppress(MalformedEvents):
            assert not decode(0, payload).batch.events
    assert time.process_time() - began < 4
    tracemalloc.start()
    with suppress(MalformedEvents):
        decode(0, b"\x92\x01\x91\x92\xacBlockRemoved" + b"\xdd" + (most // 8).to_bytes(4, "big") + b"\xc4\0" * most)
    assert tracemalloc.get_traced_memory()[1] < 10 * most
    tracemalloc.stop()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for payload in (data, b"\x92\xcb" + bytes(8) + data, b"\x92\x01\x91\x96\xabBlockStored" + data):
        with suppress(MalformedEvents):
            decode(0, payload)


def test_damaged_batches_are_read_or_refused() -> None:
    dice = random.Random(11)
    stored = ["BlockStored", [NAME, 9], PARENT, TOKENS, 2, 1, "GPU", "a", [["a", "s"], None], 0]
    whole = pack([1.0, [stored, ["BlockRemoved", [NAME], "GPU"], ["AllBlocksCleared"]], 0])
    refused = 0
    for _ in range(4000):
        damaged = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        try:
            decode(0, bytes(damaged[: dice.randint(1, len(damaged)) if dice.random() < 0.2 else len(damaged)]))
        except MalformedEvents:
            refused += 1
    assert 0 < refused < 4000
