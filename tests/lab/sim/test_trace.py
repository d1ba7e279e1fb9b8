"""Traces: what is read, what is refused and where, and what jitter, rates and splits leave as it was."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from skymemory.errors import InvalidInput
from skymemory_lab.sim.trace import TraceRequest, at_rate, ideal_hits, jittered, read_trace, split_at

TRACE = Path(__file__).parents[4] / "shared/data/traces/conversation_trace.jsonl"
GOOD = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}


def written(path: Path, *lines: dict[str, object] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


def test_reads_both_countings_and_infers_sessions(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t",
        GOOD,
        GOOD | {"timestamp": 1500, "input_length": 1536, "hash_ids": [0, 2, 3]},
        "",
        GOOD | {"timestamp": 1500, "input_length": 1537, "hash_ids": [0, 2, 3, 4]},
        GOOD | {"timestamp": 9000, "input_length": 1100, "hash_ids": [0, 2, 9]},
    )
    first, second, third, fourth = read_trace(path)
    assert (first.at_s, first.input_tokens, first.output_tokens, first.ids) == (0.0, 1000, 5, (0, 1))
    assert first.blocks() == (0,) and first.blocks(partial=True) == (0, 1)
    assert second.blocks() == second.blocks(partial=True) == (0, 2, 3)
    assert second.at_s == 1.5 and first.session != second.session == third.session == fourth.session
    assert len(read_trace(path, most=2)) == 2
    assert ideal_hits([first, second, third, fourth]) == (0 + 1 + 3 + 2, 1 + 3 + 3 + 2)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ({"timestamp": 0}, "missing input_length, output_length, hash_ids"),
        (GOOD | {"input_length": 0, "hash_ids": []}, "input_length is 0"),
        (GOOD | {"output_length": -1}, "output_length is -1"),
        (GOOD | {"timestamp": 1.5}, "timestamp is 1.5"),
        (GOOD | {"timestamp": True}, "timestamp is True"),
        (GOOD | {"hash_ids": [0]}, "1 hash_ids for 1000 tokens, of 512 each: expected 2"),
        (GOOD | {"hash_ids": [0, "1"]}, "list of whole numbers"),
        (GOOD | {"hash_ids": 7}, "list of whole numbers"),
        (GOOD | {"timestamp": 2000}, "timestamp 2000 after 3000"),
    ],
)
def test_says_which_line_is_no_request(tmp_path: Path, line: dict[str, object] | str, complaint: str) -> None:
    path = written(tmp_path / "t.jsonl", GOOD | {"timestamp": 3000}, line)
    with pytest.raises(InvalidInput, match=r"t\.jsonl, line 2: ") as caught:
        read_trace(path)
    assert complaint in str(caught.value)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="has no requests"):
        read_trace(written(tmp_path / "t", ""))


def test_jitter_is_seeded_forward_and_within_a_batch() -> None:
    batch = [TraceRequest(3.0 * (at // 10), 600, 1, (0, at)) for at in range(100)]
    moved = jittered(batch, 4)
    assert moved == jittered(batch, 4) != jittered(batch, 5)
    assert [request.at_s for request in moved] == sorted(request.at_s for request in moved)
    assert all(0 <= request.at_s - 3.0 * (request.ids[1] // 10) <= 3.0 for request in moved)
    assert Counter(request.ids for request in moved) == Counter(request.ids for request in batch)


def test_rates_and_splits_are_of_time() -> None:
    requests = [TraceRequest(float(at), 600, 1, (0, at)) for at in (0, 1, 2, 90, 100)]
    assert [request.at_s for request in at_rate(requests, 2)] == [0, 0.5, 1, 45, 50]
    assert split_at(requests, 0.7) == pytest.approx(70)
    for wrong in (0, -1):
        with pytest.raises(InvalidInput):
            at_rate(requests, wrong)
    for wrong in (0, 1):
        with pytest.raises(InvalidInput):
            split_at(requests, wrong)


@pytest.mark.brief()
@pytest.mark.skipif(not TRACE.is_file(), reason=f"the trace is not shipped; put it at {TRACE}")
def test_the_conversation_trace_is_what_is_said_of_it() -> None:
    requests = read_trace(TRACE)
    assert len(requests) == 12_031 and requests[-1].at_s == pytest.approx(3537, abs=0.5)
    assert sum(request.input_tokens for request in requests) / len(requests) == pytest.approx(12_035, abs=1)
    assert sum(request.output_tokens for request in requests) / len(requests) == pytest.approx(343, abs=1)
    hits, asked = ideal_hits(requests, partial=True)
    assert asked == pytest.approx(288_500, abs=50) and hits / asked == pytest.approx(0.3664, abs=1e-4)
    assert all(request.ids[0] == 0 for request in requests)
    turns = Counter(request.session for request in requests)
    assert len(turns) == pytest.approx(7_373, abs=5)
