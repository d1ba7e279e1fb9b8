"""Options that this release moved into settings files, or replaced: the error of each says where.

To be removed with the next release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SKY = (
    "tle shell skip_bad memory_per_satellite servers strategy links chunk eviction replacement sweep keys "
    "host-at=ground.at host-path=ground.path ground.mask ground.gateway faults.loss "
    "faults.duplicate faults.reorder faults.corrupt fault-seed=faults.seed"
)
_LINKS = "lat lon mask up down isl server_time"
# Keys of the file by verb, with the option before ``=`` where it had another name.
_MOVED: Mapping[str, str] = {
    "route": "[backends].elastic disaggregation.handover disaggregation.split_from "
    "sidecar=sidecar.engine sidecar.prefillers prompts.block_tokens limits.max_body "
    "limits.max_in_flight limits.max_waiting drain admission=admission.rule "
    "admission.ttft admission.tbt admission.fair admission-option=admission.options "
    "queue=queue.max_requests cors-origin=cors.origins state log_requests",
    "epp": "disaggregation.split_from picker.endpoints picker.apart "
    "picker.discover_prefill picker.refresh health.metrics_path "
    "picker.fallbacks prompts.block_tokens seed kv-events=picker.events_port "
    "kv-replay=picker.replay_port picker.model picker.max_requests "
    "picker.max_streams limits.max_body picker.tell_decisions state "
    "replicas=replicas.redis replica-keys=replicas.keys grace=drain picker.tls_client_ca "
    "envoy-listen=listen",
    "constellation up": _SKY,
    "constellation plan": _SKY,
    "store serve": "connections in_flight hold stall",
    "serve": "policy dtype context waiting kv_replay wait",
    "replay": "ids jitter concurrency api context api_key_env patience ttft_slo tbt_slo",
    "fit": "lengths shares batch contexts no-decode=decode repeats statistic clock prompt_unit ids flops memory "
    "network model api_key_env threads seed",
    "breakeven": f"{_LINKS} rate=rates measured",
    "optimise": f"{_LINKS} puts",
    "demo cells": "grid cell_m speed_kmh legs servers value seed",
    "demo conductor": "pools trace seed",
}
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


def moved_keys(verb: str) -> dict[str, str]:
    """Return the key of each option of ``verb`` that went into its file."""
    keys: dict[str, str] = {}
    for word in _MOVED.get(verb, "").split():
        option, _, key = word.rpartition("=")
        keys[f"--{option or key.rpartition('.')[2].replace('_', '-')}"] = key
    return keys


def moved_hint(verb: str, words: Sequence[str]) -> str:
    """Return where the first of ``words`` that was an option of ``verb`` is set now; else empty."""
    keys, replaced = moved_keys(verb), _REPLACED.get(verb, {})
    for word in words:
        option = word.partition("=")[0]
        if option in replaced:
            return f"{option} was replaced: {replaced[option]}"
        if option in keys:
            section, _, key = keys[option].rpartition(".")
            under = f" under [{section}]" if section else ""
            page = "router" if verb in ("route", "epp") else "settings"
            return (
                f"{option} is a key of the settings file now: {key} = …{under} in --settings FILE "
                f"(see docs/reference/{page}.md)"
            )
    return ""
