"""CacheContext: every field counts, and nothing secret is shown."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from skymemory.errors import InvalidInput
from skymemory.kv.context import CacheContext

BASE = CacheContext("model", "weights", "tokenizer", "bfloat16", "layout")

CHANGES: dict[str, Any] = {
    "model": "other",
    "weights": "other",
    "tokenizer": "other",
    "kv_dtype": "float32",
    "layout": "other",
    "lossless": False,
    "block_tokens": 64,
    "adapter": "lora",
    "tenant_salt": b"salt",
}


def test_every_field_is_part_of_the_identity() -> None:
    assert set(CHANGES) == {field.name for field in dataclasses.fields(CacheContext)}
    digests = [dataclasses.replace(BASE, **{name: value}).digest() for name, value in CHANGES.items()]
    assert len({BASE.digest(), *digests}) == len(CHANGES) + 1


def test_text_cannot_move_from_one_field_to_the_next() -> None:
    assert CacheContext("ab", "c", "", "", "").digest() != CacheContext("a", "bc", "", "", "").digest()
    salted = dataclasses.replace(BASE, adapter="", tenant_salt=b"x")
    assert salted.digest() != dataclasses.replace(BASE, adapter="x").digest()


def test_the_salt_is_never_shown() -> None:
    salted = dataclasses.replace(BASE, tenant_salt=b"secret-salt")
    assert "secret" not in repr(salted)
    assert "secret" not in str(salted.describe())
    assert salted.describe()["tenant_salted"] is True
    assert salted.describe()["digest"] == salted.digest().hex()


@pytest.mark.parametrize(
    "change",
    [
        {"model": 3},
        {"layout": "\ud800"},
        {"block_tokens": 0},
        {"block_tokens": True},
        {"block_tokens": 1.5},
        {"block_tokens": 2**32},
        {"lossless": 1},
        {"tenant_salt": "text"},
    ],
)
def test_fields_that_cannot_be_encoded_are_refused_at_once(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="cache context"):
        dataclasses.replace(BASE, **change)
