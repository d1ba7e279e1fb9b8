"""Settings in ``kv_connector_extra_config``, and refusals of unsupported vLLM configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skymemory.config import duration, filled, setting, size, text, whole_number
from skymemory.errors import InvalidInput
from skymemory.testbed.open_store import how_to_share, is_of_one_process

TESTED_VERSIONS = ("0.32",)
"""Tested releases of vLLM; others cause a warning."""


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    store: str = setting("store", text, "", "address of the store, such as unix:///run/sky.sock of a store daemon")
    value_tokens: int = setting(
        "value_tokens", whole_number, 128, "tokens stored under one key; whole blocks of vLLM's"
    )
    queue_bytes: int = setting("queue", size, 512 << 20, "bound on bytes that wait to be saved; more are not saved")
    drain_s: float = setting("drain", duration, 3.0, "how long a stopping engine goes on saving what waits")
    wait_s: float = setting("wait", duration, 5.0, "how long a load waits for the next value of another's prefill")

    def __post_init__(self) -> None:
        if not self.store:
            raise InvalidInput("store is missing: expected an address, such as unix:///run/sky.sock of a store daemon")
        if is_of_one_process(self.store):
            raise InvalidInput(
                f"store {self.store!r} belongs to one process, and vLLM's scheduler and workers are several: "
                f"{how_to_share(self.store)}"
            )
        if self.queue_bytes < 1:
            raise InvalidInput("queue: expected a size above 0")

    @classmethod
    def read(cls, extra_config: Mapping[str, Any]) -> ConnectorSettings:
        return filled(cls, extra_config, "kv_connector_extra_config")

    def blocks_per_value(self, block_tokens: int) -> int:
        """Return the blocks of a value, at least 1. Raises InvalidInput unless they are whole."""
        if self.value_tokens % block_tokens and self.value_tokens > block_tokens:
            raise InvalidInput(
                f"kv_connector_extra_config: value_tokens is {self.value_tokens}: expected a multiple of vLLM's block "
                f"size of {block_tokens} tokens"
            )
        return max(1, self.value_tokens // block_tokens)


def transfer_config(extra_config: Mapping[str, Any], role: str = "both") -> dict[str, Any]:
    """Return vLLM's ``--kv-transfer-config``: a ``producer`` only saves, a ``consumer`` only loads."""
    ConnectorSettings.read(extra_config)
    return {
        "kv_connector": "SkyMemoryConnector",
        "kv_connector_module_path": "skymemory.engine.vllm",
        "kv_role": f"kv_{role}",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra_config),
    }


def is_tested(version: str) -> bool:
    return version.startswith(tuple(f"{tested}." for tested in TESTED_VERSIONS))


def check_engine(config: Any, groups: Any) -> None:
    """Raise InvalidInput for a ``VllmConfig`` that would give wrong tokens, lost requests or no hits."""
    policy = config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise InvalidInput(
            f'kv_load_failure_policy is "{policy}": a block that fails to load would end its request without tokens. '
            'Write "kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )
    check_groups(groups)
    if not config.model_config.is_prefix_caching_supported:
        raise InvalidInput(f"this model's answers need all tokens of a prompt computed in one pass; {_WITHOUT}")
    latent = any(type(group.kv_cache_spec).__name__ == _LATENT for group in groups)
    if latent and config.device_config.device_type == "cpu" and not config.scheduler_config.enable_chunked_prefill:
        raise InvalidInput(
            "vLLM's attention for latent caches (MLA) on this CPU computes each prompt from its beginning, and would "
            "not see what is loaded: set VLLM_MLA_DISABLE=1, which keeps keys and values instead"
        )
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if (ranks := getattr(parallel, name, 1)) != 1:
            raise InvalidInput(f"{name} is {ranks}: only tensor parallelism is supported")
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "suffix"):
        raise InvalidInput(
            f"speculative decoding by {speculative.method!r}: a drafting model has keys and values of its own; only "
            "ngram and suffix are supported"
        )


_LATENT, _WINDOW, STATES = "MLAAttentionSpec", "SlidingWindowSpec", "MambaSpec"
_FULL = ("FullAttentionSpec", _LATENT)
_WITHOUT = "run this model without the connector: vLLM's own caching works as before"


@dataclass(frozen=True, slots=True)
class PartOfModel:
    """Groups of layers with the same window (None: all before), stored together.

    Recurrent states have a window of two tokens: the next token needs only the state after the last block.
    """

    groups: tuple[int, ...]
    window: int | None = None
    has_states: bool = False


def parts_of(groups: Any) -> list[PartOfModel]:
    """Return the parts of the KV cache groups; a part without a window is the first."""
    numbers_by_kind: dict[tuple[int | None, bool], list[int]] = {}
    for number, group in enumerate(groups):
        spec = group.kv_cache_spec
        kind = type(spec).__name__
        window = spec.sliding_window if kind == _WINDOW else 2 if kind == STATES else None
        numbers_by_kind.setdefault((window, kind == STATES), []).append(number)
    parts = [PartOfModel(tuple(numbers), window, states) for (window, states), numbers in numbers_by_kind.items()]
    return sorted(parts, key=lambda part: (part.window or 0, part.has_states))


def check_groups(groups: Any) -> None:
    """Raise InvalidInput for caches of a kind that cannot be stored."""
    if not groups:
        raise InvalidInput("this model keeps no keys and values that could be stored: run it without the connector")
    for group in groups:
        kind = type(group.kv_cache_spec).__name__
        if kind not in (*_FULL, _WINDOW, STATES):
            raise InvalidInput(
                f"layer {group.layer_names[0]} has a cache of vLLM's kind {kind}: expected keys and values of all "
                f"tokens or of a sliding window, or states ({', '.join((*_FULL, _WINDOW, STATES))}); {_WITHOUT}"
            )
        if kind == STATES:
            _check_states(group.kv_cache_spec)
        if kind == _WINDOW and group.kv_cache_spec.extra_retained_tokens:
            raise InvalidInput(f"windows are longer than the model's, for drafting: that is not supported; {_WITHOUT}")
    if len(sizes := sorted({group.kv_cache_spec.block_size for group in groups})) != 1:
        raise InvalidInput(f"blocks of {sizes} tokens in different layers: expected one size; {_WITHOUT}")


def _check_states(spec: Any) -> None:
    """Raise InvalidInput unless a slot of the block table has the state after exactly its blocks."""
    if spec.mamba_cache_mode != "align":
        raise InvalidInput(
            f'states are kept by mamba_cache_mode "{spec.mamba_cache_mode}", not at the ends of blocks: write '
            f"--enable-prefix-caching --mamba-cache-mode align, or {_WITHOUT}"
        )
    if spec.num_speculative_blocks or spec.num_prefill_checkpoint_blocks:
        raise InvalidInput(f"states of drafted tokens and checkpoints within blocks are not supported; {_WITHOUT}")
