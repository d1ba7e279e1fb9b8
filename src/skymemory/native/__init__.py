"""Hot loops: in C if the helper was compiled, else in Python (``twin``, whose docstrings document each function).
Without libcrypto, the twin hashes.

``SKYMEMORY_PURE_PYTHON=1`` in the environment forces the twin.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from skymemory.native.twin import backend
from skymemory.native.twin.nh import PAYLOAD_KEY_BYTES
from skymemory.native.twin.relay import BY_PLANE_LINK, BY_SLOT_LINK, Link, Passed, Slot, Transit
from skymemory.native.twin.runs import AnswerTerms, Guard, PlainRequests, Run, Served, Tally
from skymemory.native.twin.segments import Landing, Rows
from skymemory.native.twin.sockets import SLOT_BYTES, Ack, Arrival

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from skymemory.native.host import HostDirectory, HostReader, HostRoom, HostView
    from skymemory.native.twin.backend import *  # noqa: F403

__all__ = ["NATIVE", "SLOT_BYTES", "Ack", "AnswerTerms", "Arrival", "Guard", "Landing", "Rows", "Run"]
__all__ += ["BY_PLANE_LINK", "BY_SLOT_LINK", "Link", "Passed", "PlainRequests", "Served", "Slot", "Tally", "Transit"]
__all__ += ["HostDirectory", "HostReader", "HostRoom", "HostView"]
__all__ += ["PAYLOAD_KEY_BYTES", "chain_hashes", "crc32_chunks", "piece_hashes"]
__all__ += backend.__all__

_CRC, _HASH = np.dtype(np.uint32), np.dtype(np.uint64)
_OF_SHA = ("chain_sha256", "check_macs", "sign_packets", "strip_macs")


def _compiled() -> Any:
    if os.environ.get("SKYMEMORY_PURE_PYTHON", "0") not in ("", "0"):
        return None
    try:
        from skymemory.native import _fast
    except ImportError:
        return None
    missing = [name for name in backend.__all__ if not hasattr(_fast, name)]
    if missing:
        warnings.warn(
            f"the compiled helper is of another version (it lacks {', '.join(missing)}) and is not used, which is slow:"
            " install the package again, or in a checkout: python setup.py build_ext --inplace",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return _fast


_fast = _compiled()
NATIVE: bool = _fast is not None
for _name in backend.__all__:
    _from = backend if _fast is None or (_name in _OF_SHA and not _fast.sha_ready()) else _fast
    globals()[_name] = getattr(_from, _name)
for _name in ("HostDirectory", "HostReader", "HostRoom", "HostView"):
    globals()[_name] = getattr(_fast, _name, None)


def crc32_chunks(value: Buffer, chunk_bytes: int) -> backend.Crcs:
    """Return the CRC-32 of each ``chunk_bytes`` (uint32)."""
    if _fast is not None:
        return np.frombuffer(_fast.crc32_chunks(value, chunk_bytes), _CRC)
    return backend.crc32_chunks(value, chunk_bytes)


def chain_hashes(data: Buffer, block_bytes: int, seed: int) -> backend.Hashes:
    """Return the chained XXH64 of the whole blocks (uint64)."""
    if _fast is not None:
        return np.frombuffer(_fast.chain_hashes(data, block_bytes, seed), _HASH)
    return backend.chain_hashes(data, block_bytes, seed)


def piece_hashes(data: Buffer, block_bytes: int, seed: int) -> backend.Hashes:
    """Return the seeded XXH64 of each whole block (uint64)."""
    if _fast is not None:
        return np.frombuffer(_fast.piece_hashes(data, block_bytes, seed), _HASH)
    return backend.piece_hashes(data, block_bytes, seed)
