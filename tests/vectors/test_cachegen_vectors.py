"""Golden bytes of the cachegen codec, and a second decoder that shares no code with the product nor with its library.

``cachegen.json`` was written once, on float32 so that no rounding hides anything. The decoder below says in whole
numbers what a payload means: if ``constriction`` ever codes otherwise, or the product, blocks stored before are lost.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skymemory.kv.block import KVLayout
from skymemory.kv.codec.cachegen import CacheGen

pytest.importorskip("constriction")

VECTOR: dict[str, Any] = json.loads((Path(__file__).parent / "cachegen.json").read_text(encoding="utf-8"))
LAYOUT = KVLayout(*VECTOR["layout"])
BLOCK, PAYLOAD, DECODED = (bytes.fromhex(VECTOR[name]) for name in ("block", "payload", "decoded"))
GROUPS, FAR = (0, 1, 10), 31


def uint(raw: bytes, at: int, width: int = 4) -> int:
    return int.from_bytes(raw[at : at + width], "little")


class Section:
    """ANS with a state of 64 bits, words of 32 and probabilities in 2 ** -24, as constriction's AnsCoder has them."""

    def __init__(self, raw: bytes) -> None:
        end = 4 + uint(raw, 0)
        self.tables = list(raw[4:end])
        self.words = [uint(raw, at) for at in range(end, len(raw), 4)]
        self.state = 0
        for _ in range(min(2, len(self.words))):
            self.state = self.state << 32 | self.words.pop()

    def symbol(self, bounds: list[int]) -> int:
        quantile = self.state & (1 << 24) - 1
        found = max(at for at, bound in enumerate(bounds[:-1]) if bound <= quantile)
        self.state = (self.state >> 24) * (bounds[found + 1] - bounds[found]) + quantile - bounds[found]
        if self.state < 1 << 32 and self.words:
            self.state = self.state << 32 | self.words.pop()
        return found

    def run(self, count: int) -> list[int]:
        if not count:
            return []
        first, more = self.tables.pop(0), self.tables.pop(0)
        if not more:
            return [first] * count
        frequencies = []
        for _ in range(more + 1):
            low = self.tables.pop(0)
            frequencies.append(low if low < 128 else low - 128 + 128 * self.tables.pop(0))
        assert sum(frequencies) == 4096
        # Every symbol has 2 ** -24; what is left of 1 goes by frequency, in float32 arithmetic.
        scale = np.float32((1 << 24) - len(frequencies)) / np.float32(4096)
        bounds = [int(np.float32(sum(frequencies[:at])) * scale) + at for at in range(len(frequencies))]
        return [first + self.symbol([*bounds, 1 << 24]) for _ in range(count)]

    def bits(self, count: int, width: int) -> list[int]:
        bounds = [number << 24 - width for number in range((1 << width) + 1)]
        return [self.symbol(bounds) for _ in range(count)] if width else [0] * count

    def numbers(self, count: int) -> list[int]:
        widths = self.run(count)
        folded = [1 << width - 1 if width else 0 for width in widths]
        for width in range(2, max(widths, default=0) + 1):
            at = [number for number in range(count) if widths[number] == width]
            for number, low in zip(at, self.bits(len(at), width - 1), strict=True):
                folded[number] |= low
        return [-(number + 1) // 2 if number & 1 else number // 2 for number in folded]


def channels_of(section: Section, channels: int, tokens: int, seen: set[str]) -> list[list[int]]:
    kinds = [divmod(kind, 3) for kind in section.run(channels)]
    bases = section.numbers(channels)
    differences = [[0] * tokens for _ in range(channels)]
    escapes = []
    for number in sorted({number for number, _ in kinds} - {0}):
        rows = [row for row in range(channels) if kinds[row][0] == number]
        places = [(row, token) for row in rows for token in range(tokens)]
        width = max(0, (number - 5) // 2 - 2)
        high = section.run(len(places))
        near = [at for at, symbol in zip(places, high, strict=True) if symbol != 2 * FAR + 1]
        escapes += [at for at, symbol in zip(places, high, strict=True) if symbol == 2 * FAR + 1]
        near_high = [symbol - FAR for symbol in high if symbol != 2 * FAR + 1]
        for (row, token), top, low in zip(near, near_high, section.bits(len(near), width), strict=True):
            differences[row][token] = (top << width) + low
    for (row, token), number in zip(escapes, section.numbers(len(escapes)), strict=True):
        differences[row][token] = number
    assert not section.tables and not section.words and not section.state, "nothing is left"
    seen.update(f"group {GROUPS[way]}" for _, way in kinds)
    seen.update(name for name, there in (("escapes", escapes), ("class 0", (0, 0) in kinds)) if there)
    seen.update("low bits" for number, _ in kinds if number >= 11)
    for row, (_, way) in enumerate(kinds):
        group, numbers = GROUPS[way], differences[row]
        for token in range(tokens):
            if not group:
                numbers[token] += bases[row]
            elif token % group:
                numbers[token] += numbers[token - token % group]
            else:
                numbers[token] += numbers[token - group] if token else bases[row]
    return differences


def turned(keys: Any, base: float) -> Any:
    """Channels i and i + head_dim / 2 of token t turned by t · base ** (−2 i / head_dim)."""
    found, half = keys.copy(), keys.shape[1] // 2
    for token, key in enumerate(keys):
        for pair in range(half):
            angle = token * base ** (-2 * pair / (2 * half))
            cosine, sine = np.float32(math.cos(angle)), np.float32(math.sin(angle))
            found[token, pair] = key[pair] * cosine - key[pair + half] * sine
            found[token, pair + half] = key[pair + half] * cosine + key[pair] * sine
    return found


def test_the_bytes_of_a_block() -> None:
    assert CacheGen(VECTOR["level"]).encode(memoryview(BLOCK), LAYOUT) == PAYLOAD
    out = bytearray(LAYOUT.block_bytes)
    CacheGen().decode(PAYLOAD, LAYOUT, memoryview(out))
    assert out == DECODED


def test_what_the_bytes_mean() -> None:
    layers, _, heads, tokens, head_dim = LAYOUT.shape
    begin = 28 + 8 * 2 * layers
    assert PAYLOAD[:8] == b"CGEN" + bytes([2, 0, VECTOR["number"], 0])
    assert [uint(PAYLOAD, at) for at in range(8, 24, 4)] == [layers, heads, head_dim, tokens]
    assert uint(PAYLOAD, 24) == zlib.crc32(PAYLOAD[:24] + bytes(4) + PAYLOAD[28:begin])
    seen: set[str] = set()
    by_hand = np.zeros((2 * layers, heads, tokens, head_dim), np.float32)
    for part in range(2 * layers):
        length = uint(PAYLOAD, 28 + 8 * part)
        raw = PAYLOAD[begin : begin + length]
        assert uint(PAYLOAD, 32 + 8 * part) == zlib.crc32(raw)
        begin += length
        base, pull = raw[2 * heads], raw[2 * heads + 1]
        front = 2 * heads + 2 + (3 * heads * head_dim + 7) // 8
        phases = f"{int.from_bytes(raw[2 * heads + 2 : front], 'big'):0{8 * (front - 2 * heads - 2)}b}"
        rows = channels_of(Section(raw[front:]), heads * head_dim, tokens, seen)
        seen.update(name for name, there in (("turned", base), ("pulled", pull), ("phases", "1" in phases)) if there)
        for head in range(heads):
            step = np.float32(2.0 ** (int.from_bytes(raw[2 * head : 2 * head + 2], "little", signed=True) / 4))
            for channel in range(head_dim):
                row = head * head_dim + channel
                phase, centre = int(phases[3 * row : 3 * row + 3], 2), round(sum(rows[row]) / tokens)
                side = [(number > centre) - (number < centre) for number in rows[row]]
                exact = [number + phase / 8 - sign * pull / 64 for number, sign in zip(rows[row], side, strict=True)]
                by_hand[part, head, :, channel] = np.array(exact, np.float32) * step
            if base:
                by_hand[part, head] = turned(by_hand[part, head], (1e4, 5e5, 1e6)[base - 1])
    assert begin == len(PAYLOAD)
    assert by_hand.tobytes() == DECODED
    everything = {"group 0", "group 1", "group 10", "escapes", "class 0", "low bits", "turned", "pulled", "phases"}
    assert seen == everything, "the vector has everything"
