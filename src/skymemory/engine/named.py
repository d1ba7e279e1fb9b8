"""Models by name, each with its tokenizer: the trained one that the package ships, and shapes with random weights.

Nothing is fetched from anywhere. Names are listed in ``inputs.MODEL_NAMES``, so that they can be checked without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skymemory.engine.inputs import MODEL_NAMES, SMALL_MODEL_FOLDER, is_model_name
from skymemory.engine.models import TINYLLAMA_SHAPE, build_llama, build_small, build_tinyllama, load_model
from skymemory.engine.tokenizer import load_tokenizer, train_tokenizer
from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A model in eval mode, its tokenizer, and what it is in words."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    words: str


def ready_model(name: str, *, seed: int = 0, dtype: str = "bfloat16") -> ReadyModel:
    """The model called ``name``, or the one saved in the folder of this name.

    ``seed``: of random weights, otherwise unused. Raises InvalidInput where there is neither.
    """
    if not is_model_name(name):
        return ReadyModel(load_model(name, dtype=dtype), load_tokenizer(name), name)
    if name == "small":
        words = "the small trained model (6.5 M parameters)"
        return ReadyModel(load_model(SMALL_MODEL_FOLDER, dtype=dtype), load_tokenizer(SMALL_MODEL_FOLDER), words)
    if name == "small-random":
        tokenizer = train_tokenizer(1024)
        words = "a small model (random weights)"
        return ReadyModel(build_small(seed, dtype=dtype, vocab_size=len(tokenizer)), tokenizer, words)
    tokenizer = train_tokenizer(4096)
    if name == "tinyllama-random":
        words = "a model of TinyLlama-1.1B's shape (random weights)"
        return ReadyModel(build_tinyllama(seed, dtype=dtype), tokenizer, words)
    if name == "tinyllama-6-random":
        shape = {**TINYLLAMA_SHAPE, "num_hidden_layers": 6}
        words = "a model of TinyLlama-1.1B's shape but 6 of its 22 layers (random weights)"
        return ReadyModel(build_llama(shape, seed, dtype=dtype), tokenizer, words)
    raise InvalidInput(f"no model is called {name!r}: choose one of {', '.join(MODEL_NAMES)}")
