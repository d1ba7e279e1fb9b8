"""Rules by name, with their options by name: for settings, flags and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from skymemory.conductor.admission.base import Admission, AdmitAll, Slo
from skymemory.conductor.admission.goodput import Goodput, GoodputSettings
from skymemory.conductor.admission.published import Baseline, Early, Predicted
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
        NoSettings,
        lambda slo, settings: Early(slo),
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


def admission(name: str, slo: Slo, **options: object) -> Admission:
    """The rule of that name. Words are taken for numbers, as they come from flags.

    Raises:
        InvalidInput: no rule or option of that name (with the nearest that there is), or a value it cannot have.
    """
    known = options_of(name)
    given = {}
    for option, value in options.items():
        if option not in known:
            there = f"; there are {', '.join(known)}" if known else "; it has none"
            raise InvalidInput(f"admission rule {name!r} has no option {option!r}{nearest(option, known)}{there}")
        given[option] = converted(f"option {option!r} of admission rule {name!r}", value, known[option])
    found = RULES[name]
    return found.build(slo, found.settings(**given))


def options_of(name: str) -> dict[str, bool | int | float]:
    """The options of a rule, with their defaults.

    Raises:
        InvalidInput: no rule of that name.
    """
    found = RULES.get(name)
    if found is None:
        raise InvalidInput(f"no admission rule {name!r}{nearest(name, NAMES)}; there are {', '.join(NAMES)}")
    defaults = found.settings()
    return {field.name: getattr(defaults, field.name) for field in fields(defaults)}
