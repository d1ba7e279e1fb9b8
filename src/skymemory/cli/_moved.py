"""Options that this release moved into settings files, or replaced: the error of each says where.

To be removed with the next release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_ROUTER = "docs/reference/router.md"
_SETTINGS = "docs/reference/settings.md"
_SKY = {
    "--tle": "tle",
    "--shell": "shell",
    "--skip-bad": "skip_bad",
    "--memory-per-satellite": "memory_per_satellite",
    "--servers": "servers",
    "--strategy": "strategy",
    "--links": "links",
    "--chunk": "chunk",
    "--eviction": "eviction",
    "--replacement": "replacement",
    "--sweep": "sweep",
    "--keys": "keys",
    "--host-at": "ground.at",
    "--host-path": "ground.path",
    "--mask": "ground.mask",
    "--gateway": "ground.gateway",
    "--loss": "faults.loss",
    "--duplicate": "faults.duplicate",
    "--reorder": "faults.reorder",
    "--corrupt": "faults.corrupt",
    "--fault-seed": "faults.seed",
}
_LINKS = {
    "--lat": "lat",
    "--lon": "lon",
    "--mask": "mask",
    "--up": "up",
    "--down": "down",
    "--isl": "isl",
    "--server-time": "server_time",
}
_MOVED: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "route": (
        _ROUTER,
        {
            "--elastic": "[backends].elastic",
            "--handover": "disaggregation.handover",
            "--split-from": "disaggregation.split_from",
            "--sidecar": "sidecar.engine",
            "--prefillers": "sidecar.prefillers",
            "--block-tokens": "prompts.block_tokens",
            "--max-body": "limits.max_body",
            "--max-in-flight": "limits.max_in_flight",
            "--max-waiting": "limits.max_waiting",
            "--drain": "drain",
            "--admission": "admission.rule",
            "--ttft": "admission.ttft",
            "--tbt": "admission.tbt",
            "--fair": "admission.fair",
            "--admission-option": "admission.options",
            "--queue": "queue.max_requests",
            "--cors-origin": "cors.origins",
            "--state": "state",
            "--log-requests": "log_requests",
        },
    ),
    "epp": (
        _ROUTER,
        {
            "--split-from": "disaggregation.split_from",
            "--endpoints": "picker.endpoints",
            "--apart": "picker.apart",
            "--discover-prefill": "picker.discover_prefill",
            "--refresh": "picker.refresh",
            "--metrics-path": "health.metrics_path",
            "--fallbacks": "picker.fallbacks",
            "--block-tokens": "prompts.block_tokens",
            "--seed": "seed",
            "--kv-events": "picker.events_port",
            "--kv-replay": "picker.replay_port",
            "--model": "picker.model",
            "--max-requests": "picker.max_requests",
            "--max-streams": "picker.max_streams",
            "--max-body": "limits.max_body",
            "--tell-decisions": "picker.tell_decisions",
            "--state": "state",
            "--replicas": "replicas.redis",
            "--replica-keys": "replicas.keys",
            "--grace": "drain",
            "--tls-client-ca": "picker.tls_client_ca",
            "--envoy-listen": "listen",
        },
    ),
    "constellation up": (_SETTINGS, _SKY),
    "constellation plan": (_SETTINGS, _SKY),
    "store serve": (
        _SETTINGS,
        {"--connections": "connections", "--in-flight": "in_flight", "--hold": "hold", "--stall": "stall"},
    ),
    "serve": (
        _SETTINGS,
        {
            "--policy": "policy",
            "--dtype": "dtype",
            "--context": "context",
            "--waiting": "waiting",
            "--kv-replay": "kv_replay",
            "--wait": "wait",
        },
    ),
    "replay": (
        _SETTINGS,
        {
            "--ids": "ids",
            "--jitter": "jitter",
            "--concurrency": "concurrency",
            "--api": "api",
            "--context": "context",
            "--api-key-env": "api_key_env",
            "--patience": "patience",
            "--ttft-slo": "ttft_slo",
            "--tbt-slo": "tbt_slo",
        },
    ),
    "fit": (
        _SETTINGS,
        {
            "--lengths": "lengths",
            "--shares": "shares",
            "--batch": "batch",
            "--contexts": "contexts",
            "--no-decode": "decode",
            "--repeats": "repeats",
            "--statistic": "statistic",
            "--clock": "clock",
            "--prompt-unit": "prompt_unit",
            "--ids": "ids",
            "--flops": "flops",
            "--memory": "memory",
            "--network": "network",
            "--model": "model",
            "--api-key-env": "api_key_env",
            "--threads": "threads",
            "--seed": "seed",
        },
    ),
    "breakeven": (_SETTINGS, {**_LINKS, "--rate": "rates", "--measured": "measured"}),
    "optimise": (_SETTINGS, {**_LINKS, "--puts": "puts"}),
    "demo cells": (
        _SETTINGS,
        {
            "--grid": "grid",
            "--cell-m": "cell_m",
            "--speed-kmh": "speed_kmh",
            "--legs": "legs",
            "--servers": "servers",
            "--value": "value",
            "--seed": "seed",
        },
    ),
    "demo conductor": (_SETTINGS, {"--pools": "pools", "--trace": "trace", "--seed": "seed"}),
}
"""By verb: the page that documents the file, and each option's key."""
_ADDRESS = "write it into the address: --store 'constellation{}'"
_KV = {
    "--access": _ADDRESS.format("?access=…"),
    "--no-index": _ADDRESS.format("?index=no"),
    "--run-dir": _ADDRESS.format(":///run/dir"),
}
_OUT = "write --out FILE"
_NO_COLOR = "set NO_COLOR=1 in the environment"
_REPLACED: Mapping[str, Mapping[str, str]] = {
    **{f"kv {verb}": _KV for verb in ("put", "get", "pin", "delete", "list")},
    **{verb: {"--csv": _OUT, "--figure": _OUT} for verb in ("breakeven", "optimise")},
    "fit": {"--engine": "without --url an engine of the small model is started"},
    "demo conductor": {"--report": _OUT, "--chart": _OUT},
    "demo motion": {"--no-color": _NO_COLOR},
    "demo cake": {"--no-color": _NO_COLOR},
    "reproduce": {"--all": "without --fig all figures are computed"},
    "figures": {"--all": "write `figures all`"},
    "cluster up": {"--address": "set RAY_ADDRESS in the environment"},
}
"""By verb: what stands in the place of an option."""


def moved_hint(verb: str, words: Sequence[str]) -> str:
    """Return where the first of ``words`` that was an option of ``verb`` is set now; empty: none was."""
    page, keys = _MOVED.get(verb, ("", {}))
    replaced = _REPLACED.get(verb, {})
    for word in words:
        option = word.partition("=")[0]
        if option in replaced:
            return f"{option} was replaced: {replaced[option]}"
        if option in keys:
            section, _, key = keys[option].rpartition(".")
            under = f" under [{section}]" if section else ""
            return f"{option} is a key of the settings file now: {key} = …{under} in --settings FILE (see {page})"
    return ""
