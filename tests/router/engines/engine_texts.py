"""Metrics as engines write them: vLLM's from a server of version 0.32, SGLang's from its documentation and source.

SGLang needs CUDA, so no text of a running one is here: names, labels and types follow its page *Production Metrics*
and its metrics collector.
"""

from __future__ import annotations

VLLM = b"""\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 11529.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="small"} 8.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="small"} 3.0
# HELP vllm:num_requests_waiting_by_reason Number of requests waiting to be processed, by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="small",reason="capacity"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="small",reason="deferred"} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="small"} 0.4375
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="small"} 1.2035e+04
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",\
gpu_memory_utilization="0.9",num_cpu_blocks="None",num_gpu_blocks="11560",num_gpu_blocks_override="None"} 1.0
# HELP vllm:lora_requests_info Running stats on lora requests.
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""} 1.7886264477368872e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql,chat",waiting_lora_adapters="de"} 1.7886264577e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters="old"} 1.788626454631e+09
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="small"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="small"} 12.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="small"} 12.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="small"} 0.7
# HELP vllm:request_prompt_tokens Number of prefill tokens processed.
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf",model_name="small"} 12.0
vllm:request_prompt_tokens_count{engine="0",model_name="small"} 12.0
vllm:request_prompt_tokens_sum{engine="0",model_name="small"} 12035.0
# HELP vllm:request_prefill_time_seconds Histogram of time spent in PREFILL phase for request.
# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_count{engine="0",model_name="small"} 12.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="small"} 0.6
# HELP vllm:request_prefill_kv_computed_tokens Histogram of new KV tokens computed during prefill
# TYPE vllm:request_prefill_kv_computed_tokens histogram
vllm:request_prefill_kv_computed_tokens_count{engine="0",model_name="small"} 12.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="small"} 9035.0
"""

VLLM_TWO_ENGINES = b"""\
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="200"} 1.0
"""

SGLANG = b"""\
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="meta-llama/Llama-3.1-8B-Instruct"} 8.128902e+06
# HELP sglang:token_usage The token usage
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.28
# HELP sglang:cache_hit_rate The cache hit rate
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate{model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.007507552643049313
# HELP sglang:num_running_reqs The number of running requests
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="meta-llama/Llama-3.1-8B-Instruct"} 162.0
# HELP sglang:num_queue_reqs The number of requests in the waiting queue
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="meta-llama/Llama-3.1-8B-Instruct"} 2826.0
# HELP sglang:cache_config_info Information of the cache config
# TYPE sglang:cache_config_info gauge
sglang:cache_config_info{num_pages="11147",page_size="64"} 1.0
"""

SGLANG_0_5_11 = b"""\
sglang:token_usage{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 0.25
sglang:token_usage{dp_rank="0",model_name="m",pp_rank="0",tp_rank="1"} 0.25
sglang:token_usage{dp_rank="1",model_name="m",pp_rank="0",tp_rank="0"} 0.75
sglang:num_running_reqs{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="0",model_name="m",pp_rank="0",tp_rank="1"} 3.0
sglang:num_running_reqs{dp_rank="1",model_name="m",pp_rank="0",tp_rank="0"} 4.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 5.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",pp_rank="0",tp_rank="1"} 5.0
sglang:num_queue_reqs{dp_rank="1",model_name="m",pp_rank="0",tp_rank="0"} 0.0
sglang:num_running_reqs_offline_batch{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 9.0
sglang:page_size{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 64.0
sglang:page_size{dp_rank="1",model_name="m",pp_rank="0",tp_rank="0"} 64.0
sglang:num_pages{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 11147.0
sglang:num_pages{dp_rank="1",model_name="m",pp_rank="0",tp_rank="0"} 11147.0
sglang:lora_pool_slots_used{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 2.0
sglang:lora_pool_slots_total{dp_rank="0",model_name="m",pp_rank="0",tp_rank="0"} 8.0
"""
