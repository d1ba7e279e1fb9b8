"""Rules by name, with their options by name: for settings, flags and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from skymemory.conductor.admission.base import Admission, AdmitAll, Slo
from skymemory.conductor.admission.fairness import Fair, FairnessSettings
from skymemory.conductor.admission.goodput import Goodput, GoodputSettings
from skymemory.conductor.admission.published import Baseline, Early, EarlySettings, Predicted
from skymemory.conductor.options import converted, nearest
from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class NoSettings:
    """Of a rule that has none."""


@dataclass(frozen=True, slots=True)
class Named:
    description: str
    """One line, for help."""
    settings: type[Any]
    """A frozen dataclass: the rule's options, with their defaults."""
    build: Callable[[Slo, Any], Admission]


RULES: Mapping[str, Named] = {
    "all": Named("nobody is refused", NoSettings, lambda slo, settings: AdmitAll()),
    "baseline": Named(
        "on arrival by the first token's time, at decoding by its load (Mooncake's baseline)",
        NoSettings,
        lambda slo, settings: Baseline(slo),
    ),
    "early": Named(
        "on arrival by the first token's time and the decoding load of now (Mooncake's early rejection)",
        EarlySettings,
        lambda slo, settings: Early(slo, settings),
    ),
    "predicted": Named(
        "on arrival by the first token's time and the decoding load there will be then (Mooncake's, on prediction)",
        NoSettings,
        lambda slo, settings: Predicted(slo),
    ),
    "goodput": Named(
        "under overload the requests that cost least, so that most keep their promises (ours)",
        GoodputSettings,
        lambda slo, settings: Goodput(slo, settings),
    ),
}
NAMES = tuple(RULES)
FAIR = "+fair"
"""Behind a rule's name: with priorities and fair shares before it; its options are then ``FairnessSettings`` too."""


def admission(name: str, slo: Slo, **options: object) -> Admission:
    """The rule of that name. Words are taken for numbers, as they come from flags.

    ``weights`` of fair shares are a table, or ``gold=3,free=0.5``.

    Raises:
        InvalidInput: no rule or option of that name (with the nearest that there is), or a value it cannot have.
    """
    known = options_of(name)
    given: dict[str, Any] = {}
    for option, value in options.items():
        if option not in known:
            there = f"; there are {', '.join(known)}" if known else "; it has none"
            raise InvalidInput(f"admission rule {name!r} has no option {option!r}{nearest(option, known)}{there}")
        what = f"option {option!r} of admission rule {name!r}"
        given[option] = weights_of(what, value) if option == "weights" else converted(what, value, known[option])
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
    found = RULES.get(name.removesuffix(FAIR))
    if found is None:
        near = nearest(name, (*NAMES, *(rule + FAIR for rule in NAMES)))
        raise InvalidInput(f"no admission rule {name!r}{near}; there are {', '.join(NAMES)}, each also with {FAIR!r}")
    settings = [found.settings(), FairnessSettings()] if name.endswith(FAIR) else [found.settings()]
    return {field.name: getattr(each, field.name) for each in settings for field in fields(each)}


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
