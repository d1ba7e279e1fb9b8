"""One vLLM in this process, by vLLM's own Python interface: runs requests of a file and writes what came of them.

    .venv-vllm/bin/python tests/vllm/offline.py JOB.json RESULT.json

The job: ``engine`` (options of ``LLM``), ``transfer`` (of ``KVTransferConfig``, or null), ``pooling`` (vLLM's name of a
task, for a model that pools), ``rounds`` of requests (``tokens``, ``salt``, ``adapter``, ``max_tokens``, ``sampling``).
Before each round but the first vLLM's own prefix cache is emptied; before those in ``changed`` the weights are changed
in place, and the connector is reset, too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}
os.environ |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # a function is sent to the worker
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

COUNTS = {
    "vllm:external_prefix_cache_queries": "asked",
    "vllm:external_prefix_cache_hits": "external",
    "vllm:prefix_cache_hits": "local",
    "vllm:num_preemptions": "preemptions",
}


def sampling_of(request: dict[str, Any]) -> dict[str, Any]:
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    more = dict(request.get("sampling", {}))
    if "structured_outputs" in more:
        more["structured_outputs"] = StructuredOutputsParams(**more["structured_outputs"])
    if "logit_bias" in more:
        more["logit_bias"] = {int(token): bias for token, bias in more["logit_bias"].items()}
    if "output_kind" in more:
        more["output_kind"] = RequestOutputKind(more["output_kind"])
    return {"temperature": 0, "max_tokens": request["max_tokens"], "ignore_eos": True, **more}


def all_of(answer: Any) -> dict[str, Any]:
    """Tokens, text and why it ended, of each output; log probabilities by position, where asked."""

    def probabilities(positions: Any) -> list[Any]:
        found = []
        for at in range(len(positions or ())):
            one = positions[at]
            found.append(one and sorted((int(token), round(float(value.logprob), 2)) for token, value in one.items()))
        return found

    return {
        "outputs": [
            [list(one.token_ids), one.text, one.finish_reason, str(one.stop_reason), probabilities(one.logprobs)]
            for one in answer.outputs
        ],
        "prompt": probabilities(answer.prompt_logprobs),
    }


def main() -> None:
    from tests.vllm.weights import change_weights
    from vllm.config import KVTransferConfig, PoolerConfig
    from vllm.lora.request import LoRARequest

    from vllm import LLM, SamplingParams

    job = json.loads(Path(sys.argv[1]).read_text())
    task = job.get("pooling")
    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "disable_log_stats": False}
    if job["transfer"]:
        options["kv_transfer_config"] = KVTransferConfig(**job["transfer"])
    options |= job["engine"]
    if "pooler_config" in options:
        options["pooler_config"] = PoolerConfig(**options["pooler_config"])
    llm = LLM(**options)
    rounds: list[dict[str, Any]] = []
    before: dict[str, float] = {}

    def counted(prefix: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for one in llm.get_metrics():
            if one.name.startswith(prefix):
                label = one.labels.get("reason") or one.labels.get("source") or ""
                name = " ".join(filter(None, (one.name.removeprefix(prefix), label)))
                found[name] = found.get(name, 0) + one.value
        return found

    for number, requests in enumerate(job["rounds"]):
        if number:
            time.sleep(job.get("pause_s", 1.0))  # what is being saved
            if number in job.get("changed", ()):
                llm.apply_model(change_weights)
            assert llm.reset_prefix_cache(reset_connector=number in job.get("changed", ()))
        prompts = [{"prompt_token_ids": one["tokens"], "cache_salt": one.get("salt")} for one in requests]
        for prompt in prompts:
            if prompt["cache_salt"] is None:
                del prompt["cache_salt"]
        if task:
            pooled = llm.encode(prompts, pooling_task=task, use_tqdm=False)
            vectors = [one.outputs.data.tolist() for one in pooled]
            rounds.append({"vectors": vectors, "cached": [one.num_cached_tokens for one in pooled]})
            continue
        adapters = [LoRARequest("sql", 1, one["adapter"]) if one.get("adapter") else None for one in requests]
        sampling = [SamplingParams(**sampling_of(one)) for one in requests]
        by_priority = job["engine"].get("scheduling_policy") == "priority"
        priority = {"priority": [one["priority"] for one in requests]} if by_priority else {}
        began_s = time.monotonic()
        if job.get("one_by_one"):
            answers = [
                llm.generate(prompt, one, lora_request=adapter, use_tqdm=False)[0]
                for prompt, one, adapter in zip(prompts, sampling, adapters, strict=True)
            ]
        else:
            answers = llm.generate(prompts, sampling, lora_request=adapters, use_tqdm=False, **priority)
        now = {
            name: sum(one.value for one in llm.get_metrics() if one.name == metric) for metric, name in COUNTS.items()
        }
        rounds.append(
            {
                "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
                "answers": [all_of(answer) for answer in answers] if job.get("all") else [],
                "seconds": time.monotonic() - began_s,
                "cached": [answer.num_cached_tokens for answer in answers],
                "ttft_s": [answer.metrics.first_token_latency for answer in answers],
                **{name: value - before.get(name, 0) for name, value in now.items()},
                "counts": counted("vllm:skymemory_"),
                "sources": counted("vllm:prompt_tokens_cached_by_source"),
            }
        )
        before = now
    llm.llm_engine.engine_core.shutdown()  # else the process ends, with what waits to be saved
    Path(sys.argv[2]).write_text(json.dumps(rounds))


if __name__ == "__main__":
    main()
