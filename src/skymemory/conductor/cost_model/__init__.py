"""What prefills, decoding steps and transfers cost, in seconds."""

from skymemory.conductor.cost_model.model import CostModel, LLAMA_70B_8xA800
from skymemory.conductor.cost_model.shapes import EIGHT_A800, LLAMA_70B, Machine, ModelShape
from skymemory.conductor.cost_model.transfer import Medium

__all__ = ["EIGHT_A800", "LLAMA_70B", "CostModel", "LLAMA_70B_8xA800", "Machine", "Medium", "ModelShape"]
