"""Headers of HTTP by their names, whatever the case: compiled and twin."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.native.conftest import IMPLEMENTATIONS

NAMES = st.sampled_from([b"Host", b"host", b"HOST", b"Te", b"x-a", b"X-A", b"", b"\xc4"]) | st.binary(max_size=6)
HEADERS = st.lists(st.tuples(NAMES, st.binary(max_size=6)), max_size=12)


def test_of_each_name_the_first_value_is_found(impl: ModuleType) -> None:
    came = [(b"Host", b"a"), (b"x-a", b"1"), (b"HOST", b"b"), (b"X-A", b"2")]
    assert list(impl.first_values(came).items()) == [(b"host", b"a"), (b"x-a", b"1")]
    assert impl.first_values(()) == {}


def test_a_name_of_one_letter_changes_no_byte_elsewhere(impl: ModuleType) -> None:
    """The interpreter has one object for each single byte: lowered in place, every ``b"Q"`` would be a ``b"q"``."""
    letter = bytes((81,))
    assert impl.first_values([(letter, b"1")]) == {bytes((113,)): b"1"}
    assert impl.header_lines([(letter, b"1")], frozenset([b"host"])) == b"\x51: 1\r\n"
    assert (letter[0], bytes((81,))[0]) == (81, 81)


def test_lines_are_as_they_came_but_for_those_left_out(impl: ModuleType) -> None:
    came = [(b"Host", b"a"), (b"X-A", b"1"), (b"Empty", b""), (b"x-a", b"2")]
    assert impl.header_lines(came, frozenset([b"host"])) == b"X-A: 1\r\nEmpty: \r\nx-a: 2\r\n"
    assert impl.header_lines(tuple(came), {b"x-a", b"empty", b"host"}) == b""
    assert impl.header_lines([], frozenset()) == b""


@pytest.mark.skipif(len(IMPLEMENTATIONS) < 2, reason="the compiled helper was not built")
@settings(max_examples=300, deadline=None)
@given(came=HEADERS, left_out=st.frozensets(NAMES, max_size=4))
def test_compiled_and_twin_agree(came: list[tuple[bytes, bytes]], left_out: frozenset[bytes]) -> None:
    twin, fast = IMPLEMENTATIONS
    assert list(fast.first_values(came).items()) == list(twin.first_values(came).items())
    assert fast.header_lines(came, left_out) == twin.header_lines(came, left_out)


def test_what_is_no_header_is_refused(fast: ModuleType) -> None:
    for wrong in ([(b"a",)], [(b"a", "b")], [("a", b"b")], [b"ab"], [5], 5):
        with pytest.raises(TypeError):
            fast.first_values(wrong)
        with pytest.raises(TypeError):
            fast.header_lines(wrong, frozenset())
    for arguments in (([(b"a", b"b")], [b"a"]), ([(b"a", b"b")],), ()):
        with pytest.raises(TypeError):
            fast.header_lines(*arguments)


def test_a_parsers_pairs_are_appended(impl: ModuleType) -> None:
    came: list[tuple[bytes, bytes]] = []
    append = impl.pairs_into(came)
    append(b"Name", b"value")
    append(b"Name", b"")
    assert came == [(b"Name", b"value"), (b"Name", b"")]
    came.clear()
    append(b"a", b"b")
    assert came == [(b"a", b"b")], "it keeps to the list"
    for wrong in ((), (b"a",), (b"a", b"b", b"c")):
        with pytest.raises(TypeError):
            append(*wrong)
