"""What links carry: queues against arithmetic by hand, rain against ITU's own table, outages, bad files."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from typing import Any

import pytest

from skymemory.constellation.links import (
    DATAGRAM_OVERHEAD_BYTES,
    LOST,
    LinkCounts,
    LinkQueue,
    LinkQueues,
    Links,
    Outage,
    Rain,
    elevation_deg,
    rain_coefficients,
)
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.units import parse_rate

A, B, C = SatelliteId(2, 9), SatelliteId(2, 10), SatelliteId(3, 9)
HOST = ("ground", 1)


def _queue(bytes_per_s: float, buffer_bytes: int = 1 << 20) -> tuple[LinkQueue, LinkCounts]:
    counts = LinkCounts()
    return LinkQueue(bytes_per_s, buffer_bytes, counts, None), counts


def test_rain_takes_what_itu_says() -> None:
    # ITU-R P.838-3, table 5: k and alpha, horizontal and vertical. Circular is their mean (k), weighted by k (alpha).
    for ghz, k_h, alpha_h, k_v, alpha_v in (
        (12, 0.02386, 1.1825, 0.02455, 1.1216),
        (20, 0.09164, 1.0568, 0.09611, 0.9847),
        (30, 0.2403, 0.9485, 0.2291, 0.9129),
        (40, 0.4431, 0.8673, 0.4274, 0.8421),
    ):
        k, alpha = rain_coefficients(ghz)
        assert k == pytest.approx((k_h + k_v) / 2, rel=2e-3)
        assert alpha == pytest.approx((k_h * alpha_h + k_v * alpha_v) / (k_h + k_v), rel=2e-3)


def test_more_rain_and_a_longer_way_through_it_leave_less() -> None:
    rain = Rain(margin_db=6.0)
    for low, high in ((25.0, 40.0), (40.0, 90.0)):
        assert rain.fade_db("down", 20.0, low) > rain.fade_db("down", 20.0, high)
    assert rain.fade_db("up", 20.0, 40.0) > rain.fade_db("down", 20.0, 40.0)  # 30 GHz, and 20
    shares = [rain.factor("up", mm_h, 30.0) for mm_h in (0.0, 5.0, 10.0, 20.0, 100.0)]
    assert shares[0] == 1.0 and shares[-1] == 0.0 and shares == sorted(shares, reverse=True)
    # At the zenith the way is the rain's height: k · R ** alpha · 3 km.
    k, alpha = rain_coefficients(20.0)
    assert rain.fade_db("down", 10.0, 90.0) == pytest.approx(k * 10.0**alpha * 3.0)


def test_wet_spells_are_as_frequent_and_heavy_as_stated() -> None:
    rain = Rain(mm_h=12.0, share=0.3, spell_s=60.0)
    rates = [rain.rate_mm_h(60.0 * spell + 1.0, "", 5) for spell in range(4000)]
    wet = [rate for rate in rates if rate]
    assert len(wet) / len(rates) == pytest.approx(0.3, abs=0.03)
    assert sum(wet) / len(wet) == pytest.approx(12.0, rel=0.1)
    assert rain.rate_mm_h(30.0, "", 5) == rain.rate_mm_h(59.0, "", 5) != rain.rate_mm_h(30.0, "40,-75", 5)


def test_another_process_has_the_same_weather() -> None:
    code = (
        "from skymemory.constellation.links import Rain\n"
        "print([Rain(share=0.5).rate_mm_h(600.0 * at, '1.0,2.0', 9) for at in range(20)])"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.strip() == str([Rain(share=0.5).rate_mm_h(600.0 * at, "1.0,2.0", 9) for at in range(20)])


def test_a_link_is_first_in_first_out() -> None:
    # Against a loop over bits sent: packets of random size and time through one transmitter.
    dice = random.Random(3)
    queue, counts = _queue(1e6)
    now_s = free_s = 0.0
    for _ in range(500):
        now_s += dice.expovariate(200.0)
        size = dice.randrange(20, 9000)
        free_s = max(free_s, now_s) + (size + DATAGRAM_OVERHEAD_BYTES) / 1e6
        assert queue.leaves_s(size, now_s) == pytest.approx(free_s, abs=1e-12)
    assert counts.carried == 500 and counts.dropped == 0 and counts.longest_s > 0


def test_a_full_buffer_drops_and_takes_again() -> None:
    queue, counts = _queue(1e6, 65_536)
    left = [queue.leaves_s(5972, 0.0) for _ in range(20)]  # 6000 bytes with the overhead: 6 ms each
    # Ten fit into 65,536, with the one that is being sent.
    assert [leaves_s > 0 for leaves_s in left] == [True] * 10 + [False] * 10
    assert counts.dropped == 10 and counts.carried == 10 and left[-1] == LOST
    assert queue.queued_bytes(0.0) == pytest.approx(60_000)
    assert queue.leaves_s(5972, 0.007) == pytest.approx(0.066)
    assert queue.queued_bytes(1.0) == 0.0 and queue.leaves_s(972, 1.0) == pytest.approx(1.001)


def test_packets_of_routing_go_first_and_cost_the_others_their_time() -> None:
    queue, _ = _queue(1e6)
    assert queue.leaves_s(9972, 0.0) == pytest.approx(0.010)
    assert queue.leaves_s(972, 0.001, urgent=True) == pytest.approx(0.002)
    assert queue.leaves_s(972, 0.001) == pytest.approx(0.012)


def test_other_traffic_takes_its_share() -> None:
    links = Links.read({"up": "8Mbit", "load": {"up": 0.75}}, "x")
    assert links.bytes_per_s("up") == 250_000 and links.bytes_per_s("isl") == math.inf
    queues = LinkQueues(links)
    assert queues.of(HOST, A).leaves_s(222, 1.0) == pytest.approx(1.001)
    assert queues.of(A, B).leaves_s(222, 1.0) == 1.0
    assert queues.of(A, HOST) is not queues.of(HOST, A) and queues.of(HOST, A) is queues.of(HOST, A)


@pytest.mark.parametrize(
    ("link", "hit"),
    [
        ("up", ["up"]),
        ("beams", ["up", "down"]),
        ("isl", ["isl", "isl back", "far"]),
        ("2,9", ["up", "down", "isl", "isl back"]),
        ("2,10-2,9", ["isl", "isl back"]),
    ],
)
def test_an_outage_hits_its_links_for_its_time(link: str, hit: list[str]) -> None:
    links = Links.read({"outage": [{"link": link, "from": "10s", "to": 20}]}, "x")
    ends = {"up": (HOST, A), "down": (A, HOST), "isl": (A, B), "isl back": (B, A), "far": (B, SatelliteId(3, 10))}
    queues = LinkQueues(links, epoch_s=1000.0)
    for at_s, out in ((1009.9, False), (1010.0, True), (1019.9, True), (1020.0, False)):
        lost = [name for name, two in ends.items() if queues.of(*two).leaves_s(100, at_s) == LOST]
        assert lost == (hit if out else []), at_s
    assert sum(counts.outage for counts in queues.counts.values()) == 2 * len(hit)


def test_elevation_lessens_a_beam_and_hides_it() -> None:
    assert elevation_deg(550e3, 550e3 / 299_792_458) == pytest.approx(90.0)
    links = Links.read({"down": "8Mbit", "elevations": [[25, 0.5], [50, 1]]}, "x")
    seen = {A: 60.0, B: 30.0, C: 10.0}
    queues = LinkQueues(links, 0.0, lambda satellite, host, now_s: seen[satellite])
    took = [queues.of(satellite, HOST).leaves_s(972, 0.0) for satellite in (A, B, C)]
    assert took == [pytest.approx(0.001), pytest.approx(0.002), LOST]
    assert queues.of(A, B).leaves_s(972, 0.0) == 0.0  # no beam
    on_board = LinkQueues(links, 0.0, lambda *_: 10.0, onboard=A)
    assert on_board.of(A, HOST).leaves_s(972, 0.0) == 0.0


def test_what_was_read_is_written_the_same() -> None:
    table: dict[str, Any] = {
        "up": "200Mbit",
        "isl": 1e10,
        "load": {"isl": 0.3, "up": 0.1},
        "buffer": "4MiB",
        "handover_gap": "20ms",
        "outage": [{"link": "2,9", "from": "3s", "to": 5}],
        "elevations": [[25, 0.5], [40, 1]],
        "rain": {"rate": 20.0},
        "seed": 4,
    }
    links = Links.read(table, "x")
    assert links.up_bit_s == 2e8 and links.outages == (Outage("2,9", 3.0, 5.0),) and links.handover_gap_s == 0.02
    assert Links.read(links.as_table(), "y") == links and Links().as_table() == {}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"up": 0}, "rate"),
        ({"down": "-5Mbit"}, "not a rate"),
        ({"isl": "200MB"}, "not a rate"),
        ({"isl": True}, "rate"),
        ({"load": {"up": 1.0}}, "less than 1"),
        ({"load": {"up": -0.1}}, "at least 0"),
        ({"load": {"sideways": 0.1}}, "no class of links"),
        ({"uplink": "1Gbit"}, "did you mean 'up'"),
        ({"outages": []}, "did you mean 'outage'"),
        ({"buffer": "1KiB"}, "at least 65536"),
        ({"handover_gap": "1h"}, "0 to 10 s"),
        ({"outage": [{"link": "isl", "from": "20s", "to": "10s"}]}, "an end after its begin"),
        ({"outage": [{"link": "moon", "from": 0, "to": 1}]}, "a satellite such as 2,9"),
        ({"outage": [{"link": "isl", "form": 0, "to": 1}]}, "did you mean 'from'"),
        ({"rain": {"rate": 0}}, "0.1 to 200"),
        ({"rain": {"spell": 0}}, "more than 0 s"),
        ({"elevations": [[40, 1], [25, 0.5]]}, "ascending"),
        ({"elevations": [[40, 2]]}, "share of the rate"),
    ],
)
def test_bad_tables_are_refused_with_what_was_expected(table: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=r"^sky\.toml: .*") as refused:
        Links.read(table, "sky.toml")
    assert says in str(refused.value)


def test_rates_as_people_write_them() -> None:
    assert [parse_rate(text) for text in ("200Mbit", "1.2 Gbit/s", "64000", "8kbit")] == [2e8, 1.2e9, 64_000, 8_000]
    with pytest.raises(InvalidInput, match="such as 200Mbit"):
        parse_rate("fast")
