"""Figure 16 against a plain second reading of paper §4, and the sentences drawn from it."""

from __future__ import annotations

import math

import pytest

from skymemory.errors import InvalidInput
from skymemory_lab.sim.latency import (
    PAPER_STRATEGIES,
    SWEEPS,
    LatencySetting,
    claims,
    figure_16,
    satellites_for_link_s,
    server_latencies_s,
    settings,
    worst_latency_s,
)


def read_again(setting: LatencySetting) -> float:
    """The model once more, one server and one chunk at a time, with its own walk over the grid."""
    side = math.isqrt(setting.servers) // 2
    inside = range(-side, side + 1)
    if setting.strategy == "rotation":
        cells = [(x, y) for y in inside for x in inside]
    else:
        cells = [(0, 0)]
        for x, y in cells:
            for cell in ((x, y - 1), (x + 1, y), (x, y + 1), (x - 1, y)):
                free = setting.strategy == "hop" or (cell[0] in inside and cell[1] in inside)
                if free and cell not in cells:
                    cells.append(cell)
            if len(cells) >= setting.servers + 4:
                break
        cells = cells[: setting.servers]
    held = [0] * setting.servers
    for chunk in range(math.ceil(setting.kvc_bytes / 12_288)):
        held[chunk % setting.servers] += 1
    link_m = (6_371_000 + setting.altitude_m) * math.sqrt(2 * (1 - math.cos(2 * math.pi / 15)))
    worst = 0.0
    for (x, y), chunks in zip(cells, held, strict=True):
        if setting.strategy == "hop":
            way_m = (abs(x) + abs(y)) * link_m
        else:
            way_m = math.sqrt((x * link_m) ** 2 + (y * link_m) ** 2 + setting.altitude_m**2)
        worst = max(worst, way_m / 2.998e8 + chunks * setting.processing_s)
    return worst


def test_all_132_points_are_those_of_a_plain_second_reading() -> None:
    points = list(settings())
    assert len(points) == len(figure_16()) == 132
    for _, _, setting in points:
        assert worst_latency_s(setting) == pytest.approx(read_again(setting), rel=1e-12)


def test_the_sweep_is_the_one_of_the_published_script() -> None:
    assert [len(values) for values in SWEEPS.values()] == [21, 4, 10, 9]
    assert SWEEPS["kvc_bytes"][0] == 2**20 and SWEEPS["kvc_bytes"][-1] == 21 * 2**20
    assert SWEEPS["servers"] == (9, 25, 49, 81)
    assert SWEEPS["processing_s"][0] == 0.002 and SWEEPS["processing_s"][-1] == 0.02
    assert SWEEPS["altitude_m"][0] == 160_000 and SWEEPS["altitude_m"][-1] == 1_920_000
    for parameter, value, setting in settings():
        kept = {name: values[-1] for name, values in SWEEPS.items()} | {parameter: value}
        assert {name: getattr(setting, name) for name in SWEEPS} == kept


def test_known_points() -> None:
    # Worked by hand: 1792 chunks over 81 servers are 22 each, and 23 on the first ten; the corner is 4·√2 links off.
    link_m = 8_291_000 * math.sqrt(2 * (1 - math.cos(2 * math.pi / 15)))
    corner_s = math.sqrt(32 * link_m**2 + 1_920_000**2) / 2.998e8
    assert worst_latency_s(LatencySetting("rotation")) == pytest.approx(23 * 0.02 + corner_s)
    assert worst_latency_s(LatencySetting("rotation_hop")) == pytest.approx(22 * 0.02 + corner_s)
    assert worst_latency_s(LatencySetting("hop")) == pytest.approx(22 * 0.02 + 6 * link_m / 2.998e8)
    assert worst_latency_s(LatencySetting("rotation_hop", servers=9)) == pytest.approx(200 * 0.02 + 1_920_000 / 2.998e8)


def test_what_the_paper_sees_in_figure_16() -> None:
    by_altitude = {
        strategy: [
            point.worst_s for point in figure_16() if (point.parameter, point.strategy) == ("altitude_m", strategy)
        ]
        for strategy in PAPER_STRATEGIES
    }
    for rotation_s, hop_s, both_s in zip(*by_altitude.values(), strict=True):
        assert both_s < hop_s < rotation_s


def test_the_paper_and_its_model_are_two_columns() -> None:
    servers, gain, _, links = claims()
    assert "90 %" in servers.paper and "87.4%" in servers.model
    assert "20 ms of 525" in gain.model and "0 ms without remainder" in gain.model
    assert "50+" in links.paper and "73+" in links.model
    assert satellites_for_link_s(0.002, 550_000) == 73


def test_servers_without_a_chunk_are_not_asked() -> None:
    assert len(server_latencies_s(LatencySetting(kvc_bytes=3 * 12_288))) == 3
    assert len(server_latencies_s(LatencySetting(kvc_bytes=1))) == 1


@pytest.mark.parametrize(
    "wrong", [{"kvc_bytes": 0}, {"chunk_bytes": 0}, {"processing_s": -1.0}, {"altitude_m": 0.0}], ids=str
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        LatencySetting(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="expected 1 to 225"):
        worst_latency_s(LatencySetting(servers=226))
