"""Cost models: seconds of prefills, decoding steps and transfers."""

from skymemory.conductor.cost_model.model import (
    EIGHT_A800,
    LLAMA_70B,
    CostModel,
    LLAMA_70B_8xA800,
    Machine,
    Medium,
    ModelShape,
)
from skymemory.conductor.cost_model.presets import (
    PRESETS,
    QWEN_7B_L4,
    LLAMA_70B_4xA100,
    LLAMA_70B_8xA100,
    LLAMA_70B_8xH800,
)

__all__ = [
    "EIGHT_A800",
    "LLAMA_70B",
    "PRESETS",
    "QWEN_7B_L4",
    "CostModel",
    "LLAMA_70B_4xA100",
    "LLAMA_70B_8xA100",
    "LLAMA_70B_8xA800",
    "LLAMA_70B_8xH800",
    "Machine",
    "Medium",
    "ModelShape",
]
