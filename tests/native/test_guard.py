"""The share of requests that one server may get, over every window: compiled and twin."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.native.conftest import IMPLEMENTATIONS

from skymemory.conductor.strategies.least_ttft import LeastTtftSettings
from skymemory.errors import InvalidInput
from skymemory.native import ShareGuard


def a_guard(impl: ModuleType, limit: float = 2.2, requests: int = 80, mean: float = 5.0) -> ShareGuard:
    guard: ShareGuard = impl.ShareGuard(limit, 60.0, requests, mean)
    return guard


def run(guard: ShareGuard, times_s: list[float], servers: int, wanted: list[int]) -> list[int]:
    """Each request goes to the server it wants, or to the next that may have it."""
    placed = []
    for now_s, want in zip(times_s, wanted, strict=True):
        order = [(want + step) % servers for step in range(servers)]
        allowed = [slot for slot in order if not guard.over(slot, servers, now_s)]
        assert allowed, "any server may have it"
        guard.sent(allowed[0], now_s)
        placed.append(allowed[0])
    return placed


def worst(times_s: list[float], placed: list[int], servers: int, settings: LeastTtftSettings) -> float:
    """The greatest share, in means, over all runs of consecutive requests that a window could hold: brute force."""
    slots = np.array(placed)
    most = 0.0
    enough = max(settings.guard_requests, settings.guard_mean * servers)
    for start in range(len(slots)):
        end = int(np.searchsorted(times_s, times_s[start] + settings.guard_window_s, side="left"))
        if end - start < enough:
            continue
        counts = np.cumsum(slots[start:end, np.newaxis] == np.arange(servers), axis=0)
        lengths = np.arange(1, end - start + 1)
        long_enough = lengths >= enough
        shares = counts.max(axis=1)[long_enough] * servers / lengths[long_enough]
        most = max(most, float(shares.max()))
    return most


@pytest.mark.brief("backend-a few-8", "_fast-one burst, then another server-3")
@pytest.mark.parametrize(
    "servers", [3, pytest.param(4, marks=pytest.mark.slow), 8, pytest.param(16, marks=pytest.mark.slow), 64]
)
@pytest.mark.parametrize("traffic", ["all want one", "a few", "one burst, then another server"])
def test_in_no_window_is_the_share_larger(impl: ModuleType, servers: int, traffic: str) -> None:
    settings = LeastTtftSettings(guard_limit=2.2)
    dice = np.random.default_rng((servers, len(traffic)))
    times_s: list[float] = []
    now_s = 0.0
    for mean_s in (0.01, 2.0, 0.3, 0.02, 0.7):
        for gap_s in dice.exponential(mean_s, min(400, int(6 + 90 / mean_s))):
            now_s += float(gap_s)
            times_s.append(now_s)
        now_s += float(dice.choice([0.0, 30.0, 70.0]))
    count = len(times_s)
    wanted = {
        "all want one": [0] * count,
        "a few": dice.choice(servers, count, p=dice.dirichlet(np.full(servers, 0.2))).tolist(),
        "one burst, then another server": [at // 60 % servers for at in range(count)],
    }[traffic]
    placed = run(a_guard(impl), times_s, servers, wanted)
    assert worst(times_s, placed, servers, settings) <= 2.2
    assert worst(times_s, wanted, servers, settings) > 2.2, "else the guard had nothing to do"


def test_it_does_not_bind_while_traffic_is_light(impl: ModuleType) -> None:
    guard = a_guard(impl)
    times_s = [number * 3.0 for number in range(300)]  # 20 in 60 s: less than the 22 that 80 requests would allow.
    assert run(guard, times_s, 8, [5] * 300) == [5] * 300


def test_it_is_exact_at_its_edge(impl: ModuleType) -> None:
    guard = a_guard(impl)
    placed = run(guard, [number * 0.001 for number in range(80)], 8, [0] * 80)
    assert placed[:22] == [0] * 22 and placed[22] == 1
    assert placed.count(0) == 22


def test_two_servers_and_no_limit_need_no_guard(impl: ModuleType) -> None:
    assert run(a_guard(impl), [0.001 * number for number in range(500)], 2, [0] * 500) == [0] * 500
    free = a_guard(impl, float("inf"))
    assert run(free, [0.001 * number for number in range(500)], 8, [0] * 500) == [0] * 500


@pytest.mark.brief()
def test_asking_about_other_numbers_of_servers_changes_nothing(impl: ModuleType) -> None:
    one, other = a_guard(impl), a_guard(impl)
    dice = np.random.default_rng(5)
    for number in range(2000):
        now_s = number * 0.05
        slot = int(dice.choice(8, p=[0.3] + [0.1] * 7))
        for servers in (3, 5, 8, 20, 6, 7):
            other.over(slot, servers, now_s)
        assert one.over(slot, 8, now_s) == other.over(slot, 8, now_s)
        if not one.over(slot, 8, now_s):
            one.sent(slot, now_s)
            other.sent(slot, now_s)


def test_a_forgotten_server_begins_with_a_clean_slate(impl: ModuleType) -> None:
    guard = a_guard(impl)
    run(guard, [0.0] * 40, 8, [0] * 40)
    assert guard.over(0, 8, 0.0)
    guard.forget(0)
    assert not guard.over(0, 8, 0.0)


def test_what_makes_no_guard_is_refused() -> None:
    with pytest.raises(InvalidInput, match="expected ≥ 1"):
        LeastTtftSettings(guard_limit=0.5)


@pytest.mark.parametrize("limit", [1.0, 2.2])
def test_with_many_servers_and_no_least_run_a_server_may_get_one(impl: ModuleType, limit: float) -> None:
    guard = a_guard(impl, limit, requests=1, mean=0.0)
    for slot in range(3):
        assert not guard.over(slot, 64, 1.0)
        guard.sent(slot, 1.0)
    assert guard.over(0, 64, 1.0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    limit=st.sampled_from([1.0, 1.3, 2.2]),
    requests=st.sampled_from([1, 5, 20]),
    mean=st.sampled_from([0.0, 1.0, 3.5]),
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 9.0, 70.0]), st.integers(1, 9), st.booleans()),
        max_size=120,
    ),
)
def test_compiled_and_twin_say_the_same(
    limit: float, requests: int, mean: float, steps: list[tuple[int, float, int, bool]]
) -> None:
    guards = [a_guard(module, limit, requests, mean) for module in IMPLEMENTATIONS]
    now_s = 0.0
    for slot, gap_s, servers, sends in steps:
        now_s += gap_s
        said = {guard.over(slot, servers, now_s) for guard in guards}
        assert len(said) == 1
        for guard in guards:
            if sends:
                guard.sent(slot, now_s)
            elif gap_s == 70.0:
                guard.forget(slot)
