"""Admission rules and their options by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from skymemory.conductor.admission.fairness import Fair, FairnessSettings
from skymemory.conductor.admission.goodput import Goodput, GoodputSettings
from skymemory.conductor.admission.mooncake import Baseline, Early, EarlySettings, Predicted
from skymemory.conductor.request import Slo
from skymemory.conductor.scheduler import Admission, AdmitAll, OnArrival
from skymemory.config import NoSettings, Registry, RegistryEntry, converted, defaults_of, read_options, suggestion
from skymemory.errors import InvalidInput

Build = Callable[[Slo, Any], Admission]
RULES: Registry[Build] = Registry(
    "admission rule",
    {
        "all": RegistryEntry("refuses nothing", NoSettings, lambda slo, settings: AdmitAll()),
        "baseline": RegistryEntry(
            "time to first token on arrival, decode load after the prefill (Mooncake's baseline)",
            NoSettings,
            lambda slo, settings: Baseline(slo),
        ),
        "early": RegistryEntry(
            "time to first token and current decode load on arrival (Mooncake's early rejection)",
            EarlySettings,
            lambda slo, settings: Early(slo, settings),
        ),
        "predicted": RegistryEntry(
            "time to first token and forecast decode load on arrival (Mooncake's, with prediction)",
            NoSettings,
            lambda slo, settings: Predicted(slo),
        ),
        "goodput": RegistryEntry(
            "under overload admits the cheapest requests, so that most meet their objectives (ours)",
            GoodputSettings,
            lambda slo, settings: Goodput(slo, settings),
        ),
    },
)
NAMES = tuple(RULES)
FAIR = "+fair"
"""Suffix that adds ``Fair``."""


def admission(name: str, slo: Slo, on_arrival: bool = False, /, **options: object) -> Admission:
    """Return a rule; options may be text, ``weights`` such as ``gold=3,free=0.5``. ``on_arrival``: wrap it in
    ``OnArrival``.
    """
    owner, known = f"admission rule {name!r}", options_of(name)
    without_weights = {option: value for option, value in options.items() if option != "weights" or option not in known}
    values = read_options(owner, without_weights, known)
    if without_weights.keys() != options.keys():  # a table has no default to convert to
        values["weights"] = weights_of(f"option 'weights' of {owner}", options["weights"])
    entry = RULES[name.removesuffix(FAIR)]
    own = {field.name for field in fields(entry.settings)}
    rule = entry.build(slo, entry.settings(**{option: values[option] for option in values if option in own}))
    if on_arrival:
        rule = OnArrival(rule)
    if not name.endswith(FAIR):
        return rule
    return Fair(rule, slo, FairnessSettings(**{option: values[option] for option in values if option not in own}))


def options_of(name: str) -> dict[str, object]:
    """Return the options of a rule with their defaults."""
    rule = name.removesuffix(FAIR)
    if rule not in RULES:
        raise InvalidInput(f"no admission rule {name!r}; {suggestion(rule, NAMES)}; each also with {FAIR!r}")
    return RULES.options_of(rule) | (defaults_of(FairnessSettings) if name.endswith(FAIR) else {})


def weights_of(what: str, value: object) -> dict[str, float]:
    """Return tenant weights; ``what`` begins the error."""
    if isinstance(value, str):
        value = dict(part.partition("=")[::2] for part in value.split(",") if part)
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{what} is {value!r}; expected a table, or text such as gold=3,free=0.5")
    read = {str(tenant): converted(f"{what}, of {tenant!r}", weight, 1.0) for tenant, weight in value.items()}
    return {tenant: weight for tenant, weight in read.items() if isinstance(weight, float)}
