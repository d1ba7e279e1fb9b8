"""What was reached of each goal in docs/benchmarks.md, from the JSON of the runs; part of ``tools.prose_figures``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from skymemory.eviction import POLICIES
from tools import admission_tables
from tools.arena_tables import FOLDER
from tools.benchmark_tables import OURS, Row, row_of, rows_of

KB_4, KB_64, KB_512, MB_2_9, MB_16 = 4096, 65_536, 524_288, 2_949_120, 16_777_216


def missed(reached: Iterable[tuple[float, float]], digits: int = 2, *, at_most: bool = False) -> str:
    """Values, each with its goal, and which of them miss it: ``0.58, 0.76; 0.90: **missed**``."""
    parts = []
    for is_met, group in groupby(reached, lambda pair: pair[0] <= pair[1] if at_most else pair[0] >= pair[1]):
        parts.append(", ".join(f"{value:.{digits}f}" for value, _ in group) + ("" if is_met else ": **missed**"))
    return "; ".join(parts)


def extent(values: Iterable[float], digits: int = 2) -> str:
    """``0.29 to 0.82``, or one value where both are alike."""
    ordered = sorted(values)
    least, most = (f"{value:.{digits}f}" for value in (ordered[0], ordered[-1]))
    return least if least == most else f"{least} to {most}"


def _of_redis(verb: str, clients: int, *goals: tuple[int, float]) -> str:
    def rate(size_bytes: int) -> float:
        row = row_of("data_path", section="sizes", path=OURS[0], verb=verb, clients=clients, size_bytes=size_bytes)
        return float(row["x"])

    return missed((rate(size_bytes), goal) for size_bytes, goal in goals)


def _of_lmcache() -> str:
    def ratio(verb: str) -> float:
        ours, theirs = (
            row_of("data_path", section="sizes", path=path, verb=verb, clients=1, size_bytes=MB_16)["us"]
            for path in (OURS[0], "LMCache")
        )
        return float(theirs / ours)

    return missed([(ratio("read"), 1.3), (ratio("write"), 1.1)])


def _host_tier(verb: str, peer: str, *goals: tuple[int, float]) -> str:
    """By how much the host tier is faster than ``peer``, one client."""
    rows = [(row_of("host_tier", verb=verb, clients=1, size_bytes=size_bytes), goal) for size_bytes, goal in goals]
    return missed((row[f"{peer}_ratio"], goal) for row, goal in rows)


def _host_tier_of_copies(clients: int, goal: float) -> str:
    row = row_of("host_tier", verb="read", clients=clients, size_bytes=MB_2_9)
    return missed([(row["copy_ratio"], goal)])


def _host_tier_us(verb: str, most_us: float) -> str:
    return missed([(row_of("host_tier", verb=verb, clients=1, size_bytes=KB_64)["host_us"], most_us)], 0, at_most=True)


def _host_tier_of_file() -> str:
    return missed(((row["of_file"], 1.02) for row in rows_of("ttft_host")), at_most=True)


def _through_a_gateway() -> str:
    direct, through = (row_of("data_path", section="ways", path=path) for path in ("on ten", "on ten, by a gateway"))
    shares = [(direct[f"{verb}_ms"] / through[f"{verb}_ms"], 0.6) for verb in ("read", "write")]
    return missed(shares)


def _hashing() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "hashing_index.json").read_text("utf-8"))["results"]
    return found


def _hashed() -> str:
    array, plain, theirs = (
        _hashing()[f"hash 128k tokens, {how} [ms]"][0]
        for how in ("numpy, blocks of 128", "list, blocks of 128", "list, blocks of 128, vLLM's xxhash")
    )
    return f"{array:.2f} ms; a list {plain:.2f}, vLLM's {theirs:.2f}"


def _longest_prefix() -> str:
    ours_us = _hashing()["prefix of 1,000, all present [us]"][0]
    dictionary_us = _hashing()["(a plain dictionary, one lookup per block) [us]"][0]
    return f"{ours_us:.0f} µs (a dictionary {dictionary_us:.0f})" + (": **missed**" if ours_us >= 20 else "")


def _disk_hits() -> str:
    """Of blocks that the processor's cache does not hold; every other hit meets its goal."""
    rows = [row for row in rows_of("tiers") if row["goal"] and row["ratio"] < row["goal"]]
    if others := [row["tier"] for row in rows if (row["tier"], row["what"]) != ("disk", "page cache")]:
        raise SystemExit(f"docs/benchmarks.md says that these hits meet their goals: {', '.join(others)}")
    return missed((row["ratio"], row["goal"]) for row in rows)


def _first_prompts() -> str:
    """In chunks of a block, over links that are not random."""
    rows = [
        row
        for row in rows_of("loading")
        if (row.get("state"), row.get("chunk_tokens")) == ("cold", 128) and row["link"] != "random"
    ]
    cells = sum(row["cells"] for row in rows)
    return f"{cells - sum(row['above_goal'] for row in rows)} of {cells}"


def _daemon(verb: str) -> str:
    return extent(row["ratio"] for row in rows_of("store_daemon") if row["goal"] and row["verb"] == verb) + " ×"


def _vllm(mode: str, key: str, store: str = "", digits: int = 1) -> str:
    """Percent, of our stores or of one."""
    stores = {store} if store else {"memory", "disk", "redis"}
    rows = [row for row in rows_of("vllm_connector") if row["mode"] == mode and row["store"] in stores]
    return extent((100 * row[key] for row in rows), digits) + " %"


def _vllm_step(step: str) -> str:
    """Percent beyond a step alone."""
    rows = [row for row in rows_of("vllm_connector") if row["mode"] == "steps" and row["step"] == step]
    return " and ".join(f"{100 * (row['of_alone'] - 1):.1f}" for row in rows).replace("-", "−") + " %"


def _behind_the_best_policy() -> str:
    def behind(row: Row) -> float:
        return float(max(row[name] for name in POLICIES) - row["lrfu"])

    if any(behind(row) > 0 for row in rows_of("policies")):
        raise SystemExit("docs/benchmarks.md says that lrfu is the best on the conversation trace")
    worst = max(behind(row) for row in rows_of("policies_synthetic"))
    return f"{100 * worst:.1f} points"


def _while_it_turns() -> str:
    return extent(row["p99_of_still"] for row in rows_of("motion") if row["kind"] == "merged" and row["scale"]) + " ×"


def _simulated() -> str:
    rows = [row for row in rows_of("links") if row["access"] == "ideal"]
    return ", ".join(f"{100 * max(row[key] for row in rows):.1f}" for key in ("off_p50", "off_p99")) + " %"


def _above_the_bound() -> str:
    bound = row_of("physical", part="machines", access="all", ratio="of_bound")
    points = row_of("physical", part="points", servers="all")["points_per_s"]
    return f"{bound['median']:.3f} ×, worst {bound['most']:.2f}; {points / 1000:.0f},000"


def _looking() -> str:
    row = row_of("guard")
    again, step = (f"{row[key]:.0f} µs" for key in ("step_again_us", "step_us"))
    return f"{again} warm; {step} after a pass" + (": **missed**" if row["step_us"] >= 100 else "")


def _packet_events() -> str:
    rates = [round(row["per_s"], -3) for row in rows_of("links_speed")]
    return f"{min(rates):,.0f} to {max(rates):,.0f}" + (": **missed**" if min(rates) < 80_000 else "")


def _satellites_in_c() -> str:
    row = row_of("flight", section="path", satellites="C")
    starts = [
        max(each["resident_bytes"] for each in rows_of("flight") if each["section"] == "start" and each["keys"] == keys)
        for keys in (False, True)
    ]
    return (
        f"{row['read_x']:.2f} ×; read {row['read_s_per_gb_x']:.2f}, written {row['write_s_per_gb_x']:.2f}; "
        f"{row['beside_store_bytes'] / 1e6:.1f} MB; {starts[0] / 1e6:.0f} MB, with keys {starts[1] / 1e6:.0f}"
    )


def _prefetched() -> str:
    follow, predicted = (row_of("prediction", scheme=scheme) for scheme in ("follow", "parked, predicted"))
    medians = {f"{row['p50_s'] * 1e3:.0f} ms" for row in (follow, predicted)}
    if len(medians) > 1:
        raise SystemExit("docs/benchmarks.md says that both medians are alike")
    share = sum(follow["isl_bytes_a_day"].values()) / sum(predicted["isl_bytes_a_day"].values())
    return f"{medians.pop()} median both, 1/{share:.0f} of the traffic"


def _kvcache_centric(*rates: float) -> str:
    def ratio(rate: float) -> float:
        ours, random = (
            row_of("cluster", part="schedulers", rate=rate, scheduler=name)["ttft_mean_s"]
            for name in ("kvcache-centric", "random")
        )
        return float(ours / random)

    return missed(((ratio(rate), 0.156) for rate in rates), 3, at_most=True)


def _elastic_pools() -> str:
    shares = (100 * row["elastic"]["share"] for row in rows_of("pools") if row["part"] == "summary")
    return extent(shares, 1) + " %"


def _promises() -> str:
    ratios = [
        there[admission_tables.OURS]["met"] / there[admission_tables.best_rival(there)]["met"]
        for family in admission_tables.FAMILIES
        for there in admission_tables.cells(family).values()
    ]
    fewer, level = sum(ratio < 0.99 for ratio in ratios), sum(ratio >= 1 for ratio in ratios)
    goal = "" if level >= 73 else " (goal 73): **missed**"
    return f"{fewer or 'none'} of {len(ratios)} cells 1 % fewer; level or ahead in {level}{goal}"


def _answered_after_overload() -> str:
    runs = json.loads((FOLDER / "overload.json").read_text("utf-8"))
    if not all(run["hits"] == 1 for run in runs):
        raise SystemExit("docs/benchmarks.md says that every read hits after an overload")
    return f"{95 * min(run['answer'] for run in runs):.0f} of 95"


def _idle() -> str:
    percent = row_of("footprint")["idle_percent"]
    return "< 0.1 %" if percent < 0.1 else f"{percent:.1f} %"


def _figure_16() -> str:
    row = row_of("figure_16")
    return f"{row['cold_s'] * 1e3:.1f} ms for {row['points']} points"


GOALS: dict[str, Callable[[], str]] = {
    "goal: reads": lambda: _of_redis("read", 1, (KB_4, 0.5), (KB_64, 0.5), (KB_512, 1.0), (MB_2_9, 1.3)),
    "goal: writes": lambda: _of_redis("write", 1, (KB_4, 0.5), (KB_64, 0.5), (KB_512, 1.0), (MB_2_9, 1.2)),
    "goal: reads of 8 clients": lambda: _of_redis("read", 8, (KB_64, 0.7), (MB_2_9, 1.2)),
    "goal: of LMCache's server": _of_lmcache,
    "goal: host tier, reads": lambda: _host_tier("read", "Redis", (KB_4, 3.0), (KB_64, 4.0), (MB_2_9, 6.0)),
    "goal: host tier, writes": lambda: _host_tier("write", "Redis", (KB_4, 2.1), (KB_64, 2.8), (MB_2_9, 4.2)),
    "goal: host tier, memcached, reads": lambda: _host_tier("read", "memcached", (MB_2_9, 2.0)),
    "goal: host tier, memcached, writes": lambda: _host_tier("write", "memcached", (MB_2_9, 1.4)),
    "goal: host tier, a copy": lambda: _host_tier_of_copies(1, 0.8),
    "goal: host tier, 16 copies": lambda: _host_tier_of_copies(16, 0.7),
    "goal: host tier, read": lambda: f"{_host_tier_us('read', 35)} µs",
    "goal: host tier, write": lambda: f"{_host_tier_us('write', 50)} µs",
    "goal: host tier, of a file": _host_tier_of_file,
    "goal: through a gateway": _through_a_gateway,
    "goal: threads": lambda: f"{row_of('data_path', section='threads')['x']:.1f} ×",
    "goal: delayed read": lambda: f"{row_of('data_path', path='on ten, delay')['read_over_least']:.2f} ×",
    "goal: hashed": _hashed,
    "goal: longest prefix": _longest_prefix,
    "goal: disk hits": _disk_hits,
    "goal: hung tiers": lambda: extent((row["may_cost_ms"] for row in rows_of("hung_tiers")), 0) + " ms",
    "goal: hung tiers, first": lambda: extent((row["first_ms"] for row in rows_of("hung_tiers")), 0) + " ms",
    "goal: first prompts": _first_prompts,
    "goal: daemon, reads": lambda: _daemon("read"),
    "goal: daemon, writes": lambda: _daemon("write"),
    "goal: vLLM, warm": lambda: _vllm("ttft", "shared_of_plain"),
    "goal: vLLM, warm from the sky": lambda: _vllm("ttft", "shared_of_plain", "constellation"),
    "goal: vLLM, cold": lambda: _vllm("ttft", "cold_of_plain"),
    "goal: vLLM, Cake": lambda: f"{row_of('vllm_connector', mode='cake', ratio=1.0)['of_better']:.3f} ×",
    "goal: vLLM, decoding": lambda: _vllm_step("decoding"),
    "goal: vLLM, prefill": lambda: _vllm_step("prefill"),
    "goal: policies": _behind_the_best_policy,
    "goal: turning": _while_it_turns,
    "goal: looking": _looking,
    "goal: packet events": _packet_events,
    "goal: whole shell": lambda: f"{row_of('whole_shell')['seconds']:.0f} s",
    "goal: simulated": _simulated,
    "goal: bound": _above_the_bound,
    "goal: satellites in C": _satellites_in_c,
    "goal: prefetched": _prefetched,
    "goal: KVCache-centric": lambda: _kvcache_centric(0.75, 1.0, 1.25),
    "goal: KVCache-centric, half the rate": lambda: _kvcache_centric(0.5),
    "goal: elastic pools": _elastic_pools,
    "goal: promises": _promises,
    "goal: after an overload": _answered_after_overload,
    "goal: nothing wrong": lambda: f"{len(json.loads((FOLDER / 'soak.json').read_text('utf-8'))['wrong'])} wrong",
    "goal: idle": _idle,
    "goal: figure 16": _figure_16,
}
"""By name of the mark: what was reached."""
