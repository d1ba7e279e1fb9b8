from __future__ import annotations

_KEPT_STEPS = 64.0
_KEPT_LOADS = 32.0
_FULL = 0.75  # of its budget: a step with less measures the minimum cost of a step
# Minimum cost of a step as a share of a full step, before it is measured; by ``others_fill``.
_ASSUMED_LEAST = {None: 0.5, True: 1.0, False: 0.0}

_OPTIMISM = 0.98  # factor per prompt on an unused side's time: not measured, it would keep a bad measurement


class SpeedEstimate:
    """Measured speeds of computing and loading, shared by prompts; old measurements decay."""

    def __init__(self) -> None:
        # Weight and sums of a line through the steps: seconds of a full step by position in the prompt.
        self._steps = 0.0
        self._sum_x = self._sum_y = self._sum_xx = self._sum_xy = 0.0
        self._others_fill: bool | None = None
        self._least: dict[bool | None, tuple[float, float]] = {}  # weight and sum, by ``others_fill``
        self._loads = 0.0  # on a busy link; the first loads found it idle
        self._loaded_bytes = 0.0
        self._loading_s = 0.0
        self._first_loads = self._first_bytes = self._first_s = 0.0
        self._unstepped = self._unloaded = 0  # prompts since a full step, or a load, was measured

    def fade(self, samples: float) -> None:
        """Limit the weight of measurements, between prompts, so that a change shows within a few chunks."""
        self._unstepped += 1
        self._unloaded += 1
        self._fade_steps(samples)
        self._fade_loads(samples)

    def _fade_steps(self, samples: float) -> None:
        if self._steps > samples:
            share = samples / self._steps
            self._steps = samples
            self._sum_x, self._sum_y = self._sum_x * share, self._sum_y * share
            self._sum_xx, self._sum_xy = self._sum_xx * share, self._sum_xy * share

    def _fade_loads(self, samples: float) -> None:
        if self._loads > samples:
            share = samples / self._loads
            self._loads = samples
            self._loaded_bytes, self._loading_s = self._loaded_bytes * share, self._loading_s * share
        if self._first_loads > samples:
            share = samples / self._first_loads
            self._first_loads = samples
            self._first_bytes, self._first_s = self._first_bytes * share, self._first_s * share

    def assume_batch(self, others_fill: bool) -> None:
        """Set if other requests fill the remainder of steps."""
        self._others_fill = others_fill

    def step_took(self, position: float, seconds: float, filled: float = 1.0) -> None:
        """Record the time of a step: ``position`` of its middle token, share of its token budget ``filled``."""
        line = self._measured_line()
        if filled < _FULL and line is not None:
            full_s = line[0] + line[1] * position
            if full_s > 0:
                least = min(max((seconds / full_s - filled) / (1 - filled), 0.0), 1.0)
                keep = 1 - 1 / _KEPT_LOADS
                weight, total = self._least.get(self._others_fill, (0.0, 0.0))
                self._least[self._others_fill] = weight * keep + 1 - filled, total * keep + (1 - filled) * least
            return
        full_s = seconds / self.part(filled)
        self._unstepped = 0
        self._fade_steps(_KEPT_STEPS - 1)
        self._steps += 1
        self._sum_x += position
        self._sum_y += full_s
        self._sum_xx += position * position
        self._sum_xy += position * full_s

    def load_took(self, size_bytes: int, seconds: float, *, from_idle: bool = False) -> None:
        """Record a load (0 bytes if it failed) that kept the link busy for ``seconds``; ``from_idle``: with its
        latency.
        """
        self._fade_loads(_KEPT_LOADS - 1)
        self._unloaded = 0
        if from_idle:
            self._first_loads += 1
            self._first_bytes += size_bytes
            self._first_s += seconds
            return
        self._loads += 1
        self._loaded_bytes += size_bytes
        self._loading_s += seconds

    def line(self) -> tuple[float, float] | None:
        """Return seconds of a full step at token 0, and their growth per token of position."""
        line = self._measured_line()
        optimism = _optimism(self._unstepped)
        return None if line is None else (line[0] * optimism, line[1] * optimism)

    def _measured_line(self) -> tuple[float, float] | None:
        """Fit a line (least squares) through the times of steps."""
        if not self._steps:
            return None
        mean_x, mean_y = self._sum_x / self._steps, self._sum_y / self._steps
        spread = self._sum_xx - self._sum_x * mean_x
        slope = 0.0
        if self._steps > 1 and spread > 1e-9 * self._sum_xx:
            # Later positions never make a step cheaper; a falling line is noise, and the mean is the better guess.
            slope = max((self._sum_xy - self._sum_x * mean_y) / spread, 0.0)
        return mean_y - slope * mean_x, slope

    def step_s(self, position: float) -> float | None:
        line = self.line()
        return None if line is None else max(line[0] + line[1] * position, 0.0)

    def part(self, filled: float) -> float:
        """Return a partial step's cost as a share of a full step."""
        weight, total = self._least.get(self._others_fill, (0.0, 0.0))
        least = total / weight if weight else _ASSUMED_LEAST[self._others_fill]
        return least + (1 - least) * filled

    @property
    def bytes_per_s(self) -> float | None:
        """Rate of the busy link; loads from an idle link, with its latency, count only without others."""
        size_bytes, seconds = self._loaded_bytes, self._loading_s
        if not size_bytes:
            size_bytes, seconds = self._first_bytes, self._first_s + seconds
        if not size_bytes:
            return None
        return size_bytes / seconds / _optimism(self._unloaded) if seconds > 0 else float("inf")

    @property
    def loads_are_recent(self) -> bool:
        """True if a load was measured since the last but one ``fade``."""
        return self._unloaded <= 1 and bool(self._loads or self._first_loads)

    @property
    def latency_s(self) -> float:
        """Extra seconds of a load from an idle link."""
        rate = self.bytes_per_s
        if not self._first_loads or not self._loaded_bytes or rate is None:
            return 0.0
        return max(self._first_s - self._first_bytes / rate, 0.0) / self._first_loads

    def prompt_s(self, tokens: int, step_tokens: int) -> float | None:
        line = self._measured_line()
        if line is None:
            return None
        return tokens / step_tokens * max(line[0] + line[1] * tokens / 2, 0.0)


def _optimism(prompts: int) -> float:
    return _OPTIMISM ** max(0, prompts - 1)
