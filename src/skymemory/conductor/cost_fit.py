"""Fitting of cost models to measurements of an engine, and their file format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from skymemory.conductor.cost_model import CostModel, Machine, ModelShape
from skymemory.config import parse_json, parse_toml
from skymemory.errors import InvalidInput

_ROUNDS = 12
_LEAST_ERROR = 0.002  # floor of errors: two exact points must not dominate
_MEMORY_BYTES_PER_S = np.geomspace(1e7, 1e15, 161)

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """Measured seconds to the first token on an idle engine, which had ``cached`` of the prompt's ``tokens``."""

    tokens: int
    cached: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Measured seconds of a decoding step of ``batch`` requests with ``kv_tokens`` of context in total."""

    batch: int
    kv_tokens: float
    seconds: float


def fit_prefill(points: Sequence[PrefillPoint], shape: ModelShape, machine: Machine | None = None) -> CostModel:
    """Fit ``mfu``, ``fixed_s``, ``cached_token_s`` and ``attention_flops`` to measured prefills.

    n tokens, p of them cached, take ``fixed + per_token·(n − p) + per_pair·(n² − p²) + per_cached·p`` seconds. Without
    a ``machine``, its speed is what was measured, and ``mfu`` is 1.

    Raises:
        InvalidInput: too few lengths, times that do not grow with the prompts, or a speed above the machine's.
    """
    lengths = {point.tokens - point.cached for point in points}
    if len(lengths) < 3 or any(point.seconds <= 0 or not 0 <= point.cached < point.tokens for point in points):
        raise InvalidInput("expected prefills of at least three lengths, each longer than its cached part")
    tokens, cached, seconds = np.array(
        [(point.tokens, point.cached, point.seconds) for point in points], dtype=np.float64
    ).T
    # If nothing was cached, the last column would be zero and its factor arbitrary.
    parts = [np.ones(len(points)), tokens - cached, tokens**2 - cached**2, cached]
    if not cached.any():
        parts.pop()
    fixed_s, per_token_s, per_pair_s, *per_cached_s = _fitted(parts, seconds)
    weights = shape.layers * shape.weight_flops * shape.width**2
    attention = shape.layers * shape.width
    cached_s = per_cached_s[0] if per_cached_s else 0.0
    # Subtract the time of cached tokens: a slow store may take longer to load them than computing takes.
    computing_s = seconds - cached_s * cached
    by_work = np.argsort(tokens - cached)
    if not per_token_s > 0 or computing_s[by_work[-1]] <= computing_s[by_work[0]]:
        raise InvalidInput("times do not grow with the computed tokens: measure longer prompts, or with more repeats")
    speed = weights / per_token_s
    if machine is None:
        machine = Machine("as measured", speed, speed, 1e9)
    if speed > machine.flops_per_s:
        raise InvalidInput(
            f"measured {speed:.3g} operations per second, more than the {machine.flops_per_s:.3g} of {machine.name}"
        )
    effective = replace(shape, attention_flops=per_pair_s * speed / attention)
    return CostModel(effective, machine, speed / machine.flops_per_s, fixed_s=fixed_s, cached_token_s=cached_s)


def fit_decode(points: Sequence[DecodePoint], cost: CostModel) -> CostModel:
    """Fit ``decode_fixed_s``, ``decode_request_s`` and the memory bandwidth of ``cost`` to measured decoding steps.

    Raises:
        InvalidInput: fewer than three points, or none above 0 s.
    """
    if len(points) < 3 or any(point.seconds <= 0 or point.batch < 1 for point in points):
        raise InvalidInput("expected decoding steps of at least three batches or contexts, each longer than 0 s")
    batch = np.array([point.batch for point in points], dtype=np.float64)
    seconds = np.array([point.seconds for point in points])
    best: CostModel | None = None
    best_error = np.inf
    known = cost.machine.memory_bytes_per_s if cost.mfu < 1 else None
    # A step contains a maximum, so it is not linear in the bandwidth: try a grid, and fit the other parts per value.
    for speed in _MEMORY_BYTES_PER_S:
        if known is not None and speed > known:
            break
        tried = _with_memory(cost, float(speed), known)
        residual_s = np.array([point.seconds - tried.decode_step_s(point.batch, point.kv_tokens) for point in points])
        fixed_s, per_request_s = _fitted([np.ones(len(points)), batch], residual_s, seconds, needed=())
        error = float(np.abs((residual_s - fixed_s - per_request_s * batch) / seconds).mean())
        if error < best_error:
            best = replace(tried, decode_fixed_s=fixed_s, decode_request_s=per_request_s)
            best_error = error
    assert best is not None
    return best


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predictions: mean and largest magnitude, and signed mean."""

    mean: float
    worst: float
    bias: float


def errors(predicted: Sequence[float], measured: Sequence[float]) -> Errors:
    if not measured or len(predicted) != len(measured):
        raise InvalidInput("no measurements to compare with")
    off = np.array(predicted) / np.array(measured) - 1
    return Errors(float(np.abs(off).mean()), float(np.abs(off).max()), float(off.mean()))


def prefill_errors(cost: CostModel, points: Sequence[PrefillPoint]) -> Errors:
    predicted = [cost.prefill_s(point.tokens, point.cached) for point in points]
    return errors(predicted, [point.seconds for point in points])


def decode_errors(cost: CostModel, points: Sequence[DecodePoint]) -> Errors:
    predicted = [cost.decode_step_s(point.batch, point.kv_tokens) for point in points]
    return errors(predicted, [point.seconds for point in points])


def _with_memory(cost: CostModel, bytes_per_s: float, known: float | None) -> CostModel:
    # Return ``cost`` with this memory bandwidth, as a share of the machine's if ``known``, and no fixed decoding times.
    without_fixed = replace(cost, decode_fixed_s=0.0, decode_request_s=0.0)
    if known is not None:
        return replace(without_fixed, memory_share=bytes_per_s / known)
    return replace(without_fixed, machine=replace(cost.machine, memory_bytes_per_s=bytes_per_s), memory_share=1.0)


def _fitted(
    parts: Sequence[Column], target: Column, scale: Column | None = None, needed: Sequence[int] = (1,)
) -> list[float]:
    """Return non-negative factors that minimise the mean of ``|target - Σ factor·part| / scale`` (by default
    ``target``). Parts with an index in ``needed`` are never left out.
    """
    scale = target if scale is None else scale
    columns = np.stack([part / scale for part in parts], axis=1)
    aim = target / scale
    weights = np.ones(len(target))
    factors = np.zeros(len(parts))
    # Iteratively reweighted least squares minimise absolute errors, which disturbed measurements move little. Relative
    # errors weigh short and long prompts alike.
    for _ in range(_ROUNDS):
        factors = _not_negative(columns, aim, weights, needed)
        weights = 1.0 / np.sqrt(np.maximum(np.abs(aim - columns @ factors), _LEAST_ERROR))
    return [float(factor) for factor in factors]


def _not_negative(columns: Column, aim: Column, weights: Column, needed: Sequence[int]) -> Column:
    # Return the non-negative factors of ``columns`` nearest to ``aim`` by weighted least squares; 0: left out.
    count = columns.shape[1]
    best, best_error = np.zeros(count), np.inf
    optional = [at for at in range(count) if at not in needed]
    norms = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    # With at most four parts, trying all subsets is faster than an active-set method and has no special cases.
    for size in range(len(optional) + 1):
        for chosen in combinations(optional, size):
            used = [*needed, *chosen]
            if not used:
                factors, error = np.zeros(count), float(((weights * aim) ** 2).sum())
            else:
                scaled = columns[:, used] / norms[used] * weights[:, None]
                solved = np.linalg.lstsq(scaled, weights * aim, rcond=None)[0]
                if (solved < 0).any():
                    continue
                factors = np.zeros(count)
                factors[used] = solved / norms[used]
                error = float(((weights * (aim - columns @ factors)) ** 2).sum())
            if error < best_error:
                best, best_error = factors, error
    return best


FORMAT = "skymemory-cost/1"
T = TypeVar("T")


def dump(cost: CostModel, notes: Mapping[str, Any] | None = None) -> str:
    """Return ``cost`` as JSON; ``parse`` ignores ``notes``."""
    return json.dumps({"format": FORMAT, **asdict(cost), "notes": dict(notes or {})}, indent=1) + "\n"


def parse(text: str) -> CostModel:
    """Return the cost model of a ``dump``, or of the same tables as TOML."""
    table = parse_json(text) if text.lstrip().startswith("{") else parse_toml(text)
    if table.get("format") != FORMAT:
        raise InvalidInput(f"not a cost model: expected format = {FORMAT!r}, as `skymemory fit` writes it")
    numbers = {name: value for name, value in table.items() if name not in ("format", "notes", "shape", "machine")}
    shape = _filled(ModelShape, _table(table, "shape"), "shape")
    machine = _filled(Machine, _table(table, "machine"), "machine")
    return _filled(CostModel, {**numbers, "shape": shape, "machine": machine}, "")


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = table.get(name)
    if not isinstance(value, dict):
        raise InvalidInput(f"{name}: expected a table")
    return value


def _filled(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    # Build the dataclass ``kind`` after checking keys and types; ``where`` names the table in errors.
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    place = f"{where}: " if where else ""
    for name, value in values.items():
        if name not in known:
            raise InvalidInput(f"{place}unknown key {name!r}; expected one or more of {', '.join(known)}")
        wanted = {"str": str, "int": int, "float": (int, float)}.get(str(known[name].type))
        if wanted is not None and (isinstance(value, bool) or not isinstance(value, wanted)):  # type: ignore[arg-type]
            raise InvalidInput(f"{place}{name} is {value!r}; expected {known[name].type}")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
    if missing:
        raise InvalidInput(f"{place}missing {', '.join(missing)}")
    return kind(**values)
