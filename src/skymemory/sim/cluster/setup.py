"""What a simulated cluster is made of, what it is believed to be, and what happens to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from skymemory.conductor.admission.base import Slo
from skymemory.conductor.cost_model import CostModel, LLAMA_70B_8xA800
from skymemory.conductor.cost_model.model import DRAM, SSD, Medium
from skymemory.errors import InvalidInput
from skymemory.eviction.policies import POLICIES

# What a simulated cluster's pool is made of. Bytes are of KV as the model computes it, rates in bytes a second.


@dataclass(frozen=True, slots=True)
class SkySetup:
    """A constellation behind the cluster: one ground station, and a box of satellites that stays over it."""

    bytes_per_s: float = 100e9 / 8
    """Between ground and satellites, in each direction, shared by all nodes."""
    preset: str = "starlink-a"
    strategy: str = "rotation_hop"
    servers: int = 81
    access: str = "hybrid"
    gateway: str = "climbing"
    memory_bytes_per_satellite: float = 256e9
    isl_bytes_per_s: float = 100e9 / 8
    """Of one link between satellites: what the box hands over as it moves must pass it within a slot move."""
    packing: float = 1.0
    """Bytes in the sky for each byte of KV: 0.5 where numbers of two bytes are quantized to one."""
    most_queued_s: float = 10.0
    """Nothing more is written while the way up is busy for longer than this."""
    picky_queued_s: float = 5.0
    """While it is busy for longer than this, only what was offered before is written."""
    geometry_s: float = 10.0
    """Lengths of beams are taken anew so often; which satellite holds what is exact at every moment."""

    def __post_init__(self) -> None:
        rates = (self.bytes_per_s, self.isl_bytes_per_s, self.memory_bytes_per_satellite, self.geometry_s)
        if not (
            all(rate > 0 for rate in rates)
            and 0 < self.packing <= 1
            and min(self.most_queued_s, self.picky_queued_s) >= 0
        ):
            raise InvalidInput("a sky needs memory, links with rates above 0, and a packing above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What each node has, and what is between and behind them."""

    dram_bytes: float = 1e12
    """In the memory of each node that caches."""
    policy: str = "lru"
    """Who is evicted from it: one of ``eviction.policies.POLICIES``."""
    ssd_bytes: float = 0.0
    """Behind it, for what it evicts; the SSD itself goes by LRU."""
    network: Medium | None = None
    """Of each node, in each direction; None: the cost model's machine."""
    dram: Medium = DRAM
    """From a node's memory to its accelerators."""
    ssd: Medium = SSD
    jitter_s: float = 0.0
    """Mean of what every transfer between nodes or from the sky comes late by chance (exponential, seeded)."""
    seed: int = 0
    sky: SkySetup | None = None

    def __post_init__(self) -> None:
        for name, size in (("dram_bytes", self.dram_bytes), ("ssd_bytes", self.ssd_bytes), ("jitter_s", self.jitter_s)):
            if not 0 <= size < math.inf:
                raise InvalidInput(f"{name} {size:g}: 0 or more is needed")
        if self.policy not in POLICIES:
            raise InvalidInput(f"policy {self.policy!r}: expected one of {', '.join(POLICIES)}")


@dataclass(frozen=True, slots=True)
class Failure:
    """An instance dies, and is back, empty, after ``down_s``."""

    instance: str
    """``prefill-0``, ``decode-3``, ``coupled-1``."""
    at_s: float
    down_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSetup:
    """Machines are all alike: those of ``cost``. Prefill and decode apart, or coupled instances that do both."""

    prefill: int = 8
    """Machines that prefill, in groups of ``pipeline``."""
    decode: int = 8
    coupled: int = 0
    cost: CostModel = LLAMA_70B_8xA800
    """What is true in the simulation."""
    believed: CostModel | None = None
    """What the scheduler estimates with; None: the truth."""
    error: float = 0.0
    """Standard deviation of a seeded error on every estimate of a prefill, as a part of it (``ErringSpeeds``)."""
    tells_output: bool = False
    """Requests say how long their answers will be."""
    output_error: float = 0.0
    """Standard deviation of a seeded error on that, as a part of it."""
    pipeline: int = 1
    """Machines of one prefilling instance."""
    chunk_tokens: int = 4096
    """Of a chunk in a pipeline of more than one machine."""
    layer_wise: bool = True
    """KV goes to the decoding machine while it is computed; else after."""
    kv_tokens: int = 1_300_000
    """Memory for KV of a machine that decodes: of 8×80 GB, nine tenths less the weights of 70B, at 320 KiB a token."""
    most_batch: int = 256
    """Requests that a machine decodes at once (vLLM's ``max_num_seqs``)."""
    mixed_tokens: int = 0
    """Of a coupled instance: tokens of one step, decoding first and chunks of prefills in the rest (vLLM's chunked
    prefill, ``max_num_batched_tokens``). 0: prefills come first, and decoding waits."""
    coupled_cache_tokens: int = 650_000
    """Of ``kv_tokens``, what a coupled instance keeps as its prefix cache; the rest is for requests in its batch."""
    pool: PoolSettings = field(default_factory=PoolSettings)
    slo: Slo = Slo(30.0, 0.1)  # noqa: RUF009 - frozen
    failures: tuple[Failure, ...] = ()
    retries: int = 1
    """How often a request is tried again whose machine died."""
    partial: bool = False
    """The last block of a prompt is cached although it is not full, as published tables count it."""
    rate: float = 1.0
    """Requests arrive so many times as fast."""
    jitter_s: float = 0.0
    """Each arrival is moved later by an even draw of up to that."""
    sample_s: float = 1.0
    """From one sample of the loads to the next."""
    spans: bool = False
    """Keep what every instance did, for charts."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.coupled:
            if self.prefill or self.decode or self.coupled < 0:
                raise InvalidInput("coupled instances stand alone: prefill and decode must be 0")
        elif self.prefill < 1 or self.decode < 1:
            raise InvalidInput("a cluster needs machines that prefill and machines that decode, or coupled ones")
        if self.pipeline < 1 or self.prefill % self.pipeline:
            raise InvalidInput(f"{self.prefill} machines do not make whole groups of {self.pipeline}")
        if min(self.chunk_tokens, self.kv_tokens, self.most_batch) < 1 or min(self.mixed_tokens, self.retries) < 0:
            raise InvalidInput("chunks, memory and batches are at least 1; mixed steps and retries 0 or more")
        if self.coupled and not 0 <= self.coupled_cache_tokens < self.kv_tokens:
            raise InvalidInput(f"a cache of {self.coupled_cache_tokens} of {self.kv_tokens} tokens leaves no memory")
        if not (self.sample_s > 0 and self.rate > 0 and self.jitter_s >= 0):
            raise InvalidInput("samples are some time apart, the rate is above 0, and jitter 0 s or more")
        if not (0 <= self.error <= 1 and 0 <= self.output_error <= 1):
            raise InvalidInput("errors of estimates are parts of them, 0 to 1")
        known = {*self.prefilling(), *self.decoding()}
        for failure in self.failures:
            if failure.instance not in known or failure.at_s < 0 or not failure.down_s > 0:
                raise InvalidInput(f"{failure} is of no instance here, or not of a time; there are {sorted(known)}")

    def prefilling(self) -> list[str]:
        """Names of the instances that prefill, by number."""
        if self.coupled:
            return [f"coupled-{number}" for number in range(self.coupled)]
        return [f"prefill-{number}" for number in range(self.prefill // self.pipeline)]

    def decoding(self) -> list[str]:
        """Names of the instances that only decode, by number."""
        return [f"decode-{number}" for number in range(self.decode)]

    def machines(self) -> int:
        return self.prefill + self.decode + self.coupled

    def with_coupled(self) -> ClusterSetup:
        """As many machines, all coupled."""
        return replace(self, prefill=0, decode=0, coupled=self.machines(), pipeline=1, failures=())
