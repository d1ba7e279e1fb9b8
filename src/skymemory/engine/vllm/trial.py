"""Tried at start, on the very engine, instead of asking for its name: vLLM's interface, and copies of its blocks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from skymemory.engine.vllm.copier import PartCopier
from skymemory.errors import InvalidInput


def try_copier(copier: PartCopier, groups: Sequence[int], value_blocks: int, blocks: int) -> int:
    """Writes noise into blocks that no request has yet, of each of a part's ``groups``, reads it back, and puts back
    what was there; returns the number of blocks tried.

    Raises:
        InvalidInput: with what differed.
    """
    each = min(value_blocks, (blocks - 1) // (2 * len(groups)))
    if not each:
        return 0
    # Different ones in each group, since groups may share their memory; every second one stays as it is.
    chosen = np.linspace(1, blocks - 1, 2 * each * len(groups)).round().astype(int)
    ours = [
        [int(one) for one in chosen[2 * number * each : 2 * (number + 1) * each : 2]] for number in range(len(groups))
    ]
    others = [[block + 1 if block + 1 < blocks else 0 for block in some] for some in ours]
    size_bytes = copier.block_bytes * each

    def read(which: Sequence[Sequence[int]]) -> bytes:
        (out, *_) = copier.buffers(size_bytes)
        copier.read(which, out[:size_bytes]).wait()
        return bytes(out[:size_bytes])

    def write(value: bytes) -> None:
        copier.write(ours, memoryview(value), 0, each, copier.mark()).wait()

    before, beside = read(ours), read(others)
    noise = np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8).tobytes()
    write(noise)
    found, beside_now = read(ours), read(others)
    write(before)
    for what, expected, was in (
        ("written into blocks and read back", noise, found),
        ("of other blocks, which nothing was written into", beside, beside_now),
        ("put back into blocks", before, read(ours)),
    ):
        if expected != was:
            wrong = int(np.count_nonzero(np.frombuffer(expected, np.uint8) != np.frombuffer(was, np.uint8)))
            raise InvalidInput(
                f"{wrong} of {size_bytes} bytes {what} differ in the caches of groups {str(list(groups))[1:-1]}: "
                "this attention backend keeps its blocks in an unsupported way; run vLLM without the connector"
            )
    return each * len(groups)


def check_interface(ours: type, theirs: type, added: Iterable[str] = ()) -> None:
    """Compares the methods of a connector with those of vLLM's base class; ``added``: those that only ours has.

    Raises:
        InvalidInput: vLLM has one no more, or calls it with other arguments.
    """
    for name, method in vars(ours).items():
        if name.startswith("_") or name in added or not callable(getattr(ours, name)):
            continue
        base = getattr(theirs, name, None)
        if base is None:
            raise InvalidInput(f"this vLLM does not call {name}(), which the connector relies on")
        if (wanted := _arguments(base)) != (had := _arguments(method)):
            raise InvalidInput(f"this vLLM calls {name}({', '.join(wanted)}): expected {name}({', '.join(had)})")


def _arguments(method: Any) -> list[str]:
    """Names of those that must be given."""
    method = method.__func__ if isinstance(method, classmethod) else method
    listed = inspect.signature(method).parameters.values()
    named = [one.name for one in listed if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty]
    return [name for name in named if name not in ("self", "cls")]
