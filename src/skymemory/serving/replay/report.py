"""What a replay found, from the outcomes of its requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from skymemory.serving.replay.outcome import Outcome, Status
from skymemory.stats import Spread, spread

EXAMPLES = 8


@dataclass(frozen=True, slots=True)
class Slo:
    """What a user would have; None: nothing is asked."""

    ttft_s: float | None = None
    tbt_s: float | None = None

    def met(self, outcome: Outcome) -> bool:
        """Completed, its first token in time from when it was due, its mean time between tokens short enough."""
        return outcome.status is Status.COMPLETED and self.ttft_met(outcome) and self.tbt_met(outcome)

    def ttft_met(self, outcome: Outcome) -> bool:
        return self.ttft_s is None or outcome.due_ttft_s <= self.ttft_s

    def tbt_met(self, outcome: Outcome) -> bool:
        """An answer of one token has no time between tokens."""
        return self.tbt_s is None or math.isnan(outcome.tbt_s) or outcome.tbt_s <= self.tbt_s


@dataclass(frozen=True, slots=True)
class Report:
    """Counts of requests and tokens; times in seconds."""

    asked: int
    """Requests that were to be sent; those that were not are ``unsent``."""
    unsent: int
    completed: int
    refused: int
    failed: int
    interrupted: int
    seconds: float
    """From the beginning until the last answer's end."""
    ttft: Spread
    due_ttft: Spread
    tbt_gaps: Spread
    """Between two pieces of an answer, over all answers."""
    tbt_means: Spread
    """Each answer's mean time between tokens."""
    late: Spread
    """From when a request was due until it was sent, without what it was held up by others under way."""
    held_up: int
    """Requests that waited because as many were under way as may be."""
    held_up_s: float
    """The longest of them."""
    slo: Slo
    within_ttft: int
    within_tbt: int
    within_both: int
    retry_after: int
    """Refusals that said when to come again."""
    prompt_tokens: int
    """Of completed requests that were told of their length; the next for those also told what was cached."""
    told_prompts: int
    cached_tokens: int
    cached_of_tokens: int
    told_cached: int
    output_tokens: int
    pieces: int
    """In which the answers came."""
    short: int
    """Answers of fewer tokens than were asked for."""
    without_done: int
    length_errors: Spread
    """Prompt tokens told over those wanted, less 1."""
    faults: tuple[tuple[str, int, str], ...]
    """Kinds of refusals and failures, how many, and the words of the first of each."""
    stall: Spread
    """By how much the client came late to look at what had come."""
    reusable: float
    """Part of the prompt tokens that one cache with room for everything would hit; nan: not known."""

    @property
    def sent(self) -> int:
        return self.asked - self.unsent

    @property
    def goodput_per_s(self) -> float:
        """Requests within all that was asked, per second."""
        return self.within_both / self.seconds if self.seconds > 0 else 0.0

    @property
    def hit_ratio(self) -> float | None:
        """Part of the prompts' tokens that caches supplied; None: no server said."""
        return self.cached_tokens / self.cached_of_tokens if self.cached_of_tokens else None

    @property
    def client_kept_up(self) -> bool:
        """What it measured of the server is not in doubt: it sent, and saw what came, with 1 % of exceptions within
        10 ms or a tenth of the median time to the first token."""
        return self.sent_in_time and self.looked_in_time

    @property
    def sent_in_time(self) -> bool:
        return not self.late.count or self.late.p99 <= self._most_late_s

    @property
    def looked_in_time(self) -> bool:
        return not self.stall.count or self.stall.p99 <= self._most_late_s

    @property
    def already_cached(self) -> bool:
        """Caches supplied more than these prompts have in common: the server was sent them before."""
        return (self.hit_ratio or 0.0) > self.reusable + 0.05

    @property
    def _most_late_s(self) -> float:
        return max(0.010, 0.1 * _or_zero(self.ttft.p50))


def report_of(
    outcomes: Sequence[Outcome],
    asked: int,
    slo: Slo,
    stalls_s: Sequence[float] = (),
    reusable: float = math.nan,
    wanted_in_tokens: bool = True,
    seconds: float | None = None,
) -> Report:
    """``asked``: how many were to be sent, of which ``outcomes`` tells of those that were.

    Without ``wanted_in_tokens`` prompts were made by characters, and their lengths are held against nothing.
    ``seconds``: how long it went on, where that is not until the last answer's end.
    """
    by = Counter(outcome.status for outcome in outcomes)
    done = [outcome for outcome in outcomes if outcome.status is Status.COMPLETED]
    told = [outcome for outcome in done if outcome.prompt_tokens is not None]
    hits = [outcome for outcome in told if outcome.cached_tokens is not None]
    return Report(
        asked=asked,
        unsent=asked - len(outcomes),
        completed=by[Status.COMPLETED],
        refused=by[Status.REFUSED],
        failed=by[Status.FAILED],
        interrupted=by[Status.INTERRUPTED],
        seconds=max((one.end_s for one in outcomes if not math.isnan(one.end_s)), default=0.0)
        if seconds is None
        else seconds,
        ttft=spread(outcome.ttft_s for outcome in done),
        due_ttft=spread(outcome.due_ttft_s for outcome in done),
        tbt_gaps=spread(gap for outcome in done for gap in outcome.gaps_s),
        tbt_means=spread(outcome.tbt_s for outcome in done),
        late=spread(outcome.late_s - outcome.held_up_s for outcome in outcomes),
        held_up=sum(outcome.held_up_s > 0 for outcome in outcomes),
        held_up_s=max((outcome.held_up_s for outcome in outcomes), default=0.0),
        slo=slo,
        within_ttft=sum(slo.ttft_met(outcome) for outcome in done),
        within_tbt=sum(slo.tbt_met(outcome) for outcome in done),
        within_both=sum(slo.met(outcome) for outcome in done),
        retry_after=sum(outcome.retry_after_s is not None for outcome in outcomes),
        prompt_tokens=sum(outcome.prompt_tokens or 0 for outcome in told),
        told_prompts=len(told),
        cached_tokens=sum(outcome.cached_tokens or 0 for outcome in hits),
        cached_of_tokens=sum(outcome.prompt_tokens or 0 for outcome in hits),
        told_cached=len(hits),
        output_tokens=sum(_tokens_of(outcome) for outcome in done),
        pieces=sum(len(outcome.gaps_s) + (not math.isnan(outcome.first_s)) for outcome in done),
        short=sum(
            outcome.output_tokens is not None and outcome.output_tokens < outcome.wanted_output_tokens
            for outcome in done
        ),
        without_done=sum(not outcome.whole for outcome in done),
        length_errors=spread(
            (outcome.prompt_tokens or 0) / outcome.wanted_prompt_tokens - 1 for outcome in told if wanted_in_tokens
        ),
        faults=_faults(outcomes),
        stall=spread(stalls_s),
        reusable=reusable,
    )


def as_json(report: Report) -> dict[str, object]:
    """The report as one JSON object."""
    told: dict[str, object] = {
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
            "told_prompts",
            "cached_tokens",
            "told_cached",
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
    told["seconds"] = round(report.seconds, 6)
    told["goodput_per_s"] = round(report.goodput_per_s, 6)
    told["reusable"] = None if math.isnan(report.reusable) else round(report.reusable, 6)
    told["slo"] = {"ttft_s": report.slo.ttft_s, "tbt_s": report.slo.tbt_s}
    for name in ("ttft", "due_ttft", "tbt_gaps", "tbt_means", "late", "stall", "length_errors"):
        told[f"{name}_s" if name != "length_errors" else name] = getattr(report, name).as_json()
    told["faults"] = [{"kind": kind, "count": count, "first": first} for kind, count, first in report.faults]
    return told


def _tokens_of(outcome: Outcome) -> int:
    """Tokens of an answer: told, or else its pieces."""
    return outcome.output_tokens if outcome.output_tokens is not None else len(outcome.gaps_s) + 1


def _faults(outcomes: Sequence[Outcome]) -> tuple[tuple[str, int, str], ...]:
    """By kind, the most frequent first."""
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


# A replay's report as lines for people.


_NAME = 16


def lines_of(report: Report) -> list[str]:
    """All of it; what was not asked or not told is said to be so."""
    parts = (_counts, _lateness, _times, _slos, _tokens, _answers, _fault_lines)
    return [line for part in parts for line in part(report)]


def _counts(report: Report) -> Iterator[str]:
    how = f"{report.completed:,} completed, {report.refused:,} refused, {report.failed:,} failed"
    if report.interrupted or report.unsent:
        how += f", {report.interrupted:,} interrupted, {report.unsent:,} never sent"
    yield f"{report.asked:,} requests in {report.seconds:.1f} s: {how}"


def _lateness(report: Report) -> Iterator[str]:
    late = report.late
    if late.count:
        words = f"p50 {_time(late.p50)}, p99 {_time(late.p99)}, most {_time(late.most)}"
        if report.stall.count:
            words += f"; it saw answers up to {_time(report.stall.most)} late (p99 {_time(report.stall.p99)})"
        yield _line("client late by", words)
    if report.held_up:
        yield _line(
            "",
            f"{report.held_up:,} requests were held up by --concurrency, the longest {_time(report.held_up_s)}: "
            "times from their sending flatter the server",
        )
    if not report.sent_in_time:
        yield _line("", "THE CLIENT DID NOT KEEP UP: it sent late, and times from sending flatter the server")
    if not report.looked_in_time:
        yield _line("", "THE CLIENT DID NOT KEEP UP: it saw answers late, and its times are longer than the server's")


def _times(report: Report) -> Iterator[str]:
    yield _line("TTFT", _spread(report.ttft))
    if not report.sent_in_time or report.held_up:
        yield _line("TTFT from due", _spread(report.due_ttft))
    yield _line("TBT of pieces", _spread(report.tbt_gaps))
    yield _line("TBT of requests", _spread(report.tbt_means))


def _slos(report: Report) -> Iterator[str]:
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


def _tokens(report: Report) -> Iterator[str]:
    if report.hit_ratio is None:
        yield _line("hits", "unknown: no answer told cached_tokens")
    else:
        most = "" if math.isnan(report.reusable) else f"; an endless cache: {report.reusable:.1%}"
        few = "" if report.told_cached == report.completed else f" (told by {report.told_cached} answers)"
        yield _line(
            "hits",
            f"{report.cached_tokens:,} of {report.cached_of_tokens:,} prompt tokens, {report.hit_ratio:.1%}{few}{most}",
        )
        if report.already_cached:
            yield _line("", "MORE THAN THESE PROMPTS SHARE: the server was sent them before; take another --seed")
    if report.seconds > 0:
        prompts = (
            f"{report.prompt_tokens / report.seconds:,.0f} prompt" if report.told_prompts else "unknown of prompts"
        )
        yield _line("tokens/s", f"{prompts}, {report.output_tokens / report.seconds:,.0f} answered")
    off = report.length_errors
    if off.count:
        yield _line(
            "prompt lengths", f"told over wanted: mean {off.mean:+.1%}, p50 {off.p50:+.1%}, most {off.most:+.1%}"
        )


def _answers(report: Report) -> Iterator[str]:
    if report.completed:
        words = f"{report.output_tokens:,} tokens in {report.pieces:,} pieces"
        if report.short:
            words += f"; {report.short:,} answers shorter than asked for"
        if report.without_done:
            words += f"; {report.without_done:,} streams ended without [DONE]"
        yield _line("answers", words)


def _fault_lines(report: Report) -> Iterator[str]:
    for kind, count, first in report.faults:
        again = ""
        if kind.startswith("refused"):
            again = f"; {report.retry_after:,} of all refusals with Retry-After"
        yield _line("faults", f"{count:,} × {first[:200]}{again}")


def _line(name: str, words: str) -> str:
    return f"  {name:<{_NAME}}{words}"


def _spread(one: Spread) -> str:
    if not one.count:
        return "none"
    figures = (("mean", one.mean), ("p50", one.p50), ("p90", one.p90), ("p99", one.p99), ("most", one.most))
    return "  ".join(f"{name} {_time(value)}" for name, value in figures) + f"  ({one.count:,})"


def _time(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    if abs(seconds) < 1:
        return f"{seconds * 1000:.3g} ms" if abs(seconds) < 0.1 else f"{seconds * 1000:.0f} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


# What an engine itself counts in its /metrics, to hold a replay's report against: vLLM's names and SGLang's.


NAMES: Mapping[str, tuple[str, ...]] = {
    "requests": ("vllm:request_success_total", "sglang:num_requests_total"),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "cached_tokens": ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "output_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
}


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Since the engine began, or between two looks; None: it does not count that."""

    requests: float | None = None
    prompt_tokens: float | None = None
    cached_tokens: float | None = None
    output_tokens: float | None = None

    def since(self, before: EngineCounts) -> EngineCounts:
        return EngineCounts(*(_both(now, then, -1) for now, then in zip(self.all(), before.all(), strict=True)))

    def plus(self, other: EngineCounts) -> EngineCounts:
        return EngineCounts(*(_both(one, more, 1) for one, more in zip(self.all(), other.all(), strict=True)))

    def all(self) -> tuple[float | None, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


def samples_of(text: str) -> dict[str, float]:
    """What /metrics says, by name, over all labels."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    return samples


def counts_of(text: str) -> EngineCounts:
    """By what /metrics says."""
    samples = samples_of(text)
    told = {what: next((samples[name] for name in names if name in samples), None) for what, names in NAMES.items()}
    return EngineCounts(**told)


def _both(one: float | None, other: float | None, sign: int) -> float | None:
    return None if one is None or other is None else one + sign * other
