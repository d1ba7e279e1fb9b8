"""Texts of both dialects are read as ``prometheus_client`` reads them; what is wrong with one is said."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.router.engines.engine_texts import SGLANG, SGLANG_0_5_11, VLLM, VLLM_TWO_ENGINES

from skymemory.conductor.picker import PrefillTotals
from skymemory.router.engines.engine_metrics import UnreadableMetrics, read_metrics, samples


def test_vllm() -> None:
    metrics = read_metrics(VLLM, at_s=7.0)
    report = metrics.report
    assert (metrics.dialect, metrics.missing) == ("vllm", ())
    assert (report.at_s, report.waiting, report.running, report.kv_usage) == (7.0, 3, 8, 0.4375)
    assert (report.cache_blocks, report.block_tokens) == (11560, 16)
    # Three states were left behind; the newest is the one with the largest value.
    assert (report.adapters, report.max_adapters) == (frozenset({"sql", "chat", "de"}), 4)


def test_prefill_times_are_read_where_all_of_them_are_reported() -> None:
    assert read_metrics(VLLM, 0.0).report.prefills == PrefillTotals(12, 12_035, 9_035, 0.6)
    older = VLLM.replace(b"vllm:request_prefill_kv_computed", b"vllm:request_other")
    assert read_metrics(older, 0.0).report.prefills is None
    uneven = VLLM.replace(b'vllm:request_prefill_time_seconds_count{engine="0",model_name="small"} 12', b"x 12")
    assert read_metrics(uneven, 0.0).report.prefills is None
    assert read_metrics(SGLANG, 0.0).report.prefills is None


def test_sglang_before_and_since_its_gauges_of_pages() -> None:
    old, new = read_metrics(SGLANG, 1.0), read_metrics(SGLANG_0_5_11, 1.0)
    assert (old.dialect, old.missing, new.missing) == ("sglang", (), ())
    assert (old.report.waiting, old.report.running, old.report.kv_usage) == (2826, 162, 0.28)
    assert (old.report.cache_blocks, old.report.block_tokens) == (11147, 64)
    assert (new.report.cache_blocks, new.report.block_tokens, new.report.max_adapters) == (2 * 11147, 64, 8)
    # Two data-parallel ranks add up; the second tensor-parallel rank of the first reports the same thing again.
    assert (new.report.waiting, new.report.running, new.report.kv_usage) == (5, 7, 0.5)


def test_engines_behind_one_address_add_up() -> None:
    report = read_metrics(VLLM_TWO_ENGINES, 0.0).report
    assert (report.waiting, report.running, report.kv_usage, report.cache_blocks) == (5, 3, 0.5, 300)


def test_tokens_of_prompts_and_answers_are_added_up() -> None:
    assert read_metrics(VLLM, 0.0).report.tokens == 0.0
    assert read_metrics(SGLANG, 0.0).report.tokens == 8_128_902
    more = VLLM + b'vllm:prompt_tokens_total{engine="0"} 100\nvllm:generation_tokens_total{engine="0"} 7\n'
    assert read_metrics(more, 0.0).report.tokens == 107.0


def test_what_a_dialect_lacks_is_named_and_the_rest_is_read() -> None:
    renamed = VLLM.replace(b"vllm:num_requests_waiting", b"vllm:queue_length")
    metrics = read_metrics(renamed, 0.0)
    assert metrics.missing == ("vllm:num_requests_waiting",)
    assert (metrics.report.waiting, metrics.report.running) == (0, 8)
    early = read_metrics(VLLM.replace(b'num_gpu_blocks="11560"', b'num_gpu_blocks="None"'), 0.0)
    assert early.missing == ("vllm:cache_config_info",) and early.report.cache_blocks is None
    aged = read_metrics(VLLM.replace(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"), 0.0)
    assert aged.missing == () and aged.report.kv_usage == 0.4375


@pytest.mark.parametrize("value", [b"NaN", b"-1.0", b"+Inf", b"1e300", b"many", b""])
def test_figures_that_cannot_be_are_not_believed(value: bytes) -> None:
    line = b'vllm:num_requests_waiting{engine="0"} ' + value
    metrics = read_metrics(line + b"\nvllm:num_requests_running 2\n", 0.0)
    assert "vllm:num_requests_waiting" in metrics.missing and metrics.report.waiting == 0
    assert metrics.report.running == 2


def test_block_sizes_that_differ_behind_one_address_are_not_averaged() -> None:
    text = VLLM_TWO_ENGINES.replace(b'block_size="16",engine="1"', b'block_size="32",engine="1"')
    assert read_metrics(text, 0.0).missing == ("vllm:cache_config_info",)


@pytest.mark.parametrize("text", [b"", b"<html>404</html>", b"python_gc_objects_collected_total 1\n"])
def test_what_is_no_engine_is_refused(text: bytes) -> None:
    with pytest.raises(UnreadableMetrics, match="metrics enabled"):
        read_metrics(text, 0.0)


def test_hostile_texts_cost_little() -> None:
    with pytest.raises(UnreadableMetrics, match="more than 4096 series"):
        read_metrics(b'vllm:num_requests_waiting{engine="0"} 1\n' * 5000, 0.0)
    hostile = [
        b"vllm:num_requests_waiting{" + b'a="b",' * 40_000 + b"} 1 1 1\n",
        b'vllm:num_requests_waiting{a="' + b"\\" * 200_000 + b"\n",
        b"vllm:num_requests_waiting{" + b" " * 250_000,
        b"vllm:num_requests_waiting " + b"9" * 250_000,
        b"\nvllm:num_requests_waitin" * 170_000,
        b'vllm:lora_requests_info{max_lora="1",running_lora_adapters="' + b"a," * 120_000 + b'"} 1\n',
    ]
    began = time.process_time()
    for text in hostile:
        assert len(read_metrics(text, 0.0).report.adapters) <= 4096
    assert time.process_time() - began < 2.0


NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,6}", fullmatch=True).filter(lambda name: not name.startswith("__"))
WORDS = st.text(st.characters(codec="utf-8"), max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.dictionaries(NAMES.filter(lambda n: n not in ("le", "quantile")), WORDS, max_size=3), st.floats()),
        max_size=4,
    )
)
@example([({"a": '\\"\n,}{ '}, 1.0), ({"a": "\\n"}, float("nan"))])
def test_the_reader_reads_what_the_library_wrote_as_the_library_does(rows: list[tuple[dict[str, str], float]]) -> None:
    lines = []
    for labels, value in rows:
        registry = CollectorRegistry()
        gauge = Gauge("vllm:num_requests_waiting", "h", sorted(labels), registry=registry)
        (gauge.labels(**labels) if labels else gauge).set(value)
        lines += [line for line in generate_latest(registry).split(b"\n") if line and not line.startswith(b"#")]
    text = b"\n".join([b"", *lines, b"vllm:num_requests_waiting_by_reason 5", b"other 1", b""])
    judged = [
        (sample.labels, repr(float(sample.value)))
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == "vllm:num_requests_waiting"
    ]
    read = [(sample.labels, repr(sample.value)) for sample in samples(text, "vllm:num_requests_waiting")]
    assert read == judged


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for text in (b"vllm:num_requests_waiting" + data, b"vllm:cache_config_info{" + data, b"sglang:num_pages " + data):
        read_metrics(text, 0.0)
