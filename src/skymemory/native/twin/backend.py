"""Pure-Python twin of the compiled helper: same signatures, same results. All functions are here or in:

=============  ==================================================================
``segments``   packets: verify, place payloads; MACs
``relay``      packets in transit
``runs``       runs of packets: a client's answers, a satellite's plain GETs, SETs
``sockets``    batched socket calls, small packets; values from stream sockets
``blocks``     blocks that an index knows
``prefix``     servers that hold blocks of prompts
``queues``     prefills sent to servers, and their ends
``ttft``       estimates of the time to first token
=============  ==================================================================
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Callable, Sequence, Set
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from skymemory.native.twin.blocks import BlockTable
from skymemory.native.twin.prefix import HolderTable, PrefixTable
from skymemory.native.twin.queues import PrefillQueues, UnderWay
from skymemory.native.twin.relay import count_hops, same_journey
from skymemory.native.twin.runs import answer_get, bulk_headers, open_runs, place_runs, recv_runs, serve, serve_runs
from skymemory.native.twin.segments import (
    check_macs,
    place_segments,
    seal_headers,
    sign_packets,
    strip_macs,
    value_refs,
    verify_segments,
)
from skymemory.native.twin.sockets import (
    command_packets,
    open_ack,
    receive_all,
    recv_batch,
    request_words,
    send_batch,
    send_each,
    send_slices,
)
from skymemory.native.twin.ttft import DelayPrice, ShareGuard, TtftRanker, fit_prefills, fit_whole

__all__ = [
    "BlockTable",
    "DelayPrice",
    "HolderTable",
    "PrefillQueues",
    "PrefixTable",
    "ShareGuard",
    "TtftRanker",
    "UnderWay",
    "answer_get",
    "bulk_headers",
    "chain_sha256",
    "check_macs",
    "command_packets",
    "count_hops",
    "crc32",
    "crc32_combine",
    "crc32_join",
    "cut_texts",
    "first_values",
    "fit_prefills",
    "fit_whole",
    "header_lines",
    "json_counts",
    "open_ack",
    "open_runs",
    "pack_tokens",
    "pairs_into",
    "place_runs",
    "place_segments",
    "read_cached",
    "receive_all",
    "recv_batch",
    "recv_runs",
    "request_words",
    "same_journey",
    "seal_headers",
    "send_batch",
    "send_each",
    "send_slices",
    "serve",
    "serve_runs",
    "sign_packets",
    "strip_macs",
    "value_refs",
    "verify_segments",
]

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Crcs = np.ndarray[tuple[int], np.dtype[np.uint32]]
    Hashes = np.ndarray[tuple[int], np.dtype[np.uint64]]


# CRC-32 of zlib and Ethernet (reflected polynomial 0xEDB88320). Combining follows from linearity: the CRC of ``a +
# b`` is the CRC of ``a`` multiplied by ``x**(8*len(b))`` modulo the polynomial, plus (XOR) the CRC of ``b``.

_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000


def crc32(data: Buffer, value: int = 0) -> int:
    """Return the CRC-32 of ``data``, continued from ``value``."""
    return zlib.crc32(data, value)


def _multiply(a: int, b: int) -> int:
    """Multiply polynomials over GF(2), modulo the CRC's."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=256)
def _shift_of(length_bytes: int) -> int:
    """Return x to the power of ``8 * length_bytes``, modulo the CRC's polynomial."""
    result, square = _ONE, _ONE >> 8
    while length_bytes:
        if length_bytes & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        length_bytes >>= 1
    return result


@lru_cache(maxsize=16)
def _shift_tables(length_bytes: int) -> tuple[tuple[int, ...], ...]:
    shift = _shift_of(length_bytes)
    return tuple(tuple(_multiply(byte << at, shift) for byte in range(256)) for at in (0, 8, 16, 24))


def crc32_combine(crc1: int, crc2: int, len2: int) -> int:
    """Return the CRC-32 of ``a + b`` from both CRCs and ``len(b)``."""
    if len2 < 0:
        raise ValueError(f"length {len2}: expected 0 or more")
    return _multiply(crc1 & 0xFFFFFFFF, _shift_of(len2)) ^ crc2 & 0xFFFFFFFF


def crc32_chunks(value: Buffer, chunk_bytes: int) -> Crcs:
    if chunk_bytes < 1:
        raise ValueError(f"chunks of {chunk_bytes} bytes: expected 1 or more")
    view = memoryview(value).cast("B")
    crcs = [zlib.crc32(view[at : at + chunk_bytes]) for at in range(0, len(view), chunk_bytes)]
    return np.array(crcs, dtype=np.uint32)


def crc32_join(crcs: Buffer, chunk_bytes: int, value_bytes: int) -> int:
    """Return a value's CRC-32 from its chunks' (native-endian uint32, in order)."""
    if chunk_bytes < 1:
        raise ValueError(f"chunks of {chunk_bytes} bytes: expected 1 or more")
    parts = memoryview(crcs).cast("B").cast("I").tolist()
    if value_bytes < 0 or len(parts) != -(-value_bytes // chunk_bytes):
        raise ValueError(f"{len(parts)} CRCs for {value_bytes} bytes in chunks of {chunk_bytes}: the count disagrees")
    if not parts:
        return 0
    crc = parts[0]
    if len(parts) > 2:
        t0, t1, t2, t3 = _shift_tables(chunk_bytes)
        for part in parts[1:-1]:
            crc = t0[crc & 255] ^ t1[crc >> 8 & 255] ^ t2[crc >> 16 & 255] ^ t3[crc >> 24] ^ part
    if len(parts) > 1:
        crc = crc32_combine(crc, parts[-1], value_bytes - (len(parts) - 1) * chunk_bytes)
    return int(crc)


# XXH64 over the blocks of a prompt, with the xxhash library if it is installed.
#
# A *chained* hash names a block and all before it: ``h_i = XXH64(block_i || h_{i-1} as 8 bytes, little-endian)``, and
# ``h_{-1}`` is the seed. So a chain is continued with its last hash as the next seed. XXH64 is fast and not
# cryptographic: a client can construct two prompts with equal hashes. A router then sends a request to a server that
# does not hold its prefix, which costs time; an engine's answers do not depend on the hashes.

_MASK = (1 << 64) - 1
_PRIME_1 = 0x9E3779B185EBCA87
_PRIME_2 = 0xC2B2AE3D27D4EB4F
_PRIME_3 = 0x165667B19E3779F9
_PRIME_4 = 0x85EBCA77C2B2AE63
_PRIME_5 = 0x27D4EB2F165667C5
_STRIPE_BYTES = 32


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK


def _mixed(lane: int, word: int) -> int:
    return _rotate(lane + word * _PRIME_2 & _MASK, 31) * _PRIME_1 & _MASK


def xxh64(data: bytes, seed: int = 0) -> int:
    at, size = 0, len(data)
    if size >= _STRIPE_BYTES:
        lanes = [seed + _PRIME_1 + _PRIME_2 & _MASK, seed + _PRIME_2 & _MASK, seed, seed - _PRIME_1 & _MASK]
        while size - at >= _STRIPE_BYTES:
            words = (int.from_bytes(data[at + 8 * lane : at + 8 * lane + 8], "little") for lane in range(4))
            lanes = [_mixed(lane, word) for lane, word in zip(lanes, words, strict=True)]
            at += _STRIPE_BYTES
        value = sum(_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
        for lane in lanes:
            value = (value ^ _mixed(0, lane)) * _PRIME_1 + _PRIME_4 & _MASK
    else:
        value = seed + _PRIME_5 & _MASK
    value = value + size & _MASK
    while size - at >= 8:
        value = (
            _rotate(value ^ _mixed(0, int.from_bytes(data[at : at + 8], "little")), 27) * _PRIME_1 + _PRIME_4 & _MASK
        )
        at += 8
    if size - at >= 4:
        word = int.from_bytes(data[at : at + 4], "little")
        value = _rotate(value ^ word * _PRIME_1 & _MASK, 23) * _PRIME_2 + _PRIME_3 & _MASK
        at += 4
    for byte in data[at:]:
        value = _rotate(value ^ byte * _PRIME_5 & _MASK, 11) * _PRIME_1 & _MASK
    value = (value ^ value >> 33) * _PRIME_2 & _MASK
    value = (value ^ value >> 29) * _PRIME_3 & _MASK
    return value ^ value >> 32


_hash: Callable[[bytes, int], int] = xxh64
try:
    import xxhash

    _hash = xxhash.xxh64_intdigest
except ImportError:  # our own xxh64 is slower
    pass


def _blocks(data: Buffer, block_bytes: int) -> list[bytes]:
    if block_bytes < 1:
        raise ValueError(f"blocks of {block_bytes} bytes: expected 1 or more")
    raw = bytes(memoryview(data).cast("B"))
    return [raw[at : at + block_bytes] for at in range(0, len(raw) - block_bytes + 1, block_bytes)]


def chain_hashes(data: Buffer, block_bytes: int, seed: int) -> Hashes:
    """Return the chained hashes of the whole blocks; ``seed`` stands for everything before."""
    previous, hashes = seed & _MASK, []
    for block in _blocks(data, block_bytes):
        previous = _hash(block + previous.to_bytes(8, "little"), 0)
        hashes.append(previous)
    return np.array(hashes, dtype=np.uint64)


def piece_hashes(data: Buffer, block_bytes: int, seed: int) -> Hashes:
    return np.array([_hash(block, seed & _MASK) for block in _blocks(data, block_bytes)], dtype=np.uint64)


def chain_sha256(data: Buffer, block_bytes: int, seed: bytes) -> list[bytes]:
    """Return chained SHA-256 of the whole blocks: of the previous digest (first ``seed``) and the block."""
    if len(seed) != hashlib.sha256().digest_size:
        raise ValueError(f"a seed of {len(seed)} bytes: expected 32")
    previous, digests = seed, []
    for block in _blocks(data, block_bytes):
        previous = hashlib.sha256(previous + block).digest()
        digests.append(previous)
    return digests


def pack_tokens(tokens: object) -> bytes | None:
    """Pack a list or tuple of plain ``int`` as unsigned 32-bit little-endian; None for anything else."""
    if not (type(tokens) is list or type(tokens) is tuple) or set(map(type, tokens)) - {int}:
        return None
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error:
        return None


RawHeaders = Sequence[tuple[bytes, bytes]]


def first_values(headers: RawHeaders) -> dict[bytes, bytes]:
    """Return the first value of each name, in lower case."""
    first: dict[bytes, bytes] = {}
    for name, value in headers:
        first.setdefault(name.lower(), value)
    return first


def header_lines(headers: RawHeaders, left_out: Set[bytes]) -> bytes:
    """Return the header lines, without the names (in lower case) ``left_out``."""
    lines: list[bytes] = []
    for name, value in headers:
        if name.lower() not in left_out:
            lines += (name, b": ", value, b"\r\n")
    return b"".join(lines)


def pairs_into(headers: list[tuple[bytes, bytes]]) -> Callable[[bytes, bytes], None]:
    """Return a parser's callback that appends name and value."""

    def append_pair(name: bytes, value: bytes) -> None:
        headers.append((name, value))

    return append_pair


_JSON_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[][{},]', re.DOTALL)


def json_counts(text: Buffer) -> tuple[int, int, int, int, int]:
    """Count the parts of a JSON text, unchecked: lists and objects, texts, commas, the outermost list's commas, and its
    first item's end (0: none).
    """
    lists = texts = commas = items = first_end = depth = 0
    for match in _JSON_MARKS.finditer(text):
        mark = match[0][:1]
        if mark == b'"':
            texts += 1
        elif mark in b"[{":
            lists, depth = lists + 1, depth + 1
        elif mark in b"]}":
            if depth == 1 and not first_end:
                first_end = match.start()
            depth -= 1
        else:
            commas += 1
            if depth == 1:
                items, first_end = items + 1, first_end or match.start()
    return lists, texts, commas, items, first_end


_LEAST_TEXT_BYTES, _MOST_CUTS, _OF_PROMPT = 512, 64, -1
_JSON_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_PLAIN = re.compile(rb'[^\x00-\x1f\x80-\xff\\"]*')


def cut_texts(text: bytes) -> tuple[bytes, dict[int, bytes]]:
    """Cut long texts (ASCII without escapes, from 512 bytes on) out of a request's body. Return the rest, JSON if and
    only if ``text`` is, and the texts: the ``prompt`` by -1, the ``content`` of messages by number.
    """
    cuts = _long_texts(text)
    remainder, texts, at = b"", {}, 0
    for number, begin, end in cuts:
        remainder, texts[number], at = remainder + text[at:begin], text[begin:end], end
    return (remainder + text[at:], texts) if cuts else (text, texts)


def _long_texts(text: bytes) -> list[tuple[int, int, int]]:
    """Return number, begin and end of texts to cut; none if fields are repeated or escaped: only a decoder knows which
    counts.
    """
    cuts: list[tuple[int, int, int]] = []
    fields: set[tuple[int, bytes]] = set()
    depth, number, at, in_messages = 0, _OF_PROMPT, 0, False
    while match := _JSON_MARKS.search(text, at):
        mark, at = match[0], match.end()
        if mark in (b"[", b"{"):
            depth += 1
            number += in_messages and depth == 3
        elif mark in (b"]", b"}"):
            depth -= 1
            in_messages = in_messages and depth > 1
        elif mark[:1] == b'"' and (colon := _JSON_COLON.match(text, at)):
            at = colon.end()
            if b"\\" in mark:
                return []
            of_prompt, of_messages = (depth == 1 and mark == name for name in (b'"prompt"', b'"messages"'))
            of_content = depth == 3 and in_messages and mark == b'"content"'
            if not (of_prompt or of_messages or of_content):
                continue
            field = (number if of_content else _OF_PROMPT, mark)
            if field in fields:
                return []
            fields.add(field)
            if of_messages:
                in_messages = text[at : at + 1] == b"["
            elif text[at : at + 1] == b'"' and (value := _JSON_MARKS.match(text, at)):
                begin, at = at + 1, value.end()
                ascii_run = _PLAIN.match(text, begin)
                assert ascii_run is not None
                end = ascii_run.end()
                if end - begin >= _LEAST_TEXT_BYTES and text[end : end + 1] == b'"' and len(cuts) < _MOST_CUTS:
                    cuts.append((field[0], begin, end))
    return cuts


def read_cached(path: str, head: bytearray | memoryview, out: bytearray | memoryview) -> int | None:
    """Fill ``head``, then ``out``, from the page cache; return the number of bytes, None if that would block. The twin
    returns None.
    """
    return None
