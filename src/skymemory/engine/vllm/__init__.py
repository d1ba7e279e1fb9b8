"""vLLM with this cache: a KV connector for ``--kv-transfer-config`` (docs/guide/vllm.md)."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

NAME = "SkyMemoryConnector"


def register() -> None:
    """Makes the connector known to vLLM by its name, as ``MultiConnector`` looks up its children. vLLM calls this in
    each of its processes (entry point ``vllm.general_plugins``), and so does the connector's import by module path.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # it is known already
        KVConnectorFactory.register_connector(NAME, __name__, NAME)


def __getattr__(name: str) -> Any:
    """``SkyMemoryConnector`` and ``CakeScheduler``, imported when vLLM asks for them: all else here runs without it."""
    if name in ("SkyMemoryConnector", "CakeScheduler"):
        from skymemory.engine.vllm import connector

        return getattr(connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
