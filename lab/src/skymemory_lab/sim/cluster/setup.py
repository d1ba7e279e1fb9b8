"""Configuration of a simulated cluster. All rates are bytes of KV per second."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

from skymemory.conductor.cost_model import DRAM, SSD, CostModel, LLAMA_70B_8xA800, Medium
from skymemory.conductor.pools import ElasticSettings, PoolController
from skymemory.conductor.request import Slo
from skymemory.errors import InvalidInput
from skymemory.eviction import POLICIES


@dataclass(frozen=True, slots=True)
class SkySetup:
    """Constellation as a tier of the KV pool."""

    bytes_per_s: float = 100e9 / 8
    """Rate between ground and satellites, per direction, shared by all nodes."""
    preset: str = "starlink-a"
    strategy: str = "rotation_hop"
    servers: int = 81
    access: str = "hybrid"
    gateway: str = "climbing"
    memory_bytes_per_satellite: float = 256e9
    isl_bytes_per_s: float = 100e9 / 8
    """Rate of an inter-satellite link. Handovers must complete within one slot move."""
    packing: float = 1.0
    """Stored bytes per byte of KV."""
    most_queued_s: float = 10.0
    """Uplink queue above which nothing is written."""
    picky_queued_s: float = 5.0
    """Uplink queue above which new blocks are not written."""
    geometry_s: float = 10.0
    """Interval of recomputed link lengths."""

    def __post_init__(self) -> None:
        rates = (self.bytes_per_s, self.isl_bytes_per_s, self.memory_bytes_per_satellite, self.geometry_s)
        if not (
            all(rate > 0 for rate in rates)
            and 0 < self.packing <= 1
            and min(self.most_queued_s, self.picky_queued_s) >= 0
        ):
            raise InvalidInput("sky: expected rates, memory and geometry_s > 0, 0 < packing ≤ 1, queues ≥ 0")


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Cache and links of each node, and the tiers that all share."""

    dram_bytes: float = 1e12
    policy: str = "lru"
    ssd_bytes: float = 0.0
    network: Medium | None = None
    """Network per node and direction; None: the cost model's."""
    dram: Medium = DRAM
    ssd: Medium = SSD
    jitter_s: float = 0.0
    """Mean of each transfer's random delay (exponential)."""
    seed: int = 0
    sky: SkySetup | None = None

    def __post_init__(self) -> None:
        for name, size in (("dram_bytes", self.dram_bytes), ("ssd_bytes", self.ssd_bytes), ("jitter_s", self.jitter_s)):
            if not 0 <= size < math.inf:
                raise InvalidInput(f"{name} is {size:g}; expected 0 or more")
        if self.policy not in POLICIES:
            raise InvalidInput(f"policy {self.policy!r}: expected one of {', '.join(POLICIES)}")


@dataclass(frozen=True, slots=True)
class InstanceFailure:
    """Failure of an instance, which returns empty after ``down_s``."""

    instance: str
    at_s: float
    down_s: float = 60.0


@dataclass(frozen=True, slots=True)
class PromptHandover:
    """Transfer of a prompt through a store, with a two-step router: the decode instance gives the first token."""

    save_s: float = 0.0
    """Fixed time from the prefill's end until its values are stored."""
    save_token_s: float = 0.0
    fetch_s: float = 0.0
    """Fixed time to ask the decode instance, fetch, and queue the remaining prompt, begun between steps."""
    fetch_token_s: float = 0.0
    """Additional time per token that the decode instance lacks."""
    take_s: float = 1e-3
    """Time to load the values and compute the last prompt tokens, while the batch waits."""
    take_token_s: float = 0.0

    def __post_init__(self) -> None:
        for setting in fields(self):
            if not 0 <= getattr(self, setting.name) < math.inf:
                raise InvalidInput(f"handover: {setting.name} is {getattr(self, setting.name):g}; expected 0 or more")
        if not self.take_s > 0:
            raise InvalidInput("handover: take_s is 0, but the first token takes a step")


Pools = Literal["fixed", "elastic"]
POOLS: tuple[Pools, ...] = get_args(Pools)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSetup:
    prefill: int = 8
    decode: int = 8
    coupled: int = 0
    cost: CostModel = LLAMA_70B_8xA800
    believed: CostModel | None = None
    """Cost model that the scheduler assumes; None: the true model."""
    error: float = 0.0
    """Standard deviation of the relative error of prefill estimates."""
    tells_output: bool = False
    output_error: float = 0.0
    """Standard deviation of the stated length's relative error."""
    pools: Pools = "fixed"
    """Pool mode. ``elastic``: instances change roles but keep their names."""
    elastic: ElasticSettings = ElasticSettings()  # noqa: RUF009 - frozen
    change_s: float = 2.0
    """Set-up time after a drain."""
    pipeline: int = 1
    chunk_tokens: int = 4096
    layer_wise: bool = True
    """True if KV is sent to the decode machine while it is computed."""
    handover: PromptHandover | None = None
    """Transfer through a store; None: KV streams between accelerators."""
    request_s: float = 0.0
    """Time of a request before its prefill: client, router, parsing."""
    kv_tokens: int = 1_300_000
    """KV memory of a decode machine: 0.9 of 8×80 GB less the 70B weights, at 320 KiB per token."""
    most_batch: int = 256
    decode_s: float | None = None
    """Time that the scheduler takes a request to decode; None: learnt."""
    mixed_tokens: int = 0
    """Tokens per step of coupled instances, decode tokens first; 0: decoding waits for prefills."""
    coupled_cache_tokens: int = 650_000
    """Part of ``kv_tokens`` used as prefix cache."""
    pool: PoolSettings = field(default_factory=PoolSettings)
    slo: Slo = Slo(30.0, 0.1)  # noqa: RUF009 - frozen
    failures: tuple[InstanceFailure, ...] = ()
    retries: int = 1
    partial: bool = False
    """True if a prompt's last, partial block is cached, as published tables count."""
    rate: float = 1.0
    jitter_s: float = 0.0
    """Upper bound of the arrivals' uniform random delay."""
    sample_s: float = 1.0
    spans: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.coupled:
            if self.prefill or self.decode or self.coupled < 0:
                raise InvalidInput("coupled > 0: expected prefill and decode of 0")
        elif self.prefill < 1 or self.decode < 1:
            raise InvalidInput("expected prefill ≥ 1 and decode ≥ 1, or coupled ≥ 1")
        if self.pipeline < 1 or self.prefill % self.pipeline:
            raise InvalidInput(f"prefill {self.prefill} is not a multiple of pipeline {self.pipeline}")
        if min(self.chunk_tokens, self.kv_tokens, self.most_batch) < 1 or min(self.mixed_tokens, self.retries) < 0:
            raise InvalidInput("expected chunk_tokens, kv_tokens, most_batch ≥ 1; mixed_tokens, retries ≥ 0")
        if self.coupled and not 0 <= self.coupled_cache_tokens < self.kv_tokens:
            raise InvalidInput(
                f"coupled_cache_tokens is {self.coupled_cache_tokens}; expected 0 to below kv_tokens, {self.kv_tokens}"
            )
        if not (self.sample_s > 0 and self.rate > 0 and self.jitter_s >= 0):
            raise InvalidInput("expected sample_s > 0, rate > 0, jitter_s ≥ 0")
        if not (0 <= self.error <= 1 and 0 <= self.output_error <= 1):
            raise InvalidInput("expected error and output_error from 0 to 1")
        if self.pools not in POOLS:
            raise InvalidInput(f"pools {self.pools!r}: expected one of {', '.join(POOLS)}")
        if self.pools == "elastic":
            if self.coupled or self.pipeline > 1:
                raise InvalidInput(
                    "elastic pools: expected coupled of 0 and pipeline of 1; coupled ones do both already"
                )
            PoolController(self.slo, self.elastic_settings())  # refuses objectives that an idle instance misses
        if not 0 <= self.change_s < math.inf:
            raise InvalidInput(f"change_s is {self.change_s:g}; expected 0 or more")
        if self.handover is not None and (self.coupled or self.pools == "elastic"):
            raise InvalidInput("handover: expected fixed pools of prefill and decode instances")
        if not 0 <= self.request_s < math.inf:
            raise InvalidInput(f"request_s is {self.request_s:g}; expected 0 or more")
        known = {*self.prefilling(), *self.decoding()}
        for failure in self.failures:
            if failure.instance not in known or failure.at_s < 0 or not failure.down_s > 0:
                raise InvalidInput(f"{failure}: expected at_s ≥ 0, down_s > 0 and an instance of {sorted(known)}")

    def prefilling(self) -> list[str]:
        if self.coupled:
            return [f"coupled-{number}" for number in range(self.coupled)]
        return [f"prefill-{number}" for number in range(self.prefill // self.pipeline)]

    def decoding(self) -> list[str]:
        return [f"decode-{number}" for number in range(self.decode)]

    def elastic_settings(self) -> ElasticSettings:
        """Return ``elastic`` with an idle instance's time between tokens, by default the believed model's."""
        if self.elastic.idle_tbt_s:
            return self.elastic
        return replace(self.elastic, idle_tbt_s=(self.believed or self.cost).decode_step_s(1, 0))

    def machines(self) -> int:
        return self.prefill + self.decode + self.coupled

    def with_coupled(self) -> ClusterSetup:
        return replace(self, prefill=0, decode=0, coupled=self.machines(), pipeline=1, failures=(), handover=None)
