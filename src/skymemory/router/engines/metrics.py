"""What an engine's ``/metrics`` text says, in vLLM's and SGLang's dialects, as a ``LoadReport``.

A line reader for the dozen names that matter, since an engine's text is tens to hundreds of kilobytes of histograms
that nobody here reads: each name is searched for by itself. ``prometheus_client.parser`` is the judge in the tests.

Names: vLLM ``vllm/v1/metrics/loggers.py``; SGLang ``docs/references/production_metrics.md`` and its metrics collector
(``sglang:page_size`` and ``sglang:num_pages`` since 0.5.11, labels of ``sglang:cache_config_info`` before).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from skymemory.conductor.fleet import LoadReport, PrefillTotals
from skymemory.errors import SkyMemoryError

MAX_SERIES = 4096
"""Series of one name that are read; an engine has one per data-parallel rank."""
MAX_ADAPTERS = 4096
MAX_LINE_BYTES = 256 * 1024
"""A line with more adapters than that names is not believed."""
_LARGEST = 1e12

_LABEL = rb'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*+)"[ \t]*'
_EACH_LABEL = re.compile(_LABEL)
_SAMPLE = re.compile(rb"(?:\{((?:" + _LABEL + rb",?)*+)[ \t]*\})?[ \t]*([^ \t{},\"]+)(?:[ \t]+[-+.0-9eE]+)?[ \t\r]*")
_ESCAPES = re.compile(r"\\(.)")


class UnreadableMetrics(SkyMemoryError):
    """A text that is no engine's metrics, or more of it than we read; the message says what was wrong."""


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One reading."""

    report: LoadReport
    dialect: str
    """``vllm`` or ``sglang``."""
    missing: tuple[str, ...]
    """Metrics that routing uses and this engine does not tell; the report has its defaults there."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Names of one engine's metrics, today's first and older ones behind."""

    name: str
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    kv_usage: tuple[str, ...]
    cache_info: str
    block_label: str
    blocks_label: str
    block_gauge: str = ""
    blocks_gauge: str = ""
    adapters: str = ""
    adapter_slots: str = ""
    prefills: tuple[str, str, str] | None = None
    """Histograms of requests that have ended: tokens of the prompt, those computed, and seconds of the prefill."""


VLLM = Dialect(
    "vllm",
    waiting=("vllm:num_requests_waiting",),
    running=("vllm:num_requests_running",),
    kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    cache_info="vllm:cache_config_info",
    block_label="block_size",
    blocks_label="num_gpu_blocks",
    adapters="vllm:lora_requests_info",
    prefills=(
        "vllm:request_prompt_tokens",
        "vllm:request_prefill_kv_computed_tokens",
        "vllm:request_prefill_time_seconds",
    ),
)
SGLANG = Dialect(
    "sglang",
    waiting=("sglang:num_queue_reqs",),
    running=("sglang:num_running_reqs",),
    kv_usage=("sglang:token_usage",),
    cache_info="sglang:cache_config_info",
    block_label="page_size",
    blocks_label="num_pages",
    block_gauge="sglang:page_size",
    blocks_gauge="sglang:num_pages",
    adapter_slots="sglang:lora_pool_slots_total",
)
DIALECTS = (VLLM, SGLANG)


def read_metrics(text: bytes, at_s: float) -> EngineMetrics:
    """The report in ``text``, as of ``at_s``. Ranks of one engine are added up; their cache use is averaged.

    Raises:
        UnreadableMetrics: no dialect that is known, or one name with more than ``MAX_SERIES`` series.
    """
    dialect = next((dialect for dialect in DIALECTS if dialect.name.encode() + b":" in text), None)
    if dialect is None:
        raise UnreadableMetrics("neither vllm: nor sglang: metrics; does the engine run with metrics enabled?")
    text = b"\n" + text
    missing = []
    figures = []
    for names in (dialect.waiting, dialect.running, dialect.kv_usage):
        values = _by_rank(_first(text, names))
        if not values:
            missing.append(names[0])
        figures.append(values)
    waiting, running, usage = figures
    blocks, block_tokens = _cache(text, dialect)
    if blocks is None or block_tokens is None:
        missing.append(dialect.cache_info)
    adapters, max_adapters = _adapters(text, dialect)
    report = LoadReport(
        at_s=at_s,
        waiting=round(sum(waiting)),
        running=round(sum(running)),
        kv_usage=min(1.0, sum(usage) / len(usage)) if usage else 0.0,
        cache_blocks=blocks,
        block_tokens=block_tokens,
        adapters=adapters,
        max_adapters=max_adapters,
        prefills=_prefills(text, dialect),
    )
    return EngineMetrics(report, dialect.name, tuple(missing))


def samples(text: bytes, name: str) -> list[Sample]:
    """Every series of ``name`` in ``text``, which begins with a line feed. Lines that are no samples are left out."""
    found: list[Sample] = []
    start = b"\n" + name.encode()
    at = text.find(start)
    while at >= 0:
        at += len(start)
        end = text.find(b"\n", at)
        end = len(text) if end < 0 else end
        # A longer name that begins like ours goes on with a letter.
        if end - at <= MAX_LINE_BYTES and text[at : at + 1] in (b"{", b" ", b"\t"):
            sample = _sample(text[at:end])
            if sample is not None:
                found.append(sample)
                if len(found) > MAX_SERIES:
                    raise UnreadableMetrics(f"{name} has more than {MAX_SERIES} series")
        at = text.find(start, end)
    return found


def _sample(line: bytes) -> Sample | None:
    match = _SAMPLE.fullmatch(line.lstrip(b" \t"))
    if match is None:
        return None
    try:
        value = float(match[4])
    except ValueError:
        return None
    labels = {}
    for label in _EACH_LABEL.finditer(match[1] or b""):
        word = label[2].decode("utf-8", "replace")
        labels[label[1].decode()] = _ESCAPES.sub(_unescape, word) if "\\" in word else word
    return Sample(labels, value)


def _unescape(match: re.Match[str]) -> str:
    # The text format knows three escapes; another one stands for itself.
    return {"n": "\n", "\\": "\\", '"': '"'}.get(match[1], match[0])


def _first(text: bytes, names: tuple[str, ...]) -> list[Sample]:
    """Series of the first name that has any which can be used: a figure, not below zero."""
    for name in names:
        usable = [sample for sample in samples(text, name) if 0.0 <= sample.value <= _LARGEST]
        if usable:
            return usable
    return []


def _by_rank(found: list[Sample]) -> list[float]:
    """One value per engine (vLLM) or data-parallel rank (SGLang): tensor-parallel ranks all tell the same."""
    values: dict[tuple[str, ...], float] = {}
    for sample in found:
        rank = tuple(sample.labels.get(label, "") for label in ("model_name", "engine", "dp_rank"))
        values[rank] = max(sample.value, values.get(rank, 0.0))
    return list(values.values())


def _cache(text: bytes, dialect: Dialect) -> tuple[int | None, int | None]:
    """Blocks of the cache and tokens of a block; ranks add up, if their blocks are of one size."""
    by_rank: dict[tuple[str, str], tuple[int, int]] = {}
    for sample in samples(text, dialect.cache_info):
        blocks = _count(sample.labels.get(dialect.blocks_label, ""))
        tokens = _count(sample.labels.get(dialect.block_label, ""))
        if blocks is not None and tokens is not None:
            by_rank[sample.labels.get("engine", ""), sample.labels.get("dp_rank", "")] = (blocks, tokens)
    if by_rank:
        sizes = {tokens for _, tokens in by_rank.values()}
        return (sum(blocks for blocks, _ in by_rank.values()), sizes.pop()) if len(sizes) == 1 else (None, None)
    if dialect.block_gauge:
        sizes = {round(value) for value in _by_rank(_first(text, (dialect.block_gauge,)))} - {0}
        pages = round(sum(_by_rank(_first(text, (dialect.blocks_gauge,)))))
        if len(sizes) == 1 and pages:
            return pages, sizes.pop()
    return None, None


def _prefills(text: bytes, dialect: Dialect) -> PrefillTotals | None:
    """Sums over all series; None unless all three histograms have seen the same requests."""
    if dialect.prefills is None:
        return None
    sums = [sum(sample.value for sample in _first(text, (f"{name}_sum",))) for name in dialect.prefills]
    counts = {sum(sample.value for sample in _first(text, (f"{name}_count",))) for name in dialect.prefills}
    if len(counts) != 1 or not any(sums):
        return None
    tokens, computed, seconds = sums
    return PrefillTotals(counts.pop(), tokens, computed, seconds)


def _count(word: str) -> int | None:
    """A number above zero: vLLM writes ``None`` before it has laid out its cache."""
    return int(word) if word.isascii() and word.isdigit() and 0 < len(word) <= 12 and int(word) > 0 else None


def _adapters(text: bytes, dialect: Dialect) -> tuple[frozenset[str], int | None]:
    """Adapters that run or wait, and how many the engine can hold at once.

    vLLM leaves a series behind for every state it was ever in, and the value says when that was: the newest counts.
    SGLang tells how many it can hold and not which it holds.
    """
    if dialect.adapters:
        states = [sample for sample in samples(text, dialect.adapters) if math.isfinite(sample.value)]
        if not states:
            return frozenset(), None
        newest = max(states, key=lambda sample: sample.value).labels
        names = f"{newest.get('running_lora_adapters', '')},{newest.get('waiting_lora_adapters', '')}".split(",")
        return frozenset([name.strip() for name in names if name.strip()][:MAX_ADAPTERS]), _count(
            newest.get("max_lora", "")
        )
    slots = _by_rank(_first(text, (dialect.adapter_slots,)))
    return frozenset(), round(min(slots)) or None if slots else None
