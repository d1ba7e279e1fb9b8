"""The raw codec, and the report that measures any codec."""

from __future__ import annotations

import numpy as np
import pytest

from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.kv.block import Buffer, KVLayout
from skymemory.kv.codec.codec_base import RAW, Codec, CodecReport, measure

LAYOUT = KVLayout(2, 2, 4, 8, "float32")
BLOCK = np.random.default_rng(5).standard_normal(LAYOUT.shape).astype("<f4").tobytes()


class Coarse:
    """Rounds to multiples of a quarter: a codec whose loss is known."""

    name = "coarse"
    codec_id = 200
    lossless = False

    def encode(self, block: memoryview, layout: KVLayout) -> bytes:
        return np.round(np.frombuffer(block, "<f4") * 4).astype(np.int8).tobytes()

    def decode(self, payload: Buffer, layout: KVLayout, out: memoryview) -> None:
        out.cast("B")[:] = (np.frombuffer(payload, np.int8).astype("<f4") / 4).tobytes()


def test_raw_is_the_identity_and_copies() -> None:
    codec: Codec = RAW
    source = bytearray(BLOCK)
    payload = codec.encode(memoryview(source), LAYOUT)
    source[:4] = b"\xff" * 4
    out = bytearray(LAYOUT.block_bytes)
    codec.decode(memoryview(payload), LAYOUT, memoryview(out))
    assert out == BLOCK
    assert measure(codec, BLOCK, LAYOUT) == CodecReport(LAYOUT.block_bytes, LAYOUT.block_bytes, 0.0, 0.0)


def test_raw_refuses_other_sizes() -> None:
    out = bytearray(LAYOUT.block_bytes)
    with pytest.raises(InvalidInput):
        RAW.encode(memoryview(BLOCK)[:-4], LAYOUT)
    with pytest.raises(MalformedPacket):
        RAW.decode(BLOCK[:-1], LAYOUT, memoryview(out))
    with pytest.raises(InvalidInput):
        RAW.decode(BLOCK, LAYOUT, memoryview(out)[1:])


def test_loss_is_measured() -> None:
    report = measure(Coarse(), BLOCK, LAYOUT)
    numbers = np.frombuffer(BLOCK, "<f4").astype(np.float64)
    error = numbers - np.round(numbers * 4) / 4
    assert report.size_bytes == LAYOUT.block_bytes // 4
    assert report.ratio == 0.25
    assert report.max_abs_error == pytest.approx(np.abs(error).max())
    assert report.rms_error == pytest.approx(np.sqrt(np.mean(error**2)))


def test_loss_of_infinities_and_nan_is_not_hidden() -> None:
    layout = KVLayout(1, 1, 1, 1, "bfloat16")

    class Zero(Coarse):
        def encode(self, block: memoryview, layout: KVLayout) -> bytes:
            return bytes(block[:2])

        def decode(self, payload: Buffer, layout: KVLayout, out: memoryview) -> None:
            out[:] = bytes(payload) + bytes(2)

    nan_and_one = bytes.fromhex("c07f803f")
    assert measure(RAW, nan_and_one, layout).max_abs_error == 0.0
    assert measure(Zero(), nan_and_one, layout).max_abs_error == 1.0, "the kept NaN is no error"
    one_and_nan = bytes.fromhex("803fc07f")
    assert measure(Zero(), one_and_nan, layout).max_abs_error == np.inf
