"""Tried releases of transformers, as in the extra "hf" of pyproject.toml."""

from __future__ import annotations

_FROM, _BELOW = (4, 57), (5, 25)
_NEXT_MAJOR = (6, 0)
TRIED_TRANSFORMERS = f">= {_FROM[0]}.{_FROM[1]}, < {_BELOW[0]}.{_BELOW[1]}"


def is_tried(release: str) -> bool:
    return _FROM <= _number(release) < _BELOW


def is_admitted(release: str) -> bool:
    """Return True for a tried release, or a later release of its major version, whose hits are tried with each
    model.
    """
    return _FROM <= _number(release) < _NEXT_MAJOR


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")[:2]))
