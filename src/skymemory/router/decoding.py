"""The choice of decode servers, and of those that serve a request alone, where prefill and decode are apart."""

from __future__ import annotations

from skymemory.conductor.picker import Fleet, Picker
from skymemory.conductor.scheduler import DecodeForecast, Scheduler
from skymemory.conductor.scheduling.decode import LeastTbt
from skymemory.conductor.strategies.simple import LeastLoad
from skymemory.router.admission import without_probes
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


def alone_schedulers(scheduler: Scheduler, seed: int) -> tuple[Scheduler, Scheduler | None]:
    """Schedulers of requests that one server serves, by the least load: of those without a prompt, which are always
    admitted, and of prompts. The second is None where prefill and decode are not apart.
    """
    whole = Picker((scheduler.decode or scheduler.prefill).fleet, LeastLoad(), seed)
    apart = scheduler.decode is not None
    return Scheduler(whole), Scheduler(whole, admission=without_probes(scheduler.admission)) if apart else None
