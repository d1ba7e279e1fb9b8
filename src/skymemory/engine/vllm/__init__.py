"""vLLM with this cache: a KV connector for ``--kv-transfer-config`` (docs/guide/vllm.md)."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``SkyMemoryConnector``, imported when vLLM asks for it: all else here runs without vLLM."""
    if name == "SkyMemoryConnector":
        from skymemory.engine.vllm.connector import SkyMemoryConnector

        return SkyMemoryConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
