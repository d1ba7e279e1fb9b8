"""vLLM with this cache: a KV connector for ``--kv-transfer-config`` (docs/guide/vllm.md)."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``SkyMemoryConnector`` and ``CakeScheduler``, imported when vLLM asks for them: all else here runs without it."""
    if name in ("SkyMemoryConnector", "CakeScheduler"):
        from skymemory.engine.vllm import connector

        return getattr(connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
