"""The choice of decode servers, where prefill and decode are apart."""

from __future__ import annotations

from skymemory.conductor.picker import Fleet, Picker
from skymemory.conductor.scheduler import DecodeForecast
from skymemory.conductor.scheduling.decode import LeastTbt
from skymemory.conductor.strategies.simple import LeastLoad
from skymemory.router.settings import Settings, read_cost


def decode_picker(settings: Settings) -> Picker:
    """The picker of the servers that decode: by the shortest time between tokens where a cost model is given, else by
    requests. Its ties must not follow those of the prefill servers.

    Raises:
        InvalidInput: the cost model cannot be read.
    """
    fleet = Fleet()
    scorer = LeastLoad() if settings.cost is None else LeastTbt(read_cost(settings.cost), fleet)
    return Picker(fleet, scorer, settings.seed + 1)


def forecast_of(decode: Picker | None) -> DecodeForecast | None:
    """The forecast of the decode servers' load; None where no cost model estimates it."""
    return decode.scorer if decode is not None and isinstance(decode.scorer, LeastTbt) else None
