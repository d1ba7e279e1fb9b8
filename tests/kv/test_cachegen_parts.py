"""The lossless half of cachegen: differences, runs of numbers and sections come back exactly; damage is malformed."""

from __future__ import annotations

import random
import zlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz.mutations import mutate
from tests.kv.cachegen_steps import CACHEGEN, steps_in

from skymemory.errors import MalformedPacket
from skymemory.kv.block import KVLayout
from skymemory.kv.codec import entropy
from skymemory.kv.codec.entropy import Reader, Writer, decode_section, encode_section

pytest.importorskip("constriction")

LAYOUT = KVLayout(2, 2, 8, 24, "float32")
BLOCK = np.random.default_rng(8).standard_normal(LAYOUT.shape).astype("<f4").tobytes()
PAYLOAD = CACHEGEN.encode(memoryview(BLOCK), LAYOUT)
TABLE_AT, SECTIONS_AT = 28, 28 + 8 * 2 * LAYOUT.layers


def quotients(seed: int, channels: int, tokens: int, spread: float) -> npt.NDArray[np.int32]:
    dice = np.random.default_rng(seed)
    heavy = dice.laplace(0, 1, (channels, tokens)) * spread * np.exp(dice.normal(0, 1, (channels, 1)))
    drift = np.cumsum(dice.normal(0, spread / 3, (channels, tokens)), axis=1) * dice.integers(0, 2, (channels, 1))
    return np.clip(np.rint(heavy + drift), -(2**21), 2**21).astype(np.int32)


SHAPES = {"channels": st.integers(1, 40), "tokens": st.integers(1, 33), "seed": st.integers(0, 2**32 - 1)}


@given(**SHAPES, spread=st.sampled_from([0.01, 1.0, 50.0, 1e6]))
def test_differences_come_back(channels: int, tokens: int, seed: int, spread: float) -> None:
    numbers = quotients(seed, channels, tokens, spread)
    assert (entropy.join(*entropy.split(numbers)) == numbers).all()


def test_each_channel_is_coded_in_the_way_that_leaves_least() -> None:
    dice = np.random.default_rng(4)
    steady = 500 + np.rint(dice.normal(0, 4, 60))
    drifting = np.cumsum(np.rint(dice.normal(0, 4, 60)))
    in_groups = np.repeat(100 * dice.integers(-9, 9, 6), 10) + np.rint(dice.normal(0, 4, 60))
    in_groups[::10] = np.rint(in_groups[::10] / 100) * 100
    numbers = np.stack([steady, drifting, in_groups]).astype(np.int32)
    ways, bases, differences = entropy.split(numbers)
    assert [entropy.GROUPS[way] for way in ways] == [0, 1, 10]
    assert 490 < bases[0] < 510 and (bases[1:] == numbers[1:, 0]).all()
    assert np.abs(differences).mean() < 16


@settings(deadline=None)
@given(st.lists(st.integers(-(2**23), 2**23)), st.lists(st.integers(0, 255)), st.integers(1, 20))
def test_runs_come_back_in_order(numbers: list[int], symbols: list[int], width: int) -> None:
    writer = Writer()
    low = np.array(symbols, np.int32) & (1 << width) - 1
    writer.symbols(np.array(symbols, np.int32))
    writer.numbers(np.array(numbers, np.int32))
    writer.bits(low, width)
    reader = Reader(memoryview(writer.section()))
    assert reader.symbols(len(symbols)).tolist() == symbols
    assert reader.numbers(len(numbers)).tolist() == numbers
    assert (reader.bits(len(symbols), width) == low).all()
    reader.end()


@pytest.mark.parametrize("rare", [1, 128, 255])
def test_tables_of_many_rare_symbols_add_up(rare: int) -> None:
    """A table gives everything that occurs at least 1 of 4096, however rare it is."""
    common = np.repeat(np.arange(rare, 256), 100_000 // (256 - rare))
    symbols = np.concatenate([np.arange(rare), common]).astype(np.int32)
    writer = Writer()
    writer.symbols(symbols)
    assert (Reader(memoryview(writer.section())).symbols(len(symbols)) == symbols).all()


@settings(deadline=None)
@given(**SHAPES, spread=st.sampled_from([0.0, 0.01, 1.0, 50.0, 1e6]))
def test_sections_come_back(channels: int, tokens: int, seed: int, spread: float) -> None:
    numbers = quotients(seed, channels, tokens, spread)
    assert (decode_section(memoryview(encode_section(numbers)), channels, tokens) == numbers).all()


def decode(payload: bytes, layout: KVLayout = LAYOUT) -> None:
    CACHEGEN.decode(payload, layout, memoryview(bytearray(layout.block_bytes)))


def sealed(payload: bytes) -> bytes:
    """``payload`` with checksums that are right for what its table says, as an adversary would make them."""
    made, at = bytearray(payload), SECTIONS_AT
    for entry in range(TABLE_AT, SECTIONS_AT, 8):
        length = int.from_bytes(made[entry : entry + 4], "little")
        made[entry + 4 : entry + 8] = zlib.crc32(made[at : at + length]).to_bytes(4, "little")
        at += length
    made[24:28] = bytes(4)
    crc = zlib.crc32(made[24 + 4 : SECTIONS_AT], zlib.crc32(made[:TABLE_AT]))
    made[24:28] = crc.to_bytes(4, "little")
    return bytes(made)


def test_every_truncation_and_every_flipped_byte_is_malformed() -> None:
    assert sealed(PAYLOAD) == PAYLOAD
    for length in range(len(PAYLOAD)):
        with pytest.raises(MalformedPacket):
            decode(PAYLOAD[:length])
    for at in range(len(PAYLOAD)):
        with pytest.raises(MalformedPacket):
            decode(PAYLOAD[:at] + bytes([PAYLOAD[at] ^ 1 << at % 8]) + PAYLOAD[at + 1 :])
    with pytest.raises(MalformedPacket):
        decode(PAYLOAD + b"\0")


@pytest.mark.parametrize(
    "other",
    [
        KVLayout(2, 2, 8, 24, "float16"),
        KVLayout(2, 2, 24, 8, "float32"),
        KVLayout(1, 2, 8, 24, "float32"),
        KVLayout(4, 2, 8, 24, "float32"),
        KVLayout(2**31 - 1, 1, 1, 1, "float16"),
    ],
)
def test_another_layout_is_malformed_before_anything_is_read(other: KVLayout) -> None:
    with pytest.raises(MalformedPacket):
        steps_in(PAYLOAD, other)
    if other.block_bytes <= LAYOUT.block_bytes * 2:
        with pytest.raises(MalformedPacket):
            decode(PAYLOAD, other)


@pytest.mark.brief()
def test_forged_sections_raise_nothing_else() -> None:
    """Damage under right checksums: a value of the wrong numbers at worst, never another exception."""
    dice, refused = random.Random(5), 0
    for _ in range(3000):
        changed = mutate(dice, PAYLOAD[SECTIONS_AT:], [PAYLOAD])
        grown = len(changed) - (len(PAYLOAD) - SECTIONS_AT)
        made = bytearray(PAYLOAD[:SECTIONS_AT] + changed)
        length = int.from_bytes(made[SECTIONS_AT - 8 : SECTIONS_AT - 4], "little") + grown
        made[SECTIONS_AT - 8 : SECTIONS_AT - 4] = max(0, length).to_bytes(4, "little")
        try:
            decode(sealed(bytes(made)))
        except MalformedPacket:
            refused += 1
    assert refused > 1500


def test_sections_of_random_bytes_raise_nothing_else() -> None:
    dice = random.Random(6)
    for _ in range(3000):
        tables = dice.randbytes(dice.randrange(40))
        section = len(tables).to_bytes(4, "little") + tables + dice.randbytes(4 * dice.randrange(20))
        with pytest.raises(MalformedPacket):
            decode_section(memoryview(section), 16, 24)
