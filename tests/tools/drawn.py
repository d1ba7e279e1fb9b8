"""A property test whose drawn examples are its output; collected only where it is named."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

_seen = hashlib.sha256()


@settings(max_examples=200)
@given(st.integers(), st.floats(), st.text(), st.sets(st.binary(max_size=4)), st.integers(0, 1 << 30))
def test_draw(whole: int, real: float, text: str, some: set[bytes], bounded: int) -> None:
    _seen.update(repr((whole, real, text, sorted(some), bounded)).encode())


def test_draws() -> None:
    print(f"drawn: {_seen.hexdigest()}")
