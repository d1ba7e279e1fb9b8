"""Prometheus metrics of the engine, with the names of vLLM's /metrics."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class PublishedMetrics:
    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        names = list(self._labels)

        def counter(name: str, words: str, *more: str) -> Counter:
            return Counter(f"vllm:{name}", words, [*names, *more], registry=self._registry)

        self._queries = counter("prefix_cache_queries", "Tokens of prompts that were looked up.").labels(**self._labels)
        self._hits = counter("prefix_cache_hits", "Of those, the ones the cache supplied.").labels(**self._labels)
        self._prompt = counter("prompt_tokens", "Tokens of prompts.").labels(**self._labels)
        self._generation = counter("generation_tokens", "Tokens generated.").labels(**self._labels)
        # Not in vLLM: processor time, which other load on the machine does not change.
        self._spent = {
            name: Counter(f"skymemory:{name}_processor_seconds", words, names, registry=self._registry).labels(
                **self._labels
            )
            for name, words in (
                ("prefill", "Processor time of the engine's thread for prompts, up to their first tokens."),
                ("decode", "Processor time of the engine's thread for the tokens after the first."),
            )
        }

        def of_ours(name: str, words: str) -> Counter:
            return Counter(f"skymemory:{name}", words, names, registry=self._registry).labels(**self._labels)

        self._waited = of_ours("remote_prefill_requests", "Requests whose prompt another engine prefilled.")
        self._waited_s = of_ours("remote_prefill_wait_seconds", "Time those waited for its blocks, loading included.")
        self._given_up = of_ours(
            "remote_prefill_given_up", "Of those requests, the ones whose blocks did not all come in time."
        )
        self._fetched = of_ours("store_fetched_blocks", "Blocks fetched from the store.")
        self._saved = of_ours("store_saved_blocks", "Blocks of prompts that the store has, or has taken.")
        self._unsaved = of_ours("store_unsaved_blocks", "Blocks that the store did not take.")
        self._ended = counter("request_success", "Requests ended, by how.", "finished_reason")

        def histogram(name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(f"vllm:{name}", words, names, buckets=buckets, registry=self._registry)
            return metric.labels(**self._labels)

        self._ttft = histogram("time_to_first_token_seconds", "From the request to its first token.", _TTFT_S)
        # Counted when a request has ended, as in vLLM; routers learn the engine's speed from these.
        self._prompts = histogram("request_prompt_tokens", "Tokens of the prompt.", _TOKENS)
        self._computed = histogram(
            "request_prefill_kv_computed_tokens", "Of those, the ones that the cache did not supply.", _TOKENS
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "From when its prefill began to its first token.", _TTFT_S
        )

    def watch(
        self,
        *,
        waiting: Callable[[], int],
        running: Callable[[], int],
        usage: Callable[[], float],
        block_tokens: int,
        blocks: int,
    ) -> None:
        """Register gauges that read the engine at each scrape."""
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "num_requests_waiting": ("Requests that wait for their prefill.", waiting),
            "num_requests_running": ("Requests in prefill or being answered.", running),
            "kv_cache_usage_perc": ("Tokens of running requests as a part of what the cache holds, 0 to 1.", usage),
        }
        for name, (words, read) in gauges.items():
            gauge = Gauge(f"vllm:{name}", words, list(self._labels), registry=self._registry)
            gauge.labels(**self._labels).set_function(read)
        info = {"block_size": str(block_tokens), "num_gpu_blocks": str(blocks), "enable_prefix_caching": "True"}
        info["engine"] = "0"
        Gauge("vllm:cache_config_info", "The cache's shape.", list(info), registry=self._registry).labels(**info).set(1)

    def looked_up(self, tokens: int, cached: int) -> None:
        self._queries.inc(tokens)
        self._hits.inc(cached)
        self._prompt.inc(tokens)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def spent(self, prefill_s: float = 0.0, decode_s: float = 0.0) -> None:
        self._spent["prefill"].inc(prefill_s)
        self._spent["decode"].inc(decode_s)

    def prefilled(self, tokens: int, cached: int, seconds: float) -> None:
        self._prompts.observe(tokens)
        self._computed.observe(tokens - cached)
        self._prefill.observe(seconds)

    def waited(self, seconds: float, given_up: bool) -> None:
        self._waited.inc()
        self._waited_s.inc(seconds)
        self._given_up.inc(given_up)

    def fetched(self, blocks: int) -> None:
        self._fetched.inc(blocks)

    def saved(self, blocks: int, unsaved: int) -> None:
        self._saved.inc(blocks)
        self._unsaved.inc(unsaved)

    def generated(self) -> None:
        self._generation.inc()

    def on_request_end(self, reason: str) -> None:
        self._ended.labels(**self._labels, finished_reason=reason).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
