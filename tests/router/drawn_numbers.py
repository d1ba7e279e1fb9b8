"""Numbers as text, drawn over their digits, signs and exponents, and what may stand in the place of one."""

from __future__ import annotations

from hypothesis import strategies as st

LENGTHS = (1, 2, 15, 16, 17, 18, 19, 20, 21, 38, 77, 307, 308, 309, 310, 617, 1024, 4299, 4300, 4301, 5000, 10_000)
"""Digits at which some type ends: 53 and 64 bits, doubles, what Python reads."""


def digits(lengths: st.SearchStrategy[int]) -> st.SearchStrategy[str]:
    return st.builds(lambda count, digit: digit * count, lengths, st.sampled_from("1379"))


WHOLE = st.one_of(digits(st.sampled_from(LENGTHS)), digits(st.integers(1, 10_000)), st.integers(0, 2**64 + 1).map(str))
NUMBERS = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["", "", "-", "+", "0", " "]),
    WHOLE,
    st.sampled_from(["", "", ".0", ".5", "." + "0" * 400, "_0", ".", "\u0663"]),
    st.sampled_from(["", "", "e0", "e3", "E+18", "e19", "e-5", "e308", "e400", "e" + "9" * 400]),
)
OTHERS = st.sampled_from(
    ["NaN", "Infinity", "-Infinity", "true", "false", "null", '"16"', '"' + "9" * 5000 + '"', "[1]", '{"a": 1}', "0x10"]
    + ["-0", "-0.0", "1e999", "-1e999", "[" * 2000 + "9" * 400 + "]" * 2000, '[{"a": ' + "9" * 5000 + "}]", '""', ""]
)
VALUES = st.one_of(NUMBERS, OTHERS)
