"""SkyMemory: a KV-cache memory hierarchy for LLM inference that reaches up to satellites in low Earth orbit.

Public names are loaded at their first use: a satellite never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from skymemory import errors

if TYPE_CHECKING:
    from skymemory.engine.transformers.huggingface import KVCManager
    from skymemory.kv.context import CacheContext
    from skymemory.store.memory import MemoryStore
    from skymemory.store.named_values import NamedValues
    from skymemory.testbed.open_store import open_store

__version__ = "0.1.0"
__all__ = ["CacheContext", "KVCManager", "MemoryStore", "NamedValues", "errors", "open_store"]

_HOME = {
    "CacheContext": "skymemory.kv.context",
    "KVCManager": "skymemory.engine.transformers.huggingface",
    "MemoryStore": "skymemory.store.memory",
    "NamedValues": "skymemory.store.named_values",
    "open_store": "skymemory.testbed.open_store",
}
_EXTRA = {"KVCManager": "hf"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'skymemory' has no attribute {name!r}: it offers {', '.join(__all__)}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if name not in _EXTRA or (error.name or "").startswith("skymemory"):
            raise
        raise errors.missing_extra(f"skymemory.{name}", str(error.name), _EXTRA[name]) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
