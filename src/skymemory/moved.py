"""Imports by old module names: they work for another release, with a warning that gives the new name."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "skymemory.cache.hierarchy_settings": "skymemory.cache.tiers.store",
    "skymemory.cache.tier": "skymemory.cache.tiers.tier",
    "skymemory.cache.value": "skymemory.kv.value",
    "skymemory.conductor.admission.base": "skymemory.conductor.scheduler",
    "skymemory.conductor.cost_model.written": "skymemory.conductor.cost_fit",
    "skymemory.conductor.fleet": "skymemory.conductor.picker",
    "skymemory.conductor.seeds": "skymemory.conductor.request",
    "skymemory.engine.compare": "skymemory.engine.doctor",
    "skymemory.engine.named": "skymemory.engine.models",
    "skymemory.engine.other_prompts": "skymemory.engine.cake",
    "skymemory.index.lookup": "skymemory.store.sky.probing",
    "skymemory.sim.cluster.capacity": "skymemory.sim.cluster.cells",
    "skymemory.sim.cluster.chrome_trace": "skymemory.sim.cluster.outcome",
    "skymemory.sim.cluster.metrics": "skymemory.sim.cluster.outcome",
    "skymemory.sim.cluster.pool_settings": "skymemory.sim.cluster.setup",
    "skymemory.sim.cluster.run": "skymemory.sim.cluster.simulation",
    "skymemory.sim.prompt_text": "skymemory.sim.workload",
    "skymemory.sim.routing_metrics": "skymemory.sim.routing",
    "skymemory.sim.routing_strategies": "skymemory.sim.routing",
    "skymemory.sim.sources": "skymemory.sim.workload",
    "skymemory.sim.trace_statistics": "skymemory.sim.trace",
    "skymemory.store.rate_limited": "skymemory.store.wrappers",
    "skymemory.testbed.addresses": "skymemory.testbed.open_store",
}


class _Forwarding(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        now = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} is now {now}; the old name goes with the next release", FutureWarning, 2)
        names = vars(import_module(now)).items()
        vars(module).update({name: value for name, value in names if not name.startswith("__")})


def forward() -> None:
    if not any(isinstance(finder, _Forwarding) for finder in sys.meta_path):
        sys.meta_path.append(_Forwarding())
