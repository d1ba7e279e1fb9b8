"""How fast prompts were computed and chunks were loaded so far: all that the loader knows of the machine.

Nothing is tuned or profiled beforehand: before the first measurement an estimate is None. What was measured long ago
gives way to what is measured now.
"""

from __future__ import annotations

_KEPT_STEPS = 64.0
_KEPT_LOADS = 32.0
_A_PROMPT = 8
_KEPT_SHARE = 0.75
"""Of what passes before one count when it is noted."""
_FULL = 0.75  # of its budget: a step that holds less tells what a step costs at least, not what a full one does
_SUPPOSED_LEAST = {
    None: 0.5,
    True: 1.0,
    False: 0.0,
}  # of a full step that any step costs, as others fill the batch or not

_HOPE = 0.98
"""A side that was not tried is believed to be faster by this factor with each prompt. Else one bad measurement would be
for ever: who is believed to be slow is not used, and who is not used is not measured."""


class Pace:
    """Measured speeds; hand the same one to request after request, and the next begins with what is known."""

    def __init__(self) -> None:
        self._steps = 0.0
        self._sum_x = self._sum_y = self._sum_xx = self._sum_xy = 0.0
        self._others_fill: bool | None = None
        self._least: dict[bool | None, tuple[float, float]] = {}  # weight and sum, for each thing to suppose
        self._loads = 0.0
        self._loaded_bytes = 0.0
        self._loading_s = 0.0
        self._first_loads = self._first_bytes = self._first_s = 0.0
        self._unstepped = self._unloaded = 0  # prompts since a full step, or a load, was measured

    def fade(self, samples: float) -> None:
        """From now on all that was measured counts as much as ``samples`` steps and as many loads, if it was more.

        Called between prompts, so that a link or a machine that has changed is believed within a few chunks, and that
        what was not tried for long is tried again.
        """
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

    def suppose(self, others_fill: bool) -> None:
        """Others fill what a step of ours leaves free of its batch, or nobody does. What a step costs that is not full
        is taken so until it is measured, and measured for each apart.
        """
        self._others_fill = others_fill

    def step_took(self, position: float, seconds: float, filled: float = 1.0) -> None:
        """A step whose middle token stands at ``position`` and that filled this part of its budget took ``seconds``."""
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
        """The link was busy for ``seconds``, and ``size_bytes`` (0 for a failed load) came of it.

        ``from_idle``: it had nothing to do when they were asked for, so its latency is in the time.
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
        """Seconds of a full step at token 0 and how they grow per token of position: least squares, as attention grows
        linearly. None before the first step.
        """
        line = self._measured_line()
        hope = _hope(self._unstepped)
        return None if line is None else (line[0] * hope, line[1] * hope)

    def _measured_line(self) -> tuple[float, float] | None:
        if not self._steps:
            return None
        mean_x, mean_y = self._sum_x / self._steps, self._sum_y / self._steps
        spread = self._sum_xx - self._sum_x * mean_x
        slope = 0.0
        if self._steps > 1 and spread > 1e-9 * self._sum_xx:
            # A step never gets cheaper further back; a falling line is noise, and the mean is the better guess.
            slope = max((self._sum_xy - self._sum_x * mean_y) / spread, 0.0)
        return mean_y - slope * mean_x, slope

    def step_s(self, position: float) -> float | None:
        """Seconds of a full step around token ``position``."""
        line = self.line()
        return None if line is None else max(line[0] + line[1] * position, 0.0)

    def part(self, filled: float) -> float:
        """What part of a full step's time a step takes that fills this part of its budget.

        All of it where others fill the rest of the batch, its share where nobody does: learned from steps that were not
        full, and as supposed before there was one.
        """
        weight, total = self._least.get(self._others_fill, (0.0, 0.0))
        least = total / weight if weight else _SUPPOSED_LEAST[self._others_fill]
        return least + (1 - least) * filled

    @property
    def bytes_per_s(self) -> float | None:
        """Rate of the link while it was busy, or None where nothing came yet.

        Loads from an idle link, whose latency is in their time, count only as long as there were no others.
        """
        size_bytes, seconds = self._loaded_bytes, self._loading_s
        if not size_bytes:
            size_bytes, seconds = self._first_bytes, self._first_s + seconds
        if not size_bytes:
            return None
        return size_bytes / seconds / _hope(self._unloaded) if seconds > 0 else float("inf")

    @property
    def loads_are_recent(self) -> bool:
        """Whether a load was measured since the prompt before the last ``fade``."""
        return self._unloaded <= 1 and bool(self._loads or self._first_loads)

    @property
    def latency_s(self) -> float:
        """Seconds that a load from an idle link takes longer than one behind another; 0 before both were seen."""
        rate = self.bytes_per_s
        if not self._first_loads or not self._loaded_bytes or rate is None:
            return 0.0
        return max(self._first_s - self._first_bytes / rate, 0.0) / self._first_loads

    def prompt_s(self, tokens: int, step_tokens: int) -> float | None:
        """Seconds that so many tokens take in full steps; None before the first."""
        line = self._measured_line()
        if line is None:
            return None
        return tokens / step_tokens * max(line[0] + line[1] * tokens / 2, 0.0)


class ComputeRate:
    """Seconds that tokens of a prompt take, by the forward passes seen; the later count more.

    It knows nothing of attention growing with the prompt: of a long one it says too little rather than too much.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._supposed_s: float | None = None

    def suppose(self, token_s: float) -> None:
        """What a token takes, by an estimate: so much is believed until a pass was seen."""
        self._supposed_s = token_s

    def took(self, tokens: int, seconds: float) -> None:
        """A pass over so many tokens. One over a few (a step of decoding) tells nothing of prompts."""
        if tokens >= _A_PROMPT:
            self._tokens = self._tokens * _KEPT_SHARE + tokens
            self._seconds = self._seconds * _KEPT_SHARE + seconds

    @property
    def measured(self) -> bool:
        """Whether a pass was seen."""
        return self._tokens > 0

    def seconds(self, tokens: int) -> float | None:
        """As estimated before the first pass; None where nothing was."""
        if self._tokens:
            return tokens * self._seconds / self._tokens
        return None if self._supposed_s is None else tokens * self._supposed_s


def _hope(prompts: int) -> float:
    """What a time is believed to have become that was measured so many prompts ago; the last prompt's is as it was."""
    return _HOPE ** max(0, prompts - 1)
