"""The optimiser: what it may choose, that it chooses the best, and the waits of a load against simulated queues."""

from __future__ import annotations

import random

import numpy as np
import pytest

from skymemory.constellation.presets import Preset, preset_named
from skymemory.errors import InvalidInput
from skymemory_lab.sim.sky.bound import lower_bound_s
from skymemory_lab.sim.sky.optimise import Optimum, RequestMix, SearchSpace, at_place, grid, optimise, waits_s
from skymemory_lab.sim.sky.physical import LinkRates, TransferSetting, Ways, latency_s, sight_of, ways_of

KA = LinkRates(0.3e9, 1.2e9, 20e9)


def few(preset: Preset, load: RequestMix, rates: LinkRates = KA, **options: object) -> Optimum:
    """A small grid at few times."""
    small: dict[str, object] = {
        "servers": (1, 4, 9),
        "chunks_bytes": (6144, 24_576),
        "windows_bytes": (1 << 20, 8 << 20),
    }
    space = SearchSpace(**{**small, "times": 8, "accesses": ("gateway",), **options})  # type: ignore[arg-type]
    return optimise(preset, rates, load, space=space)


def test_the_best_of_the_first_half_is_chosen_and_the_second_half_judges() -> None:
    preset = preset_named("kuiper-a")
    load = RequestMix(2_000_000, 1e-4)
    found = few(preset, load)
    period_s = preset.shell.period_s
    at_s = np.array([period_s * (number + 0.5) / 8 for number in range(8)])

    def mean_s(choice, half) -> tuple[float, float]:  # type: ignore[no-untyped-def]
        sight = sight_of(preset, 25.0, "climbing")
        ways = ways_of(
            preset, sight, choice.access, half, strategy=choice.strategy, servers=choice.servers, exact_links=True
        )
        setting = TransferSetting(load.value_bytes, choice.chunk_bytes, load.server_s, choice.window_bytes)
        both = [f(ways, setting, KA, one).mean() for f in (latency_s, lower_bound_s) for one in ("get", "set")]
        return 0.8 * both[0] + 0.2 * both[1], 0.8 * both[2] + 0.2 * both[3]

    best = found.chosen.choice
    strategies = ("rotation_hop", "rotation", "cost")
    all_of_it = grid(preset, SearchSpace(("gateway",), strategies, (1, 4, 9), (6144, 24_576), (1 << 20, 8 << 20)))
    first = {choice: mean_s(choice, at_s[:4])[0] for choice in all_of_it}
    assert first[best] <= min(first.values()) + 1e-5 and found.chosen_s == pytest.approx(first[best])
    later_s, bound_s = mean_s(best, at_s[4:])
    assert found.chosen.seconds == pytest.approx(later_s) and found.chosen.bound_s == pytest.approx(bound_s)
    assert found.chosen.of_bound >= 1 and found.settings == len(first) and found.overloaded == 0
    assert found.second is not None and found.second.choice[:3] != best[:3]
    assert found.judged_best.seconds <= found.chosen.seconds + 1e-5
    assert {one.choice.servers for one in found.curves["servers"]} == {1, 4, 9}
    for name, curve in found.curves.items():
        assert best in [one.choice for one in curve], name
        assert len({getattr(one.choice, name) for one in curve}) == len(curve)


def test_slow_servers_share_a_value_and_fast_ones_do_not() -> None:
    preset = preset_named("kuiper-a")
    fast = few(preset, RequestMix(2_000_000, 0.0, 0.0), LinkRates(None, 1e9, None)).chosen.choice
    slow = few(preset, RequestMix(2_000_000, 5e-3, 0.0), LinkRates(None, 1e9, None)).chosen.choice
    assert fast.servers < slow.servers == 9 and slow.chunk_bytes == 24_576


@pytest.mark.parametrize("used", [0.3, 0.8])
def test_the_wait_for_a_beam_is_that_of_a_simulated_queue(used: float) -> None:
    ways = Ways("gateway", *(np.array([[each]]) for each in (0.0, 0.01, 0, -1, -1)))  # type: ignore[arg-type]
    setting, rates = TransferSetting(1_000_000, 10_000), LinkRates(down_bit_s=1e9)
    service_s, draw = 0.008, random.Random(5)
    wait_s, busiest, most = waits_s(ways, setting, rates, RequestMix(1_000_000, 0.0, 0.0, used / service_s))
    assert busiest == "beam down" and most == pytest.approx(used)
    waited, free_s, now_s, count = 0.0, 0.0, 0.0, 60_000
    for _ in range(count):
        now_s += draw.expovariate(used / service_s)
        waited += max(0.0, free_s - now_s)
        free_s = max(free_s, now_s) + service_s
    assert wait_s[0] == pytest.approx(waited / count, rel=0.05)


def test_what_no_setting_carries_and_what_cannot_be_is_said() -> None:
    preset = preset_named("kuiper-a")
    with pytest.raises(InvalidInput, match=r"no setting carries 1000 requests a second .* uses its beam down to"):
        few(preset, RequestMix(2_000_000, 0.0, 0.0, 1000.0))
    half = few(preset, RequestMix(2_000_000, 1e-3, 0.0, 20.0), LinkRates(None, 1e9, None))
    assert 0 < half.overloaded < half.settings and half.chosen.carries and half.chosen.wait_s > 0
    with pytest.raises(InvalidInput, match="no setting to choose from"):
        few(preset, RequestMix(1000), accesses=("onboard",), strategies=("rotation",))
    with pytest.raises(InvalidInput, match="2000 servers on 34 planes"):
        few(preset, RequestMix(1000), servers=(2000,))
    with pytest.raises(InvalidInput, match="3 times: expected at least 4"):
        few(preset, RequestMix(1000), times=3)
    with pytest.raises(InvalidInput, match="no satellite of kuiper-b is in sight of 80, -75"):
        few(at_place(preset_named("kuiper-b"), 80.0, None), RequestMix(1000))
    with pytest.raises(InvalidInput, match="leave the place out"):
        at_place(preset_named("testbed-19x5"), 10.0, None)
    for wrong, words in ((True, "share of puts"), (False, "requests a second")):
        with pytest.raises(InvalidInput, match=words):
            RequestMix(1, 0.0, 1.5) if wrong else RequestMix(1, 0.0, 0.5, -1.0)
    with pytest.raises(InvalidInput, match="a value of 0 bytes"):
        RequestMix(0)


def test_a_value_in_the_memory_of_the_host_itself_takes_no_time() -> None:
    found = few(
        preset_named("kuiper-a"),
        RequestMix(1000),
        LinkRates(),
        accesses=("onboard",),
        servers=(1,),
        strategies=("hop",),
    )
    assert found.chosen.seconds == 0 and found.chosen.of_bound == 1 and found.second is None
