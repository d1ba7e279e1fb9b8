"""The cachegen codec: how far a number may move, that only rounding loses anything, and how small it gets."""

from __future__ import annotations

import builtins
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kv.cachegen_steps import BOUND, CACHEGEN, steps_in

from skymemory.errors import CodecUnavailable, InvalidInput
from skymemory.kv.block import KVLayout, to_float32
from skymemory.kv.codec import entropy
from skymemory.kv.codec.cachegen import LEVELS, CacheGen, _to_bytes
from skymemory.kv.codec.codec_base import Codec, measure

pytest.importorskip("constriction")

DTYPES = ("float32", "float16", "bfloat16")
ULP = {"float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Rounding the result to its dtype moves it by at most this part of itself."""


def raw_of(numbers: npt.NDArray[Any], dtype: str) -> bytes:
    """``numbers`` in the layout's dtype; bfloat16 by cutting the low half off."""
    if dtype == "bfloat16":
        return (numbers.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return numbers.astype("<f4" if dtype == "float32" else "<f2").tobytes()


def like_keys(layout: KVLayout, *, correlation: float = 0.0, seed: int = 3) -> npt.NDArray[np.float64]:
    """Channels with means and spreads of their own, each token correlated with the one before."""
    dice = np.random.default_rng(seed)
    noise = dice.standard_normal(layout.shape)
    numbers = noise.copy()
    for token in range(1, layout.block_tokens):
        fresh = np.sqrt(1 - correlation**2) * noise[..., token, :]
        numbers[..., token, :] = correlation * numbers[..., token - 1, :] + fresh
    per_channel = (*layout.shape[:3], 1, layout.head_dim)
    return numbers * np.exp(dice.normal(0, 0.5, per_channel)) + dice.normal(0, 3, per_channel)


def decoded(codec: Codec, payload: bytes, layout: KVLayout) -> bytes:
    out = bytearray(layout.block_bytes)
    codec.decode(payload, layout, memoryview(out))
    return bytes(out)


def assert_within_bound(raw: bytes, payload: bytes, layout: KVLayout) -> None:
    before = to_float32(raw, layout.dtype).reshape(layout.shape).astype(np.float64)
    after = to_float32(decoded(CACHEGEN, payload, layout), layout.dtype).reshape(layout.shape)
    most = BOUND * steps_in(payload, layout)[:, :, :, None, None].astype(np.float64)
    slack = most * 1e-6 + ULP[layout.dtype] * (np.abs(before) + most) + (2.0**-24 if layout.dtype == "float16" else 0)
    assert (np.abs(after - before) <= most + slack).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_no_number_moves_by_more_than_half_a_step_of_its_level(level: str, dtype: str) -> None:
    layout = KVLayout(6, 2, 16, 40, dtype)
    numbers = like_keys(layout)
    raw = raw_of(numbers, dtype)
    payload = CacheGen(level).encode(memoryview(raw), layout)
    assert_within_bound(raw, payload, layout)
    spread = np.sqrt(np.var(numbers, axis=3, ddof=1).mean(axis=3))
    both = np.stack((LEVELS[level].keys, LEVELS[level].values), axis=1)
    wanted = np.repeat(both, 2, axis=0)[:, :, None] * spread
    part = steps_in(payload, layout) / wanted
    assert (part <= 1.01).all() and (part > 0.83).all(), "the level's step, down to a quarter octave finer"


@settings(deadline=None, max_examples=60)
@given(
    layout=st.builds(
        KVLayout, st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 25), st.sampled_from(DTYPES)
    ),
    level=st.sampled_from(list(LEVELS)),
    seed=st.integers(0, 2**32 - 1),
    special=st.sampled_from(["uniform bits", "zeros", "constant channels", "outlier", "tiny", "sparse"]),
)
def test_any_finite_block_comes_back_within_the_bound(layout: KVLayout, level: str, seed: int, special: str) -> None:
    dice = np.random.default_rng(seed)
    numbers = dice.standard_normal(layout.shape)
    if special == "uniform bits":
        raw = bytearray(dice.bytes(layout.block_bytes))
        bits = np.frombuffer(raw, "<u4" if layout.dtype == "float32" else "<u2")
        exponent = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}[layout.dtype]
        bits[(bits & exponent) == exponent] = 0
        raw = bytes(raw)
    else:
        if special == "zeros":
            numbers *= 0
        elif special == "constant channels":
            numbers[:] = numbers[:, :, :, :1]
        elif special == "outlier":
            numbers.reshape(-1)[dice.integers(numbers.size)] = 6e4
        elif special == "tiny":
            numbers *= 1e-40
        else:
            numbers *= dice.random(layout.shape) < 0.05
        raw = raw_of(numbers, layout.dtype)
    codec = CacheGen(level)
    payload = codec.encode(memoryview(raw), layout)
    assert payload == codec.encode(memoryview(raw), layout), "the same block, the same bytes"
    assert_within_bound(raw, payload, layout)
    once = decoded(codec, payload, layout)
    assert np.isfinite(to_float32(once, layout.dtype)).all()
    assert decoded(CacheGen("finest"), payload, layout) == once, "any level decodes what another encoded"


def test_coarser_levels_are_smaller_and_lose_more() -> None:
    layout = KVLayout(6, 4, 32, 128, "bfloat16")
    raw = raw_of(like_keys(layout), "bfloat16")
    reports = [measure(CacheGen(level), raw, layout) for level in LEVELS]
    sizes = [report.size_bytes for report in reports]
    errors = [report.rms_error for report in reports]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    assert errors == sorted(errors) and len(set(errors)) == len(errors)


def test_keys_are_kept_finer_than_values_and_every_third_of_the_layers_has_its_steps() -> None:
    layout = KVLayout(6, 2, 16, 64, "float32")
    one_layer = np.random.default_rng(1).standard_normal((1, *layout.shape[1:]))
    raw = raw_of(np.repeat(one_layer, 6, axis=0), "float32")
    steps = steps_in(CACHEGEN.encode(memoryview(raw), layout), layout)
    assert (steps[:, 0] < steps[:, 1]).all()
    assert (steps[::2] == steps[1::2]).all()
    assert len(np.unique(steps[::2, 0, 0])) == 3


def test_independent_numbers_cost_about_their_entropy() -> None:
    """A Gaussian in steps of r deviations has log2(√(2πe) / r) bits, less nothing: within 0.15 bit of that."""
    layout = KVLayout(3, 4, 64, 128, "float32")
    raw = raw_of(np.random.default_rng(2).standard_normal(layout.shape), "float32")
    payload = CacheGen("fine").encode(memoryview(raw), layout)
    bits = 8 * len(payload) / (layout.block_bytes / 4)
    entropy_bits = np.mean(np.log2(np.sqrt(2 * np.pi * np.e) / steps_in(payload, layout)))
    assert entropy_bits - 0.01 < bits < entropy_bits + 0.15


def test_token_wise_differences_pay_where_tokens_are_alike() -> None:
    """The same numbers in another order of tokens have the same steps and nothing to predict them from but the mean."""
    layout = KVLayout(3, 4, 32, 128, "bfloat16")
    numbers = like_keys(layout, correlation=0.95)
    shuffled = np.random.default_rng(1).permutation(numbers, axis=3)
    payloads = [CACHEGEN.encode(memoryview(raw_of(n, "bfloat16")), layout) for n in (numbers, shuffled)]
    assert (steps_in(payloads[0], layout) == steps_in(payloads[1], layout)).mean() > 0.9
    assert len(payloads[0]) < 0.7 * len(payloads[1])


def test_two_bits_and_a_half_where_eight_bits_and_zlib_stay_large() -> None:
    layout = KVLayout(6, 4, 64, 128, "bfloat16")
    raw = raw_of(like_keys(layout), "bfloat16")
    size = len(CACHEGEN.encode(memoryview(raw), layout))
    numbers = layout.block_bytes // 2
    assert size < numbers * (8 + 32 / 64) / 8 / 3, "a third of quanto8: 8 bits and a float32 scale per 64 numbers"
    assert size < len(zlib.compress(raw, 6)) / 4


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_refused(dtype: str, number: float) -> None:
    layout = KVLayout(2, 1, 4, 3, dtype)
    numbers = np.zeros(layout.shape)
    numbers[1, 1, 0, 2, 3] = number
    with pytest.raises(InvalidInput, match="finite"):
        CACHEGEN.encode(memoryview(raw_of(numbers, dtype)), layout)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_of_a_dtype_stay_finite(dtype: str) -> None:
    layout = KVLayout(1, 1, 2, 3, dtype)
    largest = {"float32": 0xFF7FFFFF, "float16": 0xFBFF, "bfloat16": 0xFF7F}[dtype]
    bits = np.zeros(layout.shape, "<u4" if dtype == "float32" else "<u2")
    bits[..., 0, :] = largest
    raw = bits.tobytes()
    assert_within_bound(raw, CACHEGEN.encode(memoryview(raw), layout), layout)


def test_bfloat16_is_rounded_to_the_nearest_and_ties_to_the_even() -> None:
    tie, above = 2.0**-8, 2.0**-8 + 2.0**-16
    numbers = np.array([1.0, 1 + tie, 1 + above, 1 + 3 * tie, 1 + 3 * tie - 2.0**-16, -1 - above], np.float32)
    raw = _to_bytes(numbers, "bfloat16")
    assert to_float32(raw, "bfloat16").tolist() == [1.0, 1.0, 1 + 2 * tie, 1 + 4 * tie, 1 + 2 * tie, -1 - 2 * tie]


def test_sizes_of_the_caller_are_checked() -> None:
    layout = KVLayout(1, 1, 4, 3, "float32")
    raw = memoryview(bytes(layout.block_bytes))
    with pytest.raises(InvalidInput):
        CACHEGEN.encode(raw[:-4], layout)
    with pytest.raises(InvalidInput):
        CACHEGEN.decode(CACHEGEN.encode(raw, layout), layout, memoryview(bytearray(layout.block_bytes - 1)))
    with pytest.raises(InvalidInput, match="finest, fine, medium, coarse"):
        CacheGen("rough")


def test_a_missing_library_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "constriction":
            raise ImportError("No module named 'constriction'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    entropy.constriction.cache_clear()
    with pytest.raises(CodecUnavailable, match=r"pip install .*\[cachegen\]"):
        CACHEGEN.check()
    layout = KVLayout(1, 1, 4, 3, "float32")
    with pytest.raises(CodecUnavailable):
        CACHEGEN.encode(memoryview(bytes(layout.block_bytes)), layout)
