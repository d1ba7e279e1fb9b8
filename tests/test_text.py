"""Text within a width: wrapped at words, tables in blocks, figures below each other."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.text import LEAST_WIDTH, PIPED_WIDTH, Table, command_lines, flowed, is_terminal, width_of, wrapped, write

WORDS = st.lists(st.text("abc█·-", min_size=1, max_size=12), min_size=1, max_size=40)


@given(WORDS, st.integers(LEAST_WIDTH, 100), st.integers(0, 4))
def test_lines_are_wrapped_at_words_and_none_is_lost(words: list[str], width: int, hanging: int) -> None:
    lines = wrapped(" ".join(words), width, hanging)
    assert max(map(len, lines)) <= width
    assert " ".join(lines).split() == words
    assert all(line.startswith(" " * hanging) for line in lines[1:])


def test_a_word_wider_than_a_line_stays_whole() -> None:
    assert wrapped("see https://example.org/a/rather/long/path now", 24) == [
        "see",
        "https://example.org/a/rather/long/path",
        "now",
    ]


def test_line_breaks_and_leading_spaces_stay() -> None:
    assert wrapped("a title\n  a list of several words", 20) == ["a title", "  a list of several", "  words"]


@given(WORDS, st.integers(20, 60))
def test_items_flow_unbroken(items: list[str], width: int) -> None:
    lines = flowed(items, width)
    assert max(map(len, lines)) <= width and [part for line in lines for part in line.split("   ")] == items


COMMANDS = {
    "skymemory constellation up": "",
    "skymemory demo --tokens 2048": "a longer context: the cache wins by more",
}


def test_notes_stand_beside_commands_where_there_is_room() -> None:
    assert command_lines(COMMANDS, 80) == [
        "  skymemory constellation up",
        "  skymemory demo --tokens 2048   a longer context: the cache wins by more",
    ]


def test_notes_stand_below_commands_that_stay_whole() -> None:
    assert command_lines(COMMANDS, 28) == [
        "  skymemory constellation up",
        "  skymemory demo --tokens 2048",
        "      a longer context: the",
        "      cache wins by more",
    ]


ROWS = [["random", "1,833", "17.2 s", "local 10%"], ["kvcache-centric", "895", "5.78 s", "local 13%, node 20%"]]
RESULTS = Table(["scheduler", "done", "TTFT mean", "from where"], ROWS, left=(0, 3))


def test_a_table_that_fits_is_one_block_with_numbers_to_the_right() -> None:
    assert RESULTS.lines(60) == [
        "scheduler         done  TTFT mean  from where",
        "random           1,833     17.2 s  local 10%",
        "kvcache-centric    895     5.78 s  local 13%, node 20%",
    ]


def test_a_table_that_is_too_wide_is_cut_into_blocks_that_repeat_the_first_column() -> None:
    assert RESULTS.lines(40) == [
        "scheduler         done  TTFT mean",
        "random           1,833     17.2 s",
        "kvcache-centric    895     5.78 s",
        "",
        "scheduler        from where",
        "random           local 10%",
        "kvcache-centric  local 13%, node 20%",
    ]


def test_a_cell_of_words_is_wrapped_where_even_a_block_is_too_wide() -> None:
    table = Table(["what", "words"], [["a model", "a block of 128 tokens is 384 KiB"], ["b", "well"]], left=(0, 1))
    assert table.lines(24) == [
        "what     words",
        "a model  a block of 128",
        "         tokens is 384",
        "         KiB",
        "b        well",
    ]


CELL = st.text("ab1% ", min_size=1, max_size=11).map(str.strip)


@given(
    st.integers(1, 9).flatmap(lambda n: st.lists(st.lists(CELL, min_size=n, max_size=n), min_size=1, max_size=4)),
    st.integers(30, 100),
)
def test_every_table_fits_and_has_every_cell(rows: list[list[str]], width: int) -> None:
    head = [f"h{at}" for at in range(len(rows[0]))]
    lines = Table(head, rows).lines(width)
    assert max(map(len, lines)) <= width
    shown = " ".join(lines)
    assert all(word in shown for row in (head, *rows) for cell in row for word in cell.split())


@pytest.mark.parametrize("text", ["", "words " * 40])
def test_a_pipe_has_lines_of_a_fixed_width(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    out = io.StringIO()
    write(text, out)
    assert width_of(out) == PIPED_WIDTH and not is_terminal(out)
    assert max(map(len, out.getvalue().split("\n"))) <= PIPED_WIDTH


def test_characters_that_an_encoding_lacks_are_measured_as_they_will_be_shown() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", errors="backslashreplace")
    Table(["a", "Δ"], [["b", "→ 1"]]).print(out)
    write("→ " * 40, out)
    lines = raw.getvalue().decode("ascii").splitlines()
    assert lines[:2] == ["a    \\u0394", "b  \\u2192 1"] and max(map(len, lines)) <= PIPED_WIDTH
