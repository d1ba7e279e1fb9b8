"""The trial at start: sound copiers of any layout pass and leave the caches as they were, others are refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tests.engine.vllm.test_copier import BLOCKS, LAYOUTS, bytes_of, drawn_for, fill, torch_copier

from skymemory.engine.vllm.copier import CpuCopier, Host, Mark, PartCopier
from skymemory.engine.vllm.trial import check_interface, try_copier
from skymemory.errors import InvalidInput


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_order_of_strides_passes_and_is_as_before(layout: str) -> None:
    caches = LAYOUTS[layout]("cpu")
    fill(caches, drawn_for(caches, 3))
    before = [bytes_of(cache) for cache in caches.values()]
    copier = PartCopier([torch_copier(caches, 2, Host())])
    assert try_copier(copier, [0], 2, BLOCKS) == 2
    assert [bytes_of(cache) for cache in caches.values()] == before


@pytest.mark.parametrize(("blocks", "tried"), [(1, 0), (4, 0), (5, 2), (9, 4), (200, 6)])
def test_groups_that_share_their_memory_are_tried_in_blocks_of_their_own(blocks: int, tried: int) -> None:
    memory = list(np.zeros((3, blocks, 8), np.uint8))
    assert try_copier(PartCopier([CpuCopier(memory), CpuCopier(memory)]), [0, 1], 3, blocks) == tried
    assert not np.array(memory).any()


class _Shifted(CpuCopier):
    """Writes one block further than it reads."""

    def write(self, blocks: Sequence[int], value: memoryview, skipped: int, of: int, after: Mark) -> Mark:
        return super().write([block - 1 for block in blocks], value, skipped, of, after)


class _Wide(CpuCopier):
    """Writes the next block, too."""

    def write(self, blocks: Sequence[int], value: memoryview, skipped: int, of: int, after: Mark) -> Mark:
        super().write([block + 1 for block in blocks], value, skipped, of, after)
        return super().write(blocks, value, skipped, of, after)


class _Short(CpuCopier):
    """Leaves out the last layer, and gives zeros for it."""

    def write(self, blocks: Sequence[int], value: memoryview, skipped: int, of: int, after: Mark) -> Mark:
        kept = self._layers[-1].copy()
        mark = super().write(blocks, value, skipped, of, after)
        self._layers[-1][:] = kept
        return mark


@pytest.mark.parametrize(
    ("kind", "said"),
    [(_Shifted, "read back differ"), (_Wide, "of other blocks"), (_Short, "read back differ .* groups 4: .* run vLLM")],
)
def test_a_copier_that_mistakes_the_blocks_is_refused(kind: type[CpuCopier], said: str) -> None:
    memory = list(np.random.default_rng(1).integers(0, 256, (3, 20, 16), np.uint8))
    with pytest.raises(InvalidInput, match=said):
        try_copier(PartCopier([kind(memory)]), [4], 3, 20)


class Base:
    def plain(self, request: int, count: int = 0) -> None: ...

    def gone(self) -> None: ...

    @classmethod
    def built(cls, config: int) -> None: ...


class Ours(Base):
    def plain(self, request: int) -> None: ...

    @classmethod
    def built(cls, config: int) -> None: ...

    def only_ours(self) -> None: ...

    def _hidden(self) -> None: ...


def test_an_interface_that_is_the_same_passes_and_another_is_refused_by_name() -> None:
    check_interface(Ours, Base, ["only_ours"])
    with pytest.raises(InvalidInput, match=r"does not call only_ours\(\)"):
        check_interface(Ours, Base)
    later = type("Later", (), {"plain": lambda self, request, step: None, "built": Base.__dict__["built"]})
    with pytest.raises(InvalidInput, match=r"calls plain\(request, step\): expected plain\(request\)"):
        check_interface(Ours, later, ["only_ours"])
