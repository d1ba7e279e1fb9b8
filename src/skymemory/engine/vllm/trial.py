"""Trials at start on the running engine: vLLM's interface, and copies of its blocks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from skymemory.engine.vllm.copier import PartCopier
from skymemory.errors import InvalidInput


def try_copier(copier: PartCopier, groups: Sequence[int], value_blocks: int, blocks: int) -> int:
    """Write noise into unused blocks of each group, read it back, and restore the blocks; returns their number.

    Raises:
        InvalidInput: describes what differed.
    """
    blocks_per_group = min(value_blocks, (blocks - 1) // (2 * len(groups)))
    if not blocks_per_group:
        return 0
    # Different blocks in each group, since groups may share their memory; every second block stays unchanged.
    chosen = np.linspace(1, blocks - 1, 2 * blocks_per_group * len(groups)).round().astype(int)
    ours = [
        [int(block) for block in chosen[2 * number * blocks_per_group : 2 * (number + 1) * blocks_per_group : 2]]
        for number in range(len(groups))
    ]
    neighbours = [[block + 1 if block + 1 < blocks else 0 for block in some] for some in ours]
    size_bytes = copier.block_bytes * blocks_per_group

    def read(which: Sequence[Sequence[int]]) -> bytes:
        (out, *_) = copier.buffers(size_bytes)
        copier.read(which, out[:size_bytes]).wait()
        return bytes(out[:size_bytes])

    def write(value: bytes) -> None:
        copier.write(ours, memoryview(value), 0, blocks_per_group, copier.mark()).wait()

    before, neighbours_before = read(ours), read(neighbours)
    noise = np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8).tobytes()
    write(noise)
    read_back, neighbours_after = read(ours), read(neighbours)
    write(before)
    for what, expected, was in (
        ("written into blocks and read back", noise, read_back),
        ("of other blocks, which nothing was written into", neighbours_before, neighbours_after),
        ("put back into blocks", before, read(ours)),
    ):
        if expected != was:
            wrong = int(np.count_nonzero(np.frombuffer(expected, np.uint8) != np.frombuffer(was, np.uint8)))
            raise InvalidInput(
                f"{wrong} of {size_bytes} bytes {what} differ in the caches of groups {str(list(groups))[1:-1]}: "
                "this attention backend keeps its blocks in an unsupported way; run vLLM without the connector"
            )
    return blocks_per_group * len(groups)


def check_interface(ours: type, theirs: type, added: Iterable[str] = ()) -> None:
    """Refuse a vLLM whose base class lacks a method of ``ours`` (except ``added``) or calls it with other arguments."""
    for name, method in vars(ours).items():
        if name.startswith("_") or name in added or not callable(getattr(ours, name)):
            continue
        base = getattr(theirs, name, None)
        if base is None:
            raise InvalidInput(f"this vLLM does not call {name}(), which the connector relies on")
        if (wanted := _arguments(base)) != (had := _arguments(method)):
            raise InvalidInput(f"this vLLM calls {name}({', '.join(wanted)}): expected {name}({', '.join(had)})")


def _arguments(method: Any) -> list[str]:
    method = method.__func__ if isinstance(method, classmethod) else method
    listed = inspect.signature(method).parameters.values()
    named = [
        parameter.name
        for parameter in listed
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
    ]
    return [name for name in named if name not in ("self", "cls")]
