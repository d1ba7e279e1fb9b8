"""Outcomes of a replay's requests and their report, as JSON and as text."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from skymemory.metrics import Spread, percentile, spread

REFUSALS = frozenset({429, 503})


class ResponseStatus(StrEnum):
    COMPLETED = "completed"
    REFUSED = "refused"  # status 429 or 503
    FAILED = "failed"  # no complete answer, or another status
    INTERRUPTED = "interrupted"  # cancelled with the replay


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Outcome of a request; seconds since the start of the replay.

    None and nan: not reached, or not reported.
    """

    number: int
    status: ResponseStatus
    due_s: float
    sent_s: float
    wanted_prompt_tokens: int
    wanted_output_tokens: int
    first_s: float = math.nan
    """First chunk with content."""
    end_s: float = math.nan
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    http_status: int | None = None
    retry_after_s: float | None = None
    error: str = ""
    """Kind of fault, colon, details."""
    whole: bool = True  # the stream ended with [DONE]
    held_up_s: float = 0.0
    """Part of ``late_s`` due to the concurrency limit."""

    @property
    def late_s(self) -> float:
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def due_ttft_s(self) -> float:
        """Seconds from due to the first chunk: the user's wait."""
        return self.first_s - self.due_s

    @property
    def tbt_s(self) -> float:
        """Seconds per token after the first."""
        later_tokens = (self.output_tokens or len(self.gaps_s) + 1) - 1
        return sum(self.gaps_s) / later_tokens if later_tokens > 0 else math.nan

    def as_json(self) -> dict[str, object]:
        fields: dict[str, object] = {"number": self.number, "status": str(self.status)}
        for name in ("due_s", "sent_s", "late_s", "ttft_s", "tbt_s", "end_s"):
            fields[name] = _rounded(getattr(self, name))
        fields["gaps_s"] = [_rounded(gap) for gap in self.gaps_s]
        for name in (
            "wanted_prompt_tokens",
            "prompt_tokens",
            "cached_tokens",
            "wanted_output_tokens",
            "output_tokens",
            "http_status",
            "retry_after_s",
            "error",
        ):
            fields[name] = getattr(self, name)
        return fields


def _rounded(seconds: float) -> float | None:
    return round(seconds, 6) if math.isfinite(seconds) else None


EXAMPLES = 8


@dataclass(frozen=True, slots=True)
class SloLimits:
    ttft_s: float | None = None
    tbt_s: float | None = None

    def met(self, outcome: ReplayOutcome) -> bool:
        """Return True if within the limits; TTFT counts from due."""
        return outcome.status is ResponseStatus.COMPLETED and self.ttft_met(outcome) and self.tbt_met(outcome)

    def ttft_met(self, outcome: ReplayOutcome) -> bool:
        return self.ttft_s is None or outcome.due_ttft_s <= self.ttft_s

    def tbt_met(self, outcome: ReplayOutcome) -> bool:
        return self.tbt_s is None or math.isnan(outcome.tbt_s) or outcome.tbt_s <= self.tbt_s


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Counts; times in seconds."""

    asked: int
    unsent: int
    completed: int
    refused: int
    failed: int
    interrupted: int
    seconds: float
    ttft: Spread
    quick_ttft_s: float
    """1st percentile of TTFT: the least queueing."""
    due_ttft: Spread
    tbt_gaps: Spread
    tbt_means: Spread
    late: Spread
    """Seconds from due to sent, without waits for the limit."""
    held_up: int
    held_up_s: float
    slo: SloLimits
    within_ttft: int
    within_tbt: int
    within_both: int
    retry_after: int
    prompt_tokens: int
    """Prompt tokens of the ``usage_answers``."""
    usage_answers: int
    cached_tokens: int
    """Cached tokens of the ``cached_answers``, of ``cached_of_tokens``."""
    cached_of_tokens: int
    cached_answers: int
    output_tokens: int
    pieces: int
    short: int
    without_done: int
    length_errors: Spread
    """Reported over planned prompt tokens, less 1."""
    faults: tuple[tuple[str, int, str], ...]
    """Kinds, counts and first messages."""
    stall: Spread
    reusable: float
    """Hit ratio of an unbounded cache."""

    @property
    def sent(self) -> int:
        return self.asked - self.unsent

    @property
    def goodput_per_s(self) -> float:
        return self.within_both / self.seconds if self.seconds > 0 else 0.0

    @property
    def hit_ratio(self) -> float | None:
        """None: not reported."""
        return self.cached_tokens / self.cached_of_tokens if self.cached_of_tokens else None

    @property
    def client_kept_up(self) -> bool:
        """True if the client's delays are negligible: at p99 10 ms, or a tenth of ``quick_ttft_s``.

        Past saturation, the median TTFT is mostly queueing and would excuse any client.
        """
        return self.sent_in_time and self.looked_in_time

    @property
    def sent_in_time(self) -> bool:
        return not self.late.count or self.late.p99 <= self._most_late_s

    @property
    def looked_in_time(self) -> bool:
        return not self.stall.count or self.stall.p99 <= self._most_late_s

    @property
    def already_cached(self) -> bool:
        """True if the server has received these prompts before."""
        # A tolerance, because engine blocks differ from the trace's, so hits end at other tokens.
        return (self.hit_ratio or 0.0) > self.reusable + 0.05

    @property
    def _most_late_s(self) -> float:
        return max(0.010, 0.1 * _or_zero(self.quick_ttft_s))


def report_of(
    outcomes: Sequence[ReplayOutcome],
    planned_count: int,
    slo: SloLimits,
    stalls_s: Sequence[float] = (),
    reusable: float = math.nan,
    wanted_in_tokens: bool = True,
    seconds: float | None = None,
) -> ReplayReport:
    """Build the report.

    Args:
        planned_count: requests planned; ``outcomes`` are of the requests sent.
        wanted_in_tokens: False if prompts were made by characters.
    """
    by = Counter(outcome.status for outcome in outcomes)
    completed = [outcome for outcome in outcomes if outcome.status is ResponseStatus.COMPLETED]
    with_usage = [outcome for outcome in completed if outcome.prompt_tokens is not None]
    hits = [outcome for outcome in with_usage if outcome.cached_tokens is not None]
    return ReplayReport(
        asked=planned_count,
        unsent=planned_count - len(outcomes),
        completed=by[ResponseStatus.COMPLETED],
        refused=by[ResponseStatus.REFUSED],
        failed=by[ResponseStatus.FAILED],
        interrupted=by[ResponseStatus.INTERRUPTED],
        seconds=max((outcome.end_s for outcome in outcomes if not math.isnan(outcome.end_s)), default=0.0)
        if seconds is None
        else seconds,
        ttft=spread(outcome.ttft_s for outcome in completed),
        quick_ttft_s=percentile([outcome.ttft_s for outcome in completed if not math.isnan(outcome.ttft_s)], 1),
        due_ttft=spread(outcome.due_ttft_s for outcome in completed),
        tbt_gaps=spread(gap for outcome in completed for gap in outcome.gaps_s),
        tbt_means=spread(outcome.tbt_s for outcome in completed),
        late=spread(outcome.late_s - outcome.held_up_s for outcome in outcomes),
        held_up=sum(outcome.held_up_s > 0 for outcome in outcomes),
        held_up_s=max((outcome.held_up_s for outcome in outcomes), default=0.0),
        slo=slo,
        within_ttft=sum(slo.ttft_met(outcome) for outcome in completed),
        within_tbt=sum(slo.tbt_met(outcome) for outcome in completed),
        within_both=sum(slo.met(outcome) for outcome in completed),
        retry_after=sum(outcome.retry_after_s is not None for outcome in outcomes),
        prompt_tokens=sum(outcome.prompt_tokens or 0 for outcome in with_usage),
        usage_answers=len(with_usage),
        cached_tokens=sum(outcome.cached_tokens or 0 for outcome in hits),
        cached_of_tokens=sum(outcome.prompt_tokens or 0 for outcome in hits),
        cached_answers=len(hits),
        output_tokens=sum(_tokens_of(outcome) for outcome in completed),
        pieces=sum(len(outcome.gaps_s) + (not math.isnan(outcome.first_s)) for outcome in completed),
        short=sum(
            outcome.output_tokens is not None and outcome.output_tokens < outcome.wanted_output_tokens
            for outcome in completed
        ),
        without_done=sum(not outcome.whole for outcome in completed),
        length_errors=spread(
            (outcome.prompt_tokens or 0) / outcome.wanted_prompt_tokens - 1
            for outcome in with_usage
            if wanted_in_tokens
        ),
        faults=_faults(outcomes),
        stall=spread(stalls_s),
        reusable=reusable,
    )


def as_json(report: ReplayReport) -> dict[str, object]:
    fields: dict[str, object] = {
        name: getattr(report, name)
        for name in (
            "asked",
            "sent",
            "unsent",
            "completed",
            "refused",
            "failed",
            "interrupted",
            "within_ttft",
            "within_tbt",
            "within_both",
            "retry_after",
            "prompt_tokens",
            "cached_tokens",
            "output_tokens",
            "pieces",
            "short",
            "without_done",
            "held_up",
            "held_up_s",
            "hit_ratio",
            "client_kept_up",
        )
    }
    fields["told_prompts"] = report.usage_answers  # words: keep
    fields["told_cached"] = report.cached_answers  # words: keep
    fields["seconds"] = round(report.seconds, 6)
    fields["goodput_per_s"] = round(report.goodput_per_s, 6)
    fields["reusable"] = None if math.isnan(report.reusable) else round(report.reusable, 6)
    fields["slo"] = {"ttft_s": report.slo.ttft_s, "tbt_s": report.slo.tbt_s}
    for name in ("ttft", "due_ttft", "tbt_gaps", "tbt_means", "late", "stall", "length_errors"):
        fields[f"{name}_s" if name != "length_errors" else name] = getattr(report, name).as_json()
    fields["faults"] = [{"kind": kind, "count": count, "first": first} for kind, count, first in report.faults]
    return fields


def _tokens_of(outcome: ReplayOutcome) -> int:
    return outcome.output_tokens if outcome.output_tokens is not None else len(outcome.gaps_s) + 1


def _faults(outcomes: Sequence[ReplayOutcome]) -> tuple[tuple[str, int, str], ...]:
    first: dict[str, str] = {}
    kinds: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome.error:
            kind = outcome.error.partition(":")[0]
            kinds[kind] += 1
            first.setdefault(kind, outcome.error)
    return tuple((kind, count, first[kind]) for kind, count in kinds.most_common(EXAMPLES))


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value


# --- the report as text ---

_NAME = 16


def lines_of(report: ReplayReport) -> list[str]:
    parts = (_counts, _lateness, _times, _slos, _tokens, _answers, _fault_lines)
    return [line for part in parts for line in part(report)]


def _counts(report: ReplayReport) -> Iterator[str]:
    outcomes = f"{report.completed:,} completed, {report.refused:,} refused, {report.failed:,} failed"
    if report.interrupted or report.unsent:
        outcomes += f", {report.interrupted:,} interrupted, {report.unsent:,} never sent"
    yield f"{report.asked:,} requests in {report.seconds:.1f} s: {outcomes}"


def _lateness(report: ReplayReport) -> Iterator[str]:
    lateness = report.late
    if lateness.count:
        words = f"p50 {_time(lateness.p50)}, p99 {_time(lateness.p99)}, most {_time(lateness.most)}"
        if report.stall.count:
            words += f"; it saw answers up to {_time(report.stall.most)} late (p99 {_time(report.stall.p99)})"
        yield _line("client late by", words)
    if report.held_up:
        yield _line(
            "",
            f"{report.held_up:,} requests were held up by `concurrency`, the longest {_time(report.held_up_s)}: "
            "times from their sending flatter the server",
        )
    if not report.sent_in_time:
        yield _line("", "THE CLIENT DID NOT KEEP UP: it sent late, and times from sending flatter the server")
    if not report.looked_in_time:
        yield _line("", "THE CLIENT DID NOT KEEP UP: it saw answers late, and its times are longer than the server's")


def _times(report: ReplayReport) -> Iterator[str]:
    yield _line("TTFT", _spread(report.ttft))
    if not report.sent_in_time or report.held_up:
        yield _line("TTFT from due", _spread(report.due_ttft))
    yield _line("TBT of pieces", _spread(report.tbt_gaps))
    yield _line("TBT of requests", _spread(report.tbt_means))


def _slos(report: ReplayReport) -> Iterator[str]:
    slo, sent = report.slo, report.sent
    if (slo.ttft_s is None and slo.tbt_s is None) or not sent:
        return
    words = []
    if slo.ttft_s is not None:
        words.append(f"TTFT ≤ {_time(slo.ttft_s)}: {report.within_ttft / sent:.1%}")
    if slo.tbt_s is not None:
        words.append(f"TBT ≤ {_time(slo.tbt_s)}: {report.within_tbt / sent:.1%}")
    if len(words) == 2:
        words.append(f"both: {report.within_both / sent:.1%}")
    yield _line("within SLO", f"{', '.join(words)} of {sent:,} sent; goodput {report.goodput_per_s:.3g} requests/s")


def _tokens(report: ReplayReport) -> Iterator[str]:
    if report.hit_ratio is None:
        yield _line("hits", "unknown: no answer reported cached_tokens")
    else:
        most = "" if math.isnan(report.reusable) else f"; one unbounded cache: {report.reusable:.1%}"
        few = "" if report.cached_answers == report.completed else f" (in {report.cached_answers} answers)"
        yield _line(
            "hits",
            f"{report.cached_tokens:,} of {report.cached_of_tokens:,} prompt tokens, {report.hit_ratio:.1%}{few}{most}",
        )
        if report.already_cached:
            yield _line("", "MORE THAN THESE PROMPTS SHARE: the server was sent them before; take another --seed")
    if report.seconds > 0:
        prompts = (
            f"{report.prompt_tokens / report.seconds:,.0f} prompt" if report.usage_answers else "unknown of prompts"
        )
        yield _line("tokens/s", f"{prompts}, {report.output_tokens / report.seconds:,.0f} answered")
    errors = report.length_errors
    if errors.count:
        yield _line(
            "prompt lengths",
            f"actual over planned: mean {errors.mean:+.1%}, p50 {errors.p50:+.1%}, most {errors.most:+.1%}",
        )


def _answers(report: ReplayReport) -> Iterator[str]:
    if report.completed:
        words = f"{report.output_tokens:,} tokens in {report.pieces:,} pieces"
        if report.short:
            words += f"; {report.short:,} answers shorter than requested"
        if report.without_done:
            words += f"; {report.without_done:,} streams ended without [DONE]"
        yield _line("answers", words)


def _fault_lines(report: ReplayReport) -> Iterator[str]:
    for kind, count, first in report.faults:
        retries = ""
        if kind.startswith("refused"):
            retries = f"; {report.retry_after:,} of all refusals with Retry-After"
        yield _line("faults", f"{count:,} × {first[:200]}{retries}")


def _line(name: str, words: str) -> str:
    return f"  {name:<{_NAME}}{words}"


def _spread(summary: Spread) -> str:
    if not summary.count:
        return "none"
    figures = (
        ("mean", summary.mean),
        ("p50", summary.p50),
        ("p90", summary.p90),
        ("p99", summary.p99),
        ("most", summary.most),
    )
    return "  ".join(f"{name} {_time(value)}" for name, value in figures) + f"  ({summary.count:,})"


def _time(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    if abs(seconds) < 1:
        return f"{seconds * 1000:.3g} ms" if abs(seconds) < 0.1 else f"{seconds * 1000:.0f} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


# --- an engine's own counters from /metrics, to compare with the report ---

# vLLM's names, then SGLang's.
NAMES: Mapping[str, tuple[str, ...]] = {
    "requests": ("vllm:request_success_total", "sglang:num_requests_total"),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "cached_tokens": ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "output_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
}


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Counts since the start or between two scrapes; None: not counted."""

    requests: float | None = None
    prompt_tokens: float | None = None
    cached_tokens: float | None = None
    output_tokens: float | None = None

    def since(self, before: EngineCounts) -> EngineCounts:
        return EngineCounts(
            *(_both(current, earlier, -1) for current, earlier in zip(self.all(), before.all(), strict=True))
        )

    def plus(self, other: EngineCounts) -> EngineCounts:
        return EngineCounts(*(_both(mine, theirs, 1) for mine, theirs in zip(self.all(), other.all(), strict=True)))

    def all(self) -> tuple[float | None, ...]:
        return tuple(getattr(self, count_field.name) for count_field in dataclasses.fields(self))


def samples_of(text: str) -> dict[str, float]:
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    return samples


def counts_of(text: str) -> EngineCounts:
    samples = samples_of(text)
    counts = {field: next((samples[name] for name in names if name in samples), None) for field, names in NAMES.items()}
    return EngineCounts(**counts)


def _both(first: float | None, second: float | None, sign: int) -> float | None:
    return None if first is None or second is None else first + sign * second
