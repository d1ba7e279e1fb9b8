"""Imports that pages showed before the tree was rebuilt."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from skymemory.moved import MOVED

DOCUMENTED = {
    "skymemory.cache.hierarchy_settings": ["HierarchySettings"],
    "skymemory.cache.tier": ["TierSettings"],
    "skymemory.cache.tiers": ["TieredStore"],
    "skymemory.cache.value": ["is_sound_block"],
    "skymemory.conductor.admission.base": ["Slo"],
    "skymemory.conductor.fleet": ["Fleet"],
    "skymemory.conductor.cost_model": ["LLAMA_70B_8xA800"],
    "skymemory.conductor.cost_model.written": ["parse"],
    "skymemory.conductor.scheduling.named": ["build"],
    "skymemory.conductor.seeds": ["seed"],
    "skymemory.conductor.strategies.named": ["named"],
    "skymemory.engine.compare": ["logit_distance", "measure_logit_distance"],
    "skymemory.engine.named": ["ready_model"],
    "skymemory.engine.other_prompts": ["OtherPrompts"],
    "skymemory.sim.cluster.capacity": ["CapacityCell", "capacity"],
    "skymemory.sim.cluster.metrics": ["measured"],
    "skymemory.sim.cluster.pool_settings": ["PoolSettings", "SkySetup"],
    "skymemory.sim.cluster.run": ["run_cluster"],
    "skymemory.sim.prompt_text": ["render_text"],
    "skymemory.sim.routing_metrics": ["measured"],
    "skymemory.sim.routing_strategies": ["strategy_for"],
    "skymemory.sim.sources": ["Source"],
    "skymemory.sim.trace_statistics": ["statistics_of"],
    "skymemory.store.rate_limited": ["RateLimited"],
    "skymemory.testbed.addresses": ["open_store"],
}


@pytest.mark.parametrize("old", DOCUMENTED)
def test_a_documented_import_still_works(old: str) -> None:
    if old.startswith("skymemory.engine"):
        pytest.importorskip("torch")
    sys.modules.pop(old, None) if old in MOVED else None
    if old in MOVED:
        with pytest.warns(FutureWarning, match=MOVED[old]):
            module = importlib.import_module(old)
        now = importlib.import_module(MOVED[old])
        assert all(getattr(module, name) is getattr(now, name) for name in DOCUMENTED[old])
    else:
        module = importlib.import_module(old)
    assert all(hasattr(module, name) for name in DOCUMENTED[old])


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("skymemory.cache.there_is_no_such_module")


def test_the_warning_names_the_line_that_imports() -> None:
    line = "import warnings; warnings.simplefilter('error'); import skymemory.sim.sources"
    failed = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True)
    assert failed.returncode == 1 and "skymemory.sim.workload" in failed.stderr
