"""What an engine itself counts in its /metrics, to hold a replay's report against: vLLM's names and SGLang's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

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
    told = {
        what: next((samples[name] for name in names if name in samples), None)
        for what, names in NAMES.items()
    }  # fmt: skip
    return EngineCounts(**told)


def _both(one: float | None, other: float | None, sign: int) -> float | None:
    return None if one is None or other is None else one + sign * other
