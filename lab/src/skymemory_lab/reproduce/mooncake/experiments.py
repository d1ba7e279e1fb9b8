"""Mooncake's experiments by name and by published figure or table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from skymemory.conductor.cost_model import LLAMA_70B_8xA800, network_of, stored_s
from skymemory.errors import InvalidInput
from skymemory.eviction import policy_named
from skymemory_lab.reproduce.mooncake.base import Experiment, ExperimentSetting, Value
from skymemory_lab.reproduce.mooncake.clusters import bandwidth, public_datasets, ratio, real, scheduling, simulated
from skymemory_lab.reproduce.mooncake.overload import load_swings, rejections
from skymemory_lab.sim.sweeps import sweep
from skymemory_lab.sim.trace import BLOCK_TOKENS, block_uses, ideal_hits, shared_above, statistics_of
from skymemory_lab.sim.workload import ConversationSource

CAPACITIES = (100_000, 50_000, 30_000, 10_000, 1_000)
PUBLISHED_HITS = {
    "lru": (0.51, 0.51, 0.50, 0.48, 0.40, 0.30),
    "lfu": (0.51, 0.51, 0.49, 0.43, 0.35, 0.30),
    "length": (0.51, 0.50, 0.48, 0.42, 0.35, 0.30),
}
"""Table 1: unlimited capacity, then ``CAPACITIES``."""
PUBLISHED_NAMES = {"lru": "LRUCache", "lfu": "LFUCache", "length": "LengthAwareCache"}
THREE_MILLION_BLOCKS = 3_000_000 // BLOCK_TOKENS
_SMALL = "in theirs a few blocks have most of the hits (long prompts that all share); in ours all share only one block"
_OTHER_TRACE = "theirs is another trace (23,608 requests, not released)"


def popularity(setting: ExperimentSetting) -> Experiment:
    """Measure the popularity of blocks (figure 6)."""
    requests = setting.source.requests()
    statistics = statistics_of(requests)
    uses = block_uses(requests, partial=True)
    levels = (1, 2, 3, 5, 10, 30, 100, 1_000, 10_000)
    return Experiment(
        name="popularity",
        source=setting.source.name,
        assumed=("every id counts, also of blocks that are not full, as in the paper",),
        header=("wanted_at_least", "share_of_blocks"),
        rows=tuple((level, shared_above(uses, level)) for level in levels),
        values=(
            Value("blocks that are never requested again", "%", "over 50", 100 * statistics.once_share, digits=1),
            Value(
                "requests with the most popular block",
                "",
                "thousands of times",
                statistics.most_uses,
                "every prompt begins with the same block; no other is in a hundred prompts",
                digits=0,
            ),
            Value(
                "hits of a cache that never evicts",
                "% of blocks",
                51.0,
                100 * statistics.ideal_all_block_hits,
                _OTHER_TRACE,
                digits=1,
            ),
            Value(
                "the same, blocks that are not full left out",
                "% of blocks",
                None,
                100 * statistics.ideal_block_hits,
                "what an engine can cache",
                digits=1,
            ),
        ),
        series={"uses": (tuple(float(rank + 1) for rank in range(len(uses))), tuple(map(float, uses)))},
    )


@dataclass(frozen=True, slots=True)
class _Replay:
    """Replay of a trace through a cache of ``capacity`` blocks; ``partial``: partial blocks count."""

    source: ConversationSource
    policy: str
    capacity: int
    partial: bool


def replayed(cell: _Replay) -> float:
    """Return the hits as a share of all blocks."""
    prompts = [request.blocks(cell.partial) for request in cell.source.requests()]
    depth = {block: at for prompt in prompts for at, block in enumerate(prompt)}
    names = {block: block.to_bytes(8) for block in depth}
    depth_of = {name: depth[block] for block, name in names.items()}
    # The store's own policies over one memory, block by block. Hits are the prompt's longest stored prefix, touched
    # from the end, so that the beginning, which more prompts share, is the most recent. Missing blocks are stored from
    # the end too, with a victim for each when full.
    policy = policy_named(cell.policy, depth_of.__getitem__)
    stored: set[bytes] = set()
    hits = 0
    for prompt in ([names[block] for block in blocks] for blocks in prompts):
        matched = next((at for at, key in enumerate(prompt) if key not in stored), len(prompt))
        hits += matched
        for key in reversed(prompt[:matched]):
            policy.on_use(key)
        for key in reversed(prompt[matched : cell.capacity]):
            if key in stored:
                policy.on_store_or_touch(key)
                continue
            if len(stored) >= cell.capacity:
                victim = policy.victim(key)
                assert victim is not None
                stored.discard(victim)
                policy.on_removal(victim, evicted=True)
            stored.add(key)
            policy.on_store_or_touch(key)
    return hits / max(1, sum(map(len, prompts)))


def hits(setting: ExperimentSetting) -> Experiment:
    """Measure the hits of table 1, and of a cache of three million tokens (FAST'25)."""
    requests = setting.source.requests()
    most_hits, blocks = ideal_hits(requests, partial=True)
    most = most_hits / blocks
    policies = tuple(PUBLISHED_HITS)
    cells = [
        *(_Replay(setting.source, policy, capacity, True) for policy in policies for capacity in CAPACITIES),
        _Replay(setting.source, "lru", THREE_MILLION_BLOCKS, True),
        *(_Replay(setting.source, "lru", capacity, False) for capacity in CAPACITIES),
    ]
    hit_rates = sweep(replayed, cells, setting.way, setting.jobs, setting.progress)
    table = {policy: hit_rates[at * len(CAPACITIES) :][: len(CAPACITIES)] for at, policy in enumerate(policies)}
    # In the order of ``cells``: by policy, the 3 million tokens, then whole blocks only.
    three_million, whole_only = hit_rates[len(policies) * len(CAPACITIES)], hit_rates[-len(CAPACITIES) :]
    whole_hits, whole_blocks = ideal_hits(requests)
    rows: list[tuple[object, ...]] = [("lru, whole blocks only", whole_hits / whole_blocks, *whole_only)]
    rows = [*((policy, most, *table[policy]) for policy in policies), *rows]
    return Experiment(
        name="hits",
        source=setting.source.name,
        assumed=(
            "one memory for all; a block of 512 tokens is a block, also where it is not full, as in the table",
            "nothing is evicted before what is behind it where the policy is LRU; LFU and length-aware as named",
        ),
        header=("policy", "no end", *(f"{capacity:,} blocks" for capacity in CAPACITIES)),
        rows=tuple(rows),
        values=(
            *_compared(table, most),
            Value(
                "3 million tokens, LRU, of the most there is to hit",
                "%",
                50.0,
                100 * three_million / most,
                "in our trace blocks recur later: 30,000 blocks are needed for nine tenths",
                digits=0,
            ),
        ),
    )


# Absolute hits differ between traces; the share of all possible hits can be compared.
def _compared(table: dict[str, list[float]], most: float) -> list[Value]:
    values = [Value("most there is to hit", "% of blocks", 51.0, 100 * most, _OTHER_TRACE, digits=1)]
    for policy, ours in table.items():
        published: Sequence[float] = PUBLISHED_HITS[policy]
        for capacity, theirs, own in zip(CAPACITIES, published[1:], ours, strict=True):
            what = f"{PUBLISHED_NAMES[policy]}, {capacity:,} blocks"
            why = _SMALL if capacity <= 10_000 and policy == "lru" else ""
            values.append(Value(what, "% of the most", 100 * theirs / published[0], 100 * own / most, why, digits=0))
    return values


LENGTHS = (8, 16, 32, 64, 128)
"""Lengths in thousand tokens."""


def layer_wise(setting: ExperimentSetting) -> Experiment:
    """Compare the latency that storing KV adds to a prefill, layer by layer and after it (figure 7)."""
    cost = LLAMA_70B_8xA800
    network = network_of(cost)
    rows = []
    for thousand in LENGTHS:
        tokens = thousand * 1024
        compute_s, transfer_s = cost.prefill_s(tokens), network.seconds(cost.kv_bytes(tokens))
        # Each layer is sent while the next is computed; only what outlasts the prefill is visible.
        visible_s = stored_s(transfer_s, compute_s, cost.shape.layers)
        rows.append((thousand, compute_s, transfer_s * 1e3, visible_s * 1e3, visible_s / transfer_s))
    worst = max(row[4] for row in rows)
    return Experiment(
        name="layer-wise",
        source="none: lengths alone",
        assumed=(
            f"KV goes over the network at {network.bytes_per_s / 1e9:g} GB/s; half of the machine's speed is reached",
            "the figure's own values are in an image only: shapes are compared",
        ),
        header=("thousand_tokens", "prefill_s", "serial_ms", "layer_wise_ms", "left"),
        rows=tuple(rows),
        values=(
            Value(
                "what layer-wise storing leaves of the serial latency, most",
                "%",
                "nearly nothing",
                100 * worst,
                "one layer of 80 has nothing to hide behind",
                digits=1,
            ),
            Value(
                "serial latency, 128k against 8k tokens",
                "×",
                "grows with the length",
                rows[-1][2] / rows[0][2],
                digits=1,
            ),
        ),
    )


EXPERIMENTS: Mapping[str, Callable[[ExperimentSetting], Experiment]] = {
    "popularity": popularity,
    "hits": hits,
    "layer-wise": layer_wise,
    "scheduling": scheduling,
    "bandwidth": bandwidth,
    "ratio": ratio,
    "datasets": public_datasets,
    "simulated": simulated,
    "real": real,
    "rejections": rejections,
    "swings": load_swings,
}
PUBLISHED = {
    "5": "scheduling",
    "6": "popularity",
    "7": "layer-wise",
    "8": "scheduling",
    "9": "swings",
    "10": "swings",
    "11": "datasets",
    "12": "simulated",
    "13": "real",
    "table1": "hits",
    "table3": "rejections",
}
"""Experiments by published figure or table, numbered as on arXiv, but 5 as in FAST'25."""


def chosen(names: Sequence[str]) -> list[str]:
    """Return the experiments of these names, figures or tables; all without names."""
    keys = []
    for name in names:
        key = PUBLISHED.get(name.replace(" ", "").lower(), name)
        if key not in EXPERIMENTS:
            raise InvalidInput(
                f"Mooncake's {name!r} is not reproduced; there are {', '.join(EXPERIMENTS)}, or {', '.join(PUBLISHED)}"
            )
        keys.append(key)
    return list(dict.fromkeys(keys)) or list(EXPERIMENTS)
