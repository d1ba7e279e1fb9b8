"""The releases of transformers that were tried, as in the extra "hf" of pyproject.toml."""

from __future__ import annotations

_FROM, _BELOW = (4, 57), (5, 25)
TRIED_TRANSFORMERS = f">= {_FROM[0]}.{_FROM[1]}, < {_BELOW[0]}.{_BELOW[1]}"


def is_tried(release: str) -> bool:
    """Return whether this release of transformers was tried, such as "5.24.0"."""
    return _FROM <= tuple(map(int, release.split(".")[:2])) < _BELOW
