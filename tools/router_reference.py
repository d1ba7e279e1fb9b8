"""The tables of docs/reference/router.md, from the code: ``python -m tools.router_reference`` writes them."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

from skymemory.conductor.picker import Fleet, Picker
from skymemory.conductor.scheduler import Scheduler
from skymemory.conductor.strategies.named import named
from skymemory.conductor.strategies.simple import RandomChoice
from skymemory.config import known_keys
from skymemory.router.backends import Backends
from skymemory.router.engines.events import EventsWatch
from skymemory.router.envoy.ext_proc import PickerService
from skymemory.router.envoy.metrics import COUNTERS, PREFIX, PickerCollector
from skymemory.router.failure.budget import FIRST_S, MOST_S
from skymemory.router.failure.faults import RULES
from skymemory.router.http.elastic import ElasticRoles
from skymemory.router.metrics import OUTCOMES, ProxyMetrics
from skymemory.router.prompts.reader import PromptReader
from skymemory.router.settings import SECTIONS, AdmissionSettings, Backend, Settings

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
        rows += [
            f"| `{key}` | {_default(key, field)} | {field.metadata['says']} |"
            for key, field in known_keys(kind).items()
        ]
    rows.append("| **`[options]`** | | options of the strategy, by their names |")
    return "\n".join(rows)


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
        return f"`{list(value)}`"
    if field.name.endswith("_s"):
        return f"`{value:g}s`"
    if field.name.endswith("_bytes") and key != field.name:
        return f"`{value >> 20}MiB`"
    return f"`{value}`"


def _metrics() -> str:
    rows = ["| name | labels | what |", "| --- | --- | --- |"]
    fleet = Fleet()
    fleet.add("s")
    metrics = ProxyMetrics(fleet)
    picker = Picker(fleet, RandomChoice())
    metrics.registry.register(EventsWatch(picker.scorer, Backends(picker)))
    metrics.registry.register(_roles())
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
