"""Options that went into settings files before this release: what the error of each says. Goes with the next one."""

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
}
"""By verb: the page that documents the file, and each option's key."""


def moved_hint(verb: str, words: Sequence[str]) -> str:
    """Return where the first of ``words`` that was an option of ``verb`` is set now; empty: none was one."""
    page, keys = _MOVED.get(verb, ("", {}))
    for word in words:
        option = word.partition("=")[0]
        if option in keys:
            section, _, key = keys[option].rpartition(".")
            under = f" under [{section}]" if section else ""
            return f"{option} is a key of the settings file now: {key} = …{under} in --settings FILE (see {page})"
    return ""
