"""Every parameter of vLLM's requests: values to try it with, or why it is not. New ones make ``test_matrix`` fail."""

from __future__ import annotations

from typing import Any

SAMPLING: dict[str, list[dict[str, Any]]] = {
    "allowed_token_ids": [{"allowed_token_ids": [10, 20, 30, 40, 50]}],
    "bad_words": [{"bad_words": ["the", "command"]}],
    "detokenize": [{"detokenize": False}],
    "flat_logprobs": [{"flat_logprobs": True, "logprobs": 2}],
    "frequency_penalty": [{"frequency_penalty": 1.5}],
    "ignore_eos": [{"ignore_eos": False}],
    "include_stop_str_in_output": [{"include_stop_str_in_output": True, "stop": ["e"]}],
    "logit_bias": [{"logit_bias": {"17": 6.0, "23": 5.0}}],
    "logprob_token_ids": [{"logprob_token_ids": [7, 8, 9], "logprobs": 3}],
    "logprobs": [{"logprobs": 0}, {"logprobs": 5}],
    "max_tokens": [{"max_tokens": 1}, {"max_tokens": 40}],
    "min_p": [{"min_p": 0.2, "temperature": 0.7, "seed": 5}],
    "min_tokens": [{"min_tokens": 8, "ignore_eos": False}],
    "n": [{"n": 3, "temperature": 0.9, "seed": 3}],
    "output_kind": [{"output_kind": 2}],
    "presence_penalty": [{"presence_penalty": 1.5}],
    "prompt_logprobs": [{"prompt_logprobs": 0}, {"prompt_logprobs": 3}],
    "repetition_penalty": [{"repetition_penalty": 1.3}],
    "seed": [{"seed": 11, "temperature": 0.8}],
    "skip_reading_prefix_cache": [{"skip_reading_prefix_cache": True}, {"skip_reading_prefix_cache": False}],
    "skip_special_tokens": [{"skip_special_tokens": False}],
    "spaces_between_special_tokens": [{"spaces_between_special_tokens": False}],
    "stop": [{"stop": ["a"]}],
    "stop_token_ids": [{"stop_token_ids": list(range(0, 400, 7))}],
    "structured_outputs": [{"structured_outputs": {"regex": "[a-c]{6}"}}],
    "temperature": [{"temperature": 1.2, "seed": 9}],
    "top_k": [{"top_k": 4, "temperature": 0.9, "seed": 2}],
    "top_p": [{"top_p": 0.6, "temperature": 0.9, "seed": 4}],
}
NOT_TRIED = {
    "extra_args": "of custom processors and plug-ins",
    "output_text_buffer_length": "set by vLLM",
    "prompt_logprob_start": "of model runner V2, which needs Triton",
    "prompt_logprob_token_ids": "of model runner V2, which needs Triton",
    "repetition_detection": "ends an answer by what it says, as a stop string does",
    "routed_experts_prompt_start": "of models with experts whose routes are returned",
    "skip_clone": "of vLLM's own calls",
    "stream_interval": "of the server's streams",
    "thinking_token_budget": "of reasoning models",
    "trace_decode_token_ids": "of traces",
    "watermarking": "not built for CPUs",
}
