"""A model on board against one on the ground: times and energy by hand, and who is sooner at the extremes."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from skymemory.constellation.presets import preset_named
from skymemory.errors import InvalidInput
from skymemory_lab.sim.sky.breakeven import KV_BYTES_PER_TOKEN, BreakEven
from skymemory_lab.sim.sky.onboard import (
    BOARD_W,
    GROUND_W,
    LINK_J_PER_BYTE,
    READ_J_PER_BYTE,
    TERMINAL_W,
    TOKEN_BYTES,
    OnboardComputer,
    Places,
    held_w,
)
from skymemory_lab.sim.sky.physical import LinkRates, TransferSetting, latency_s, sight_of, ways_of

RATES = LinkRates(3e8, 1.2e9, 2e10)
KV = KV_BYTES_PER_TOKEN["llama-3.1-8b"]


@cache
def places() -> Places:
    preset = preset_named("starlink-a")
    sight = sight_of(preset, 25.0, "climbing")
    ground, board = (
        ways_of(preset, sight, access, [0.0, 1500.0, 3000.0], servers=9)
        for access in ("gateway", "onboard")  # type: ignore[arg-type]
    )
    setting = TransferSetting(1, server_s=2e-5)
    beam_s = float(np.median(ground.one_way_s.min(axis=1)))
    hops = float(ground.hops.mean()), float(board.hops.mean())
    return Places(BreakEven(ground, setting, RATES), BreakEven(board, setting, RATES), RATES, beam_s, *hops)


def test_a_fast_machine_computes_where_it_is() -> None:
    sky, tokens = places(), 4096
    ground = sky.on_ground(tokens, OnboardComputer(1e6, GROUND_W), KV)
    assert (ground.way, ground.ttft_s) == ("compute", tokens / 1e6)
    assert ground.joules == pytest.approx(tokens / 1e6 * GROUND_W)
    board = sky.on_board(tokens, OnboardComputer(1e6, BOARD_W), KV)
    way_s = 2 * sky.beam_s + 8 * TOKEN_BYTES * (tokens / 3e8 + 1 / 1.2e9)
    assert board.way == "compute" and board.ttft_s == pytest.approx(tokens / 1e6 + way_s)
    moved_j = TOKEN_BYTES * (tokens + 1) * LINK_J_PER_BYTE
    assert board.joules == pytest.approx(tokens / 1e6 * BOARD_W + moved_j + board.ttft_s * TERMINAL_W)


def test_a_slow_machine_loads_and_pays_for_each_link() -> None:
    sky, tokens = places(), 512
    ground = sky.on_ground(tokens, OnboardComputer(1.0, GROUND_W), KV)
    preset = preset_named("starlink-a")
    ways = ways_of(preset, sight_of(preset, 25.0, "climbing"), "gateway", [0.0, 1500.0, 3000.0], servers=9)
    load_s = float(np.median(latency_s(ways, TransferSetting(tokens * KV, server_s=2e-5), RATES)))
    assert ground.way == "load" and ground.ttft_s == pytest.approx(load_s)
    per_byte = 2 * READ_J_PER_BYTE + (sky.ground_hops + 1) * LINK_J_PER_BYTE
    assert ground.joules == pytest.approx(tokens * KV * per_byte + load_s * TERMINAL_W)
    board = sky.on_board(tokens, OnboardComputer(1.0, BOARD_W), KV)
    assert board.way == "load" and board.ttft_s < ground.ttft_s, "links of 20 Gbit/s against a beam of 1.2"
    assert board.joules < ground.joules, "no beam carries its KV"


def test_energy_and_time_grow_with_the_prompt() -> None:
    sky = places()
    for where, watts in ((sky.on_ground, GROUND_W), (sky.on_board, BOARD_W)):
        for speed in (50.0, 2000.0, 50_000.0):
            got = [where(tokens, OnboardComputer(speed, watts), KV) for tokens in (512, 2048, 8192)]
            assert sorted(one.ttft_s for one in got) == [one.ttft_s for one in got]
            assert sorted(one.joules for one in got) == [one.joules for one in got]


@pytest.mark.parametrize(("speed", "watts"), [(0.0, 1.0), (-1.0, 1.0), (float("inf"), 1.0), (1.0, 0.0)])
def test_bad_input_is_named(speed: float, watts: float) -> None:
    with pytest.raises(InvalidInput, match="expected more than 0"):
        OnboardComputer(speed, watts)


def test_a_gibibyte_is_held_for_less_than_a_twentieth_of_a_watt() -> None:
    assert held_w(8192, KV) == pytest.approx(0.0444) and held_w(4096, KV) == pytest.approx(0.0222)
