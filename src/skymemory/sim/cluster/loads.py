"""The loads of a simulated cluster over time, as Mooncake defines them: what is predicted, over what was promised."""

from __future__ import annotations

from skymemory.conductor.admission.base import Slo
from skymemory.sim.cluster.machines import Machines
from skymemory.sim.cluster.outcome import LoadSample


class Loads:
    def __init__(self, slo: Slo, machines: Machines) -> None:
        self._slo = slo
        self._prefills = machines.prefills or machines.coupled
        self._decodes = machines.decodes or machines.coupled
        self.samples: list[LoadSample] = []

    def sample(self, now_s: float) -> None:
        ttfts_s = [instance.predicted_ttft_s(now_s) for instance in self._prefills]
        steps_s = [instance.step_s(now_s) for instance in self._decodes]
        self.samples.append(
            LoadSample(
                t_s=now_s,
                prefill=max(ttfts_s) / self._slo.ttft_s,
                decode=max(steps_s) / self._slo.tbt_s,
                waiting=sum(len(instance.waiting) for instance in self._prefills),
                decoding=sum(len(instance.batch) for instance in self._decodes),
                prefill_mean=sum(ttfts_s) / len(ttfts_s) / self._slo.ttft_s,
                decode_mean=sum(steps_s) / len(steps_s) / self._slo.tbt_s,
            )
        )
