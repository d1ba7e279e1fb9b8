"""Rules by name, with their options by name: for settings, flags and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from skymemory.conductor.admission.base import Admission, AdmitAll, Slo
from skymemory.conductor.admission.fairness import Fair, FairnessSettings
from skymemory.conductor.admission.goodput import Goodput, GoodputSettings
from skymemory.conductor.admission.mooncake import Baseline, Early, EarlySettings, Predicted
from skymemory.config import Entry, NoSettings, Registry, converted, defaults_of, read_options, suggestion
from skymemory.errors import InvalidInput

Build = Callable[[Slo, Any], Admission]
RULES: Registry[Build] = Registry(
    "admission rule",
    {
        "all": Entry("nobody is refused", NoSettings, lambda slo, settings: AdmitAll()),
        "baseline": Entry(
            "on arrival by the first token's time, at decoding by its load (Mooncake's baseline)",
            NoSettings,
            lambda slo, settings: Baseline(slo),
        ),
        "early": Entry(
            "on arrival by the first token's time and the decoding load of now (Mooncake's early rejection)",
            EarlySettings,
            lambda slo, settings: Early(slo, settings),
        ),
        "predicted": Entry(
            "on arrival by the first token's time and the decoding load there will be then (Mooncake's, on prediction)",
            NoSettings,
            lambda slo, settings: Predicted(slo),
        ),
        "goodput": Entry(
            "under overload the requests that cost least, so that most keep their promises (ours)",
            GoodputSettings,
            lambda slo, settings: Goodput(slo, settings),
        ),
    },
)
NAMES = tuple(RULES)
FAIR = "+fair"
"""Behind a rule's name: with priorities and fair shares before it; its options are then ``FairnessSettings`` too."""


def admission(name: str, slo: Slo, **options: object) -> Admission:
    """The rule of that name. Words are taken for numbers, as they come from flags.

    ``weights`` of fair shares are a table, or ``gold=3,free=0.5``.

    Raises:
        InvalidInput: no rule or option of that name (with the nearest that there is), or a value it cannot have.
    """
    owner, known = f"admission rule {name!r}", options_of(name)
    plain = {option: value for option, value in options.items() if option != "weights" or option not in known}
    given = read_options(owner, plain, known)
    if plain.keys() != options.keys():  # weights are a table, not of the type of a default
        given["weights"] = weights_of(f"option 'weights' of {owner}", options["weights"])
    found = RULES[name.removesuffix(FAIR)]
    own = {field.name for field in fields(found.settings)}
    rule = found.build(slo, found.settings(**{option: given[option] for option in given if option in own}))
    if not name.endswith(FAIR):
        return rule
    return Fair(rule, slo, FairnessSettings(**{option: given[option] for option in given if option not in own}))


def options_of(name: str) -> dict[str, object]:
    """The options of a rule, with their defaults.

    Raises:
        InvalidInput: no rule of that name.
    """
    rule = name.removesuffix(FAIR)
    if rule not in RULES:
        raise InvalidInput(f"no admission rule {name!r}; {suggestion(rule, NAMES)}; each also with {FAIR!r}")
    return RULES.options_of(rule) | (defaults_of(FairnessSettings) if name.endswith(FAIR) else {})


def weights_of(what: str, value: object) -> dict[str, float]:
    """Weights of tenants from a table or words; ``what`` begins the sentence of an error.

    Raises:
        InvalidInput: it is neither, or a weight is no number.
    """
    if isinstance(value, str):
        value = dict(part.partition("=")[::2] for part in value.split(",") if part)
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{what} is {value!r}; expected a table, or words such as gold=3,free=0.5")
    read = {str(tenant): converted(f"{what}, of {tenant!r}", weight, 1.0) for tenant, weight in value.items()}
    return {tenant: weight for tenant, weight in read.items() if isinstance(weight, float)}
