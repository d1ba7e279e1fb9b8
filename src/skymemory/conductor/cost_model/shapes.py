"""What costs depend on: of a transformer its shape, of a serving instance its speeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a transformer its costs depend on."""

    name: str
    layers: int
    width: int
    kv_heads: int
    head_dim: int
    value_bytes: int = 2
    """Bytes of one number, of the weights as of the KV cache."""
    attention_flops: float = 4.0
    """``a``: per layer, per pair of tokens (halved: each sees those before it) and per unit of width."""
    weight_flops: float = 22.0
    """``b``: per layer, per token and per unit of width squared."""
    parameters: float = 0.0
    """All weights; 0: half of ``b`` per layer and unit of width squared, as each is multiplied and added once."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes

    @property
    def weight_bytes(self) -> float:
        """What a decoding step reads whatever its batch."""
        parameters = self.parameters or self.weight_flops / 2 * self.layers * self.width**2
        return parameters * self.value_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """One serving instance: what its accelerators do together."""

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    network_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.flops_per_s > 0 and self.memory_bytes_per_s > 0 and self.network_bytes_per_s > 0):
            raise InvalidInput(f"machine {self.name!r}: its speeds must be above 0")


def shape_of(name: str, config: Mapping[str, Any], value_bytes: int | None = None) -> ModelShape:
    """The shape that a model's ``config.json`` (of transformers; Llama, Mistral, Qwen and their like) describes.

    ``value_bytes``: of the numbers that it is served in; by default those it was saved in, else 2.

    Raises:
        InvalidInput: it does not say how many layers, heads, and how wide.
    """
    try:
        layers, width = int(config["num_hidden_layers"]), int(config["hidden_size"])
        heads, inner = int(config["num_attention_heads"]), int(config["intermediate_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"{name}: a model's config.json is wanted, with its layers, heads and widths") from error
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or width // heads)
    if min(layers, width, heads, inner, kv_heads, head_dim) < 1:
        raise InvalidInput(f"{name}: layers, heads and widths are at least 1")
    of_layer = 2 * width * head_dim * (heads + kv_heads) + 3 * width * inner
    words = int(config.get("vocab_size") or 0) * width * (1 if config.get("tie_word_embeddings") else 2)
    stored = {"float32": 4, "bfloat16": 2, "float16": 2}.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    return ModelShape(
        name, layers, width, kv_heads, head_dim, value_bytes or stored,
        attention_flops=2.0 * heads * head_dim / width,
        weight_flops=2.0 * of_layer / width**2,
        parameters=float(layers * of_layer + words),
    )  # fmt: skip


LLAMA_70B = ModelShape("LLaMA-70B", layers=80, width=8192, kv_heads=8, head_dim=128, parameters=70e9)
QWEN_7B = ModelShape(
    "Qwen2.5-7B", layers=28, width=3584, kv_heads=4, head_dim=128, attention_flops=2.0, weight_flops=254 / 7,
    parameters=7.615e9,
)  # fmt: skip
"""As its ``config.json`` says (``shape_of``)."""

EIGHT_A800 = Machine("8×A800", flops_per_s=8 * 312e12, memory_bytes_per_s=16e12, network_bytes_per_s=4 * 200e9 / 8)
EIGHT_A100 = Machine("8×A100", flops_per_s=8 * 312e12, memory_bytes_per_s=8 * 2.039e12, network_bytes_per_s=100e9)
FOUR_A100 = Machine("4×A100", flops_per_s=4 * 312e12, memory_bytes_per_s=4 * 2.039e12, network_bytes_per_s=100e9)
"""A100-SXM4-80GB. An A800 is one whose NVLink does 400 GB/s instead of 600."""
EIGHT_H800 = Machine("8×H800", flops_per_s=8 * 989e12, memory_bytes_per_s=8 * 3.35e12, network_bytes_per_s=400e9)
"""An H100-SXM5-80GB whose NVLink does 400 GB/s instead of 900."""
ONE_L4 = Machine("L4", flops_per_s=121e12, memory_bytes_per_s=300e9, network_bytes_per_s=2e9)
