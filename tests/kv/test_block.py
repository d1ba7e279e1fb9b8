"""Block hashes: full blocks only, chained, and refusing what is not a token."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.errors import InvalidInput
from skymemory.kv.block import hash_blocks, key_hash

SEED = bytes(range(32))
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(TOKENS, st.integers(1, 9))
def test_only_full_blocks_and_a_prefix_keeps_its_hashes(tokens: list[int], block_tokens: int) -> None:
    hashes = hash_blocks(SEED, tokens, block_tokens)
    assert len(hashes) == len(tokens) // block_tokens
    assert len(set(hashes)) == len(hashes)
    for cut in range(len(tokens) + 1):
        assert hash_blocks(SEED, tokens[:cut], block_tokens) == hashes[: cut // block_tokens]


@given(TOKENS.filter(bool), st.data())
def test_a_changed_token_changes_its_block_and_all_after_it(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[at] ^= 1 << data.draw(st.integers(0, 31))
    before, after = hash_blocks(SEED, tokens, 2), hash_blocks(SEED, changed, 2)
    assert [a == b for a, b in zip(before, after, strict=True)] == [n < at // 2 for n in range(len(before))]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64, ">i4"])
def test_every_integer_type_hashes_alike(dtype: Any) -> None:
    tokens = [0, 1, 127, 3, 100, 99]
    assert hash_blocks(SEED, np.array(tokens, dtype=dtype), 2) == hash_blocks(SEED, tokens, 2)
    strided = np.repeat(np.array(tokens, dtype=dtype), 2)[::2]
    assert hash_blocks(SEED, strided, 2) == hash_blocks(SEED, tuple(tokens), 2)


def test_golden_hashes() -> None:
    """What stores hold is found by these: they stay."""
    tokens = [*range(20), 2**32 - 1, 127, 0, 5]
    last = "9b859902b9348b75d844ac0be257657a86bc1ac0f1d5325db5fcfa84d91a9c91"
    assert hash_blocks(SEED, tokens, 4)[-1].hex() == last
    assert hash_blocks(SEED, np.array(tokens), 4)[-1].hex() == last
    assert hash_blocks(SEED, tokens, 4, {9: b"c" * 32, 10: b"d" * 32, 17: b"e" * 32})[-1].hex() == (
        "b609e2a4c60b9edd442a1dcc6ef12693d4157dcaa3ff71f87f66eaff7c229a3b"
    )


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(1, 9),
    st.dictionaries(st.integers(0, 39), st.binary(min_size=32, max_size=32), max_size=6),
)
def test_every_block_is_the_hash_of_the_one_before_its_tokens_and_its_media(
    tokens: list[int], size: int, content: dict[int, bytes]
) -> None:
    content = {at: digest for at, digest in content.items() if at < len(tokens)}
    expected = [SEED]
    for first in range(0, len(tokens) - size + 1, size):
        message = expected[-1] + np.array(tokens[first : first + size], "<u4").tobytes()
        for at in sorted(at for at in content if first <= at < first + size):
            message += (at - first).to_bytes(4, "little") + content[at]
        expected.append(hashlib.sha256(message).digest())
    for shape in (tokens, tuple(tokens), np.array(tokens, np.uint32), np.array(tokens, np.int64)):
        assert hash_blocks(SEED, shape, size, content) == expected[1:]


def test_a_prompt_shorter_than_a_block_has_none() -> None:
    assert hash_blocks(SEED, [], 128) == []
    assert hash_blocks(SEED, np.array([], dtype=np.int64), 128) == []
    assert hash_blocks(SEED, [1] * 127, 128) == []


@pytest.mark.parametrize(
    "tokens",
    [
        [-1, 2],
        [2**32, 2],
        [2**70, 2],
        [1.0, 2.0],
        [True, False],
        [1, 2, -1],
        [1, 2, 2**32],
        (1, None),
        ["1", "2"],
        [[1, 2], [3, 4]],
        [[1, 2], [3]],
        [None, 1],
        np.array([1.5]),
        np.array(3),
        np.array([2**63], dtype=np.uint64),
        "12",
    ],
)
def test_what_is_not_a_token_is_refused(tokens: Any) -> None:
    with pytest.raises(InvalidInput, match="tokens must"):
        hash_blocks(SEED, tokens, 1)


@pytest.mark.parametrize("block_tokens", [0, -1, 1.0, True])
def test_block_size_must_be_a_whole_number(block_tokens: Any) -> None:
    with pytest.raises(InvalidInput, match="block_tokens"):
        hash_blocks(SEED, [1], block_tokens)


@pytest.mark.parametrize("digest", [b"", bytes(31), bytes(33), "x" * 32])
def test_the_seed_must_be_a_digest(digest: Any) -> None:
    with pytest.raises(InvalidInput, match="32 bytes"):
        hash_blocks(digest, [1], 1)
    with pytest.raises(InvalidInput, match="32 bytes"):
        key_hash(digest, "key")


def test_content_separates_prompts_of_equal_placeholders() -> None:
    tokens = [9] * 12
    cat, dog = b"c" * 32, b"d" * 32
    plain = hash_blocks(SEED, tokens, 4)
    with_cat = hash_blocks(SEED, tokens, 4, {5: cat})
    assert with_cat[0] == plain[0]
    assert with_cat[1] != plain[1]
    assert with_cat[2] != plain[2], "later blocks inherit the content through the chain"
    variants = [
        {5: cat},
        {5: dog},
        {6: cat},
        {4: cat},
        {5: cat, 6: dog},
        {5: dog, 6: cat},
        {5: cat, 6: cat},
    ]
    assert len({hash_blocks(SEED, tokens, 4, content)[1] for content in variants}) == len(variants)
    assert hash_blocks(SEED, tokens, 4, {}) == plain
    assert hash_blocks(SEED, [9] * 10, 4, {9: cat}) == plain[:2], "content in the uncached tail"


@pytest.mark.parametrize("content", [{-1: b"c" * 32}, {4: b"c" * 32}, {0: b"short"}, {0: "c" * 32}, {"0": b"c" * 32}])
def test_content_must_be_a_digest_within_the_prompt(content: Any) -> None:
    with pytest.raises(InvalidInput):
        hash_blocks(SEED, [1, 2, 3, 4], 2, content)


def test_general_keys() -> None:
    assert key_hash(SEED, "a") == key_hash(SEED, "a")
    assert len({key_hash(SEED, "a"), key_hash(SEED, "b"), key_hash(bytes(32), "a")}) == 3
    for bad in ("", "\ud800", b"a", None):
        with pytest.raises(InvalidInput):
            key_hash(SEED, bad)  # type: ignore[arg-type]
