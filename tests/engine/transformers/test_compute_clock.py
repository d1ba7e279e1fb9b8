"""What the engine knows of computing before it has computed, and what a tier that hangs costs the very first prompt."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.cache.tiers.test_load_deadlines import Hanging  # noqa: E402
from tests.engine.transformers.generation import BLOCK, manager, tokens_of  # noqa: E402

from skymemory.cache.patience import MIN_PATIENCE_S, PATIENCE_SHARE, ComputeRate  # noqa: E402
from skymemory.cache.tiers.store import TieredStore  # noqa: E402
from skymemory.cache.tiers.tier import TierSettings  # noqa: E402
from skymemory.engine.transformers.guard import ComputeClock, estimated_token_s  # noqa: E402
from skymemory.store.memory import MemoryStore  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.impatient]
SLACK_S = 10.0
"""For a busy computer: half of what is waited for a tier whose worth is unknown."""


def test_before_the_first_pass_computing_takes_what_the_largest_matrix_says() -> None:
    one = torch.nn.Linear(512, 2048)
    eight = torch.nn.Sequential(one, *(torch.nn.Linear(512, 2048) for _ in range(7)))
    one_s, eight_s = (min(estimated_token_s(model) or 0.0 for _ in range(5)) for model in (one, eight))
    assert 0 < one_s < eight_s
    assert estimated_token_s(torch.nn.Sequential(torch.nn.ReLU())) is None
    assert estimated_token_s(torch.nn.Linear(8, 8, device="meta")) is None


def test_the_embedding_and_the_head_are_no_part_of_the_estimate(model: Any) -> None:
    rate = ComputeRate()
    clock = ComputeClock(model, rate)
    supposed_s = rate.seconds(1000)
    assert supposed_s is not None and supposed_s > 0 and not rate.measured
    with torch.inference_mode():
        model(torch.zeros((1, 64), dtype=torch.long))
    assert rate.measured and rate.seconds(1000) != supposed_s
    clock.remove()


def test_a_pass_that_had_begun_before_is_not_timed() -> None:
    """Another thread's prompt may be in the model while a manager opens."""
    rate, clocks = ComputeRate(), []

    class Opens(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if not clocks:
                clocks.append(ComputeClock(self, rate))
            return super().forward(input)

    model = Opens(8, 8)
    model.register_forward_hook(lambda *_: None)  # without any, hooks that come later are not looked for
    with torch.inference_mode():
        model(torch.zeros((4, 8)))
        assert not rate.measured
        model(torch.zeros((4, 8)))
    assert rate.measured
    clocks[0].remove()


@pytest.mark.parametrize("method", ["prefix", "complete_load"])
def test_the_very_first_prompt_waits_for_a_tier_that_hangs_no_longer_than_it_is_worth(
    model: Any, ids: Any, plain: list[int], method: str
) -> None:
    """Nothing was computed or asked before."""
    far = Hanging(name="far")
    with manager(model, None, far) as kvc:
        kvc.add_blocks_ids(ids)
    patient = TierSettings(ask_deadline_s=2 * SLACK_S, load_deadline_s=2 * SLACK_S)
    tiers = TieredStore([(MemoryStore(name="near"), TierSettings(local=True)), (far, patient)])
    with manager(model, None, tiers) as kvc:
        far.method = method
        worth_s = kvc.blocks.compute.seconds(ids.shape[1])
        assert worth_s is not None
        began_s = time.monotonic()
        cache = kvc.get_cache_ids(ids)
        took_s = time.monotonic() - began_s
        assert took_s < max(PATIENCE_SHARE * worth_s, MIN_PATIENCE_S) + SLACK_S
        assert tokens_of(model, ids, cache) == plain and kvc.last.hit_tokens == {}
        assert ids.shape[1] > 2 * BLOCK
    far.method = ""
    far.gate.set()
    tiers.close()
