"""Cost models by name, of machines with published prefills and decoding steps.

Decoding constants are fitted (``fit.fit_decode``) to the published steps, prefills (``fit.fit_prefill``) where at least
three lengths were published. The points, the errors and held-out points: ``tests/conductor/test_cost_presets.py`` and
docs/guide/fitting.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from skymemory.conductor.cost_model.model import (
    EIGHT_A100,
    EIGHT_H800,
    FOUR_A100,
    LLAMA_70B,
    ONE_L4,
    QWEN_7B,
    CostModel,
    LLAMA_70B_8xA800,
)

LLAMA_70B_8xA100 = CostModel(
    replace(LLAMA_70B, attention_flops=24.3),
    EIGHT_A100,
    mfu=0.542,
    fixed_s=0.0466,
    memory_share=0.194,
    decode_request_s=3.27e-4,
)
"""LLaMA-2-70B in vLLM on a DGX-A100, eight A100-80GB: 43 to 72 ms a step.

Source: ``data/perf_model.csv`` of SplitwiseSim (github.com/Mutinifni/splitwise-sim at 8f99e7d; Patel et al.,
"Splitwise", ISCA 2024), tensor parallel 8, medians of five runs. 13 decoding steps (batches of 1 to 64 at 576 tokens,
one request of 192 to 8,256): error 2.1 % on average, 6.8 % at worst. Seven prompts of 128 to 8,192 tokens: 4.2 and
11.3 %; longer ones are extrapolated. Batches of long contexts were not published: these points do not
separate reading from fixed time (full bandwidth and 36 ms fixed would have an error of 2.3 %).
"""

LLAMA_70B_4xA100 = CostModel(
    LLAMA_70B, FOUR_A100, mfu=0.55, fixed_s=0.05, memory_share=0.6145, decode_fixed_s=0.00215, decode_request_s=1.093e-4
)
"""LLaMA-2-70B in LMDeploy's TurboMind on four A100-80GB: 29 to 55 ms a step.

Source: ``docs/en/benchmark/a100_fp16.md`` of github.com/InternLM/lmdeploy at 3e391df (version 0.1.0a1, CUDA 11.8),
"Static Inference Benchmark", llama2-70b: median time between tokens, in whole milliseconds. 20 steps (batches of 1 to
64 at 65 to 3,072 tokens): error 4.0 % on average, 9.2 % at worst (64 requests of 3,072 tokens). The prefill follows
from two prompts (128 and 2,048 tokens: 2 and 4 %).
"""

LLAMA_70B_8xH800 = CostModel(
    replace(LLAMA_70B, attention_flops=62.9),
    EIGHT_H800,
    mfu=0.588,
    fixed_s=0.0446,
    memory_share=0.187,
    decode_fixed_s=0.00168,
    decode_request_s=2.82e-4,
)
"""LLaMA-2-70B in vLLM on a DGX-H100, eight H100-80GB: 28 to 50 ms a step.

No published steps of a dense model on H800 were found. An H800 has the arithmetic and memory of the H100 and less than
half of its NVLink, which these figures ignore. Source as for ``LLAMA_70B_8xA100``. 13 decoding steps: error 1.8 %
 on average, 5.8 % at worst. Seven prompts of 128 to 8,192 tokens: 8.4 and 23.8 %; longer ones are extrapolated.
"""

QWEN_7B_L4 = CostModel(
    QWEN_7B, ONE_L4, mfu=0.55, fixed_s=0.06, memory_share=0.9395, decode_fixed_s=0.00406, decode_request_s=2.54e-4
)
"""Qwen2.5-7B-Instruct (16 bits) in vLLM 0.8.5 on one L4: 58 to 76 ms a step.

Source: ``raw/`` and ``results/summary.csv`` of github.com/ree2raz/inference-bench at 6219100, regime "short", median
time per output token of 100 requests, the median of three runs. Five steps (batches of 1 to 64 at about 109 tokens):
error 0.8 % on average, 1.4 % at worst. The prefill follows from two prompts (45 and 1,800 tokens).
"""

PRESETS: Mapping[str, CostModel] = {
    "llama-70b-8xa800": LLAMA_70B_8xA800,
    "llama-70b-8xa100": LLAMA_70B_8xA100,
    "llama-70b-4xa100": LLAMA_70B_4xA100,
    "llama-70b-8xh800": LLAMA_70B_8xH800,
    "qwen-7b-l4": QWEN_7B_L4,
}
"""Names for ``--cost``. The first is Mooncake's, with nothing measured."""
