"""Load of engines, scraped from their ``/metrics`` (vLLM and SGLang) into ``ReportedLoad``s.

Each engine is scraped in its own task. Reports have times of ``time.monotonic``, and age until ``Server.fresh_report``
ignores them.

Names: vLLM ``vllm/v1/metrics/loggers.py``; SGLang ``docs/references/production_metrics.md`` (``sglang:page_size`` and
``sglang:num_pages`` since 0.5.11, labels of ``sglang:cache_config_info`` before).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
from yarl import URL

from skymemory.conductor.picker import DecodeTotals, PrefillTotals, ReportedLoad, Server
from skymemory.errors import SkyMemoryError, connection_reason
from skymemory.pacing import backoff_s
from skymemory.router.tasks import cancel
from skymemory.router.tls import Access

MAX_SERIES = 4096
"""Limit per name; each data-parallel rank has a series."""
MAX_ADAPTERS = 4096
MAX_LINE_BYTES = 256 * 1024
TIMEOUT_S = 2.0
MAX_BYTES = 4 * 1024 * 1024
EVERY_S = 0.5
SLOWEST_S = 10.0
JITTER = 0.2
_LARGEST = 1e12
_log = logging.getLogger("skymemory.router")

_LABEL = rb'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*+)"[ \t]*'
_EACH_LABEL = re.compile(_LABEL)
_SAMPLE = re.compile(rb"(?:\{((?:" + _LABEL + rb",?)*+)[ \t]*\})?[ \t]*([^ \t{},\"]+)(?:[ \t]+[-+.0-9eE]+)?[ \t\r]*")
_ESCAPES = re.compile(r"\\(.)")


class NoAnswer(SkyMemoryError): ...


class UnreadableMetrics(SkyMemoryError): ...


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    report: ReportedLoad
    dialect: str
    missing: tuple[str, ...]  # metrics that this engine lacks; the report has defaults


@dataclass(frozen=True, slots=True)
class Dialect:
    """An engine's names of its metrics, the newest first."""

    name: str
    waiting: tuple[str, ...]  # requests in the queue
    running: tuple[str, ...]
    kv_usage: tuple[str, ...]  # used share of the KV cache
    cache_info: str  # has the next two as labels
    block_label: str  # tokens per block
    blocks_label: str  # number of blocks
    block_gauge: str = ""  # metrics of the same
    blocks_gauge: str = ""
    adapters: str = ""  # LoRA adapters in use
    adapter_slots: str = ""  # LoRA adapters that fit
    # Histograms of requests: prompt tokens, computed tokens, seconds of the prefill.
    prefills: tuple[str, str, str] | None = None
    decodes: tuple[str, ...] = ()  # histogram of the seconds between two tokens

    @property
    def tokens(self) -> tuple[str, str]:
        return f"{self.name}:prompt_tokens_total", f"{self.name}:generation_tokens_total"


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
    decodes=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
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
    decodes=("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
)
DIALECTS = (VLLM, SGLANG)


def read_metrics(text: bytes, at_s: float) -> EngineMetrics:
    """Parse a report. Ranks are added up; their cache usage is averaged.

    Raises:
        UnreadableMetrics: neither vLLM's nor SGLang's metrics, or more than ``MAX_SERIES`` series.
    """
    dialect = next((dialect for dialect in DIALECTS if dialect.name.encode() + b":" in text), None)
    if dialect is None:
        raise UnreadableMetrics("neither vllm: nor sglang: metrics; does the engine run with metrics enabled?")
    text = b"\n" + text
    missing = []
    figures = []
    for names in (dialect.waiting, dialect.running, dialect.kv_usage):
        values = _get_values_by_rank(_find_first_usable(text, names))
        if not values:
            missing.append(names[0])
        figures.append(values)
    waiting, running, usage = figures
    blocks, block_tokens = _read_cache_size(text, dialect)
    if blocks is None or block_tokens is None:
        missing.append(dialect.cache_info)
    adapters, max_adapters = _read_adapters(text, dialect)
    report = ReportedLoad(
        at_s=at_s,
        waiting=round(sum(waiting)),
        running=round(sum(running)),
        kv_usage=min(1.0, sum(usage) / len(usage)) if usage else 0.0,
        cache_blocks=blocks,
        block_tokens=block_tokens,
        adapters=adapters,
        max_adapters=max_adapters,
        prefills=_read_prefills(text, dialect),
        decodes=_read_decodes(text, dialect),
        tokens=sum(sample.value for name in dialect.tokens for sample in _find_first_usable(text, (name,))),
    )
    return EngineMetrics(report, dialect.name, tuple(missing))


def samples(text: bytes, name: str) -> list[Sample]:
    """Return the series of ``name`` in ``text``, which begins with a line feed."""
    series: list[Sample] = []
    start = b"\n" + name.encode()
    at = text.find(start)
    while at >= 0:
        at += len(start)
        end = text.find(b"\n", at)
        end = len(text) if end < 0 else end
        # A letter here would belong to a longer name.
        if end - at <= MAX_LINE_BYTES and text[at : at + 1] in (b"{", b" ", b"\t"):
            sample = _read_sample(text[at:end])
            if sample is not None:
                series.append(sample)
                if len(series) > MAX_SERIES:
                    raise UnreadableMetrics(f"{name} has more than {MAX_SERIES} series")
        at = text.find(start, end)
    return series


def _read_sample(line: bytes) -> Sample | None:
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
    # The text format has three escapes; any other is literal.
    return {"n": "\n", "\\": "\\", '"': '"'}.get(match[1], match[0])


def _find_first_usable(text: bytes, names: tuple[str, ...]) -> list[Sample]:
    for name in names:
        usable = [sample for sample in samples(text, name) if 0.0 <= sample.value <= _LARGEST]
        if usable:
            return usable
    return []


def _get_values_by_rank(samples: list[Sample]) -> list[float]:
    """Return a value per engine (vLLM) or data-parallel rank (SGLang); tensor-parallel ranks agree."""
    values: dict[tuple[str, ...], float] = {}
    for sample in samples:
        rank = tuple(sample.labels.get(label, "") for label in ("model_name", "engine", "dp_rank"))
        values[rank] = max(sample.value, values.get(rank, 0.0))
    return list(values.values())


def _read_cache_size(text: bytes, dialect: Dialect) -> tuple[int | None, int | None]:
    """Return blocks and their size; None if sizes differ."""
    # Info metrics carry their values in labels, and have the value 1. SGLang has gauges since 0.5.11.
    by_rank: dict[tuple[str, str], tuple[int, int]] = {}
    for sample in samples(text, dialect.cache_info):
        blocks = _read_count(sample.labels.get(dialect.blocks_label, ""))
        tokens = _read_count(sample.labels.get(dialect.block_label, ""))
        if blocks is not None and tokens is not None:
            by_rank[sample.labels.get("engine", ""), sample.labels.get("dp_rank", "")] = (blocks, tokens)
    if by_rank:
        sizes = {tokens for _, tokens in by_rank.values()}
        return (sum(blocks for blocks, _ in by_rank.values()), sizes.pop()) if len(sizes) == 1 else (None, None)
    if dialect.block_gauge:
        sizes = {round(value) for value in _get_values_by_rank(_find_first_usable(text, (dialect.block_gauge,)))} - {0}
        pages = round(sum(_get_values_by_rank(_find_first_usable(text, (dialect.blocks_gauge,)))))
        if len(sizes) == 1 and pages:
            return pages, sizes.pop()
    return None, None


def _read_prefills(text: bytes, dialect: Dialect) -> PrefillTotals | None:
    """Return totals of prefills; None: not all are reported."""
    if dialect.prefills is None:
        return None
    sums = [sum(sample.value for sample in _find_first_usable(text, (f"{name}_sum",))) for name in dialect.prefills]
    counts = {sum(sample.value for sample in _find_first_usable(text, (f"{name}_count",))) for name in dialect.prefills}
    if len(counts) != 1 or not any(sums):
        return None
    tokens, computed, seconds = sums
    return PrefillTotals(counts.pop(), tokens, computed, seconds)


def _read_decodes(text: bytes, dialect: Dialect) -> DecodeTotals | None:
    """Return totals of the time between tokens; None: not reported."""
    for name in dialect.decodes:
        seconds, tokens = (samples(text, f"{name}_{kind}") for kind in ("sum", "count"))
        if seconds and tokens:
            return DecodeTotals(sum(one.value for one in tokens), sum(one.value for one in seconds))
    return None


def _read_count(word: str) -> int | None:
    """Parse a positive number: vLLM writes ``None`` until its cache exists."""
    return int(word) if word.isascii() and word.isdigit() and 0 < len(word) <= 12 and int(word) > 0 else None


def _read_adapters(text: bytes, dialect: Dialect) -> tuple[frozenset[str], int | None]:
    """Return the adapters in use, and how many the engine can hold. Of vLLM's series (values: timestamps) the newest
    counts.
    """
    if dialect.adapters:
        states = [sample for sample in samples(text, dialect.adapters) if math.isfinite(sample.value)]
        if not states:
            return frozenset(), None
        newest = max(states, key=lambda sample: sample.value).labels
        names = f"{newest.get('running_lora_adapters', '')},{newest.get('waiting_lora_adapters', '')}".split(",")
        return frozenset([name.strip() for name in names if name.strip()][:MAX_ADAPTERS]), _read_count(
            newest.get("max_lora", "")
        )
    slots = _get_values_by_rank(_find_first_usable(text, (dialect.adapter_slots,)))
    return frozenset(), round(min(slots)) or None if slots else None


class Fetch(Protocol):
    """Function that fetches a page.

    Raises:
        NoAnswer: no connection, no answer within ``timeout_s``, a status outside 200 to 299, a compressed body, or more
        than ``max_bytes``.
    """

    async def __call__(self, url: str, access: Access, *, timeout_s: float, max_bytes: int) -> bytes: ...


async def fetch(session: aiohttp.ClientSession, url: str, access: Access, *, timeout_s: float, max_bytes: int) -> bytes:
    try:
        async with asyncio.timeout(timeout_s):
            # Compression is refused: a few bytes could expand to gigabytes.
            headers = {"Accept-Encoding": "identity", **access.headers}
            async with session.get(
                URL(url, encoded=True), headers=headers, allow_redirects=False, ssl=access.tls or True
            ) as answer:
                if not 200 <= answer.status < 300:
                    raise NoAnswer(f"answered {answer.status}")
                if "Content-Encoding" in answer.headers:
                    raise NoAnswer("answered compressed, though identity was requested")
                body = bytearray()
                async for piece in answer.content.iter_chunked(64 * 1024):
                    body += piece
                    if len(body) > max_bytes:
                        raise NoAnswer(f"answered more than {max_bytes} B")
                return bytes(body)
    except TimeoutError as error:
        raise NoAnswer(f"did not answer within {timeout_s:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NoAnswer(connection_reason(error)) from error


async def fetch_metrics(
    fetch: Fetch,
    url: str,
    *,
    timeout_s: float = TIMEOUT_S,
    max_bytes: int = MAX_BYTES,
    clock: Callable[[], float] = time.monotonic,
    access: Access = Access(),  # noqa: B008 - immutable
) -> EngineMetrics:
    """Scrape ``url`` once. The report has the time of the request.

    Raises:
        UnreadableMetrics: no answer, or no engine's metrics.
    """
    at_s = clock()
    try:
        text = await fetch(url, access, timeout_s=timeout_s, max_bytes=max_bytes)
    except NoAnswer as error:
        raise UnreadableMetrics(f"{url}: {error}") from error
    return read_metrics(text, at_s)


@dataclass(slots=True, eq=False)
class Watched:
    """Engine whose metrics are scraped, and the results."""

    server: str
    url: str
    access: Access = field(default=Access(), repr=False)
    dialect: str = ""
    missing: tuple[str, ...] = ()
    error: str = ""
    looks: int = 0  # scrapes
    failures: int = 0
    failures_in_a_row: int = 0
    last_s: float | None = None  # time of the last report
    warned: set[tuple[str, ...]] = field(default_factory=set)  # missing metrics that were logged


class MetricsWatch:
    def __init__(
        self,
        server_of: Callable[[str], Server | None],
        fetch: Fetch,
        *,
        every_s: float = EVERY_S,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[str], None] = lambda server: None,
    ) -> None:
        """``server_of`` returns None for a removed server; ``read`` is called after a new report."""
        self.watched: dict[str, Watched] = {}
        self._server_of = server_of
        self._fetch = fetch
        self.every_s = every_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_read = read
        self._dice = random.Random(0)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def follow(self, server: str, url: str, access: Access = Access()) -> Watched:  # noqa: B008 - immutable
        self.unfollow(server)
        watched = self.watched[server] = Watched(server, url, access)
        self._tasks[server] = asyncio.create_task(self._keep_scraping(watched), name=f"metrics of {server}")
        return watched

    def unfollow(self, server: str) -> None:
        task = self._tasks.pop(server, None)
        if task is not None:
            task.cancel()
            del self.watched[server]

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for server in list(self._tasks):
            self.unfollow(server)
        await cancel(tasks)

    async def _keep_scraping(self, watched: Watched) -> None:
        while True:
            await self._scrape(watched)
            wait_s = backoff_s(watched.failures_in_a_row + 1, self.every_s, max(SLOWEST_S, self.every_s))
            await asyncio.sleep(wait_s * (1.0 + JITTER * (2.0 * self._dice.random() - 1.0)))

    async def _scrape(self, watched: Watched) -> None:
        watched.looks += 1
        try:
            metrics = await fetch_metrics(
                self._fetch,
                watched.url,
                timeout_s=self._timeout_s,
                clock=self._clock,
                access=watched.access,
            )
        except UnreadableMetrics as error:
            self._failed(watched, str(error))
        except Exception as error:  # no answer of an engine may end its task
            self._failed(watched, f"{type(error).__name__}: {error}")
        else:
            self._read(watched, metrics)

    def _failed(self, watched: Watched, error: str) -> None:
        if not watched.failures_in_a_row:
            _log.warning("metrics of %s cannot be read: %s", watched.server, error)
        watched.error = error
        watched.failures += 1
        watched.failures_in_a_row += 1

    def _read(self, watched: Watched, metrics: EngineMetrics) -> None:
        if watched.failures_in_a_row:
            _log.info("metrics of %s can be read again", watched.server)
        watched.error, watched.failures_in_a_row = "", 0
        watched.dialect, watched.missing = metrics.dialect, metrics.missing
        watched.last_s = metrics.report.at_s
        if metrics.missing and metrics.missing not in watched.warned:
            watched.warned.add(metrics.missing)
            missing = ", ".join(metrics.missing)
            _log.warning("metrics of %s (%s) lack %s; defaults are used", watched.server, metrics.dialect, missing)
        server = self._server_of(watched.server)
        if server is not None:
            server.reported = metrics.report
            self._on_read(watched.server)
