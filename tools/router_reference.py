"""The tables of docs/reference/router.md, from the code: ``python -m tools.router_reference`` writes them."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

from skymemory.conductor.picker import Fleet, Picker
from skymemory.conductor.scheduler import Scheduler
from skymemory.conductor.strategies.registry import named
from skymemory.conductor.strategies.simple import RandomChoice
from skymemory.config import known_keys
from skymemory.router.backends import Backends
from skymemory.router.engines.events import EventsWatch
from skymemory.router.envoy.ext_proc import PickerService
from skymemory.router.envoy.picker_metrics import COUNTERS, PREFIX, PickerCollector
from skymemory.router.failure.budget import FIRST_S, MOST_S
from skymemory.router.failure.faults import RULES
from skymemory.router.http.connection import (
    CHUNK_FRAMING_BYTES,
    MAX_FRAMING_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
)
from skymemory.router.http.elastic import ElasticRoles
from skymemory.router.http.exchange import LARGE_BYTES
from skymemory.router.http.proxy import MAX_UNREAD_BYTES
from skymemory.router.http.upstream import MAX_CONNECTING
from skymemory.router.limits.connections import LATE_S
from skymemory.router.limits.files import MAX_CONNECTIONS
from skymemory.router.limits.held_bytes import PROGRESS_BYTES, SLOW_S
from skymemory.router.limits.rates import GRACE_S
from skymemory.router.limits.shares import SharedLimit
from skymemory.router.prefix_state import PrefixState, ReplicaFigures
from skymemory.router.prompts.continuation import MAX_KEPT_BYTES, MAX_TEXT_BYTES
from skymemory.router.prompts.item_limits import (
    MAX_FIELDS,
    MAX_LISTS,
    MAX_TEXTS,
    MAX_TOKEN_NUMBERS,
    MAX_VALUES,
)
from skymemory.router.prompts.reader import PromptReader
from skymemory.router.router_metrics import OUTCOMES, ProxyMetrics
from skymemory.router.settings import SECTIONS, AdmissionSettings, Backend, ReplicaSettings, Settings

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "router.md"
NOTES = {
    "[admission]": "which requests are admitted under overload: [the guide](../guide/admission.md)",
    "[picker]": "only `skymemory epp`: [the guide](../guide/envoy.md)",
}
_TABLES = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def page() -> str:
    """The page as it should be."""
    tables = {
        "settings": _settings(),
        "limits": _limits(),
        "faults": _faults(),
        "metrics": _metrics(),
        "outcomes": ", ".join(f"`{each}`" for each in OUTCOMES),
        "picker": _picker_metrics(),
    }
    text = PAGE.read_text("utf-8")
    return _TABLES.sub(lambda found: f"<!-- {found[1]} -->\n\n{tables[found[1]]}\n\n<!-- end -->", text)


def _settings() -> str:
    parts = [("", Settings), ("[[backends]]", Backend), *((f"[{name}]", kind) for name, kind in SECTIONS.items())]
    rows = ["| key | default | what |", "| --- | --- | --- |"]
    for section, kind in parts:
        if section:
            rows.append(f"| **`{section}`** | | {NOTES.get(section, '')} |".replace("|  |", "| |"))
        rows += key_rows(kind)
    rows.append("| **`[options]`** | | options of the strategy, by their names |")
    return "\n".join(rows)


def key_rows(kind: type[Any]) -> list[str]:
    """Return a table's row for each key of a schema."""
    return [
        f"| `{key}` | {_default(key, field)} | {field.metadata['says']} |" for key, field in known_keys(kind).items()
    ]


def _limits() -> str:
    limits, timeouts = Settings().limits, Settings().timeouts
    part = f"{SharedLimit.PART}/{SharedLimit.PART + 1}"
    rows = [
        (
            "connections of clients",
            f"{MAX_CONNECTIONS:,}; fewer where the process may open few files (`ulimit -n`), since each client's "
            "request needs one to a server, too (two where prefill and decode are apart)",
            f"of the address with the most: the oldest incomplete head or TLS handshake (beyond {LATE_S:g} s), the "
            "longest idle (first of those with one request), the client that does not read, the oldest incomplete "
            "body; never one whose request is at a server",
            "closed; 408 where a request had begun",
        ),
        (
            "files, where a connection to a server finds none",
            "the process's limit",
            "idle connections to servers, then clients as above",
            "closed",
        ),
        (
            "memory of bodies and incomplete heads: `max_held`",
            f"{_size(limits.max_held_bytes)}",
            f"of a tenant (without keys: an address) beyond its share the body that made no progress for {SLOW_S:g} s "
            f"({_size(PROGRESS_BYTES)} are progress), then its largest incomplete one, then its next request",
            "408; 503",
        ),
        (
            "responses that clients do not read",
            _size(MAX_UNREAD_BYTES),
            "likewise: the client that has not read for longest",
            "closed",
        ),
        (
            "texts of streams that another server could go on with",
            f"{_size(MAX_KEPT_BYTES)}; {_size(MAX_TEXT_BYTES)} of each",
            "the stream whose text finds no room",
            "it ends where its server fails",
        ),
        (
            "requests in flight: `max_in_flight`",
            f"{limits.max_in_flight:,}",
            f"a client that has not read for {LATE_S:g} s; else the next request of the tenant (address) beyond its "
            "share",
            "closed; 429",
        ),
        (
            "requests that wait on one connection (pipelined)",
            f"{MAX_PIPELINED}",
            "the connection",
            "429, closed",
        ),
        ("a body: `max_body`", _size(limits.max_body_bytes), "the request", "413"),
        (
            "items of a body with a prompt, nested ones too",
            f"{MAX_LISTS:,} lists and objects, {MAX_TEXTS:,} texts and names, {MAX_VALUES:,} values "
            f"({MAX_TOKEN_NUMBERS:,} in /v1/completions: tokens), {MAX_FIELDS:,} fields",
            "the request",
            "400",
        ),
        (
            "bodies that are read at once (decompressed, decoded)",
            f"1 of those from {_size(LARGE_BYTES)}, beside `max_held`",
            "later requests, in turns between tenants (addresses)",
            "they wait",
        ),
        (
            "extensions and trailers of a body in chunks",
            f"{_size(MAX_FRAMING_BYTES)}, beside {CHUNK_FRAMING_BYTES} bytes of each chunk",
            "the request",
            "400, closed",
        ),
        ("a head", f"{_size(MAX_HEAD_BYTES)}, {MAX_HEADERS} lines", "the request", "431"),
        (
            "time for a head, or a TLS handshake: `head`",
            f"{timeouts.head_s:g} s",
            "the connection",
            "408, closed",
        ),
        (
            "rate of a body: `least_rate`",
            f"{limits.least_rate} bytes/s; a pause of {GRACE_S:g} s",
            "the request",
            "408",
        ),
        ("time for a body, or for reading on: `client`", f"{timeouts.client_s:g} s", "the request", "408; closed"),
        ("time between requests: `keep_alive`", f"{timeouts.keep_alive_s:g} s", "the connection", "closed"),
        ("connections that are being opened to one server", f"{MAX_CONNECTING}", "later requests", "they wait"),
    ]
    lines = ["| limit | default | who pays | gets |", "| --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    lines += [
        "",
        f"A share is {SharedLimit.PART} times what is still free: one tenant or address gets at most {part} of a "
        "limit, and some is left for a newcomer. An address of IPv6 counts as its /64.",
    ]
    return "\n".join(lines)


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


def _faults() -> str:
    rows = ["| an attempt ends by | at another server | waits before | counts against |", "| --- | --- | --- | --- |"]
    for rule in RULES.values():
        often = "as often as `most`" if rule.retries is None else f"{rule.retries} time"
        waits = f"{FIRST_S * 1e3:g} to {MOST_S * 1e3:g} ms" if rule.backs_off else "not"
        if rule.is_back_pressure:
            against = "none: the server rests"
        else:
            against = "request and server" if rule.is_of_pair else "the server"
        rows.append(f"| {rule.says} | {often} | {waits} | {against} |")
    return "\n".join(rows)


def _default(key: str, field: Field[Any]) -> str:
    if field.default is MISSING:
        return "`{}`"  # tables
    value = field.default
    if value is None or value in ("", ()):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(f'{item:g}' if isinstance(item, float) else repr(item) for item in value)}]`"
    if field.name.endswith("_bit_s"):
        return f'`"{value / 1e6:g}Mbit"`'
    if field.name.endswith("_s") and not field.name.endswith("_per_s"):
        return f"`{value:g}s`"
    if field.name.endswith("_bytes") and key != field.name and value % (1 << 20) == 0:
        return f"`{value >> 20}MiB`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _metrics() -> str:
    rows = ["| name | labels | what |", "| --- | --- | --- |"]
    fleet = Fleet()
    fleet.add("s")
    metrics = ProxyMetrics(fleet, None, str, lambda name: False)
    picker = Picker(fleet, RandomChoice())
    metrics.registry.register(EventsWatch(picker.scorer, Backends(picker)))
    metrics.registry.register(_roles())
    shared = Settings(replicas=ReplicaSettings(redis="redis://localhost"))
    metrics.registry.register(ReplicaFigures(PrefixState(shared, fleet)))
    for family in metrics.registry.collect():
        # A family made at each collection knows its labels; of those that stand all the time the metric does.
        own = getattr(metrics.registry._names_to_collectors.get(family.name), "_labelnames", ())
        labels = getattr(family, "_labelnames", None) or own
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.append(f"| `{name}` | {', '.join(f'`{label}`' for label in labels)} | {family.documentation} |")
    return "\n".join(rows)


def _roles() -> ElasticRoles:
    settings, strategy = Settings(admission=AdmissionSettings(ttft_s=1.0, tbt_s=1.0)), named("least-ttft")
    return ElasticRoles(settings, Backends(Picker(Fleet(), strategy)), strategy)


def _picker_metrics() -> str:
    fleet = Fleet()
    fleet.add("s")
    rows = ["| name | labels | what |", "| --- | --- | --- |"]
    for family in PickerCollector(
        PickerService(Scheduler(picker := Picker(fleet, RandomChoice())), PromptReader(), Backends(picker))
    ).collect():
        counter = family.type == "counter"
        name = family.name.removeprefix(PREFIX) + "_total" * counter
        label = COUNTERS[name][0] if counter else "server" if name.startswith("server_") else ""
        rows.append(f"| `{PREFIX}{name}` | {f'`{label}`' if label else ''} | {family.documentation} |")
    return "\n".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
