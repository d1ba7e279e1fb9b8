"""Requests without a prompt, as the picker sees them."""

from __future__ import annotations

import numpy as np

from skymemory.conductor.request import Prompt, Request
from skymemory.router.prompts import BYTES_PER_TOKEN

_NONE = np.empty(0, dtype=np.uint64)


def without_prompt(body: bytes) -> Request:
    """Nothing to match, and some work, by the size of the body."""
    return Request(Prompt(_NONE, _NONE, 16, max(1, len(body) // BYTES_PER_TOKEN)))
