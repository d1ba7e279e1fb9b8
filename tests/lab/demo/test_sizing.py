"""What the demo of table 3 runs on computers of any speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory_lab.demo import resources
from skymemory_lab.demo.sizing import (
    DTYPES,
    PAPER,
    ComputerSpeeds,
    Size,
    choose,
    fits,
    reasons,
    seconds,
    shape_of,
    sizes,
)

FAST = ComputerSpeeds(
    {"bfloat16": 0.02, "float32": 0.08}, {"bfloat16": 0.002, "float32": 0.004}, 0.1, 0.05, 1.0, 8, 64 << 30
)
AVX2 = replace(
    FAST,
    prefill_s={"bfloat16": 2.0, "float32": 0.3},
    decode_s={"bfloat16": 0.011, "float32": 0.014},
    free_bytes=16 << 30,
)
"""As two cores without bfloat16 in hardware."""
TIMES = st.floats(1e-4, 50.0)
SPEEDS = st.builds(
    ComputerSpeeds,
    prefill_s=st.fixed_dictionaries(dict.fromkeys(DTYPES, TIMES)),
    decode_s=st.fixed_dictionaries(dict.fromkeys(DTYPES, TIMES)),
    build_s=st.floats(1e-3, 5.0),
    digest_s=st.floats(1e-3, 5.0),
    slowdown=st.floats(0.5, 20.0),
    threads=st.integers(1, 64),
    free_bytes=st.integers(1 << 30, 1 << 36),
)


@given(speeds=SPEEDS, left_s=st.floats(1.0, 400.0), quick=st.booleans())
def test_it_fits_the_time_and_the_memory_whenever_anything_does(
    speeds: ComputerSpeeds, left_s: float, quick: bool
) -> None:
    options = list(sizes(PAPER, quick=quick))
    size, in_time = choose(speeds, options, left_s)
    in_types = [replace(option, dtype=dtype) for option in options for dtype in DTYPES]
    held = [one for one in in_types if fits(speeds, one)]
    if held:
        assert fits(speeds, size)
        assert in_time == (seconds(speeds, size) <= left_s)
        # bfloat16 is preferred to a float32 that is little faster: only then what fits may be left for a smaller size.
        if not in_time:
            assert seconds(speeds, size) == min(seconds(speeds, one) for one in held)


@given(speeds=SPEEDS, left_s=st.floats(20.0, 400.0))
def test_the_papers_model_and_prompt_are_taken_where_they_fit(speeds: ComputerSpeeds, left_s: float) -> None:
    options = list(sizes(PAPER, quick=False))
    size, _ = choose(speeds, options, left_s)
    paper = [one for one in options if one.shape.layers == PAPER.layers and one.tokens == 524]
    if any(fits(speeds, one) and seconds(speeds, one) <= left_s for one in paper):
        assert (size.shape, size.tokens) == (PAPER, 524)


@given(speeds=SPEEDS, left_s=st.floats(20.0, 400.0), faster=st.floats(0.05, 1.0), quick=st.booleans())
def test_a_faster_computer_never_gets_less(speeds: ComputerSpeeds, left_s: float, faster: float, quick: bool) -> None:
    options = list(sizes(PAPER, quick=quick))

    def rank(speeds: ComputerSpeeds) -> int:
        size, in_time = choose(speeds, options, left_s)
        return options.index(replace(size, dtype="bfloat16")) if in_time else len(options)

    quicker = replace(
        speeds,
        prefill_s={dtype: faster * one for dtype, one in speeds.prefill_s.items()},
        decode_s={dtype: faster * one for dtype, one in speeds.decode_s.items()},
        build_s=faster * speeds.build_s,
        digest_s=faster * speeds.digest_s,
        slowdown=faster * speeds.slowdown,
    )
    assert rank(quicker) <= rank(speeds)


def test_a_fast_computer_runs_what_the_paper_ran() -> None:
    size, in_time = choose(FAST, list(sizes(PAPER, quick=False)), 150.0)
    assert in_time and size == Size(PAPER, 524, 30, "bfloat16")
    assert len(reasons(FAST, size, quick=False, promised_s=180.0)) == 1


def test_without_bfloat16_in_hardware_float32_is_taken_if_memory_admits() -> None:
    options = list(sizes(PAPER, quick=False))
    size, in_time = choose(AVX2, options, 150.0)
    assert in_time and size.dtype == "float32"
    assert any(
        "bfloat16 takes 6.7 times as long" in line for line in reasons(AVX2, size, quick=False, promised_s=180.0)
    )
    little = replace(AVX2, free_bytes=4 << 30)
    size, _ = choose(little, options, 150.0)
    assert fits(little, size)


def test_shapes_of_named_and_saved_models() -> None:
    assert shape_of("tinyllama-random") == PAPER and shape_of("tinyllama-6-random").layers == 6
    small = shape_of("small")
    assert 6_000_000 < small.layers * small.layer_parameters + small.head_parameters < 7_000_000
    assert shape_of("no-such-folder").layers == PAPER.layers


def test_cores_and_memory_are_those_of_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert resources.usable_cores(tmp_path) == 8
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert resources.usable_cores(tmp_path) == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert resources.usable_cores(tmp_path) == 8
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable: 1000000 kB\n")
    assert resources.free_memory_bytes(tmp_path, meminfo) == 1_024_000_000
    for name, text in (("memory.max", "500"), ("memory.current", "400"), ("memory.stat", "inactive_file 50\n")):
        (tmp_path / name).write_text(text)
    assert resources.free_memory_bytes(tmp_path, meminfo) == 150
    assert resources.free_memory_bytes(tmp_path / "none", tmp_path / "none") == 8 << 30
