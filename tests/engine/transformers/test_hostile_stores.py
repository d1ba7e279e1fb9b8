"""KVCManager over stores that lie or fail: the same tokens as without a cache, and a counter that says why."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.contract.hostile_store import FAULTS, OUTAGES, HostileStore
from tests.engine.transformers.generation import generate, manager

pytestmark = pytest.mark.engine


@pytest.mark.brief("False-0.1-truncate", "True-1.0-flip", "False-0.1-extend", "True-1.0-swap")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rate", [0.1, 1.0])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_lying_store_never_changes_the_output(
    model: Any, tokenizer: Any, document: str, fault: str, rate: float, in_place: bool
) -> None:
    prompt = document[:700]
    without = generate(model, tokenizer, prompt, new=6)
    with manager(model, tokenizer, HostileStore(fault, rate, seed=3, in_place=in_place), weights="w") as kvc:
        kvc.add_blocks(prompt)
        for _ in range(2):
            assert generate(model, tokenizer, prompt, kvc.get_cache(prompt), new=6) == without
            last = kvc.last
            assert last.prompt_tokens == last.computed_tokens + sum(last.hit_tokens.values())
            kvc.add_blocks(prompt)
        counters = kvc.counters
        assert counters.total("failed_blocks_total") > 0
        assert counters.total("lookup_tokens_total") == (
            counters.total("computed_tokens_total") + counters.total("hit_tokens_total")
        )


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("outage", OUTAGES)
def test_a_failing_store_never_changes_the_output(model: Any, tokenizer: Any, document: str, outage: str) -> None:
    prompt = document[:500]
    without = generate(model, tokenizer, prompt, new=6)
    with manager(model, tokenizer, HostileStore(outage=outage), weights="w") as kvc:
        kvc.add_blocks(prompt)
        assert generate(model, tokenizer, prompt, kvc.get_cache(prompt), new=6) == without


def test_what_is_received_in_place_is_what_is_copied_there(model: Any, tokenizer: Any, document: str) -> None:
    prompt = document[:700]
    caches = []
    for in_place in (False, True):
        with manager(model, tokenizer, HostileStore(in_place=in_place), weights="w") as kvc:
            kvc.add_blocks(prompt)
            caches.append(kvc.get_cache(prompt))
            assert kvc.last.size_bytes > 0 and not kvc.last.failed_blocks
    copied, received = caches
    assert copied.result.hit_tokens == received.result.hit_tokens
    assert copied.result.size_bytes == received.result.size_bytes
    assert copied.begin() == received.begin() > 0
    for one, other in zip(copied.layers, received.layers, strict=True):
        assert one.keys.equal(other.keys) and one.values.equal(other.values)
