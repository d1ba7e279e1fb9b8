"""What has become of each request of a run: it is open, or it has ended, once."""

from __future__ import annotations

from skymemory.sim.cluster.job import Job
from skymemory.sim.cluster.outcome import RequestOutcome, Span, Status


class Accounts:
    def __init__(self, spans: bool) -> None:
        self.open: dict[int, Job] = {}
        """Requests that have come and are not over, by number."""
        self.spans: list[Span] = []
        self._keeps_spans = spans
        self._ended: dict[int, RequestOutcome] = {}

    def outcomes(self, requests: int) -> list[RequestOutcome]:
        """Of a run of so many requests that is over."""
        assert not self.open and len(self._ended) == requests, "every request ends, and ends once"
        return [self._ended[number] for number in range(requests)]

    def completed(self, job: Job, now_s: float, worst_s: float | None) -> None:
        """``worst_s``: the longest time between two of its tokens; None where it has but one."""
        mean_s = (now_s - job.first_token_s) / (job.output_tokens - 1) if job.output_tokens > 1 else None
        self._close(job, "completed", now_s, job.first_token_s - job.at_s, mean_s, worst_s)

    def not_served(self, job: Job, status: Status, now_s: float) -> None:
        self._close(job, status, now_s, None, None, None)

    def span(self, instance: str, what: str, begin_s: float, end_s: float, job: Job) -> None:
        if self._keeps_spans:
            self.spans.append(Span(instance, what, begin_s, end_s, job.number))

    def _close(
        self, job: Job, status: Status, now_s: float, ttft_s: float | None, mean_s: float | None, worst_s: float | None
    ) -> None:
        assert job.number not in self._ended, "a request ends once"
        job.over = True
        del self.open[job.number]
        began, prefilled = job.begun_s >= 0, job.prefilled
        if prefilled:
            cached = job.held_tokens + sum(job.sources.values())
            assert job.computed_tokens + cached == job.prompt_tokens, "all of a prompt is cached or computed"
        self._ended[job.number] = RequestOutcome(
            at_s=job.at_s,
            status=status,
            prompt_tokens=job.prompt_tokens,
            output_tokens=job.output_tokens,
            prefill=job.prefill if began else None,
            decode=job.decode if status == "completed" else None,
            held_tokens=job.held_tokens if prefilled else 0,
            loaded_tokens=job.sources if prefilled else {},
            computed_tokens=job.computed_tokens if prefilled else 0,
            queue_s=job.begun_s - job.at_s if began else 0.0,
            prefill_s=job.spent_s,
            ttft_s=ttft_s,
            end_s=now_s,
            tbt_mean_s=mean_s,
            tbt_max_s=worst_s,
        )
