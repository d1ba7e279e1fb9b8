"""The tables of the benchmark pages, from the JSON that the benchmarks wrote: ``python -m tools.benchmark_tables``.

A page says where a table stands by ``<!-- benchmark: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skymemory.eviction import POLICIES, REPLACEMENTS
from tools.arena_tables import FOLDER, fill, table

PAGES = [page for folder in (FOLDER, FOLDER.parent, FOLDER.parent / "guide") for page in sorted(folder.glob("*.md"))]
Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def page(path: Path) -> str:
    """The page as it should be."""
    if "<!-- benchmark: " not in (text := path.read_text("utf-8")):
        return text
    return fill(path, "benchmark", _Tables())


class _Tables(Mapping[str, str]):
    """By name; made when it is asked for."""

    def __getitem__(self, name: str) -> str:
        return TABLES[name]()

    def __iter__(self) -> Any:
        return iter(TABLES)

    def __len__(self) -> int:
        return len(TABLES)


def rows_of(name: str) -> list[Row]:
    rows: list[Row] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))["rows"]
    return rows


def row_of(name: str, **wanted: object) -> Row:
    """The only row of the run ``name`` with these values."""
    (row,) = [row for row in rows_of(name) if all(row.get(key) == value for key, value in wanted.items())]
    return row


def columns(name: str, *shown: Column, where: Callable[[Row], bool] = lambda row: True) -> str:
    """One line for each row, one column for each of ``shown``."""
    heads = [head for head, _ in shown]
    return table([heads, *([cell(row) for _, cell in shown] for row in rows_of(name) if where(row))])


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


def _number(key: str, digits: int = 0, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: f"{row[key] * scale:,.{digits}f}"


def _percent(key: str, digits: int = 1) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:.{digits}%}"


def _ttft(name: str) -> Callable[[], str]:
    return lambda: columns(
        name,
        ("delays", _text("delay")),
        ("tokens", _number("tokens")),
        ("without", lambda row: f"{row['without_s']:.3f} s"),
        ("with", lambda row: f"{row['with_s'] * 1e3:.0f} ms"),
        ("share", lambda row: f"{100 * row['share']:.1f} %"),
        ("tail alone", lambda row: f"{row['tail_s'] * 1e3:.0f} ms"),
        ("fetch", lambda row: f"{row['fetch_s'] * 1e3:.0f} ms"),
        ("rebuild", lambda row: f"{row['decode_s'] * 1e3:.0f} ms"),
        ("MB", _number("bytes", scale=1e-6)),
        ("fetch MB/s", lambda row: f"{row['bytes'] / row['fetch_s'] / 1e6:,.0f}"),
        ("of bound", lambda row: f"{row['with_s'] / row['bound_s']:.2f}" if row["bound_s"] else "no Redis"),
        ("from a file", lambda row: f"{row['file_s'] * 1e3:.0f} ms"),
        ("of it", _number("of_file", 2)),
    )


def _accelerator() -> str:
    """A line for each model and length: computed, loaded as a prefix, and both (Cake)."""
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows_of("accelerator"):
        found.setdefault((row["model"], row["tokens"]), {})[row["way"]] = row

    def ms(its: dict[str, Row], way: str, key: str) -> str:
        return f"{its[way][key] * 1e3:.0f} ms" if way in its else ""

    heads = ["model", "tokens", "computed", "from memory", "Cake", "from the sky", "Cake", "MB"]
    made = [
        [
            model,
            f"{tokens:,}",
            ms(its, "computed", "ttft_s"),
            *(ms(its, way, f"{side}_s") for way in ("memory", "constellation") for side in ("prefix", "cake")),
            f"{its['memory']['bytes'] / 1e6:,.0f}" if "memory" in its else "",
        ]
        for (model, tokens), its in found.items()
    ]
    return table([heads, *made])


def _data_path() -> str:
    return columns(
        "data_path",
        ("path", _text("path")),
        *(
            column
            for way in ("read", "write")
            for column in (
                (f"{way} ms", _number(f"{way}_ms", 2)),
                ("MB/s", _number(f"{way}_MB_s")),
                ("× Redis", _number(f"{way}_x", 2)),
            )
        ),
        where=lambda row: row["section"] == "ways",
    )


def _busy() -> str:
    """64 KB beside programs that compute."""
    rows = rows_of("data_path_busy")
    paths, cells = list(dict.fromkeys(row["path"] for row in rows)), {}
    for row in rows:
        cell = f"{row['us']:,.0f} µs" + (f" ({row['x']:.2f} ×)" if row["path"] != "Redis" else "")
        key = (str(row["programs"]), f"{row['pause_s'] * 1e3:.0f} ms", row["verb"])
        cells.setdefault(key, {})[row["path"]] = cell
    return table(
        [["programs", "pause", "", *paths], *([*key, *(cell[path] for path in paths)] for key, cell in cells.items())]
    )


OURS = ("by size", "on ten")
"""The paths of ``data_path.py sizes`` that are ours, the default first."""


def _sizes(cell: Callable[[Row], str], *more: tuple[str, Callable[[dict[str, Row]], str]], key: str) -> str:
    """A line for each size, number of clients and verb: of each path's row that has ``key`` a ``cell``, and ``more``
    columns of all paths' rows.
    """
    found: dict[tuple[int, int, str], dict[str, Row]] = {}
    for row in rows_of("data_path"):
        if row["section"] == "sizes" and key in row:
            found.setdefault((row["size_bytes"], row["clients"], row["verb"]), {})[row["path"]] = row
    paths = list(dict.fromkeys(path for its in found.values() for path in its))
    made = [["value", "clients", "", *paths, *(head for head, _ in more)]]
    for (size_bytes, clients, verb), its in sorted(found.items()):
        cells = [cell(its[path]) if path in its else "" for path in paths]
        made.append([f"{size_bytes / 1000:,.0f} KB", str(clients), verb, *cells, *(one(its) for _, one in more)])
    return table(made)


def _data_path_sizes() -> str:
    """Of each path its time and by how much it is faster than Redis; of our default, than the fastest other store."""

    def time(row: Row) -> str:
        ratio = f" ({row['x']:.2f} ×)" if row["path"] != "Redis" and "x" in row else ""
        return f"{row['us']:,.0f} µs{ratio}" + (f", {row['failed']:.1%} failed" if row.get("failed") else "")

    def best(its: dict[str, Row]) -> str:
        peers = [(row["us"], path) for path, row in its.items() if path not in OURS]
        if not peers or OURS[0] not in its:
            return ""
        us, peer = min(peers)
        return f"{us / its[OURS[0]]['us']:.2f} × {peer}"

    return _sizes(time, (f"{OURS[0]}, of the best peer", best), key="us")


def _data_path_processor() -> str:
    """Of clients, and of servers."""
    return _sizes(lambda row: f"{row['clients_s_per_gb']:.2f} + {row['servers_s_per_gb']:.2f}", key="clients_s_per_gb")


def _host_tier() -> str:
    """Of the host tier its time, in place and copied out, and by how much it is faster than others."""

    def ratio(who: str) -> Callable[[Row], str]:
        return lambda row: (
            ""
            if row.get(f"{who}_ratio") is None
            else f"{row[f'{who}_ratio']:.2f} ({row[f'{who}_ratio_least']:.2f} to {row[f'{who}_ratio_most']:.2f})"
        )

    return columns(
        "host_tier",
        ("value", lambda row: f"{row['size_bytes'] / 1000:,.0f} KB"),
        ("clients", _text("clients")),
        ("", _text("verb")),
        ("µs", _number("host_us")),
        ("in place", lambda row: f"{row['in_place_us']:,.0f}" if row["verb"] == "read" else ""),
        ("GB/s", _number("host_gb_per_s", 1)),
        ("× copy", ratio("copy")),
        ("× Redis", ratio("Redis")),
        ("× memcached", ratio("memcached")),
        ("× LMCache", ratio("LMCache")),
        ("CPU s/GB", _number("host_cpu_s_per_gb", 2)),
        ("Redis", _number("Redis_cpu_s_per_gb", 2)),
    )


def _hashing() -> str:
    """Ours and vLLM's, in milliseconds."""
    results = json.loads((FOLDER / "hashing_index.json").read_text("utf-8"))["results"]
    made = [["hashed", "median", "99th"]]
    for name, found in results.items():
        if name.startswith("hash "):
            made.append([name.removeprefix("hash ").removesuffix(" [ms]"), *(f"{each:.2f} ms" for each in found)])
    return table(made)


def _tiers() -> str:
    def time(row: Row, key: str) -> str:
        return f"{row[key] * 1e3:.1f} ms" if row[key] >= 0.01 else f"{row[key] * 1e6:,.0f} µs"

    return columns(
        "tiers",
        ("tier", lambda row: f"{row['tier']}, {row['what']}"),
        ("blocks", _text("blocks")),
        ("ours", lambda row: time(row, "ours_s")),
        ("beside", _text("peer")),
        ("takes", lambda row: time(row, "peer_s")),
        ("its time by ours", lambda row: f"{row['ratio']:.2f} ({row['ratio_least']:.2f} to {row['ratio_most']:.2f})"),
        ("goal", lambda row: f"{row['goal'] or ''}"),
    )


def _hung_tiers() -> str:
    def known(row: Row, key: str) -> str:
        return f"{row[key]:.0f}" if row["known"] else ""

    return columns(
        "hung_tiers",
        ("tier that hangs", _text("tier")),
        ("", lambda row: "known" if row["known"] else "never asked"),
        ("computing", _number("computing_ms")),
        ("healthy", lambda row: known(row, "healthy_ms")),
        ("usual p99 of a load", lambda row: known(row, "usual_p99_ms")),
        ("may cost", _number("may_cost_ms")),
        ("first prompt", _number("first_ms")),
        ("next five, the most", _number("next_ms", 1)),
    )


def _policies(name: str) -> str:
    shares = (*POLICIES, "belady")
    heads = [*(f"`{policy}`" for policy in POLICIES), "Belady"]

    def cell(policy: str) -> Callable[[Row], str]:
        return _number(policy, 1, 100)

    return columns(
        name,
        ("blocks", _number("capacity")),
        *((head, cell(policy)) for head, policy in zip(heads, shares, strict=True)),
    )


def _replacement() -> str:
    shares = [(policy, _percent(policy)) for policy in REPLACEMENTS]
    return columns("replacement", ("memory, blocks", _number("capacity")), *shares, ("Belady", _percent("belady")))


def _eviction() -> str:
    replaced = len(rows_of("eviction")) - 2 * len(REPLACEMENTS)
    first = rows_of("eviction")[:replaced]
    return columns(
        "eviction",
        ("policies", _text("eviction")),
        ("dead", _percent("dead")),
        ("messages", _number("messages")),
        ("holes", _number("holes")),
        ("hits", _percent("hits")),
        ("of seen", _percent("hits_of_seen")),
        ("moved MB", _number("moved_bytes", 1, 1e-6)),
        where=lambda row: row in first,
    )


def _eviction_replacement() -> str:
    last = rows_of("eviction")[-2 * len(REPLACEMENTS) :]
    return columns(
        "eviction",
        ("replacement", _text("replacement")),
        ("stored from sighting", lambda row: "2nd" if row["admission"] == "second" else "1st"),
        ("hits", _percent("hits")),
        ("of seen", _percent("hits_of_seen")),
        ("stored MB", _number("stored_bytes", 1, 1e-6)),
        where=lambda row: row in last,
    )


def _codec_quality() -> str:
    speed = {row["codec"]: row for row in rows_of("codecs") if row["source"] == "small trained model"}
    return columns(
        "codecs",
        ("codec", lambda row: f"`{row['codec']}`"),
        ("bits per number", _number("bits", 2)),
        ("× smaller than `quanto8`", _number("times_smaller_than_quanto8", 2)),
        ("perplexity", _number("perplexity", 2)),
        ("higher, %", lambda row: f"{row['higher_percent']:.2f} ± {row['error_percent']:.2f}".replace("-", "−")),
        ("encode MB/s", lambda row: f"{speed[row['codec']]['encode_mb_s']:,}"),
        ("decode MB/s", lambda row: f"{speed[row['codec']]['decode_mb_s']:,}"),
        where=lambda row: bool(row["source"] == "quality"),
    )


def _codec_sizes() -> str:
    correlated = {row["codec"]: row for row in rows_of("codecs") if row["source"] == "drawn, correlation 0.9"}
    return columns(
        "codecs",
        ("codec", lambda row: f"`{row['codec']}`"),
        ("bits per number", _number("bits", 2)),
        ("error, %", _number("error_percent", 2)),
        ("encode MB/s", _number("encode_mb_s")),
        ("decode MB/s", _number("decode_mb_s")),
        ("correlated: bits", lambda row: f"{correlated[row['codec']]['bits']:.2f}"),
        where=lambda row: bool(row["source"] == "TinyLlama's shape, 3 layers" and row["codec"] != "raw"),
    )


def _cake() -> str:
    rows = rows_of("cake")
    ratios = sorted({row["ratio"] for row in rows})
    rates = {row["ratio"]: f"{row['bytes_per_s'] / 1e6:.1f} MB/s" for row in rows}
    made = [["tokens", "of a step", "compute only", *(rates[ratio] for ratio in ratios)]]
    for tokens, share in dict.fromkeys((row["tokens"], row["share"]) for row in rows):
        cells = {row["ratio"]: row for row in rows if (row["tokens"], row["share"]) == (tokens, share)}
        met = [f"{cells[ratio]['of_hindsight']:.2f} · {cells[ratio]['of_best']:.2f}" for ratio in ratios]
        made.append([f"{tokens:,}", f"{100 * share:.0f} %", f"{cells[ratios[0]]['compute_s']:.2f} s", *met])
    return table(made)


def _picking() -> str:
    return columns(
        "picking",
        ("strategy", lambda row: f"`{row['strategy']}`"),
        ("table", _text("table")),
        ("blocks matched", lambda row: str(row["max_match"] or 512)),
        ("pick p50", lambda row: f"{row['pick']['p50_us']:.0f}"),
        ("p99", lambda row: f"{row['pick']['p99_us']:.0f}"),
        ("match alone p50", lambda row: f"{row['match']['p50_us']:.1f}"),
        ("learn p50", lambda row: f"{row['learn']['p50_us']:.0f}"),
        ("B per block and server", _number("bytes_per_pair")),
        where=lambda row: "strategy" in row,  # the others are accounts of whole requests
    )


def _cluster() -> str:
    rows = [row for row in rows_of("cluster") if row["part"] == "schedulers"]
    rates = sorted({row["rate"] for row in rows})
    made = [["mean TTFT; p90; tokens hit", *(f"{rate:g} ×" for rate in rates)]]
    for name in dict.fromkeys(row["scheduler"] for row in rows):
        of = {row["rate"]: row for row in rows if row["scheduler"] == name}
        cells = [(of[rate]["ttft_mean_s"], of[rate]["ttft_p90_s"], of[rate]["token_hits"]) for rate in rates]
        made.append([name, *(f"{mean:.2f} s; {p90:.2f} s; {100 * hits:.1f} %" for mean, p90, hits in cells)])
    return table(made)


def _cluster_sky() -> str:
    rows = rows_of("cluster_sky")
    sizes = sorted({row["dram_tb"] for row in rows})
    made = [["behind 8 × DRAM", *(f"{size:g} TB: mean, p90, hits" for size in sizes)]]
    for behind in dict.fromkeys(row["behind"] for row in rows):
        of = {row["dram_tb"]: row for row in rows if row["behind"] == behind}
        cells = [(of[size]["ttft_mean_s"], of[size]["ttft_p90_s"], of[size]["hit_tokens"]) for size in sizes]
        made.append([behind, *(f"{mean:.2f} s, {p90:.2f} s, {hits:.1%}" for mean, p90, hits in cells)])
    return table(made)


def _cluster_pool() -> str:
    rows = rows_of("cluster_pool")
    return table(
        [
            ["each of 8 nodes", *(row["pool"] for row in rows)],
            ["processor time, s", *(f"{row['processor_s']:.2f}" for row in rows)],
            ["blocks that hit", *(f"{row['hit_blocks']:.1%}" for row in rows)],
        ]
    )


def _pools() -> str:
    def way(key: str) -> Callable[[Row], str]:
        return lambda row: f"{row[key]['share']:.1%} ({row[key]['worst_share']:.1%})" if key in row else "–"

    return columns(
        "pools",
        ("requests", _text("family")),
        ("number", _number("requests")),
        ("best split", _text("best")),
        ("its goodput", lambda row: f"{row['best_goodput_per_s']:.2f}/s"),
        ("within both", _percent("best_attainment")),
        ("even split", way("even")),
        ("elastic", way("elastic")),
        ("elastic, swept", way("elastic, swept")),
        ("changes", lambda row: f"{row['elastic']['changes']:.0f}"),
        where=lambda row: bool(row["part"] == "summary"),
    )


def _elastic_engines() -> str:
    rows = rows_of("elastic_engines")
    phases = [key for key, value in rows[0].items() if isinstance(value, dict)]
    about = (
        "Real engines (`python benchmarks/elastic_engines.py --seed 2`): three `skymemory serve` on two cores, 36 s\n"
        "of long prompts (1.7/s), then 36 s of long answers (1.0/s); objectives of 3 s and 40 ms.\n\n"
    )
    head = ["seed", "split", "within both", "of the best fixed", "splits", *(f"{name}: within, p90" for name in phases)]
    made = [head]
    for row in rows:
        best = max(one["good"] for one in rows if one["seed"] == row["seed"] and not one["elastic"])
        splits = [f"{at}P{decode}D from {since:.0f} s" for since, (at, decode) in row["splits"]]
        made.append(
            [
                str(row["seed"]),
                row["split"] + ", elastic" * row["elastic"],
                f"{row['good']} of {row['requests']}",
                f"{row['good'] / best:.0%}",
                ", ".join(splits) if row["elastic"] else "",
                *(
                    f"{row[name]['good']} of {row[name]['requests']}, {row[name]['ttft_p90_s']:.1f} s, "
                    f"{row[name]['tbt_p90_s'] * 1e3:.0f} ms"
                    for name in phases
                ),
            ]
        )
    return about + table(made)


def _ms(key: str, digits: int = 0) -> Callable[[Row], str]:
    return lambda row: f"{row[key] * 1e3:,.{digits}f} ms"


_APART_TIMES: tuple[Column, ...] = (
    ("TTFT mean", _ms("ttft_mean_s")),
    ("p99", _ms("ttft_p99_s")),
    ("TBT mean", _ms("tbt_mean_s", 1)),
    ("p99", _ms("tbt_p99_s", 1)),
    ("kept", lambda row: f"{row['kept']} of {row['requests']}"),
)


def _apart(part: str, *shown: Column) -> str:
    return columns("disagg", *shown, *_APART_TIMES, where=lambda row: row["part"] == part)


def _apart_simulated() -> str:
    real_s = {
        (row["engine"], row["seed"]): row["ttft_mean_s"]
        for row in rows_of("disagg")
        if row["part"] == "real" and row["what"] == "real"
    }

    def off(row: Row) -> str:
        of_real = row["ttft_mean_s"] / real_s[row["engine"], row["seed"]] - 1.0
        return "" if row["what"] == "real" else f"{of_real:+.1%}"

    load: Column = ("load", _percent("load", 0))
    return _apart("real", ("engine", _text("engine")), load, ("", _text("what")), ("TTFT off", off))


def _apart_coupled() -> str:
    load: Column = ("load", _percent("load", 0))
    return _apart("coupled", ("requests", _text("mix")), load, ("", _text("what")), ("way", _text("way")))


def _apart_overload() -> str:
    load: Column = ("load", lambda row: f"{row['load']:g} ×")
    return _apart("overload", load, ("admission", _text("rule")), ("refused", _text("refused")))


def _apart_speeds() -> str:
    """Ratios of goodput, each way at the best of all loads, where decoding is 1, 4 or 16 times as fast beside
    prefills."""
    with (FOLDER.parent / "figures" / "disagg-speeds.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    most: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        cell = most.setdefault(tuple(row[name] for name in ("mix", "pairs", "link_x", "prefill_x", "decode_x")), {})
        for way in ("apart", "coupled"):
            cell[way] = max(cell.get(way, 0.0), float(row[f"{way}_goodput_per_s"]))
    prefills = list(dict.fromkeys(row["prefill_x"] for row in rows))
    made = [["requests", "", "link", "decode", *(f"prefill {int(one):,} ×" for one in prefills)]]
    for mix, pairs, link in dict.fromkeys(key[:3] for key in most):
        for more in (1, 4, 16):
            cells = (most.get((mix, pairs, link, one, str(int(one) * more))) for one in prefills)
            shown = (f"{cell['apart'] / cell['coupled']:.2f}" if cell and cell["coupled"] else "" for cell in cells)
            decode = "as prefill" if more == 1 else f"{more} × prefill"
            made.append([mix, f"{pairs}P+{pairs}D", f"{int(link):,} ×", decode, *shown])
    return table(made)


def _envoy() -> str:
    return columns(
        "envoy_picker",
        ("way", _text("way")),
        ("p50 ms", _number("p50_ms", 2)),
        ("p99 ms", _number("p99_ms", 2)),
        ("× Envoy alone", _number("ratio_p50", 1)),
        where=lambda row: "ratio_p50" in row,
    )


def _floods() -> str:
    return columns(
        "picker_floods",
        ("flood", _text("flood")),
        ("p50 ms", _number("p50_ms", 1)),
        ("p99 ms", _number("p99_ms", 1)),
        ("most ms", _number("most_ms", 1)),
        ("MiB more", _number("more_mib", 1)),
        ("MiB sent", _number("sent_mib")),
    )


def _real() -> list[Row]:
    return rows_of("real_routing") + rows_of("real_routing_vllm")


def _of(row: Row) -> list[str]:
    return ["vLLM" if row["engine"] == "vllm" else "ours", row["door"], f"{row['whole']:.0%}"]


def _real_errors() -> str:
    made = [
        [
            "engine",
            "behind",
            "whole answers",
            "streams, first third",
            "whole, first third",
            "streams, last third",
            "whole, last third",
            "cached: believed, reported",
        ]
    ]
    for row in _real():
        errors = [row["errors"][part][kind] for part in ("first third", "last third") for kind in ("streams", "whole")]
        cells = [f"{one['median']:.0%}, {one['p90']:.0%}" if one["requests"] else "–" for one in errors]
        made.append([*_of(row), *cells, f"{row['cached_believed']:.0%}, {row['cached_reported']:.0%}"])
    return table(made)


def _real_learned() -> str:
    made = [
        [
            "engine",
            "behind",
            "whole answers",
            "which",
            "requests",
            "learned, ms a token",
            "its own",
            "of a processor",
            "learned by its own",
        ]
    ]
    for row in _real():
        for which, of in enumerate(row["per_engine"].values()):
            figures = [of["learned_s"], of["engine_s"], of["processor_s"]]
            shown = ["–" if each is None else f"{each * 1e3:.3f}" for each in figures]
            made.append([*_of(row), str(which), str(of["requests"]), *shown, f"{of['ratio']:.2f}"])
    return table(made)


def _messages() -> str:
    def times(row: Row, what: str) -> str:
        return f"{row[what] / row[f'least_{what}']:.3g}" if row[f"least_{what}"] else ""

    return columns(
        "messages",
        ("access", lambda row: f"`{row['access']}`"),
        ("", _text("verb")),
        ("messages", _number("messages")),
        ("least", _number("least_messages")),
        ("×", lambda row: times(row, "messages")),
        ("bytes ×", lambda row: times(row, "bytes")),
    )


def _access() -> str:
    made = [["access", "gateway", "10 servers: median", "99th", "81 servers: median", "99th", "handovers"]]
    rows = rows_of("access")
    for access, gateway in dict.fromkeys((row["access"], row["gateway"]) for row in rows):
        of = {row["servers"]: row for row in rows if (row["access"], row["gateway"]) == (access, gateway)}
        times = [f"{of[servers][key]:.1f} ms" for servers in (10, 81) for key in ("median_ms", "p99_ms")]
        made.append([f"`{access}`", gateway, *times, str(of[10]["handovers"] or "")])
    return table(made)


def _against_the_bound() -> str:
    made = [["access", "cells", "least", "median", "most", "of the model: median", "most"]]
    rows = [row for row in rows_of("physical") if row["part"] == "machines"]
    spreads = {(row["access"], row["ratio"]): row for row in rows if "ratio" in row}
    for access in dict.fromkeys(access for access, _ in spreads):
        bound, model = spreads[access, "of_bound"], spreads[access, "of_model"]
        cells = sum("operation" in row and access in (row["access"], "all") for row in rows)
        numbers = [bound["least"], bound["median"], bound["most"], model["median"], model["most"]]
        name = access if access == "all" else f"`{access}`"
        made.append([name, str(cells), *(f"{number:.3f}" for number in numbers)])
    return table(made)


def _against_sockets() -> str:
    made = [["access", "verb", "simulated: p50", "p99", "sockets: p50", "p99", "off: p50", "p99"]]
    for row in rows_of("links"):
        times = [f"{row[f'{way}_p{percent}_ms']:.1f} ms" for way in ("simulated", "udp") for percent in (50, 99)]
        off = [f"{row[f'off_p{percent}']:+.1%}" for percent in (50, 99)]
        made.append([f"`{row['access']}`", row["verb"], *times, *off])
    return table(made)


def _packet_events() -> str:
    return columns(
        "links_speed",
        ("access", lambda row: f"`{row['access']}`"),
        ("beam", _text("rates")),
        ("events", _number("events")),
        ("a second", _number("per_s")),
    )


def _windows() -> str:
    return columns(
        "windows",
        ("window", lambda row: str(row["window"] or "none")),
        ("store", _text("store")),
        ("a hit", lambda row: f"{row['size_bytes'] / 1e6:.1f} MB"),
        ("loaded in", _ms("load_s", 1)),
    )


def _flight() -> str:
    return columns(
        "flight",
        ("satellites", _text("satellites")),
        ("read MB/s", _number("read_MB_s")),
        ("×", _number("read_x", 2)),
        ("write MB/s", _number("write_MB_s")),
        ("×", _number("write_x", 2)),
        ("s/GB read", _number("read_s_per_gb", 2)),
        ("×", _number("read_s_per_gb_x", 2)),
        ("s/GB written", _number("write_s_per_gb", 2)),
        ("×", _number("write_s_per_gb_x", 2)),
        ("MB idle", _number("idle_bytes", 1, 1e-6)),
        ("beside the store", _number("beside_store_bytes", 1, 1e-6)),
        where=lambda row: bool(row["section"] == "path"),
    )


def _motion() -> str:
    return columns(
        "motion",
        ("delays", lambda row: "real" if row["delay"] else "off"),
        ("clock", lambda row: f"× {row['scale']:.0f}" if row["scale"] else "still"),
        ("reads", _number("reads")),
        ("p50 ms", _number("p50_ms", 2)),
        ("p99 ms", _number("p99_ms", 2)),
        ("× still", _number("p99_of_still", 2)),
        ("hits", _percent("hit_rate", 0)),
        ("wrong", _text("wrong")),
        where=lambda row: bool(row["kind"] == "merged"),
    )


def _demo_times() -> str:
    """One line for each demo and processor: "52 of 50 s" is what it took of what it had estimated."""
    conditions = ("all instructions", "AVX2 only", "one core", "beside a busy program")
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows_of("demo_times"):
        found.setdefault((row["demo"], row["processor"]), {})[row["condition"]] = row

    def took(row: Row | None) -> str:
        return f"{row['seconds']:.0f} of {row['estimate_s']:.0f} s" if row else ""

    heads = ["demo", "processor", *conditions, "longest silence"]
    return table(
        [
            heads,
            *(
                [
                    *key,
                    *(took(rows.get(one)) for one in conditions),
                    f"{max(row['longest_silence_s'] for row in rows.values()):.1f} s",
                ]
                for key, rows in found.items()
            ),
        ]
    )


def _prediction() -> str:
    def megabytes(link: str, *kinds: str) -> Callable[[Row], str]:
        return lambda row: f"{sum(row[link].get(kind, 0) for kind in kinds or row[link]) / 1e6:,.1f}"

    return columns(
        "prediction",
        ("values are kept", lambda row: "following the box" if row["scheme"] == "follow" else row["scheme"]),
        ("reads", _text("reads")),
        ("near", _text("near")),
        ("median ms", _number("p50_s", 0, 1e3)),
        ("99th", _number("p99_s", 0, 1e3)),
        ("migrated", megabytes("isl_bytes_a_day", "migration")),
        ("prefetched", megabytes("isl_bytes_a_day", "prefetch")),
        ("all", megabytes("isl_bytes_a_day")),
        ("beam", megabytes("beam_bytes_a_day")),
    )


def _loading() -> str:
    links = {
        "constant": "constant, 1 to 40 Gbit/s",
        "distant": "the same, 30 ms away",
        "satellite": "satellite, handovers",
        "random": "random, twice a second",
    }
    rows = [row for row in rows_of("loading") if "state" in row]
    made = [["link", "chunk", "cells", "cold: mean", "worst", "above goal", "warm: mean", "worst", "above goal"]]
    for chunk, link in dict.fromkeys((row["chunk_tokens"], row["link"]) for row in rows):
        of = {row["state"]: row for row in rows if (row["chunk_tokens"], row["link"]) == (chunk, link)}
        cells = [
            cell
            for state in ("cold", "warm")
            for cell in (f"{of[state]['mean']:.4f}", f"{of[state]['worst']:.3f}", str(of[state]["above_goal"]))
        ]
        made.append([links[link], str(chunk), str(of["cold"]["cells"]), *cells])
    return table(made)


def _loading_in_the_sky() -> str:
    return columns(
        "loading",
        ("channels of 400 MHz", _text("channels")),
        ("share of the GPU", _percent("share", 0)),
        ("compute s", _number("compute_s", 2)),
        ("load s", _number("load_s", 2)),
        ("Cake s", _number("cake_s", 2)),
        ("saved of the better", lambda row: f"{1 - row['cake_s'] / min(row['compute_s'], row['load_s']):.1%}"),
        ("computed", _percent("computed_share", 0)),
        where=lambda row: "channels" in row,
    )


def _proxy() -> str:
    """One line for each way, with what it does at each number of connections and size of body beside the peer."""
    rows = [row for row in rows_of("proxy") if not row.get("streams")]
    found = {(row["way"], row["connections"], row["body_bytes"]): row for row in rows}
    ways = list(dict.fromkeys(way for way, *_ in found))
    small, large = 8192, 65_536

    def rate(way: str, connections: int, size: int) -> str:
        row = found[way, connections, size]
        return f"{row['per_s']:,.0f}" + (f" ({row['per_s_over_peer']:.2f})" if "per_s_over_peer" in row else "")

    def late(way: str, connections: int, size: int) -> str:
        row = found[way, connections, size]
        return f"{1e3 * row['p99']:.2f}" + (f" ({row['p99_over_peer']:.2f})" if "p99_over_peer" in row else "")

    heads = ["way", "added p50 ms, 1", "per s, 8", "p99 ms, 8", "per s, 64", "p99 ms, 64", "processor µs, 8"]
    return table(
        [[*heads, "per s, 8, 64 KB"]]
        + [
            [
                way,
                f"{1e3 * found[way, 1, small]['added_p50']:.3f}" if way != ways[0] else "",
                rate(way, 8, small),
                late(way, 8, small),
                rate(way, 64, small),
                late(way, 64, small),
                f"{1e6 * found[way, 8, small]['processor']:.0f}" if way != ways[0] else "",
                rate(way, 8, large),
            ]
            for way in ways
        ]
    )


def _security() -> str:
    return columns(
        "security",
        ("", _text("way")),
        *(
            column
            for way in ("read", "write")
            for column in (
                (f"{way} ms", _number(f"{way}_ms", 2)),
                ("MB/s", _number(f"{way}_MB_s")),
                ("ratio", _number(f"{way}_x", 2)),
            )
        ),
        where=lambda row: "way" in row,
    )


def _vllm(mode: str) -> Callable[[Row], bool]:
    return lambda row: bool(row["mode"] == mode)


def _ratio(key: str) -> Callable[[Row], str]:
    """Median (least to most), or the figure of a single round."""

    def words(row: Row) -> str:
        least, most = row[f"{key}_least"], row[f"{key}_most"]
        return f"{row[key]:.3f}" + (f" ({least:.3f} to {most:.3f})" if least != most else "")

    return words


def _vllm_ttft() -> str:
    return columns(
        "vllm_connector",
        ("store", _text("store")),
        ("plain", lambda row: f"{row['plain_s']:.2f} s"),
        ("cold, of plain", _ratio("cold_of_plain")),
        ("warm, of plain", _ratio("shared_of_plain")),
        ("tokens cached", _number("shared_cached")),
        ("identical prompt, of plain", _ratio("identical_of_plain")),
        ("tokens cached", _number("identical_cached")),
        ("goal, warm", lambda row: f"{row['goal'] or ''}"),
        where=_vllm("ttft"),
    )


def _vllm_cake() -> str:
    return columns(
        "vllm_connector",
        ("link, of computing", lambda row: f"{row['ratio']:g} ×"),
        ("MB/s", _number("bytes_per_s", 1, 1e-6)),
        *((name, lambda row, key=key: f"{row[key]:.2f} s") for name, key in _CAKE_SIDES),
        ("tokens loaded", _number("cake_cached")),
        ("both, of the better", _ratio("of_better")),
        where=_vllm("cake"),
    )


_CAKE_SIDES = (("computing alone", "compute_s"), ("loading alone", "load_s"), ("both", "cake_s"))


def _vllm_steps() -> str:
    return columns(
        "vllm_connector",
        ("step", lambda row: row["step"] if row["step"] == "decoding" else "prefill, all its steps"),
        ("loading at MB/s", _number("bytes_per_s", 1, 1e-6)),
        ("alone", lambda row: f"{row['alone_s'] * 1e3:,.1f} ms"),
        ("beside a load", lambda row: f"{row['beside_s'] * 1e3:,.1f} ms"),
        ("steps beside", _number("steps")),
        ("ratio", _ratio("of_alone")),
        where=_vllm("steps"),
    )


def _vllm_prefixes() -> str:
    def time(key: str) -> Callable[[Row], str]:
        return lambda row: f"{row[f'{key}_s']:.2f} s, {row[f'{key}_cached']:.0%}"

    return columns(
        "vllm_connector",
        ("prompts", lambda row: f"{row['workload']}, {row['requests']}"),
        ("own cache", lambda row: "on" if row["prefix_caching"] else "off"),
        ("pass", _text("pass")),
        ("plain, tokens cached", time("plain")),
        ("with the connector", time("connector")),
        ("ratio", _ratio("of_plain")),
        where=_vllm("prefixes"),
    )


def _store_daemon() -> str:
    return columns(
        "store_daemon",
        ("over", _text("over")),
        ("clients", _text("clients")),
        ("value", lambda row: f"{row['size_bytes'] / 1e3:,.0f} KB"),
        ("", _text("verb")),
        ("daemon MB/s", _number("daemon_mb_per_s")),
        ("Redis MB/s", _number("redis_mb_per_s")),
        ("ratio", lambda row: f"{row['ratio']:.2f} ({row['ratio_least']:.2f} to {row['ratio_most']:.2f})"),
        ("goal", lambda row: f"{row['goal'] or ''}"),
    )


def _who_pays() -> str:
    return columns(
        "hostile",
        ("cause", _text("name")),
        ("who pays", _text("who_pays")),
        ("others: 200", _percent("share")),
        ("p99", lambda row: f"{row['p99_s'] * 1e3:.0f} ms"),
        ("after it: 200", _percent("after_share")),
        ("sends per request", lambda row: f"{row['sends']:.2f}, most {row['most_sends']}"),
        ("at the bad engine", lambda row: "" if row["at_bad_engine"] is None else str(row["at_bad_engine"])),
        ("router", lambda row: f"{row['mib']:.0f} MiB"),
    )


def _copies() -> str:
    return columns(
        "copies",
        ("case", _text("case")),
        ("copies", _text("copies")),
        ("median ms", _number("median_ms", 1)),
        ("p99 ms", _number("p99_ms", 1)),
        ("hits", lambda row: f"{row['hits']} of {row['reads']}"),
        ("bytes sent / value", _number("sent_over_value", 2)),
    )


def _seeded_faults() -> str:
    """By folder: the package's own, and what lies beside the package."""
    folders: dict[str, list[Row]] = {}
    for outcome in json.loads((FOLDER / "mutants.json").read_text("utf-8"))["outcomes"]:
        parts = Path(outcome["file"]).parent.parts
        folders.setdefault("/".join(parts[2:4] if parts[0] == "src" else parts[:2]) or "skymemory", []).append(outcome)
    lines = [["folder", "faults", "survive"]]
    for folder, outcomes in sorted(folders.items()):
        survivors = [outcome["name"] for outcome in outcomes if outcome["verdict"] == "survives"]
        lines.append([f"`{folder}`", str(len(outcomes)), "; ".join(survivors) or "0"])
    return table(lines)


def _overload() -> str:
    runs: list[Row] = json.loads((FOLDER / "overload.json").read_text("utf-8"))
    lines = [["cause", "runs", "answer, at least", "hits, at least", "reads", "processor", "wrong", "hold"]]
    for cause in dict.fromkeys(run["cause"] for run in runs):
        its = [run for run in runs if run["cause"] == cause]
        cores = [run["cores"] for run in its]
        least = [f"{min(run[key] for run in its):.0%}" for key in ("answer", "hits")]
        reads, wrong, hold = (str(sum(run[key] for run in its)) for key in ("reads", "wrong", "holds"))
        lines.append([cause, str(len(its)), *least, reads, f"{min(cores):.2f} to {max(cores):.2f} ×", wrong, hold])
    return table(lines)


TABLES: dict[str, Callable[[], str]] = {
    "seeded faults": _seeded_faults,
    "overload": _overload,
    "time to first token": _ttft("ttft"),
    "time to first token, second": _ttft("ttft_xeon"),
    "accelerator": _accelerator,
    "demo times": _demo_times,
    "data path": _data_path,
    "data path, sizes": _data_path_sizes,
    "data path, processor": _data_path_processor,
    "host tier": _host_tier,
    "data path, busy": _busy,
    "hashing": _hashing,
    "tiers": _tiers,
    "tiers that hang": _hung_tiers,
    "policies, conversations": lambda: _policies("policies"),
    "policies, synthetic": lambda: _policies("policies_synthetic"),
    "replacement": _replacement,
    "eviction": _eviction,
    "eviction by replacement": _eviction_replacement,
    "codecs, quality": _codec_quality,
    "codecs, sizes": _codec_sizes,
    "cake": _cake,
    "picking": _picking,
    "schedulers": _cluster,
    "sky behind a cluster": _cluster_sky,
    "pool": _cluster_pool,
    "apart, simulated": _apart_simulated,
    "apart and coupled": _apart_coupled,
    "apart, overload": _apart_overload,
    "apart, other speeds": _apart_speeds,
    "elastic pools": _pools,
    "elastic pools, real": _elastic_engines,
    "through Envoy": _envoy,
    "floods": _floods,
    "who pays": _who_pays,
    "real engines, errors": _real_errors,
    "real engines, speeds": _real_learned,
    "security": _security,
    "vLLM, first token": _vllm_ttft,
    "vLLM, Cake": _vllm_cake,
    "vLLM, steps": _vllm_steps,
    "vLLM, the same prompts": _vllm_prefixes,
    "store daemon": _store_daemon,
    "messages": _messages,
    "access": _access,
    "against the bound": _against_the_bound,
    "against sockets": _against_sockets,
    "packet events": _packet_events,
    "windows": _windows,
    "satellites in C": _flight,
    "motion": _motion,
    "prediction": _prediction,
    "loading": _loading,
    "loading in the sky": _loading_in_the_sky,
    "proxy": _proxy,
    "copies": _copies,
}

if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path), "utf-8")
