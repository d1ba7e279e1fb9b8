"""The physical model against a twin that moves every packet, and against the lower bound."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.sim.sky.machines import compare
from tests.lab.sim.sky.naive_sky import Server, finished_s

from skymemory.constellation.presets import Preset, preset_named
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput
from skymemory.placement.locate import Placement
from skymemory.protocol.client.gateway import ACCESS_MODES, Access
from skymemory.testbed.plan import Ground, make_plan
from skymemory_lab.sim.sky.bound import lower_bound_s
from skymemory_lab.sim.sky.physical import (
    DATA_BYTES,
    OPERATIONS,
    LinkRates,
    TransferSetting,
    Ways,
    latency_s,
    sight_of,
    ways_of,
)

BOX = replace(preset_named("starlink-a", 1), torus=Torus(35, 22), fixed_centre=SatelliteId(17, 11))
"""Starlink A's lengths around a satellite exactly overhead; without the planes that meet at phase 0."""


def servers_of(preset: Preset, access: Access, servers: int, mask_deg: float) -> list[Server]:
    """The twin's view of the box at the epoch."""
    torus, shell, centre = preset.torus, preset.shell, preset.centre
    sight = sight_of(preset, mask_deg)
    seen = (centre,) if access in ("onboard", "ideal") else sight.in_sight(centre, 0.0)
    strategy = "hop" if access == "onboard" else preset.strategy
    placed = Placement.for_preset(preset, strategy, servers).locate_all()

    def links(path: list[SatelliteId]) -> list[tuple[object, float]]:
        steps = pairwise(path)
        return [((a, b), shell.isl_one_way_s("slot" if a.plane == b.plane else "plane")) for a, b in steps]

    found = []
    for satellite in placed:
        if access == "ideal" or (access == "hybrid" and satellite in seen and satellite != seen[0]):
            found.append(Server(satellite, sight.one_way_s(satellite, centre, 0.0), [], []))
            continue
        out, back = torus.path(seen[0], satellite), torus.path(satellite, seen[0])
        beam_s = 0.0 if access == "onboard" else sight.one_way_s(seen[0], centre, 0.0)
        found.append(Server(None if access == "onboard" else seen[0], beam_s, links(out), links(back)))
    return found


def both_s(
    access: Access, servers: int, setting: TransferSetting, rates: LinkRates, operation: str
) -> tuple[float, float]:
    """By the model and by the twin. A mask of 40 degrees leaves part of the box to the gateway."""
    ways = ways_of(BOX, sight_of(BOX, 40.0), access, [0.0], servers=servers)
    twin_s = finished_s(servers_of(BOX, access, servers, 40.0), setting, rates, operation)  # type: ignore[arg-type]
    return float(latency_s(ways, setting, rates, operation)[0]), twin_s  # type: ignore[arg-type]


def drawn(draw: random.Random, per_server: int = 30) -> tuple[int, TransferSetting, LinkRates]:
    """Full chunks; links between satellites at least as fast as beams."""
    servers, chunk = draw.choice([1, 2, 4, 9, 10, 16, 25]), draw.choice([1280, 6144, 61_440])
    setting = TransferSetting(
        chunk * draw.randint(1, servers * per_server), chunk, draw.choice([0.0, 1e-5, 3e-4, 5e-3])
    )
    down, up = (draw.choice([5e7, 1e9, 2e10]) for _ in range(2))
    rates = LinkRates(draw.choice([up, None]), down, draw.choice([max(up, down) * draw.choice([1, 2, 7]), None]))
    if rates.up_bit_s is None:
        rates = replace(rates, isl_bit_s=None)
    return servers, setting, rates


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("access", ACCESS_MODES)
def test_where_it_is_exact_it_is_what_the_packets_do(access: Access, operation: str) -> None:
    draw = random.Random(f"{access} {operation}")
    for _ in range(12):
        servers, setting, rates = drawn(draw)
        if access == "ideal":
            pass  # with any server time
        elif operation == "get":
            setting = replace(setting, server_s=0.0)
        else:
            setting = replace(setting, order=draw.choice(["in_turn", "farthest"]))
        model_s, twin_s = both_s(access, servers, setting, rates, operation)
        assert model_s == pytest.approx(twin_s, abs=1e-9), (servers, setting, rates)


@pytest.mark.parametrize("access", ["gateway", "hybrid"])
def test_where_servers_take_time_it_is_wrong_by_a_chunk_for_each_server_at_most(access: Access) -> None:
    draw = random.Random(access)
    for _ in range(12):
        servers, setting, rates = drawn(draw)
        model_s, twin_s = both_s(access, servers, setting, rates, "get")
        most_s = servers * (setting.chunk_bytes + DATA_BYTES) * 8 / (rates.down_bit_s or 1e99)
        assert abs(model_s - twin_s) <= most_s + 1e-9, (servers, setting, rates)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("access", ["gateway", "onboard", "hybrid"])
def test_slow_links_between_satellites_queue_at_the_gateway(access: Access, operation: str) -> None:
    """On board there is no other queue; else the larger of two counts, which the packets may exceed a little."""
    for servers, isl_bit_s in ((9, 1e8), (10, 3e7), (25, 1e8)):
        setting, rates = TransferSetting(6144 * 12 * servers), LinkRates(2e8, 2e8, isl_bit_s)
        model_s, twin_s = both_s(access, servers, setting, rates, operation)
        rel = 1e-9 if access == "onboard" else 0.02
        assert model_s == pytest.approx(twin_s, rel=rel), (servers, isl_bit_s)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    access=st.sampled_from(ACCESS_MODES),
    operation=st.sampled_from(OPERATIONS),
    window=st.one_of(st.none(), st.integers(1, 200)),
    slow=st.booleans(),
)
def test_nothing_is_faster_than_the_bound(seed, access, operation, window, slow) -> None:  # type: ignore[no-untyped-def]
    """Nor are the packets, with any links and windows, full last chunk or not."""
    draw = random.Random(seed)
    servers, setting, rates = drawn(draw, 6)
    size_bytes = max(1, setting.value_bytes - draw.randrange(setting.chunk_bytes))
    setting = replace(setting, value_bytes=size_bytes, window_bytes=window and window * setting.chunk_bytes)
    if slow:
        rates = replace(rates, isl_bit_s=draw.choice([2e6, 3e8]))
    ways = ways_of(BOX, sight_of(BOX, 40.0), access, [0.0], servers=servers)
    bound_s = lower_bound_s(ways, setting, rates, operation)
    assert (latency_s(ways, setting, rates, operation) >= bound_s * (1 - 1e-12)).all()
    # The twin's window is a read's; what it does not model of a write only makes it faster.
    assert finished_s(servers_of(BOX, access, servers, 40.0), setting, rates, operation) >= bound_s[0] * (1 - 1e-12)


@pytest.mark.parametrize(("servers", "least_ms"), [(9, 24.8), (81, 72.8)])
def test_the_bound_of_the_specification(servers: int, least_ms: float) -> None:
    """Starlink A at phase 0, a gateway overhead with 20 Gbit/s, 21 MiB, servers that take no time."""
    ways = ways_of(BOX, sight_of(BOX, 25.0), "gateway", [0.0], servers=servers)
    bound_s = lower_bound_s(ways, TransferSetting(21 * 2**20), LinkRates(down_bit_s=20e9))
    assert bound_s[0] * 1e3 == pytest.approx(least_ms, abs=0.05)


def test_the_bound_of_one_server_by_hand() -> None:
    """Three chunks of 1000 bytes, the last of 500: 10 ms there, 8 ms each in its memory or 4 ms each on a beam."""
    ways = Ways("ideal", *(np.array([[each]]) for each in (0.0, 0.010, 0, -2, -2)))  # type: ignore[arg-type]
    setting = TransferSetting(2500, 1000, server_s=0.008)
    assert lower_bound_s(ways, setting, LinkRates(down_bit_s=2e6))[0] == pytest.approx(0.020 + 0.024 + 0.002)
    setting = replace(setting, server_s=0.001)
    assert lower_bound_s(ways, setting, LinkRates(down_bit_s=2e6))[0] == pytest.approx(0.020 + 0.001 + 0.010)
    assert lower_bound_s(ways, setting, LinkRates(up_bit_s=2e6))[0] == pytest.approx(0.020 + 0.003)
    assert lower_bound_s(ways, setting, LinkRates(up_bit_s=2e6), "set")[0] == pytest.approx(0.020 + 0.001 + 0.010)


def test_real_links_are_between_the_shortest_and_the_longest() -> None:
    """Of the version whose links between planes have one longest length."""
    preset = preset_named("starlink-a", 1)
    sight, times_s = sight_of(preset, 25.0, "climbing"), np.arange(0.0, 5700.0, 300.0).tolist()
    longest = ways_of(preset, sight, "gateway", times_s, servers=25)
    real = ways_of(preset, sight, "gateway", times_s, servers=25, exact_links=True)
    assert (real.one_way_s <= longest.one_way_s + 1e-9).all() and (real.one_way_s < longest.one_way_s - 1e-4).any()
    assert (real.hops == longest.hops).all() and len(real.times_s) == len(times_s)
    half = real.of(real.times_s < 2700)
    assert len(half.times_s) == 9 and latency_s(half, TransferSetting(10**6), LinkRates())[3] == pytest.approx(
        latency_s(real, TransferSetting(10**6), LinkRates())[3], abs=1e-12
    )


def test_bad_input_is_named() -> None:
    preset = preset_named("starlink-a")
    sight = sight_of(preset, 25.0)
    with pytest.raises(InvalidInput, match="up_bit_s 0: expected bits per second"):
        LinkRates(up_bit_s=0.0)
    with pytest.raises(InvalidInput, match="isl_bit_s -1"):
        LinkRates(isl_bit_s=-1.0)
    for wrong, words in (
        ({"value_bytes": 0}, "a value of 0 bytes"),
        ({"value_bytes": 5, "chunk_bytes": 0}, "chunks of 0 bytes"),
        ({"value_bytes": 5, "server_s": -1.0}, "server time -1 s"),
        ({"value_bytes": 5, "window_bytes": 100}, "a window of 100 bytes"),
    ):
        with pytest.raises(InvalidInput, match=words):
            TransferSetting(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="2000 servers on 72 planes"):
        ways_of(preset, sight, "gateway", [0.0], servers=2000)
    with pytest.raises(InvalidInput, match="access 'radio'"):
        ways_of(preset, sight, "radio", [0.0])  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="no times"):
        ways_of(preset, sight, "gateway", [])
    with pytest.raises(InvalidInput, match="operation 'move'"):
        latency_s(ways_of(preset, sight, "gateway", [0.0]), TransferSetting(1), LinkRates(), "move")  # type: ignore[arg-type]
    arctic = replace(preset_named("kuiper-b"), host=type(preset.host)(80.0, 0.0))
    with pytest.raises(InvalidInput, match=r"no satellite of kuiper-b is in sight of 80, 0 at any of 2 times"):
        ways_of(arctic, sight_of(arctic, 25.0), "gateway", [0.0, 60.0])


@pytest.mark.parametrize("access", ACCESS_MODES)
@pytest.mark.parametrize(
    ("preset", "value_bytes"),
    [("testbed-19x5", 400_000), pytest.param("starlink-a", 2_883_584, marks=pytest.mark.slow)],
)
def test_the_machines_are_as_fast_as_the_model_without_rates(preset: str, value_bytes: int, access: str) -> None:
    for found in compare(make_plan(preset, access=access, servers=10), value_bytes):
        assert found.machines_s >= found.bound_s * (1 - 1e-9)
        assert found.machines_s == pytest.approx(found.model_s, rel=1e-6)


RATES_BIT_S = st.none() | st.floats(50e6, 20e9)


@pytest.mark.brief()
@given(
    rates=st.builds(LinkRates, RATES_BIT_S, RATES_BIT_S, RATES_BIT_S),
    access=st.sampled_from(ACCESS_MODES),
    servers=st.sampled_from([1, 4, 9, 25]),
    value_bytes=st.integers(1, 300_000),
    chunk_bytes=st.sampled_from([1280, 6144]),
)
@settings(max_examples=12)
def test_the_machines_are_never_faster_than_the_bound(
    rates: LinkRates, access: Access, servers: int, value_bytes: int, chunk_bytes: int
) -> None:
    plan = make_plan("testbed-19x5", access=access, servers=servers, chunk_bytes=chunk_bytes)
    for found in compare(plan, value_bytes, rates):
        assert found.machines_s >= found.bound_s * (1 - 1e-9)


def test_a_set_over_a_shared_beam_is_as_fast_as_its_farthest_first() -> None:
    rates = LinkRates(50e6, 200e6, 1e9)
    found = compare(make_plan("testbed-19x5", access="gateway", servers=9), 600_000, rates)[0]
    assert found.operation == "set" and found.machines_s == pytest.approx(found.model_s, rel=0.01)
    assert found.machines_s < 1.03 * found.bound_s


@pytest.mark.slow
def test_the_machines_keep_within_a_tenth_of_the_bound_over_the_grid() -> None:
    """Slow links on the host's own board are the exception: their routes load the four unequally."""
    ka, laser, slow = LinkRates(0.3e9, 1.2e9, 10e9), LinkRates(20e9, 20e9, 100e9), LinkRates(2e9, 2e9, 1e9)
    of_bound: list[float] = []
    for rates, access, servers, value_bytes in product(
        (ka, laser, slow), ACCESS_MODES, (9, 81), (65_536, 2_883_584, 21 << 20)
    ):
        plan = make_plan("starlink-a", access=access, servers=servers, ground=Ground(gateway="climbing"))
        for found in compare(replace(plan, memory_per_satellite_bytes=256 << 20), value_bytes, rates):
            assert found.machines_s >= found.bound_s * (1 - 1e-9)
            of_bound.append(found.machines_s / found.bound_s)
            most = 1.15 if rates != slow else 2.0 if access == "onboard" else 1.2
            assert of_bound[-1] < most, (rates, access, servers, value_bytes, found)
    assert np.median(of_bound) < 1.02
