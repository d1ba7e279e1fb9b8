"""KVLayout: the paper's figures, and bytes as the numbers they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from skymemory.errors import InvalidInput
from skymemory.kv.block import KVLayout, to_float32

TINYLLAMA = KVLayout(22, 4, 64, 128, "bfloat16")


def test_tinyllama_block_is_the_papers() -> None:
    assert TINYLLAMA.block_bytes == 2 * 22 * 4 * 64 * 128 * 2 == 2_883_584
    assert TINYLLAMA.token_bytes == 22_528
    assert TINYLLAMA.shape == (22, 2, 4, 128, 64)
    assert np.prod(TINYLLAMA.shape) * TINYLLAMA.item_bytes == TINYLLAMA.block_bytes


def test_description_changes_with_every_field() -> None:
    others: list[dict[str, Any]] = [
        {"layers": 23},
        {"kv_heads": 8},
        {"head_dim": 128},
        {"block_tokens": 64},
        {"dtype": "float16"},
    ]
    texts = {dataclasses.replace(TINYLLAMA, **other).describe() for other in others}
    assert len(texts | {TINYLLAMA.describe()}) == 6
    assert TINYLLAMA.describe() == "kv1[layers=22,2,kv_heads=4,tokens=128,head_dim=64]bfloat16-le"


@pytest.mark.parametrize(
    "other",
    [{"layers": 0}, {"kv_heads": -1}, {"head_dim": 1.0}, {"block_tokens": True}, {"dtype": "int8"}, {"layers": 2**40}],
)
def test_impossible_layouts_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="KV layout"):
        dataclasses.replace(TINYLLAMA, **other)


def test_numbers_are_read_exactly() -> None:
    numbers = np.array([0.0, -0.0, 1.0, -2.5, 65504.0, np.inf], dtype=np.float32)
    assert to_float32(numbers.tobytes(), "float32").tobytes() == numbers.tobytes()
    halves = numbers.astype(np.float16)
    assert to_float32(halves.tobytes(), "float16").tobytes() == numbers.tobytes()
    # bfloat16 is the upper half of a float32: 1.0 is 3F80, -2.5 is C020, infinity 7F80.
    raw = bytes.fromhex("0000 0080 803f 20c0 807f".replace(" ", ""))
    assert to_float32(raw, "bfloat16").tolist() == [0.0, -0.0, 1.0, -2.5, np.inf]


def test_odd_bytes_and_unknown_types_are_refused() -> None:
    with pytest.raises(InvalidInput):
        to_float32(bytes(3), "float16")
    with pytest.raises(InvalidInput):
        to_float32(bytes(4), "int8")
