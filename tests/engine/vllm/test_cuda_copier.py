"""The copier on a CUDA device: every order of strides, while the device is busy, blocks overwritten right behind.

Needs a GPU, torch, pytest, hypothesis, psutil and what skymemory itself needs, not vLLM. With both sides of the
connector on the device as well (``OnDevice``)::

    python -m pytest -p tests.conftest --confcutdir tests/engine/vllm tests/engine/vllm -k cuda
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.engine.vllm.test_copier import BLOCKS, LAYOUTS, copied_there_and_back, one_allocation  # noqa: E402

from skymemory.engine.vllm.copier import Cuda, TorchCopier, copier_of  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: the CUDA copier is not tested", allow_module_level=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_in_any_order_of_strides(layout: str) -> None:
    device = Cuda(torch.device("cuda", 0))
    for seed in range(3):
        copied_there_and_back(
            layout, "cuda", device, seed, torch.cuda.synchronize, lambda: torch.cuda._sleep(10_000_000)
        )


def test_reading_and_writing_wait_for_nothing_that_is_computed() -> None:
    """Both return at once and are not done while the device has half a second to compute."""
    caches = one_allocation("LBHNC", torch.bfloat16, "cuda")
    copier = copier_of(caches, BLOCKS, 2)
    assert isinstance(copier, TorchCopier)
    out, *_ = copier.buffers(2 * copier.block_bytes)
    copier.read([1, 2], out).wait()
    torch.cuda._sleep(1_000_000_000)
    read, written = copier.read([1, 2], out), copier.write([3, 4], out, 0, 2, copier.mark())
    assert not read.done() and not written.done()
    read.wait()
    written.wait()
    assert read.done() and written.done()


def test_marks_have_the_time_that_the_device_took() -> None:
    copier = copier_of(one_allocation("LBHNC", torch.bfloat16, "cuda"), BLOCKS, 2)
    began = copier.mark()
    torch.cuda._sleep(200_000_000)
    ended = copier.mark()
    ended.wait()
    assert 0.02 < ended.seconds_after(began) < 2.0
