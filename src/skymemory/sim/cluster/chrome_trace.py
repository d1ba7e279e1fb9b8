"""Export of a run for chrome://tracing and Perfetto (Trace Event Format, JSON object form).

Each instance is a process; its overlapping spans are in lanes, the threads of that process. Loads are counters of a
process of their own. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from skymemory.sim.cluster.outcome import ClusterRun, LoadSample, Span

_CLUSTER = 1
"""Process of the counters."""


def chrome_trace(run: ClusterRun) -> dict[str, object]:
    """The run as events, with spans if the run kept them."""
    events: list[dict[str, object]] = [_named("process", _CLUSTER, 0, "cluster")]
    events += _counters(run.loads)
    instances = sorted({span.instance for span in run.spans})
    for pid, instance in enumerate(instances, _CLUSTER + 1):
        events.append(_named("process", pid, 0, instance))
        events += _complete(pid, [span for span in run.spans if span.instance == instance])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(run: ClusterRun, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(run), ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    return path


def _counters(loads: Iterable[LoadSample]) -> Iterator[dict[str, object]]:
    for one in loads:
        moment = {"ph": "C", "pid": _CLUSTER, "tid": 0, "ts": _us(one.t_s)}
        yield {**moment, "name": "load", "args": {"prefill": one.prefill, "decode": one.decode}}
        yield {**moment, "name": "requests", "args": {"waiting": one.waiting, "decoding": one.decoding}}


def _complete(pid: int, spans: Iterable[Span]) -> Iterator[dict[str, object]]:
    """An instance's spans, each in the first free lane of its kind."""
    kinds: dict[str, list[tuple[int, int]]] = {}
    """Lanes by kind: thread, end of the last span in µs."""
    lanes = 0
    for span in sorted(spans, key=lambda span: (span.begin_s, span.end_s)):
        begin, end = _us(span.begin_s), _us(span.end_s)
        own = kinds.setdefault(span.what, [])
        at = next((at for at, (_, until) in enumerate(own) if until <= begin), None)
        if at is None:
            lanes += 1
            yield _named("thread", pid, lanes, f"{span.what} {len(own) + 1}")
            own.append((lanes, end))
            at = len(own) - 1
        thread = own[at][0]
        own[at] = (thread, end)
        yield {
            "ph": "X",
            "pid": pid,
            "tid": thread,
            "ts": begin,
            "dur": end - begin,
            "cat": span.what,
            "name": f"{span.what} {span.request}",
            "args": {"request": span.request, **span.notes},
        }


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_name", "args": {"name": name}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
