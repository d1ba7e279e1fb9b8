"""A replay's report as lines for people."""

from __future__ import annotations

import math
from collections.abc import Iterator

from skymemory.serving.replay.figures import Spread
from skymemory.serving.replay.report import Report

_NAME = 16


def lines_of(report: Report) -> list[str]:
    """All of it; what was not asked or not told is said to be so."""
    parts = (_counts, _lateness, _times, _slos, _tokens, _answers, _faults)
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


def _faults(report: Report) -> Iterator[str]:
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
