"""Copies of blocks out of vLLM's KV cache tensors and into them.

A value is ``(layers, blocks, bytes of a block of a layer)``, packed, in vLLM's memory order.

On an accelerator calls only queue work, on three streams. A read gathers blocks on ``compute`` (the model's own) and
copies them on ``out``. A write copies on ``in``, after the work that ``compute`` had when the load began: until then
the blocks may belong to another request. Values in the store's own memory, page-locked, are copied from there and to
there; others pass through memory of the copier.
"""

from __future__ import annotations

import functools
import os
import queue
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from skymemory.engine.page_locked import CpuPages, CudaPages, LockedMemory, PageLocker
from skymemory.errors import InvalidInput

STAGING_BYTES = 256 << 20
_PINNED_BYTES = 64 << 20
_PINNED_VALUES = 256  # host memory pinned at once: each allocation takes milliseconds
_READS = 64
_WRITES = 4
_COPY_THREADS = min(4, (os.cpu_count() or 1) // 2)  # one moves less than a bus does
_COPY_PIECE_BYTES = 2 << 20
Stream = Literal["compute", "out", "in"]


class Mark(Protocol):
    """Point in a device's work queue."""

    def done(self) -> bool:
        """Return True if the device has reached the mark; its bytes are then in place."""

    def wait(self) -> None: ...

    def seconds_after(self, earlier: Any) -> float: ...


class BlockCopier(Protocol):
    """Copier of complete blocks of a group of layers."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers."""

    def mark(self) -> Mark:
        """Mark the model's queued work. Called by the model's thread, as is ``read``."""

    def buffers(self, size_bytes: int) -> list[memoryview]: ...

    def read(self, blocks: Sequence[int], out: memoryview) -> Mark:
        """Copy ``blocks`` into ``out``, valid when the mark is done. Later work may overwrite the blocks."""

    def write(self, blocks: Sequence[int], value: memoryview, skipped: int, of: int, after: Mark) -> Mark:
        """Copy into ``blocks``, once ``after`` is done, those of ``value``'s ``of`` blocks that follow the first
        ``skipped``. Keep ``value`` until the mark is done if it lies in the store's own memory; other memory may
        change when this returns. Called by any thread.
        """


class Now:
    """Mark of finished work."""

    __slots__ = ("at_s",)

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def seconds_after(self, earlier: Now) -> float:
        return self.at_s - earlier.at_s


class CpuCopier:
    """Copier of contiguous blocks in this process."""

    def __init__(self, layers: Sequence[npt.NDArray[np.uint8]]) -> None:
        """``layers``: views ``(blocks, bytes)``."""
        self._layers = layers
        self._layer_bytes = int(layers[0].shape[1])

    @property
    def block_bytes(self) -> int:
        return self._layer_bytes * len(self._layers)

    def mark(self) -> Mark:
        return Now()

    def buffers(self, size_bytes: int) -> list[memoryview]:
        return [memoryview(bytearray(size_bytes))]

    def read(self, blocks: Sequence[int], out: memoryview) -> Mark:
        rows = np.frombuffer(out, np.uint8).reshape(len(self._layers), len(blocks), self._layer_bytes)
        for layer, row in zip(self._layers, rows, strict=True):
            np.take(layer, blocks, axis=0, out=row, mode="clip")  # "raise" would copy through a buffer
        return Now()

    def write(self, blocks: Sequence[int], value: memoryview, skipped: int, of: int, after: Mark) -> Mark:
        rows = np.frombuffer(value, np.uint8).reshape(len(self._layers), of, self._layer_bytes)
        for layer, row in zip(self._layers, rows[:, skipped : skipped + len(blocks)], strict=True):
            layer[list(blocks)] = row
        return Now()


class Device(PageLocker, Protocol):
    """Differences between a CPU and an accelerator."""

    def give(self, stream: Stream, work: Callable[[], None], *after: Mark) -> Mark:
        """Queue ``work`` on a stream, after marks of other streams."""

    def memory(self, size_bytes: int) -> Any: ...

    def host_memory(self, size_bytes: int) -> Any:
        """Allocate host memory that the device can copy by itself."""

    def index(self, blocks: Sequence[int]) -> Any:
        """Return block numbers as a device tensor; called in ``work``."""


class Host(CpuPages):
    """CPU: queued work is done at once."""

    def give(self, stream: Stream, work: Callable[[], None], *after: Mark) -> Mark:
        work()
        return Now()

    def memory(self, size_bytes: int) -> Any:
        import torch

        return torch.empty(size_bytes, dtype=torch.uint8)

    host_memory = memory

    def index(self, blocks: Sequence[int]) -> Any:
        import torch

        return torch.tensor(blocks)


class _RecordedEvent:
    """CUDA event; a waiting thread sleeps."""

    def __init__(self, stream: Any) -> None:
        import torch

        self.event = torch.cuda.Event(enable_timing=True, blocking=True)
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_after(self, earlier: _RecordedEvent) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class Cuda(CudaPages):
    """CUDA device; ``compute`` is the calling thread's current stream."""

    def __init__(self, device: Any) -> None:
        import torch

        super().__init__(device)
        self._streams = {"out": torch.cuda.Stream(device), "in": torch.cuda.Stream(device)}

    def give(self, stream: Stream, work: Callable[[], None], *after: Mark) -> Mark:
        import torch

        on = self._streams.get(stream) or torch.cuda.current_stream(self._device)
        with torch.cuda.stream(on):
            for mark in after:
                if isinstance(mark, _RecordedEvent):
                    on.wait_event(mark.event)
            work()
            return _RecordedEvent(on)

    def memory(self, size_bytes: int) -> Any:
        import torch

        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def host_memory(self, size_bytes: int) -> Any:
        import torch

        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def index(self, blocks: Sequence[int]) -> Any:
        import torch

        # From memory that is not pinned the copy would wait for all work of the stream.
        return torch.tensor(blocks, pin_memory=True).to(self._device, non_blocking=True)


@dataclass(slots=True)
class _Slot:
    device: Any
    free: Mark
    host: npt.NDArray[np.uint8] | None = None


class TorchCopier:
    """Copier of blocks with any strides, on any device."""

    def __init__(
        self,
        views: Sequence[Any],
        value_blocks: int,
        device: Device,
        staging_bytes: int,
        memory: LockedMemory | None = None,
    ) -> None:
        """``views`` of ``(layers, blocks, ...)``; values have up to ``value_blocks``; ``memory``: the store's own."""
        self._views = views
        self._device = device
        self._memory = memory
        self._copiers = ThreadPoolExecutor(max(1, _COPY_THREADS), "vllm copy")
        self._view_bytes = [view[0, 0].numel() * view.element_size() for view in views]
        self._layers: int = sum(len(view) for view in views)
        self._layer_bytes = int(self._view_bytes[0])
        value_bytes = self.block_bytes * value_blocks
        reads = max(2, min(_READS, staging_bytes // value_bytes))
        self._reads = [_Slot(device.memory(value_bytes), Now()) for _ in range(reads)]
        self._turn = 0
        self._writes: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for _ in range(_WRITES):
            self._writes.put(_Slot(device.memory(value_bytes), Now(), device.host_memory(value_bytes).numpy()))

    @property
    def block_bytes(self) -> int:
        return self._layer_bytes * self._layers

    def mark(self) -> Mark:
        return self._device.give("compute", _nothing)

    def buffers(self, size_bytes: int) -> list[memoryview]:
        count = max(1, min(_PINNED_VALUES, _PINNED_BYTES // size_bytes))
        memory = memoryview(self._device.host_memory(count * size_bytes).numpy())
        return [memory[at * size_bytes :][:size_bytes] for at in range(count)]

    def read(self, blocks: Sequence[int], out: memoryview) -> Mark:
        """Queue a gather of the blocks on the device and its copy into ``out``."""
        import torch

        slot = self._reads[self._turn]
        self._turn = (self._turn + 1) % len(self._reads)
        staged = slot.device[: len(out)]

        def gather() -> None:
            with torch.inference_mode():  # vLLM may have made the caches in inference mode
                index = self._device.index(blocks)
                for view, rows in self._parts(staged, len(blocks)):
                    torch.index_select(view, 1, index, out=rows)

        gathered = self._device.give("compute", gather, slot.free)
        with self._locked_parts(out) as parts:
            hosts = parts or [torch.frombuffer(out, dtype=torch.uint8)]
            slot.free = self._device.give("out", lambda: _copy_all(hosts, _cut_like(staged, hosts)), gathered)
        return slot.free

    def write(self, blocks: Sequence[int], value: memoryview, skipped: int, of: int, after: Mark) -> Mark:
        """Queue a copy of ``value``'s blocks, after the first ``skipped`` of ``of``, into ``blocks``."""
        slot = self._writes.get()
        try:
            slot.free.wait()
            with self._locked_parts(value) as parts:
                if parts:
                    slot.free = self._scatter(slot.device[: len(value)], parts, blocks, skipped, of, after)
                else:
                    host = self._stage(slot, value, blocks, skipped, of)
                    staged = slot.device[: len(host)]
                    slot.free = self._scatter(staged, [host], blocks, 0, len(blocks), after)
            return slot.free
        finally:
            self._writes.put(slot)

    def _locked_parts(self, value: memoryview) -> AbstractContextManager[list[Any]]:
        return self._memory.parts(value) if self._memory is not None else nullcontext([])

    def _stage(self, slot: _Slot, value: memoryview, blocks: Sequence[int], skipped: int, of: int) -> Any:
        # Copy the blocks into the slot's host memory, a large value by several threads.
        import torch

        assert slot.host is not None
        host = slot.host[: len(blocks) * self.block_bytes]
        rows = np.frombuffer(value, np.uint8).reshape(self._layers, of, self._layer_bytes)
        rows, target = rows[:, skipped : skipped + len(blocks)], host.reshape(self._layers, len(blocks), -1)
        threads = min(_COPY_THREADS, len(host) // _COPY_PIECE_BYTES)
        if threads < 2:
            np.copyto(target, rows)
        else:
            list(self._copiers.map(np.copyto, np.array_split(target, threads), np.array_split(rows, threads)))
        return torch.from_numpy(host)

    def _scatter(
        self, staged: Any, hosts: Sequence[Any], blocks: Sequence[int], skipped: int, of: int, after: Mark
    ) -> Mark:
        import torch

        def scatter() -> None:
            with torch.inference_mode():
                _copy_all(_cut_like(staged, hosts), hosts)
                index = self._device.index(blocks)
                for view, rows in self._parts(staged, of):
                    view.index_copy_(1, index, rows[:, skipped : skipped + len(blocks)])

        return self._device.give("in", scatter, after)

    def _parts(self, staged: Any, blocks: int) -> list[tuple[Any, Any]]:
        # Return each view of the caches with its share of ``staged``, shaped alike.
        parts, at = [], 0
        for view, view_bytes in zip(self._views, self._view_bytes, strict=True):
            size = len(view) * blocks * view_bytes
            parts.append((view, staged[at : at + size].view(view.dtype).view(len(view), blocks, *view.shape[2:])))
            at += size
        return parts


class PartCopier:
    """Copier of a part's values: its groups of layers follow one another."""

    def __init__(self, groups: Sequence[BlockCopier]) -> None:
        self._groups = groups

    @property
    def block_bytes(self) -> int:
        return sum(group.block_bytes for group in self._groups)

    def mark(self) -> Mark:
        return self._groups[0].mark()

    def buffers(self, size_bytes: int) -> list[memoryview]:
        return self._groups[0].buffers(size_bytes)

    def read(self, blocks: Sequence[Sequence[int]], out: memoryview) -> Mark:
        marks, at = [], 0
        for group, some in zip(self._groups, blocks, strict=True):
            size_bytes = len(some) * group.block_bytes
            marks.append(group.read(some, out[at : at + size_bytes]))
            at += size_bytes
        return marks[-1]  # a device has one such stream, which has them in this order

    def write(self, blocks: Sequence[Sequence[int]], value: memoryview, skipped: int, of: int, after: Mark) -> Mark:
        marks, at = [], 0
        for group, some in zip(self._groups, blocks, strict=True):
            size_bytes = of * group.block_bytes
            marks.append(group.write(some, value[at : at + size_bytes], skipped, of, after))
            at += size_bytes
        return marks[-1]


def copier_of(
    caches: Mapping[str, Any],
    blocks: int,
    value_blocks: int,
    *,
    staging_bytes: int = STAGING_BYTES,
    memory: LockedMemory | None = None,
) -> BlockCopier:
    """Return a copier for the tensors that vLLM registers, by layer name; values have up to ``value_blocks``.
    ``memory``: the store's own.
    """
    import torch

    layers = [_by_block(name, caches[name], blocks) for name in sorted(caches, key=_natural)]
    sizes = {layer[0].numel() * layer.element_size() for layer in layers}
    devices = {layer.device for layer in layers}
    if len(sizes) != 1 or len(devices) != 1:
        raise InvalidInput(
            f"blocks of {sorted(sizes)} bytes on {', '.join(sorted(map(str, devices)))} in different layers: expected "
            "one size, on one device"
        )
    (device,) = devices
    if device.type == "cpu" and all(layer.is_contiguous() for layer in layers):
        return CpuCopier([layer.view(torch.uint8).reshape(blocks, -1).numpy() for layer in layers])
    return TorchCopier(_stacked(layers), value_blocks, device_of(device), staging_bytes, memory)


def states_of(name: str, cache: Any, blocks: int, size_bytes: int) -> Any:
    """Return a layer's states as a tensor of bytes ``(blocks, size_bytes)``; refuse states of a block not in a row."""
    import torch

    states = list(cache) if isinstance(cache, list | tuple) else [cache]
    start = min(state.storage_offset() * state.itemsize for state in states)
    stride = states[0].stride(0) * states[0].itemsize
    for state in states:
        inside = sum((size - 1) * step for size, step in zip(state.shape[1:], state.stride()[1:], strict=True)) + 1
        ends = (state.storage_offset() + inside) * state.itemsize - start
        if len(state) != blocks or state.stride(0) * state.itemsize != stride or not ends <= size_bytes <= stride:
            raise InvalidInput(
                f"the states of {name} have shape {tuple(state.shape)} and strides {state.stride()}: expected {blocks} "
                f"blocks with {size_bytes} bytes in a row"
            )
    row = torch.tensor([], dtype=torch.uint8, device=states[0].device)
    return row.set_(states[0].untyped_storage(), start, (blocks, size_bytes), (stride, 1))


@functools.cache
def device_of(device: Any) -> Device:
    if device.type == "cpu":
        return Host()
    if device.type != "cuda":
        raise InvalidInput(f"the KV cache is on {device}: expected a CPU's memory or a CUDA device")
    return cast(Device, Cuda(device))


def _by_block(name: str, tensor: Any, blocks: int) -> Any:
    """Return the tensor as ``(blocks, ...)`` of the widest integers, in memory order."""
    import torch

    shape, block_dim = tuple(tensor.shape), 0
    if shape[0] == 2 != blocks and len(shape) > 1 and shape[1] % blocks == 0:
        block_dim = 1  # keys and values are separate
    if shape[block_dim] % blocks:
        raise InvalidInput(
            f"the KV cache of {name} has shape {shape} and strides {tensor.stride()}: expected {blocks} blocks first, "
            "or behind keys and values"
        )
    # A backend may cut vLLM's blocks into several of its own.
    view = tensor.unflatten(block_dim, (blocks, -1)).movedim(block_dim, 0)
    other_dims = sorted(range(1, view.dim()), key=lambda at: (-view.stride(at), at))
    view = view.permute(0, *other_dims)
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[view.element_size()]
    for wide in (torch.int64, torch.int32, torch.int16):
        if wide.itemsize > same.itemsize and view.stride(-1) == 1 and _divisible(view, wide.itemsize):
            return view.view(wide)
    return view.view(same)


def _divisible(view: Any, size_bytes: int) -> bool:
    count = size_bytes // view.element_size()
    return not any(number % count for number in (view.shape[-1], view.storage_offset(), *view.stride()[:-1]))


def _stacked(layers: Sequence[Any]) -> list[Any]:
    """Return one view ``(layers, blocks, ...)`` of layers at equal distances, so that one kernel copies all; else a
    view of each.
    """
    first = layers[0]
    places = [layer.storage_offset() for layer in layers]
    step = places[1] - places[0] if len(places) > 1 else 0
    alike = all(
        (layer.untyped_storage().data_ptr(), layer.shape, layer.stride(), layer.dtype, layer.storage_offset())
        == (first.untyped_storage().data_ptr(), first.shape, first.stride(), first.dtype, places[0] + at * step)
        for at, layer in enumerate(layers)
    )
    if step <= 0 or not alike:
        return [layer.unsqueeze(0) for layer in layers]
    return [first.as_strided((len(layers), *first.shape), (step, *first.stride()), places[0])]


def _cut_like(staged: Any, hosts: Sequence[Any]) -> Sequence[Any]:
    parts: Sequence[Any] = staged.split([len(host) for host in hosts])
    return parts


def _copy_all(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    import torch

    with torch.inference_mode():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)


def _nothing() -> None:
    """Do nothing: the mark ends the previous work."""


def _natural(name: str) -> list[object]:
    """Sort layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
