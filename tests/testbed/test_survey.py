"""Whom a survey asks when, in virtual time: hosts that answer one question after the other, slowly, late or never."""

from __future__ import annotations

import heapq
import random
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skymemory.constellation.torus import SatelliteId
from skymemory.testbed.control import OVERDUE_S, REPEATED_PER_S, WINDOW, Survey


@dataclass
class Sky:
    """Hosts of some satellites each. A host takes ``service_s`` for a question, one after the other, and pauses."""

    hosts: dict[str, list[SatelliteId]]
    service_s: dict[str, float]
    pauses_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    dead: Collection[SatelliteId] = ()
    loss: float = 0.0
    seed: int = 1
    asked: list[tuple[float, SatelliteId]] = field(default_factory=list)
    answered: dict[SatelliteId, float] = field(default_factory=dict)

    def run(self, survey: Survey, *, busy: Collection[str] = (), most_s: float = 1000.0) -> float:
        """How long the survey takes."""
        dice = random.Random(self.seed)
        host_of = {one: host for host, mine in self.hosts.items() for one in mine}
        free_s, arrivals, now_s = dict.fromkeys(self.hosts, 0.0), list[tuple[float, SatelliteId]](), 0.0
        while now_s < most_s:
            survey.busy(busy, now_s)
            for satellite in survey.to_ask(now_s):
                self.asked.append((now_s, satellite))
                host = host_of[satellite]
                if satellite in self.dead or dice.random() < self.loss:
                    continue
                began_s = max(free_s[host], now_s)
                pause_s, pause_end_s = self.pauses_s.get(host, (0.0, 0.0))
                began_s = pause_end_s if pause_s <= began_s < pause_end_s else began_s
                free_s[host] = began_s + self.service_s[host]
                heapq.heappush(arrivals, (free_s[host], satellite))
            if not survey.waiting:
                return now_s
            next_s = max(min([survey.next_s(now_s), *(at_s for at_s, _ in arrivals[:1])]), now_s)
            assert next_s > now_s or arrivals, "a survey that waits for nothing"
            now_s = min(next_s, now_s + 0.5)
            while arrivals and arrivals[0][0] <= now_s:
                at_s, satellite = heapq.heappop(arrivals)
                self.answered.setdefault(satellite, at_s)
                survey.answered(satellite, now_s)
        raise AssertionError(f"no end after {most_s} s: {survey.waiting}")


def hosts_of(count: int, each: int) -> dict[str, list[SatelliteId]]:
    return {f"host-{host}": [SatelliteId(host, slot) for slot in range(each)] for host in range(count)}


def sky_of(count: int, each: int, service_s: float, **how: object) -> Sky:
    hosts = hosts_of(count, each)
    return Sky(hosts, dict.fromkeys(hosts, service_s), **how)  # type: ignore[arg-type]


def test_a_quiet_sky_of_1584_answers_in_a_second_and_each_is_asked_once() -> None:
    sky = sky_of(5, 317, 0.0005)
    took_s = sky.run(Survey(sky.hosts, 1.0, 10.0))
    assert len(sky.answered) == 1585 == len(sky.asked) and took_s < 0.5


def test_hosts_that_take_20_ms_for_an_answer_all_answer_and_are_not_flooded() -> None:
    """6.3 s for all of a host's satellites: more than the one second in which today's status counts."""
    sky = sky_of(5, 317, 0.02)
    took_s = sky.run(Survey(sky.hosts, 1.0, 10.0))
    assert len(sky.answered) == 1585
    assert len(sky.asked) < 1.5 * 1585, "most are asked once"
    assert took_s < 1.5 * 317 * 0.02 + 1


def test_no_more_than_a_window_is_asked_in_the_time_that_an_answer_may_take() -> None:
    sky = sky_of(3, 400, 10.0)
    sky.run(Survey(sky.hosts, 1.0, 10.0))
    for at_s, _ in sky.asked:
        assert sum(at_s <= other_s < at_s + OVERDUE_S * 0.999 for other_s, _ in sky.asked) <= WINDOW


def test_an_answer_counts_however_late_it_comes() -> None:
    sky = sky_of(1, 10, 0.001, pauses_s={"host-0": (0.0, 3.0)})
    survey = Survey(sky.hosts, 1.0, 10.0)
    sky.run(survey, busy=["host-0"])
    assert len(sky.answered) == 10 and len(sky.asked) <= 10 * (1 + 3 / OVERDUE_S)


def test_links_that_lose_half_of_all_questions_hide_no_satellite() -> None:
    """Corruption of 30 % each way, at which `constellation up` gave up 1 of 95 that were well."""
    for seed in range(20):
        sky = sky_of(5, 19, 0.0005, loss=0.51, seed=seed)
        sky.run(Survey(sky.hosts, 5.0, 300.0))
        assert len(sky.answered) == 95


def test_a_dead_host_costs_its_patience_and_hides_no_other() -> None:
    sky = sky_of(2, 300, 0.001)
    sky.dead = frozenset(sky.hosts["host-0"])
    took_s = sky.run(Survey(sky.hosts, 1.0, 10.0))
    assert sky.answered.keys() == set(sky.hosts["host-1"]) and max(sky.answered.values()) < 2.5
    assert took_s < 4.0


def test_one_dead_satellite_costs_one_patience_more() -> None:
    sky = sky_of(5, 19, 0.0005, dead=[SatelliteId(3, 7)])
    assert sky.run(Survey(sky.hosts, 1.0, 10.0)) == pytest.approx(1.0, abs=0.1)
    assert len(sky.answered) == 94 and sum(one == (3, 7) for _, one in sky.asked) == 1 / OVERDUE_S + 1


def test_a_busy_host_that_never_answers_is_given_up_in_the_end() -> None:
    sky = sky_of(1, 60, 0.001, dead=hosts_of(1, 60)["host-0"])
    survey = Survey(sky.hosts, 1.0, 20.0)
    assert sky.run(survey, busy=["host-0"]) == pytest.approx(20.0, abs=0.6)
    assert sum(at_s >= 10 for at_s, _ in sky.asked) <= 1.2 * 10 * REPEATED_PER_S, "repeated ever more seldom"


def test_the_round_trip_comes_on_top() -> None:
    sky = sky_of(1, 5, 2.0)
    sky.run(Survey(sky.hosts, 1.0, 10.0, round_trip_s=2.0))
    assert len(sky.answered) == 5


@settings(max_examples=60)
@given(
    each=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    loss=st.sampled_from([0.0, 0.02, 0.05]),
    service_ms=st.lists(st.floats(0.01, 90), min_size=4, max_size=4),
    dead=st.sets(st.integers(0, 239), max_size=20),
)
@example(each=[1, 1, 49], loss=0.05, service_ms=[1.0, 1.0, 76.0, 1.0], dead=set())  # the last one's turn came late
def test_every_living_satellite_is_heard_and_every_survey_ends(
    each: list[int], loss: float, service_ms: list[float], dead: set[int]
) -> None:
    hosts = {f"host-{host}": [SatelliteId(host, slot) for slot in range(count)] for host, count in enumerate(each)}
    gone = {SatelliteId(number // 60, number % 60) for number in dead}
    service_s = {host: ms / 1000 for host, ms in zip(hosts, service_ms, strict=False)}
    sky = Sky(hosts, service_s, dead=gone, loss=loss)
    took_s = sky.run(Survey(hosts, 3.0, 60.0))
    living = {one for mine in hosts.values() for one in mine} - gone
    assert sky.answered.keys() == living
    assert took_s <= 60.1
