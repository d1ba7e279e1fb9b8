"""The media in which engines say that their blocks lie: few, whatever they are called.

Names differ: vLLM says ``GPU``, ``CPU`` and ``STORAGE`` (``vllm/distributed/kv_events.py``), its Mooncake connector and
LMCache ``cpu``, SGLang ``CPU_TIER1``. They are grouped as Dynamo's router does (``StorageTier::from_kv_medium``), and
compared in capitals. A name that is in no group is ``OTHER``: nothing is known of it, so it is taken for the slowest.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

GPU, CPU, DISK, REMOTE, OTHER = MEDIA = ("GPU", "CPU", "DISK", "REMOTE", "OTHER")
"""The nearest first."""
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "": GPU,
        **dict.fromkeys(("GPU", "DEVICE"), GPU),
        **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), CPU),
        **dict.fromkeys(("CPU_TIER2", "DISK", "NVME", "STORAGE"), DISK),
        **dict.fromkeys(("EXTERNAL", "NETWORK", "REMOTE", "SHARED"), REMOTE),
    }
)


def medium_of(name: str) -> str:
    """Which of ``MEDIA`` an engine means by ``name``; an engine that says none means the GPU's memory."""
    found = _NAMES.get(name)
    return _NAMES.get(name.upper(), OTHER) if found is None else found
