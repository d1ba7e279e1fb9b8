"""How fast prompts were computed and chunks were loaded so far: all that the loader knows of the machine.

Nothing is tuned or profiled beforehand: before the first measurement an estimate is None.
"""

from __future__ import annotations


class Pace:
    """Measured speeds; hand the same one to request after request, and the next begins with what is known."""

    def __init__(self) -> None:
        self._steps = 0.0
        self._sum_x = self._sum_y = self._sum_xx = self._sum_xy = 0.0
        self._loads = 0.0
        self._loaded_bytes = 0.0
        self._loading_s = 0.0

    def fade(self, samples: float) -> None:
        """From now on all that was measured counts as much as ``samples`` steps and as many loads, if it was more.

        Called between prompts, so that a link or a machine that has changed is believed within a few chunks.
        """
        if self._steps > samples:
            share = samples / self._steps
            self._steps = samples
            self._sum_x, self._sum_y = self._sum_x * share, self._sum_y * share
            self._sum_xx, self._sum_xy = self._sum_xx * share, self._sum_xy * share
        if self._loads > samples:
            share = samples / self._loads
            self._loads = samples
            self._loaded_bytes, self._loading_s = self._loaded_bytes * share, self._loading_s * share

    def step_took(self, position: float, seconds: float) -> None:
        """A full step whose middle token stands at ``position`` took ``seconds``."""
        self._steps += 1
        self._sum_x += position
        self._sum_y += seconds
        self._sum_xx += position * position
        self._sum_xy += position * seconds

    def load_took(self, size_bytes: int, seconds: float) -> None:
        """The link was busy for ``seconds``, and ``size_bytes`` (0 for a failed load) came of it."""
        self._loads += 1
        self._loaded_bytes += size_bytes
        self._loading_s += seconds

    def step_s(self, position: float) -> float | None:
        """Seconds of a full step around token ``position``: the least-squares line, as attention grows linearly."""
        if not self._steps:
            return None
        mean_x, mean_y = self._sum_x / self._steps, self._sum_y / self._steps
        spread = self._sum_xx - self._sum_x * mean_x
        slope = 0.0
        if self._steps > 1 and spread > 1e-9 * self._sum_xx:
            # A step never gets cheaper further back; a falling line is noise, and the mean is the better guess.
            slope = max((self._sum_xy - self._sum_x * mean_y) / spread, 0.0)
        return max(mean_y + slope * (position - mean_x), 0.0)

    @property
    def bytes_per_s(self) -> float | None:
        """Rate of the link while it was busy, or None where nothing came yet."""
        if not self._loaded_bytes:
            return None
        return self._loaded_bytes / self._loading_s if self._loading_s > 0 else float("inf")
