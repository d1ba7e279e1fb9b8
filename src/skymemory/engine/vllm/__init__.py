"""vLLM with this cache: a KV connector for ``--kv-transfer-config`` (docs/guide/vllm.md)."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

NAME = "SkyMemoryConnector"


def register() -> None:
    """Register the connector under the name by which ``MultiConnector`` finds it. vLLM calls this in each of its
    processes (entry point ``vllm.general_plugins``).
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(NAME, __name__, NAME)


def __getattr__(name: str) -> Any:
    """Import the connector on request: other modules run without vLLM."""
    if name in ("SkyMemoryConnector", "CakeScheduler"):
        from skymemory.engine.vllm import connector

        return getattr(connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
