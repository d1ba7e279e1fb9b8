"""Choice of the size of ``skymemory demo`` from measured speeds.

If the paper's size takes too long, generated tokens are cut first, as a single token shows the same, then layers, then
the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skymemory.engine.inputs import is_model_name, small_model_folder
from skymemory_lab.demo.estimate import EstimatedPart

PROMISED_S, QUICK_PROMISED_S = 180.0, 60.0
PLANNED_SHARE = 0.8
"""Share of the promised time: other programs may start meanwhile."""
PROBED_TOKENS = 512
DTYPES = {"bfloat16": 2, "float32": 4}
_WORTH_LEAVING_16_BIT = 0.67  # share of bfloat16's time below which float32 is used
_TAIL_TOKENS = 12
_STAYS_FREE_BYTES = 700 << 20  # memory besides the weights
CODECS = ("raw", "quanto8", "hqq8")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes that determine a model's time. Parameters are of a layer, and of the output layer."""

    layers: int
    layer_parameters: int
    head_parameters: int
    kv_numbers: int
    name: str = ""

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + 2 * self.head_parameters


PAPER_LAYERS = 22
PAPER = ModelSizes(PAPER_LAYERS, 44_044_288, 65_536_000, 512)
SMALL_RANDOM = ModelSizes(3, 46_144, 65_536, 64, "a small model of random weights")
PAPER_TOKENS, PAPER_NEW_TOKENS = 524, 30
"""Tokens of four blocks and a question, and generated tokens."""


def shape_of(model: str) -> ModelSizes:
    """Read a model's shape from its configuration; the paper's shape if that is unreadable."""
    if is_model_name(model) and model != "small":
        named = {"small-random": SMALL_RANDOM, "tinyllama-6-random": replace(PAPER, layers=6)}
        return named.get(model, PAPER)
    folder = small_model_folder() if model == "small" else Path(model)
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        kv = 2 * kv_heads * int(config.get("head_dim") or hidden // heads)
        layer = hidden * (2 * hidden + kv + 3 * int(config["intermediate_size"]))
        head = hidden * int(config["vocab_size"])
        return ModelSizes(int(config["num_hidden_layers"]), layer, head, kv, f"the model {model!r}")
    except (OSError, ValueError, KeyError, TypeError):
        return replace(PAPER, name=f"the model {model!r}")


@dataclass(frozen=True, slots=True)
class Size:
    """Model, prompt tokens and generated tokens of a run."""

    shape: ModelSizes
    tokens: int
    new_tokens: int
    dtype: str = "bfloat16"

    @property
    def weight_bytes(self) -> int:
        return self.shape.parameters * DTYPES[self.dtype]

    @property
    def needed_bytes(self) -> int:
        return int(1.1 * self.weight_bytes) + _STAYS_FREE_BYTES


@dataclass(frozen=True, slots=True)
class ComputerSpeeds:
    """Present speeds of this computer, for a layer of TinyLlama's shape."""

    prefill_s: Mapping[str, float]  # of ``PROBED_TOKENS``, by data type
    decode_s: Mapping[str, float]  # of a token, by data type
    build_s: float  # of random weights
    digest_s: float  # hash of weights in 16 bit
    slowdown: float
    threads: int
    free_bytes: int


def sizes(shape: ModelSizes, *, quick: bool) -> Iterator[Size]:
    """Yield the sizes to choose from, the largest first."""
    layers = [6, 4] if quick else [shape.layers, 16, 11, 8, 6, 4]
    most = 10 if quick else PAPER_NEW_TOKENS
    for new_tokens in dict.fromkeys((most, 20, 10)):
        if new_tokens <= most:
            yield Size(replace(shape, layers=layers[0]), PAPER_TOKENS, new_tokens)
    for count in layers[1:]:
        yield Size(replace(shape, layers=count), PAPER_TOKENS, 10)
    for count, tokens, new_tokens in ((4, 268, 10), (2, 268, 10), (1, 268, 5), (1, 140, 5)):
        yield Size(replace(shape, layers=count), tokens, new_tokens)


def choose(speeds: ComputerSpeeds, options: Sequence[Size], left_s: float) -> tuple[Size, bool]:
    """Return the first option that takes at most ``left_s``, in its better data type, and True; else the quickest that
    fits memory, and False.
    """
    for option in options:
        size = _in_best_dtype(speeds, option)
        if size is not None and seconds(speeds, size) <= left_s:
            return size, True
    typed = [size for option in options for dtype in DTYPES if fits(speeds, size := replace(option, dtype=dtype))]
    return min(typed or options, key=lambda size: seconds(speeds, size)), False


def fits(speeds: ComputerSpeeds, size: Size) -> bool:
    return size.needed_bytes <= speeds.free_bytes


def _in_best_dtype(speeds: ComputerSpeeds, option: Size) -> Size | None:
    """Return the option in bfloat16, unless float32 is much faster or alone fits; None if neither fits into memory."""
    typed = [size for dtype in DTYPES if fits(speeds, size := replace(option, dtype=dtype))]
    if len(typed) < 2:
        return typed[0] if typed else None
    paper, wider = typed
    return wider if seconds(speeds, wider) < _WORTH_LEAVING_16_BIT * seconds(speeds, paper) else paper


def seconds(speeds: ComputerSpeeds, size: Size) -> float:
    return sum(part.seconds for part in parts(speeds, size))


# Seconds of plain Python and small tensors on the reference computer, to be multiplied by ``slowdown``.
_IDENTITY_S, _MANAGER_S = 0.8, 0.3
_STORE_S, _READ_S, _ROTATE_S = 0.06, 0.12, 0.4
_EXAMINED = 7  # short passes by which a cache examines its model
_TOKEN_S = 0.003
# Factor for the work between the parts, the mean of eight conditions on two processors.
_AROUND = 1.12
_CODEC_S_PER_NUMBER = {"raw": 2e-9, "quanto8": 4e-9, "hqq8": 6e-9}


def parts(speeds: ComputerSpeeds, size: Size) -> list[EstimatedPart]:
    """Return the parts of the run in order, as ``table3_measure`` names them."""
    shape, slow, dtype = size.shape, speeds.slowdown, size.dtype
    layers = shape.layers * shape.layer_parameters / PAPER.layer_parameters
    head_s = speeds.decode_s[dtype] * shape.head_parameters / PAPER.layer_parameters
    token_s = layers * speeds.decode_s[dtype] + head_s + _TOKEN_S * slow

    def prefill_s(tokens: int) -> float:
        return max(layers * speeds.prefill_s[dtype] * tokens / PROBED_TOKENS, token_s)

    later_s = (size.new_tokens - 1) * token_s
    stored = size.tokens * shape.layers * shape.kv_numbers
    drawn = shape.parameters / PAPER.layer_parameters
    result = [
        EstimatedPart("identity", _IDENTITY_S * slow),
        EstimatedPart("model", drawn * speeds.build_s),
        EstimatedPart("warm-up", prefill_s(min(size.tokens, 128)) + token_s),
        EstimatedPart("digest", drawn * speeds.digest_s * DTYPES[dtype] / 2),
    ]
    for at, codec in enumerate(CODECS):
        coded_s = stored * _CODEC_S_PER_NUMBER[codec] * slow
        result += [
            EstimatedPart(f"{codec}: manager", _MANAGER_S * slow + _EXAMINED * token_s, "manager"),
            EstimatedPart(f"{codec}: first token", prefill_s(size.tokens), "prefill"),
            EstimatedPart(f"{codec}: other tokens", later_s, "decode"),
            EstimatedPart(f"{codec}: storing", _STORE_S * slow + coded_s, "storing"),
        ]
        if at == 0:
            result += [
                EstimatedPart("reference", prefill_s(size.tokens), "prefill"),
                EstimatedPart("rotation", _ROTATE_S * slow),
            ]
        result += [
            EstimatedPart(f"{codec}: error of the codec", coded_s / 2, "codec"),
            EstimatedPart(
                f"{codec}: first token from the sky", _READ_S * slow + coded_s + prefill_s(_TAIL_TOKENS), "reading"
            ),
            EstimatedPart(f"{codec}: other tokens from the sky", later_s, "decode"),
            EstimatedPart(f"{codec}: logits", _READ_S * slow + coded_s + prefill_s(_TAIL_TOKENS), "reading"),
        ]
    return [replace(part, seconds=_AROUND * part.seconds) for part in result]


def reasons(speeds: ComputerSpeeds, size: Size, *, quick: bool, promised_s: float) -> list[str]:
    """Return the lines of the table's caption: the size and its reason."""
    shape = size.shape
    name = shape.name or f"TinyLlama-1.1B's shape, {_layers(shape.layers)}"
    lines = [f"{name}, {size.tokens} tokens of prompt, {size.new_tokens} generated, {size.dtype}"]
    why = []
    if size.dtype == "float32":
        slower = speeds.prefill_s["bfloat16"] / speeds.prefill_s["float32"]
        why.append(f"float32, since bfloat16 takes {slower:.1f} times as long on this processor")
    first = next(iter(sizes(PAPER, quick=quick)))
    if not shape.name and (shape.layers, size.tokens, size.new_tokens) != (
        first.shape.layers,
        first.tokens,
        first.new_tokens,
    ):
        needed_s = min(seconds(speeds, replace(first, dtype=dtype)) for dtype in DTYPES)
        fitting = any(fits(speeds, replace(first, dtype=dtype)) for dtype in DTYPES)
        paper = f"{_layers(first.shape.layers)}, {first.tokens} tokens of prompt and {first.new_tokens} generated"
        why.append(
            f"{paper} would take {needed_s:.0f} s more, of {promised_s:.0f} s in all"
            if fitting
            else f"{paper} need {first.needed_bytes / 1e9:.1f} GB of memory; {speeds.free_bytes / 1e9:.1f} GB are free"
        )
    return [*lines, *why]


def _layers(count: int) -> str:
    return f"{'all' if count == PAPER_LAYERS else f'{count} of its'} {PAPER_LAYERS} layers"
