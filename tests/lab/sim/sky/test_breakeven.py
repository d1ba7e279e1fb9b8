"""The break-even map: its cells against the model and the loader, and the engines that are shown in it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tools.measured_points import text

from skymemory.constellation.presets import preset_named
from skymemory.errors import InvalidInput
from skymemory_lab.sim.sky.bound import lower_bound_s
from skymemory_lab.sim.sky.breakeven import (
    KV_BYTES_PER_TOKEN,
    MEASURED_FILE,
    Break,
    BreakEven,
    fitted_gpus,
    kv_bytes_of,
    read_measured,
)
from skymemory_lab.sim.sky.physical import LinkRates, TransferSetting, Ways, latency_s, sight_of, ways_of

LLAMA = KV_BYTES_PER_TOKEN["llama-3.1-8b"]


@cache
def ways(access: str) -> Ways:
    preset = preset_named("kuiper-a")
    return ways_of(preset, sight_of(preset, 25.0, "climbing"), access, [0.0, 1000.0, 2000.0], servers=9)  # type: ignore[arg-type]


def even(access: str = "gateway") -> BreakEven:
    return BreakEven(ways(access), TransferSetting(1, server_s=2e-5), LinkRates(3e8, None, 2e10))


def test_a_cell_is_what_model_and_loader_say() -> None:
    cell = even().cell(8192, 5000.0, 2e10, LLAMA)
    setting, rates = TransferSetting(8192 * LLAMA, server_s=2e-5), LinkRates(3e8, 2e10, 2e10)
    assert cell.load_s == pytest.approx(float(np.median(latency_s(ways("gateway"), setting, rates))))
    assert cell.load_bound_s == pytest.approx(float(np.median(lower_bound_s(ways("gateway"), setting, rates))))
    assert cell.load_bound_s <= cell.load_s and cell.compute_s == 8192 / 5000
    # Both at once, against the best split of the prompt by hand.
    steps, of_step_s = 16, 512 / 5000
    rate_s = (
        cell.load_s - float(np.median(latency_s(ways("gateway"), TransferSetting(512 * LLAMA, server_s=2e-5), rates)))
    ) / 15
    split_s = min(max(k * of_step_s, cell.load_s - k * rate_s if k < steps else 0.0) for k in range(steps + 1))
    assert split_s <= cell.both_s * (1 + 1e-9) and cell.both_s <= split_s + of_step_s
    assert cell.best == ("both" if cell.both_s < 0.95 * min(cell.compute_s, cell.load_s) else "load")


@pytest.mark.parametrize("access", ["gateway", "onboard"])
def test_a_slow_link_computes_and_a_slow_engine_loads_and_the_rate_between_them_is_even(access: str) -> None:
    at = even(access)
    assert at.cell(2048, 5000.0, 1e7, LLAMA).best == "compute"
    assert at.cell(2048, 50.0, 1e10, LLAMA).best == "load"
    rate = at.even_bit_s(2048, 1000.0, LLAMA)
    assert at.cell(2048, 1000.0, rate, LLAMA).load_s == pytest.approx(2.048, rel=1e-6)
    assert at.even_bit_s(64, 1e6, LLAMA) == float("inf"), "light alone takes longer"
    cells = at.grid([512, 4096], [100.0, 1e4], [1e8, 1e10], LLAMA)
    assert len(cells) == 8 and all(0 <= cell.saved < 1 for cell in cells)


def test_an_even_rate_is_the_same_to_the_last_digit_and_asks_for_no_link_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, float]] = []
    link_of = BreakEven._link_of

    def counted(at: BreakEven, value_bytes: int, step_bytes: int, rate_bit_s: float) -> Break:
        asked.append((value_bytes, step_bytes, rate_bit_s))
        return link_of(at, value_bytes, step_bytes, rate_bit_s)

    speeds = (50.0, 1000.0, 1001.0, 5000.0)
    alone = [even().even_bit_s(2048, speed, LLAMA) for speed in speeds]
    monkeypatch.setattr(BreakEven, "_link_of", counted)
    together = even()
    assert [together.even_bit_s(2048, speed, LLAMA) for speed in speeds * 2] == alone * 2
    assert len(asked) == len(set(asked)) < 4 * 33, "they begin alike, and two are nearly the same"


def test_the_measured_engines_are_those_of_the_benchmarks() -> None:
    """The file is what `python -m tools.measured_points` makes of them."""
    assert MEASURED_FILE.read_text("utf-8") == text()
    own, *_ = read_measured()
    assert own.nearest(600) == (512, pytest.approx(512 / 3.1276))
    assert [gpu.device for gpu in fitted_gpus()] == ["A100", "H100"]


def test_bad_input_is_named(tmp_path: Path) -> None:
    assert kv_bytes_of("Llama-3.1-8B") == 131_072 and kv_bytes_of("4096") == 4096
    with pytest.raises(InvalidInput, match=r"no model is called 'lama-3.1-8b'; did you mean"):
        kv_bytes_of("lama-3.1-8b")
    for numbers, words in (
        ((0, 1.0, 1e9, 1), "0 tokens"),
        ((1, 0.0, 1e9, 1), "0 tokens a second"),
        ((1, 1.0, 0.0, 1), "down_bit_s 0"),
    ):
        with pytest.raises(InvalidInput, match=words):
            even().cell(*numbers)
    file = tmp_path / "engines.json"
    point = {"name": "a", "device": "b", "model": "c", "kv_bytes_per_token": 8, "prefill": [[512, 1.5]], "source": "d"}
    for content, words in (
        ("{", "not JSON"),
        ("[]", "skymemory-prefill/1"),
        (
            json.dumps({"format": "skymemory-prefill/1", "points": [{**point, "prefill": [[512]]}]}),
            "point 1: expected name",
        ),
        (json.dumps({"format": "skymemory-prefill/1", "points": [{**point, "prefill": [[512, 0]]}]}), "more than 0"),
    ):
        file.write_text(content)
        with pytest.raises(InvalidInput, match=words):
            read_measured(file)
    file.write_text(json.dumps({"format": "skymemory-prefill/1", "points": [point]}))
    assert read_measured(file)[0].prefill == ((512, 1.5),)
