"""How the loads of prefill and decode swing, and whether they do so against each other (Mooncake, figures 9 and 10).

A load is a part of what was promised (``LoadSample``). Both are put on a grid of one second, each value holding until
the next. Amplitudes say how far a load moves; ``correlation`` whether both move together (1) or against each other
(-1). The phase is that of the period that both have most of in common: the cross spectrum, averaged over halfway
overlapping windows with a Hann taper and their mean taken off, at the frequency where it is strongest. 180 degrees:
when one is at its highest, the other is at its lowest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from skymemory.errors import InvalidInput
from skymemory.sim.cluster.outcome import LoadSample

GRID_S = 1.0
WINDOW_S = 256.0
MOST_S = 1e7
LONGEST_S, SHORTEST_S = 130.0, 8.0
"""Periods that are looked at: at least two in a window, and above the 3 s in which a trace's arrivals come."""
Series = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Swings:
    """Of both loads. Periods and phases are None where the run is shorter than a window, or nothing moves."""

    prefill_mean: float
    prefill_amplitude: float
    """Half of the distance between the 5th and the 95th percentile."""
    decode_mean: float
    decode_amplitude: float
    correlation: float
    """Of both at the same moment, -1 to 1; 0 where one does not move."""
    period_s: float | None
    phase_degrees: float | None
    """By how much decode is behind prefill in that period, -180 to 180."""
    coherence: float | None
    """How steady that phase is from window to window, 0 to 1. Below 0.5 the phase says little."""

    def as_json(self) -> dict[str, float | None]:
        return {name: None if value is None else round(value, 6) for name, value in asdict(self).items()}


def swings(loads: Sequence[LoadSample], from_s: float = -math.inf, until_s: float = math.inf) -> Swings:
    """The swings between two moments. ``loads`` in the order of time.

    Raises:
        InvalidInput: fewer than two samples between them, or more than ``MOST_S`` from the first to the last.
    """
    inside = [one for one in loads if from_s <= one.t_s <= until_s]
    if len(inside) < 2:
        raise InvalidInput(f"{len(inside)} samples of the loads: swings need at least two")
    times = np.array([one.t_s for one in inside])
    if times[-1] - times[0] > MOST_S:
        raise InvalidInput(f"{times[-1] - times[0]:.3g} s are too long to be looked at second by second: name a part")
    prefill = _on_grid(times, np.array([one.prefill for one in inside]))
    decode = _on_grid(times, np.array([one.decode for one in inside]))
    moves = prefill.std() > 0 and decode.std() > 0
    period_s, phase_degrees, coherence = _in_common(prefill, decode) if moves else (None, None, None)
    return Swings(
        prefill_mean=float(prefill.mean()),
        prefill_amplitude=_amplitude(prefill),
        decode_mean=float(decode.mean()),
        decode_amplitude=_amplitude(decode),
        correlation=float(np.corrcoef(prefill, decode)[0, 1]) if moves else 0.0,
        period_s=period_s,
        phase_degrees=phase_degrees,
        coherence=coherence,
    )


def _on_grid(times: Series, values: Series) -> Series:
    grid = np.arange(times[0], times[-1] + GRID_S / 2, GRID_S)
    return values[np.searchsorted(times, grid, side="right") - 1]


def _amplitude(values: Series) -> float:
    low, high = np.percentile(values, [5, 95])
    return float(high - low) / 2


def _in_common(one: Series, other: Series) -> tuple[float | None, float | None, float | None]:
    """Period in s, phase in degrees by which ``other`` is behind, and coherence at that period."""
    size = int(WINDOW_S / GRID_S)
    if len(one) < size:
        return None, None, None
    taper = np.hanning(size)
    cross = np.zeros(size // 2 + 1, dtype=complex)
    powers = np.zeros((2, size // 2 + 1))
    for begin in range(0, len(one) - size + 1, size // 2):
        spectra = [np.fft.rfft((part - part.mean()) * taper) for part in (one[begin:][:size], other[begin:][:size])]
        cross += spectra[0] * np.conj(spectra[1])
        powers += np.abs(spectra) ** 2
    frequencies = np.fft.rfftfreq(size, GRID_S)
    wanted = np.flatnonzero((frequencies >= 1 / LONGEST_S) & (frequencies <= 1 / SHORTEST_S))
    at = wanted[np.argmax(np.abs(cross[wanted]))]
    if not np.abs(cross[at]):
        return None, None, None
    coherence = float(np.abs(cross[at]) ** 2 / (powers[0, at] * powers[1, at]))
    return 1 / float(frequencies[at]), math.degrees(float(np.angle(cross[at]))), coherence
