"""Working days, Mondays and local time are learned; habits outlive their process, whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.test_predictor import chain
from tests.cache.test_prefetching import NINE_S, Tier, learned

from skymemory.cache.predictor import DAY_S, LocalTime, Predictor
from skymemory.cache.prefetching import PrefetchScheduler, load_habits, read_habits, save_habits
from skymemory.errors import InvalidInput

BERLIN = "Europe/Berlin"


def foretold(comes: Callable[[int], bool], days: int) -> tuple[list[int], list[int]]:
    """Days, from 0 as a Monday, on which a prompt came unexpectedly, and on which an expected one did not come."""
    predictor, missed, vain = Predictor(), [], []
    for day in range(days):
        expected = bool(predictor.expected(day * DAY_S + NINE_S - 3600, 7200))
        if comes(day):
            missed += [day] * (not expected)
            predictor.record_prompt(chain("habit"), day * DAY_S + NINE_S)
        else:
            vain += [day] * expected
    return missed, vain


def test_working_days_are_learned_in_a_week_and_a_half() -> None:
    missed, vain = foretold(lambda day: day % 7 < 5, 56)
    assert missed == [0, 1] or missed == [0]
    assert vain and max(vain) <= 12 and len(vain) <= 3


def test_mondays_are_learned_in_two() -> None:
    assert foretold(lambda day: day % 7 == 0, 56) == ([0, 7], [])


def test_two_days_of_the_week_are_learned_in_two() -> None:
    missed, vain = foretold(lambda day: day % 7 in (1, 4), 56)
    assert max(missed) <= 11 and len(vain) <= 2


def test_a_holiday_does_not_end_a_weekly_habit() -> None:
    missed, vain = foretold(lambda day: day % 7 == 0 and day != 28, 70)
    assert missed == [0, 7] and vain == [28]


def test_every_day_stays_every_day_although_one_in_ten_is_left_out() -> None:
    missed, vain = foretold(lambda day: day % 10 != 9, 100)
    assert len(missed) <= 3 and len(vain) == 10


@given(first=st.integers(0, 30), week=st.integers(2, 6))
def test_once_in_a_week_is_no_habit(first: int, week: int) -> None:
    predictor = Predictor()
    predictor.record_prompt(chain("once"), first * DAY_S + NINE_S)
    assert predictor.expected((first + week) * DAY_S, 30 * DAY_S) == []


def test_the_next_time_is_predicted_a_week_ahead() -> None:
    predictor = Predictor()
    for week in range(3):
        predictor.record_prompt(chain("monday"), 7 * week * DAY_S + NINE_S)
    assert [one.at_s for one in predictor.expected(15 * DAY_S, 7 * DAY_S)] == [21 * DAY_S + NINE_S]
    assert predictor.expected(15 * DAY_S, 5 * DAY_S) == []


def berlin(day: int, hour: int) -> float:
    return datetime(2024, 3, day, hour, tzinfo=ZoneInfo(BERLIN)).timestamp()


def test_nine_on_the_wall_stays_nine_when_clocks_change() -> None:
    """On 31 March 2024 clocks in Berlin went forward: by UTC a habit is late by an hour, by the zone it is on time."""
    local, utc = Predictor(zone=BERLIN), Predictor()
    for day in range(25, 31):
        local.record_prompt(chain("daily"), berlin(day, 9))
        utc.record_prompt(chain("daily"), berlin(day, 9))
    assert [one.at_s for one in local.expected(berlin(31, 6), 6 * 3600)] == [berlin(31, 9)]
    assert [one.at_s for one in utc.expected(berlin(31, 6), 6 * 3600)] == [berlin(31, 10)]


@settings(deadline=None)
@given(st.integers(1_600_000_000, 1_900_000_000), st.sampled_from([BERLIN, "America/New_York", "Asia/Kathmandu", None]))
def test_local_time_comes_back_but_for_the_hour_that_comes_twice(at_s: int, zone: str | None) -> None:
    local = LocalTime(zone)
    back_s = local.from_local(local.to_local(at_s))
    assert back_s == at_s or (back_s == at_s - 3600 and local.to_local(back_s) == local.to_local(at_s))


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../etc/passwd"])
def test_zones_that_are_not_known_are_named(zone: str) -> None:
    with pytest.raises(InvalidInput, match="time zone"):
        Predictor(zone=zone)
    with pytest.raises(InvalidInput, match="Berlin"):
        Predictor(zone=BERLIN, day_s=3600.0)


@settings(max_examples=60, deadline=None)
@given(seen=st.lists(st.tuples(st.integers(0, 5), st.floats(0, 30 * DAY_S)), max_size=40))
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, seen: list[tuple[int, float]]
) -> None:
    path = tmp_path_factory.mktemp("habits") / "habits.json"
    first, second = Predictor(zone=BERLIN), Predictor(zone=BERLIN)
    for prompt, at_s in sorted(seen, key=lambda one: one[1]):
        first.record_prompt(chain(f"{prompt}", 3), at_s)
    save_habits(first, path)
    load_habits(second, path)
    for day in range(28, 45):
        assert first.expected(day * DAY_S, DAY_S) == second.expected(day * DAY_S, DAY_S)
        first.record_prompt(chain("1", 3), day * DAY_S + NINE_S)
        second.record_prompt(chain("1", 3), day * DAY_S + NINE_S)
    assert first.blocks == second.blocks and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["habits.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "habits.json"
    save_habits(Predictor(), path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        save_habits(Predictor(zone=BERLIN), path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["habits.json"]


GOOD = {"time_s": 1.0, "day": 3, "first_day": 1, "seen": 5, "keys": ["ab" * 32]}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "not json",
        "[" * 100_000,
        "{}",
        '{"version": 2, "zone": null, "habits": []}',
        *(
            json.dumps({"version": 1, "zone": None, "habits": [{**GOOD, name: value}]})
            for name, value in [
                ("time_s", "9"),
                ("time_s", 1e999),
                ("day", 1.5),
                ("day", 1 << 50),
                ("first_day", 4),
                ("seen", 4),
                ("seen", -1),
                ("seen", 1 << 42 | 1),
                ("keys", []),
                ("keys", ["xyz"]),
                ("keys", [7]),
                ("keys", "abcd"),
            ]
        ),
    ],
)
def test_files_that_are_not_ours_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "habits.json"
    path.write_text(content)
    with pytest.raises(InvalidInput, match="habits"):
        read_habits(path)


def test_a_file_of_another_zone_is_refused(tmp_path: Path) -> None:
    save_habits(Predictor(zone=BERLIN), tmp_path / "habits.json")
    with pytest.raises(InvalidInput, match="Europe/Berlin, not of UTC"):
        load_habits(Predictor(), tmp_path / "habits.json")


def test_what_a_process_learned_the_next_one_prefetches(tmp_path: Path) -> None:
    path, clock = tmp_path / "habits.json", [0.0]
    for day in range(4):
        scheduler = PrefetchScheduler(Tier(), clock=lambda: clock[0], habits_file=path)
        clock[0] = day * DAY_S + NINE_S - 300
        assert scheduler.tick() == (4 if day >= 2 else 0)
        clock[0] += 300
        with scheduler.running(every_s=1000):
            scheduler.record_prompt(chain("daily"))
    assert len(read_habits(path)[1]) == 1


def test_it_is_written_a_minute_after_something_was_seen(tmp_path: Path) -> None:
    path = tmp_path / "habits.json"
    now_s = 0.0
    scheduler = PrefetchScheduler(Tier(), clock=lambda: now_s, habits_file=path)
    scheduler.record_prompt(chain("daily"))
    now_s = 59.0
    scheduler.tick()
    assert not path.exists()
    now_s = 60.0
    scheduler.tick()
    assert len(read_habits(path)[1]) == 1


def test_a_damaged_file_is_set_aside_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "habits.json"
    path.write_text("half a fi")
    with caplog.at_level(logging.WARNING):
        scheduler = PrefetchScheduler(Tier(), habits_file=path)
    assert "learned from scratch" in caplog.text and scheduler.counters.get("habits_files_refused_total") == 1
    assert not path.exists() and (tmp_path / "habits.json.bad").read_text() == "half a fi"


def test_a_missing_folder_stops_no_caller(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = PrefetchScheduler(Tier(), habits_file=tmp_path / "no" / "habits.json")
    scheduler.save()
    assert scheduler.counters.get("habits_save_failures_total") == 1 and "cannot be written" in caplog.text


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    learned(Tier()).scheduler.save()
    assert os.listdir(tmp_path) == []
