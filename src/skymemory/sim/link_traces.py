"""Links for the simulated loader: rates drawn at random, and the beam of a satellite that flies past.

The beam: distances are those of the constellation's own orbits; the rate is Shannon's for the signal that is left after
free space, in clear sky and with the whole channel for one user, so a bound and not a forecast. Where its figures come
from stands at each.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from skymemory.constellation.orbit import Shell
from skymemory.constellation.presets import EPOCH_UNIX_S
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import DEFAULT_MASK_DEG, GroundHost, elevations_deg, gateway, slants_m
from skymemory.errors import InvalidInput
from skymemory.sim.loading import LinkTrace
from skymemory.units import SPEED_OF_LIGHT_M_S

REASSIGN_S = 15.0
"""Terminals of Starlink get their satellite anew every 15 s (Tanveer et al., "Making Sense of Constellations", CoNEXT
2023, and measurements since)."""
HANDOVER_S = 0.1
"""Our assumption of how long a beam is dark while the antenna turns to the next satellite; no source."""
_BOLTZMANN_DB = -228.6


def random_trace(
    seed: int, mean_bytes_per_s: float, *, spread: float = 0.5, every_s: float = 0.5, duration_s: float = 120.0
) -> LinkTrace:
    """A rate drawn anew ``every_s``, evenly from ``mean · (1 ± spread)``; after ``duration_s`` the mean."""
    if not 0 <= spread < 1 or mean_bytes_per_s <= 0 or every_s <= 0:
        raise InvalidInput(f"mean {mean_bytes_per_s:g}, spread {spread:g}, every {every_s:g} s: not a random link")
    draw = random.Random(seed)
    pieces = max(1, math.ceil(duration_s / every_s))
    rates = [mean_bytes_per_s * draw.uniform(1 - spread, 1 + spread) for _ in range(pieces)]
    return LinkTrace(tuple(every_s * i for i in range(pieces + 1)), (*rates, mean_bytes_per_s))


@dataclass(frozen=True, slots=True)
class LinkBudget:
    """A downlink in Ka band: 3GPP TR 38.821, tables 6.1.1.1-1 (LEO-600, set 1) and 6.1.1.1-3 (VSAT of 60 cm)."""

    frequency_hz: float = 20e9
    channel_hz: float = 400e6
    eirp_dbw_per_mhz: float = 4.0
    g_over_t_db: float = 15.9
    """39.7 dBi against 150 K of sky and a receiver of 1.2 dB: 39.7 − 10·log10(150 + 92) = 15.9."""
    channels: int = 1
    """Channels side by side for this one user; more than one is our assumption, to have faster links."""

    def bytes_per_s(self, slant_m: float) -> float:
        """Shannon's bound at this distance."""
        path_db = 20 * math.log10(4 * math.pi * slant_m * self.frequency_hz / SPEED_OF_LIGHT_M_S)
        snr_db = self.eirp_dbw_per_mhz - 60 + self.g_over_t_db - path_db - _BOLTZMANN_DB
        return self.channels * self.channel_hz * math.log2(1 + 10 ** (snr_db / 10)) / 8


def leo_trace(
    shell: Shell,
    host: GroundHost,
    start_s: float,
    duration_s: float,
    *,
    budget: LinkBudget | None = None,
    sample_s: float = 1.0,
    mask_deg: float = DEFAULT_MASK_DEG,
    epoch_unix_s: float = EPOCH_UNIX_S,
    handover_s: float = HANDOVER_S,
) -> LinkTrace:
    """The beam to the highest satellite, chosen anew at every multiple of 15 s; dark while it is handed over.

    A satellite that sinks below the mask, or none in sight, is dark until the next choice. ``start_s`` is since the
    epoch; the trace's own time begins at 0 there. Its latency is light's way up and down at the start. Raises
    InvalidInput where no satellite is in sight at the end.
    """
    budget = budget or LinkBudget()
    end_s = start_s + duration_s
    choices = range(math.ceil(start_s / REASSIGN_S), math.ceil(end_s / REASSIGN_S))
    samples = {start_s + sample_s * i for i in range(math.ceil(duration_s / sample_s))}
    times = sorted(samples | {REASSIGN_S * k for k in choices})
    since_s: list[float] = []
    rates: list[float] = []
    serving: SatelliteId | None = None
    chosen_in: int | None = None
    for now_s in times:
        slot = math.floor(now_s / REASSIGN_S + 1e-9)
        if slot != chosen_in:
            before, serving = serving, gateway(shell, host, epoch_unix_s, now_s, mask_deg)
            if chosen_in is not None and serving != before and handover_s:
                since_s.append(now_s - start_s)
                rates.append(0.0)
                now_s += handover_s
            chosen_in = slot
        rate = 0.0
        if serving is not None and elevations_deg(shell, host, epoch_unix_s, now_s)[serving] >= mask_deg:
            rate = budget.bytes_per_s(float(slants_m(shell, host, epoch_unix_s, now_s)[serving]))
        if since_s and now_s - start_s <= since_s[-1]:
            continue  # a sample within the handover
        since_s.append(now_s - start_s)
        rates.append(rate)
    first = gateway(shell, host, epoch_unix_s, start_s, mask_deg)
    slant_m = float(slants_m(shell, host, epoch_unix_s, start_s)[first]) if first is not None else 0.0
    return LinkTrace(tuple(since_s), tuple(rates), 2 * slant_m / SPEED_OF_LIGHT_M_S)
