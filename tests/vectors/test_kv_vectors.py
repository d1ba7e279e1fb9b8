"""Golden bytes of contexts, block hashes, general keys, value headers, and journal records.

``kv.json`` was written once. The derivations below are by hand, field by field, and share no code with the product:
a change of either means that caches and indexes already stored would no longer be found.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skymemory.index.journal import Record, RecordOp, decode_records, encode_record
from skymemory.index.radix import BlockInfo
from skymemory.kv.block import KVLayout, hash_blocks, key_hash
from skymemory.kv.context import CacheContext
from skymemory.kv.value import ValueHeader, unpack_value

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "kv.json").read_text(encoding="utf-8"))

CONTEXTS = {
    "tinyllama": CacheContext(
        model="TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        weights="fe8a4ea1",
        tokenizer="sha256:9e55",
        kv_dtype="bfloat16",
        layout=KVLayout(22, 4, 64, 128, "bfloat16").describe(),
    ),
    "every field": CacheContext(
        model="m",
        weights="w",
        tokenizer="tökenizer",
        kv_dtype="float32",
        layout="l",
        lossless=False,
        block_tokens=16,
        adapter="lora-7",
        tenant_salt=bytes(range(16)),
    ),
}
LAYOUT = KVLayout(22, 4, 64, 128, "bfloat16")
HEADERS = {
    "block": ValueHeader(0, LAYOUT.block_bytes, LAYOUT.block_bytes, LAYOUT),
    "named": ValueHeader(0, 20_000_000, 20_000_000, None, "größe/big.bin"),
}
INFO = BlockInfo(481, 2_883_648, 0xDEADBEEF, 1_700_000_000.25, -3, 2, "rotation_hop", 10, b"\x11" * 32)
HASHES = [bytes([n]) * 32 for n in (0xA1, 0xA2)]


def le(number: int, width: int) -> bytes:
    return number.to_bytes(width, "little")


def text(value: str) -> bytes:
    raw = value.encode("utf-8")
    return le(len(raw), 4) + raw


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


@pytest.mark.parametrize("name", CONTEXTS)
def test_context_digest(name: str) -> None:
    context = CONTEXTS[name]
    by_hand = sha(
        b"skycache",
        le(1, 4),
        le(1 if context.lossless else 0, 1),
        le(context.block_tokens, 4),
        text(context.model),
        text(context.weights),
        text(context.tokenizer),
        text(context.kv_dtype),
        text(context.layout),
        text(context.adapter),
        le(len(context.tenant_salt), 4) + context.tenant_salt,
    )
    assert by_hand.hex() == VECTORS["context"][name]
    assert context.digest() == by_hand


def test_chained_block_hashes() -> None:
    seed = bytes.fromhex(VECTORS["context"]["every field"])
    tokens = [0, 1, 2, 31_999, 2**32 - 1, 7, 8]
    first = sha(seed, le(0, 4), le(1, 4), le(2, 4))
    second = sha(first, le(31_999, 4), le(2**32 - 1, 4), le(7, 4))
    assert [first.hex(), second.hex()] == VECTORS["blocks"]["plain"]
    assert hash_blocks(seed, tokens, 3) == [first, second]
    assert hash_blocks(seed, np.array(tokens, dtype=np.uint32), 3) == [first, second]


def test_block_hashes_with_content() -> None:
    seed = bytes.fromhex(VECTORS["context"]["every field"])
    cat, dog = sha(b"cat"), sha(b"dog")
    first = sha(seed, le(5, 4), le(5, 4), le(1, 4), cat)
    # Two tokens per block: the cat stands at token 1 (block 0, offset 1), the dog at token 2 (block 1, offset 0).
    second = sha(first, le(6, 4), le(7, 4), le(0, 4), dog)
    third = sha(second, le(8, 4), le(9, 4))
    assert [first.hex(), second.hex(), third.hex()] == VECTORS["blocks"]["with content"]
    assert hash_blocks(seed, [5, 5, 6, 7, 8, 9], 2, {2: dog, 1: cat}) == [first, second, third]


def test_general_key() -> None:
    namespace = bytes.fromhex(VECTORS["context"]["tinyllama"])
    by_hand = sha(b"skymemory general key, version 1", namespace, "größe/big.bin".encode())
    assert by_hand.hex() == VECTORS["key"]
    assert key_hash(namespace, "größe/big.bin") == by_hand


@pytest.mark.parametrize("name", HEADERS)
def test_value_header(name: str) -> None:
    header = HEADERS[name]
    layout = header.layout
    numbers = [layout.layers, layout.kv_heads, layout.head_dim, layout.block_tokens] if layout else [0] * 4
    named = header.name.encode("utf-8")
    dtype = {"bytes": 0, "float32": 1, "float16": 2, "bfloat16": 3}[header.dtype]
    front = b"SKYV" + bytes([1, header.codec_id, dtype, 0]) + le(header.raw_bytes, 8)
    front += le(header.payload_bytes, 8) + b"".join(le(number, 4) for number in numbers)
    front += le(len(named), 2) + bytes(18)
    assert len(front) == 60
    by_hand = front + le(zlib.crc32(front + bytes(4) + named), 4) + named
    assert by_hand.hex() == VECTORS["value header"][name]
    assert header.pack() == by_hand
    assert unpack_value(by_hand + bytes(header.payload_bytes))[0] == header


def info_row(group: int) -> bytes:
    packed = le(481, 4) + le(2_883_648, 8) + le(0xDEADBEEF, 4) + np.float64(1_700_000_000.25).tobytes()
    return packed + (-3).to_bytes(4, "little", signed=True) + le(2, 4) + le(group, 4)


def group_bytes() -> bytes:
    return bytes([12]) + le(32, 2) + le(10, 4) + b"rotation_hop" + b"\x11" * 32


def test_journal_records() -> None:
    parent = b"\xa0" * 32
    bodies = {
        "add": (1, le(5, 4) + le(2, 4) + le(1, 4) + parent + group_bytes() + b"".join(HASHES) + info_row(0) * 2),
        "remove": (2, HASHES[1]),
        "remove context": (3, b"\x11" * 32),
        "clear": (4, b""),
    }
    encoded = {
        "add": encode_record(Record(RecordOp.ADD, HASHES, [INFO, INFO], start=5, parent=parent)),
        "remove": encode_record(Record(RecordOp.REMOVE, HASHES[1:])),
        "remove context": encode_record(Record(RecordOp.REMOVE_CONTEXT, context=b"\x11" * 32)),
        "clear": encode_record(Record(RecordOp.CLEAR)),
    }
    for name, (op, body) in bodies.items():
        front = bytes([0x5B, op]) + le(1, 2) + le(len(body), 4)
        by_hand = front + le(zlib.crc32(front + bytes(4) + body), 4) + body
        assert by_hand.hex() == VECTORS["journal"][name]
        assert encoded[name] == by_hand
    log = b"".join(encoded.values())
    records, consumed = decode_records(log)
    assert consumed == len(log)
    assert records == [
        Record(RecordOp.ADD, tuple(HASHES), (INFO, INFO), 5, parent),
        Record(RecordOp.REMOVE, (HASHES[1],)),
        Record(RecordOp.REMOVE_CONTEXT, context=b"\x11" * 32),
        Record(RecordOp.CLEAR),
    ]
