"""The page of models and uses is what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.engine.families import FAMILIES  # noqa: E402
from tests.engine.matrix import row  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PAGE = Path(__file__).parents[2] / "docs/reference/models.md"


@pytest.mark.parametrize("family", FAMILIES)
def test_each_cell_has_the_tokens_of_no_cache_and_the_share_that_the_page_says(family: str) -> None:
    line = row(family)
    page = PAGE.read_text()
    if f"transformers {transformers.__version__};" in page:
        assert line in page.splitlines()


@pytest.mark.parametrize("family", ["Llama", "Gemma 3", "Qwen3-Next"])
def test_a_compiled_model_says_the_same(family: str) -> None:
    """Without code being generated: what matters is that the graph is the same one."""
    import torch
    from tests.engine.families import build
    from tests.engine.matrix import NEW

    from skymemory import KVCManager

    ids = torch.randint(3, 1000, (1, 75), generator=torch.Generator().manual_seed(1))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    model = build(family)
    plain = model.generate(ids, **options).tolist()
    model.forward = torch.compile(model.forward, backend="eager")
    with KVCManager(model, block_tokens=8) as kvc:
        for _ in range(2):
            cache = kvc.get_cache_ids(ids)
            assert model.generate(ids, past_key_values=cache, **options).tolist() == plain
            kvc.add_blocks_ids(ids)
        assert kvc.last.cached_tokens == 72
