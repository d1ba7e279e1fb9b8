"""What chrome://tracing and Perfetto read: the schema of its events, and that no two of a lane overlap."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from skymemory_lab.sim.cluster.outcome import ClusterRun, LoadSample, Span, chrome_trace, write_chrome_trace

_NUMBER, _NAME = {"type": "integer", "minimum": 0}, {"type": "string", "minLength": 1}
_EVENT = {"pid": _NUMBER, "tid": _NUMBER, "name": _NAME}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["traceEvents", "displayTimeUnit"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    {
                        "required": ["ph", "pid", "tid", "name", "ts", "dur", "cat", "args"],
                        "properties": _EVENT | {"ph": {"const": "X"}, "ts": _NUMBER, "dur": _NUMBER, "cat": _NAME},
                    },
                    {
                        "required": ["ph", "pid", "tid", "name", "ts", "args"],
                        "properties": _EVENT
                        | {
                            "ph": {"const": "C"},
                            "ts": _NUMBER,
                            "args": {"type": "object", "additionalProperties": {"type": "number"}, "minProperties": 1},
                        },
                    },
                    {
                        "required": ["ph", "pid", "tid", "name", "args"],
                        "properties": _EVENT
                        | {
                            "ph": {"const": "M"},
                            "name": {"enum": ["process_name", "thread_name"]},
                            "args": {"type": "object", "required": ["name"], "properties": {"name": _NAME}},
                        },
                    },
                ]
            },
        },
    },
}
SPANS = (
    Span("prefill-0", "prefill", 0.0, 1.5, 0, {"tokens": 700}),
    Span("decode-0", "decode", 1.5, 9.0, 0),
    Span("prefill-0", "prefill", 1.5, 2.0, 1),
    Span("decode-0", "decode", 2.0, 4.0, 1),
    Span("decode-0", "decode", 4.0, 5.0, 2),
    Span("prefill-0", "load", 0.5, 1.0, 1),
)
RUN = ClusterRun((), (LoadSample(0.0, 0.5, 0.25, 3, 4), LoadSample(1.0, 0.75, 0.5)), (), (), SPANS)


def test_meets_the_schema(tmp_path: Path) -> None:
    path = write_chrome_trace(RUN, tmp_path / "deep" / "run.json")
    jsonschema.validate(json.loads(path.read_text("utf-8")), SCHEMA)


def test_the_schema_refuses_what_is_wrong() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"traceEvents": [{"ph": "X", "pid": 1}], "displayTimeUnit": "ms"}, SCHEMA)


def test_spans_of_a_lane_do_not_overlap_and_none_is_lost() -> None:
    events: Any = chrome_trace(RUN)["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert sorted((event["ts"], event["dur"], event["args"]["request"]) for event in complete) == sorted(
        (round(span.begin_s * 1e6), round((span.end_s - span.begin_s) * 1e6), span.request) for span in SPANS
    )
    lanes: dict[tuple[int, int], list[Any]] = {}
    for event in complete:
        lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    for lane in lanes.values():
        assert len({event["cat"] for event in lane}) == 1
        for before, after in pairwise(sorted(lane, key=lambda event: event["ts"])):
            assert before["ts"] + before["dur"] <= after["ts"]
    assert len(lanes) == 4  # one of prefills, one of loads, two of decoding: the third goes where the second was
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert named == set(lanes)
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["cluster", "decode-0", "prefill-0"]


def test_loads_are_counters() -> None:
    events: Any = chrome_trace(RUN)["traceEvents"]
    counters = [(event["ts"], event["name"], event["args"]) for event in events if event["ph"] == "C"]
    assert counters[0] == (0, "load", {"prefill": 0.5, "decode": 0.25})
    assert counters[1] == (0, "requests", {"waiting": 3, "decoding": 4})
    assert len(counters) == 4
