"""A replay's report by hand: who counts where, what is within an SLO, and what a late client makes of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from skymemory_lab.replay.report import ReplayOutcome, ResponseStatus, SloLimits, as_json, lines_of, report_of

GOOD = ReplayOutcome(
    number=0,
    status=ResponseStatus.COMPLETED,
    due_s=1.0,
    sent_s=1.0,
    wanted_prompt_tokens=100,
    wanted_output_tokens=4,
    first_s=1.5,
    end_s=2.0,
    gaps_s=(0.1, 0.3),
    prompt_tokens=110,
    cached_tokens=32,
    output_tokens=3,
    http_status=200,
)
REFUSED = replace(
    GOOD,
    status=ResponseStatus.REFUSED,
    first_s=math.nan,
    gaps_s=(),
    prompt_tokens=None,
    cached_tokens=None,
    output_tokens=None,
    http_status=429,
    error="refused 429: too much to do",
    retry_after_s=2.0,
)
FAILED = replace(
    REFUSED, status=ResponseStatus.FAILED, http_status=200, retry_after_s=None, error="stream cut short: wasted"
)


def test_times_of_one_request() -> None:
    late = replace(GOOD, sent_s=1.2)
    assert late.ttft_s == pytest.approx(0.3) and late.due_ttft_s == pytest.approx(0.5)
    assert GOOD.tbt_s == pytest.approx(0.4 / 2)
    # Five tokens in three pieces: the time between tokens counts tokens.
    assert replace(GOOD, output_tokens=5).tbt_s == pytest.approx(0.1)
    assert math.isnan(replace(GOOD, output_tokens=1, gaps_s=()).tbt_s)


def test_who_counts_where() -> None:
    report = report_of([GOOD, REFUSED, FAILED, replace(GOOD, cached_tokens=None)], 6, SloLimits())
    assert (report.completed, report.refused, report.failed, report.sent, report.unsent) == (2, 1, 1, 4, 2)
    assert report.ttft.count == 2 and report.tbt_gaps.count == 4
    assert report.hit_ratio == pytest.approx(32 / 110)
    assert (report.cached_answers, report.prompt_tokens, report.output_tokens, report.pieces) == (1, 220, 6, 6)
    assert report.short == 2 and report.retry_after == 1
    assert report.length_errors.mean == pytest.approx(0.1)
    assert report.faults == (
        ("refused 429", 1, "refused 429: too much to do"),
        ("stream cut short", 1, "stream cut short: wasted"),
    )


def test_an_slo_is_met_by_those_who_met_all_of_it_and_counted_over_all_that_were_sent() -> None:
    slow = replace(GOOD, first_s=4.0)
    jerky = replace(GOOD, gaps_s=(0.1, 2.0))
    one_token = replace(GOOD, gaps_s=(), output_tokens=1)
    outcomes = [GOOD, slow, jerky, one_token, REFUSED, FAILED]
    report = report_of(outcomes, 6, SloLimits(0.6, 0.25))
    assert (report.within_ttft, report.within_tbt, report.within_both) == (3, 3, 2)
    assert report.goodput_per_s == pytest.approx(2 / 2.0)
    assert "both: 33.3% of 6 sent" in "\n".join(lines_of(report))


def test_a_client_that_sends_late_makes_no_server_look_better() -> None:
    """Sent 2 s late and answered at once: from when it was due it took too long, and the report says who was late."""
    late = replace(GOOD, sent_s=3.0, first_s=3.1, end_s=3.6)
    report = report_of([late], 1, SloLimits(ttft_s=1.0))
    assert report.within_both == 0 and not report.client_kept_up
    assert "DID NOT KEEP UP" in "\n".join(lines_of(report))
    assert report_of([GOOD], 1, SloLimits()).client_kept_up
    stalled = report_of([GOOD], 1, SloLimits(), stalls_s=[0.5])
    assert not stalled.client_kept_up and stalled.sent_in_time
    assert "it saw answers late" in "\n".join(lines_of(stalled))


def test_a_queue_of_the_server_excuses_no_client() -> None:
    """Past saturation: TTFTs grow from 50 ms to 5 s, and the client is 46 ms late."""
    due = [replace(GOOD, due_s=0.1 * at, sent_s=0.1 * at + 0.046, first_s=0.15 * at + 0.096) for at in range(100)]
    report = report_of(due, 100, SloLimits())
    assert report.ttft.p50 > 2 and not report.sent_in_time
    assert "it sent late" in "\n".join(lines_of(report))
    slow = [replace(each, first_s=each.sent_s + 2.0) for each in due]
    assert report_of(slow, 100, SloLimits()).client_kept_up, "46 ms of 2 s, which the server takes without a queue"


def test_hits_beyond_what_the_prompts_share_are_another_replays() -> None:
    """32 of 110 tokens hit where nothing is shared: they were there before."""
    assert "take another --seed" in "\n".join(lines_of(report_of([GOOD], 1, SloLimits(), reusable=0.0)))
    for share in (0.29, math.nan):
        assert "--seed" not in "\n".join(lines_of(report_of([GOOD], 1, SloLimits(), reusable=share)))


def test_an_interrupted_replay_went_on_until_it_was_interrupted() -> None:
    assert report_of([GOOD], 5, SloLimits(1.0), seconds=4.0).goodput_per_s == pytest.approx(0.25)


def test_what_the_cap_held_up_is_reported_and_is_not_the_clients_lateness() -> None:
    held = replace(GOOD, sent_s=3.0, held_up_s=2.0, first_s=3.1)
    report = report_of([held], 1, SloLimits())
    assert report.client_kept_up and report.held_up == 1
    words = "\n".join(lines_of(report))
    assert "1 requests were held up by `concurrency`, the longest 2 s" in words and "TTFT from due" in words


def test_what_was_not_reported_is_unknown_and_not_zero() -> None:
    silent = replace(GOOD, prompt_tokens=None, cached_tokens=None, output_tokens=None)
    report = report_of([silent], 1, SloLimits())
    words = "\n".join(lines_of(report))
    assert report.hit_ratio is None and "unknown: no answer reported cached_tokens" in words
    assert "unknown of prompts" in words and report.output_tokens == 3


def test_a_replay_without_answers_can_be_reported() -> None:
    for outcomes in ([], [FAILED]):
        report = report_of(outcomes, 1, SloLimits(1.0, 1.0))
        assert lines_of(report)
        as_dict = json.loads(json.dumps(as_json(report), allow_nan=False))
        assert as_dict["completed"] == 0 and as_dict["ttft_s"]["mean"] is None


def test_a_line_of_json_for_each() -> None:
    as_dict = json.loads(json.dumps(GOOD.as_json(), allow_nan=False))
    assert as_dict["ttft_s"] == 0.5 and as_dict["gaps_s"] == [0.1, 0.3] and as_dict["status"] == "completed"
    assert json.loads(json.dumps(REFUSED.as_json(), allow_nan=False))["ttft_s"] is None
