"""A step of training, as vLLM's workers are sent it: by name."""

from __future__ import annotations

from typing import Any


def change_weights(model: Any) -> None:
    """All parameters that are matrices are changed in place."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.copy_(parameter.data * 0.9 + parameter.data.roll(1, 0) * 0.2)
