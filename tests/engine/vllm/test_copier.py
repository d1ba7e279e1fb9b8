"""The copier against a naive twin: every order of strides, blocks overwritten right after they were to be read, on a
device that does its work late. On CUDA the same in ``test_cuda_copier``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from skymemory.errors import InvalidInput

torch = pytest.importorskip("torch")

from tests.engine.vllm.queued import QueuedDevice  # noqa: E402

from skymemory.engine.vllm.copier import (  # noqa: E402
    CpuCopier,
    Device,
    Host,
    Now,
    TorchCopier,
    _by_block,
    _stacked,
    copier_of,
    states_of,
)

BLOCKS, LAYERS, HEADS, TOKENS, WIDTH = 12, 3, 2, 4, 6
ORDERS = {"".join(names): names for names in permutations("LBHNC")}
"""Of layer, block, head, token and content in memory: those of vLLM's ``KVCacheLayout`` among them."""
SIZES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": WIDTH}


def one_allocation(order: str, dtype: Any, device: str = "cpu", cut: int = 1) -> dict[str, Any]:
    """Layers as vLLM 0.32 makes them: views ``(blocks, heads, tokens, content)`` of one allocation; ``cut``: a backend
    with smaller blocks, ``cut`` of which are one of vLLM's.
    """
    raw = torch.empty([SIZES[name] * (cut if name == "B" else 1) for name in order], dtype=dtype, device=device)
    logical = raw.permute([order.index(name) for name in "LBHNC"])
    return {f"model.layers.{at}.attn": logical[at] for at in range(LAYERS)}


def keys_and_values(order: str, dtype: Any, device: str = "cpu") -> dict[str, Any]:
    """Layers as older ones made them: ``(2, blocks, tokens, heads, content)``, each with memory of its own."""
    shape = {"2": 2, "B": BLOCKS, "N": TOKENS, "H": HEADS, "C": WIDTH}
    caches = {}
    for at in range(LAYERS):
        raw = torch.empty([shape[name] for name in order], dtype=dtype, device=device)
        caches[f"model.layers.{at}.attn"] = raw.permute([order.index(name) for name in "2BNHC"])
    return caches


LAYOUTS: dict[str, Callable[[str], dict[str, Any]]] = {
    **{name: lambda device, name=name: one_allocation(name, torch.bfloat16, device) for name in ORDERS},  # type: ignore[misc]
    "LBHNC of bytes": lambda device: one_allocation("LBHNC", torch.uint8, device),
    "BLNHC of float32": lambda device: one_allocation("BLNHC", torch.float32, device),
    "LBNHC of float8": lambda device: one_allocation("LBNHC", torch.float8_e4m3fn, device),
    "LBNHC, cut in 2": lambda device: one_allocation("LBNHC", torch.bfloat16, device, 2),
    "2BNHC": lambda device: keys_and_values("2BNHC", torch.bfloat16, device),
    "2BHNC": lambda device: keys_and_values("2BHNC", torch.float16, device),
    "B2NHC": lambda device: keys_and_values("B2NHC", torch.bfloat16, device),
    "B2HNC": lambda device: keys_and_values("B2HNC", torch.bfloat16, device),
}


def block(cache: Any, at: int) -> Any:
    """All of one block of one layer, as its tensor has it."""
    if cache.shape[0] == 2:
        return cache[:, at]
    cut = cache.shape[0] // BLOCKS
    return cache[at * cut : (at + 1) * cut]


def drawn_for(caches: dict[str, Any], seed: int) -> list[Any]:
    """Random contents, NaNs among them, where the caches are."""
    dice = np.random.default_rng(seed)
    drawn = []
    for cache in caches.values():
        raw = torch.from_numpy(dice.integers(0, 256, cache.numel() * cache.element_size(), np.uint8))
        drawn.append(raw.view(cache.dtype).view(cache.shape).to(cache.device))
    return drawn


def fill(caches: dict[str, Any], contents: list[Any]) -> None:
    for cache, content in zip(caches.values(), contents, strict=True):
        cache.copy_(content)


def bytes_of(part: Any) -> bytes:
    return bytes(part.contiguous().cpu().view(torch.uint8).numpy().tobytes())


def torch_copier(caches: dict[str, Any], value_blocks: int, device: Device, staged_values: int = 2) -> TorchCopier:
    views = _stacked([_by_block(name, cache, BLOCKS) for name, cache in caches.items()])
    value_bytes = value_blocks * sum(cache.numel() * cache.element_size() for cache in caches.values()) // BLOCKS
    return TorchCopier(views, value_blocks, device, staged_values * value_bytes)


def copied_there_and_back(
    layout: str,
    place: str,
    device: Device,
    seed: int,
    settle: Callable[[], object] = lambda: None,
    busy: Callable[[], None] = lambda: None,
) -> None:
    """Reads values of one cache whose blocks are overwritten right behind, and writes them into another one that the
    model still computes in; compares with what a naive copy would have given. ``busy``: the model computes.
    """
    dice = np.random.default_rng(seed)
    first, second = LAYOUTS[layout](place), LAYOUTS[layout](place)
    contents = [drawn_for(first, seed + number) for number in range(8)]
    fill(first, contents[6])
    fill(second, contents[7])
    size = 3
    copier, other = torch_copier(first, size, device), torch_copier(second, size, device)
    reads = []
    for number in range(9):  # more than there is staging for
        blocks = [int(one) for one in dice.permutation(BLOCKS)[:size]]
        now: list[list[Any]] = []

        def look(blocks: list[int] = blocks, now: list[list[Any]] = now) -> None:
            busy()
            now += [[block(cache, at).clone() for at in blocks] for cache in first.values()]

        device.give("compute", look)
        out = copier.buffers(size * copier.block_bytes)[0]
        reads.append((out, copier.read(blocks, out), now))
        device.give("compute", partial(fill, first, contents[number % 6]))
    writes = []
    for _, read, _ in reads:
        read.wait()
    for number, (out, _, now) in enumerate(reads):
        skipped = int(dice.integers(0, size))
        there = [int(one) for one in dice.permutation(BLOCKS)[: size - skipped]]
        if number == 3:  # what the model was still computing when the load began
            device.give("compute", busy)
            device.give("compute", partial(fill, second, contents[6]))
        writes.append((there, skipped, now, other.write(there, out, skipped, size, other.mark())))
        out[:] = bytes(len(out))  # it may change now
    expected: list[list[bytes]] = []
    for number, (there, skipped, now, mark) in enumerate(writes):
        mark.wait()
        if number in (0, 3):  # in the latter case nothing says whether what was written before is overwritten
            before = [b"?"] * BLOCKS if number else None
            expected = [before or [bytes_of(block(one, at)) for at in range(BLOCKS)] for one in contents[7]]
            expected = [list(one) for one in expected]
        for layer in range(LAYERS):
            for at, to in enumerate(there):
                expected[layer][to] = bytes_of(now[layer][skipped + at])
    settle()
    for cache, wanted in zip(second.values(), expected, strict=True):
        for at, one in enumerate(wanted):
            assert one == b"?" or bytes_of(block(cache, at)) == one
    assert sum(one != b"?" for one in expected[0]) >= 1


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_in_any_order_of_strides(layout: str) -> None:
    copied_there_and_back(layout, "cpu", Host(), 1)


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("seed", range(30))
def test_whatever_the_device_does_first(seed: int) -> None:
    layout, device = sorted(LAYOUTS)[seed * 17 % len(LAYOUTS)], QueuedDevice(seed)
    copied_there_and_back(layout, "cpu", device, seed, lambda: device.give("compute", lambda: None).wait())


def test_a_read_that_was_only_queued_is_not_done_and_what_comes_behind_it_may_overwrite_its_blocks() -> None:
    device, caches = QueuedDevice(0), one_allocation("LBHNC", torch.bfloat16)
    fill(caches, drawn_for(caches, 9))
    before = [bytes_of(block(cache, 5)) for cache in caches.values()]
    copier = torch_copier(caches, 1, device)
    (out, *_) = copier.buffers(copier.block_bytes)
    mark = copier.read([5], out)
    device.give("compute", partial(fill, caches, drawn_for(caches, 10)))
    assert bytes(out) != b"".join(before)
    while not mark.done():
        pass
    assert bytes(out) == b"".join(before)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_layers_of_one_allocation_are_copied_at_once(order: str) -> None:
    """For each of vLLM's orders: one view, of elements of 4 bytes where a row of 12 allows no more."""
    layers = [_by_block(name, cache, BLOCKS) for name, cache in one_allocation(order, torch.bfloat16).items()]
    (view,) = _stacked(layers)
    assert view.shape[:2] == (LAYERS, BLOCKS) and view.dtype == torch.int32
    assert len(_stacked(list(reversed(layers)))) == LAYERS


def test_which_copier_a_cache_gets() -> None:
    assert isinstance(copier_of(one_allocation("LBHNC", torch.bfloat16), BLOCKS, 2), CpuCopier)
    assert isinstance(copier_of(one_allocation("LBNHC", torch.bfloat16, cut=2), BLOCKS, 2), CpuCopier)
    assert isinstance(copier_of(one_allocation("BLHNC", torch.bfloat16), BLOCKS, 2), TorchCopier)
    assert isinstance(copier_of(keys_and_values("2BNHC", torch.bfloat16), BLOCKS, 2), TorchCopier)


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_copiers_give_the_same_bytes(layout: str) -> None:
    """A value does not depend on which of them copied it."""
    caches = LAYOUTS[layout]("cpu")
    fill(caches, drawn_for(caches, 3))
    chosen, general = copier_of(caches, BLOCKS, 2), torch_copier(caches, 2, Host())
    values = [bytearray(2 * chosen.block_bytes) for _ in range(2)]
    for copier, value in zip((chosen, general), values, strict=True):
        copier.read([7, 2], memoryview(value)).wait()
    assert values[0] == values[1] and any(values[0])


def test_what_is_refused_says_why() -> None:
    with pytest.raises(InvalidInput, match="on meta: expected a CPU"):
        copier_of(one_allocation("LBHNC", torch.bfloat16, "meta"), BLOCKS, 2)
    with pytest.raises(InvalidInput, match=r"layers.0.attn has shape \(12, 2, 4, 6\) .* expected 7 blocks first"):
        copier_of(one_allocation("LBHNC", torch.bfloat16), 7, 2)
    two = one_allocation("LBHNC", torch.bfloat16)
    two["model.layers.9.attn"] = torch.empty(BLOCKS, 1, TOKENS, WIDTH, dtype=torch.bfloat16)
    with pytest.raises(InvalidInput, match=r"blocks of \[48, 96\] bytes on cpu in different layers"):
        copier_of(two, BLOCKS, 2)


def states_in_pages(blocks: int = 6, page: int = 64, at: int = 8) -> tuple[Any, list[Any]]:
    """Two states for each block, of 12 bytes at the page's beginning and of 16 behind ``at`` more, then padding."""
    memory = torch.arange(blocks * page, dtype=torch.int64).to(torch.uint8)
    first = memory.view(torch.int16).as_strided((blocks, 3, 2), (page // 2, 2, 1))
    second = memory.view(torch.float32).as_strided((blocks, 4), (page // 4, 1), 3 + at // 4)
    return memory.view(blocks, page), [first, second]


def test_states_of_a_block_are_copied_without_the_padding_behind_them() -> None:
    memory, states = states_in_pages(at=0)
    copier = copier_of({"layer": states_of("layer", states, 6, 28)}, 6, 1)
    assert copier.block_bytes == 28
    (out, *_) = copier.buffers(28)
    copier.read([2], out[:28]).wait()
    assert bytes(out[:28]) == bytes(memory[2, :28].tolist())
    before = memory.clone()
    copier.write([5], memoryview(bytes(28)), 0, 1, copier.mark()).wait()
    before[5, :28] = 0
    assert torch.equal(memory, before)
    whole = states_of("layer", memory.view(6, 1, 64), 6, 64)
    assert torch.equal(whole, memory)


def test_states_that_do_not_lie_in_a_row_are_refused() -> None:
    _, states = states_in_pages(at=8)
    with pytest.raises(InvalidInput, match="expected 6 blocks with 28 bytes in a row"):
        states_of("layer", states, 6, 28)
    with pytest.raises(InvalidInput, match="expected 7 blocks"):
        states_of("layer", states, 7, 40)


def test_caches_that_were_made_in_inference_mode_are_written_by_threads_that_are_not_in_it() -> None:
    """torch refuses that: vLLM runs in this mode, the connector's threads do not."""
    with torch.inference_mode():
        caches = one_allocation("BLHNC", torch.bfloat16)
        fill(caches, drawn_for(caches, 1))
        copier = torch_copier(caches, 2, Host())
    (out, *_) = copier.buffers(2 * copier.block_bytes)
    copier.read([1, 2], out)
    copier.write([3, 4], out, 0, 2, copier.mark())
    for cache in caches.values():
        assert bytes_of(block(cache, 3)) == bytes_of(block(cache, 1))


def test_a_mark_of_the_cpu_is_done_and_has_the_time_between() -> None:
    first = Now()
    second = Now()
    assert first.done() and second.seconds_after(first) >= 0
