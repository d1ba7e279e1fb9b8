"""Models for demonstrations and tests: from a folder, or random weights, which compute as fast as trained weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from skymemory.engine.inputs import MODEL_NAMES, check_model_folder, is_model_name, shipped_document, small_model_folder
from skymemory.engine.transformers.kv_cache import TORCH_DTYPES
from skymemory.errors import InvalidInput
from skymemory.progress import Report, ignore
from skymemory.units import format_size

TINYLLAMA_SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
"""Shape of TinyLlama-1.1B, the model of the paper's §5: 22.5 KB of KV per token."""

SMALL_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}

TWO_SECOND_SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 16384,
}
"""Shape whose prompt of 4,096 tokens takes about two seconds in float32 on one core; 6 KB of KV per token."""

_WEIGHT_STD = 0.02
_PIECE = 1 << 22  # numbers converted at a time: fits the processor's cache


def build_tinyllama(
    seed: int = 0,
    *,
    dtype: str = "bfloat16",
    layers: int = TINYLLAMA_SHAPE["num_hidden_layers"],
    report: Report = ignore,
) -> LlamaForCausalLM:
    """Build TinyLlama-1.1B's shape, or only ``layers`` of it: 2.2 GB in 16 bit, a few seconds."""
    shape = {**TINYLLAMA_SHAPE, "num_hidden_layers": layers, "max_position_embeddings": 8192}
    return build_llama(shape, seed, dtype=dtype, report=report)


def build_small(seed: int = 0, *, dtype: str = "float32", vocab_size: int = 1024) -> LlamaForCausalLM:
    """Build a small Llama; larger weights make its choices vary."""
    shape = {**SMALL_SHAPE, "vocab_size": vocab_size, "max_position_embeddings": 8192}
    return build_llama(shape, seed, dtype=dtype, weight_std=0.1)


def build_llama(
    shape: dict[str, Any],
    seed: int = 0,
    *,
    dtype: str = "float32",
    weight_std: float = _WEIGHT_STD,
    report: Report = ignore,
) -> LlamaForCausalLM:
    """Build a Llama of this ``shape`` (fields of LlamaConfig), in eval mode on the CPU; a seed gives the same weights.

    Uniform with standard deviation ``weight_std``.
    """
    if dtype not in TORCH_DTYPES:
        raise InvalidInput(f"dtype {dtype!r} is not one of {', '.join(TORCH_DTYPES)}")
    config = LlamaConfig(**{"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, **shape})
    config.dtype = TORCH_DTYPES[dtype]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(TORCH_DTYPES[dtype]).to_empty(device="cpu")
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its tables are computed, not weights
    generator = torch.Generator().manual_seed(seed)
    drawn, total = 0, sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                _randomise(parameter.view(-1), weight_std, generator)
            drawn += parameter.numel()
            report(drawn / total, f"{drawn / 1e6:,.0f} of {total / 1e6:,.0f} million weights")
    # Random weights end a sentence at random: every run must have the length it requested.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def load_model(path: str | Path, *, dtype: str = "bfloat16", report: Report = ignore) -> PreTrainedModel:
    """Load a causal language model saved by transformers; nothing is downloaded."""
    check_model_folder(path)
    try:
        with _loading_reported(Path(path), report):
            return AutoModelForCausalLM.from_pretrained(
                str(path), dtype=TORCH_DTYPES[dtype], local_files_only=True
            ).eval()
    except (OSError, ValueError, KeyError) as error:
        raise InvalidInput(f"the model in {str(path)!r} cannot be loaded: {error}") from error


_LOOK_S = 0.5


@contextmanager
def _loading_reported(folder: Path, report: Report) -> Iterator[None]:
    """Report the growth of this process as a share of the weights' files: transformers reports no progress."""
    total = sum(file.stat().st_size for file in folder.iterdir() if file.suffix in (".safetensors", ".bin"))
    before, finished = _resident_bytes(), threading.Event()

    def report_growth() -> None:
        while not finished.wait(_LOOK_S):
            grown = max(now - then for now, then in zip(_resident_bytes(), before, strict=True))
            report(min(0.99, grown / total), f"{format_size(min(grown, total))} of {format_size(total)} of weights")

    thread = threading.Thread(target=report_growth, name="loading", daemon=True)
    if total and any(before):
        thread.start()
    try:
        yield
    finally:
        finished.set()
        if thread.ident is not None:
            thread.join()


def _resident_bytes() -> tuple[int, int]:
    try:
        lines = Path("/proc/self/status").read_text("utf-8", "replace").splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
    own, mapped = (int(fields[name].split()[0]) * 1024 if name in fields else 0 for name in ("RssAnon", "RssFile"))
    return own, mapped


def _randomise(weights: torch.Tensor, std: float, generator: torch.Generator) -> None:
    # Fill with uniform random numbers of standard deviation ``std``, four from each 64-bit draw.
    scale = std * 3**0.5 / 2**15
    for piece in weights.split(_PIECE):
        bits = torch.empty(-(-len(piece) // 4), dtype=torch.int64)
        bits.random_(-(2**63), None, generator=generator)
        piece.copy_(bits.view(torch.int16)[: len(piece)])
        piece.mul_(scale)


# Models by name, each with its tokenizer: the small trained model, a separate package, and shapes with random weights.
#
# Nothing is downloaded. Names are listed in ``inputs.MODEL_NAMES``, so that they can be checked without torch.


@dataclass(frozen=True, slots=True)
class ReadyModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    words: str


def ready_model(name: str, *, seed: int = 0, dtype: str = "bfloat16", report: Report = ignore) -> ReadyModel:
    """Return the model called ``name``, or saved in this folder.

    ``seed``: of random weights; ``report`` receives the share drawn or loaded.
    """
    if not is_model_name(name):
        return ReadyModel(load_model(name, dtype=dtype, report=report), load_tokenizer(name), name)
    if name == "small":
        words = "the small trained model (6.5 M parameters)"
        folder = small_model_folder()
        return ReadyModel(load_model(folder, dtype=dtype), load_tokenizer(folder), words)
    if name == "small-random":
        tokenizer = train_tokenizer(1024)
        words = "a small model (random weights)"
        return ReadyModel(build_small(seed, dtype=dtype, vocab_size=len(tokenizer)), tokenizer, words)
    if name == "tinyllama-random":
        return ready_tinyllama(TINYLLAMA_SHAPE["num_hidden_layers"], seed=seed, dtype=dtype, report=report)
    if name == "tinyllama-6-random":
        return ready_tinyllama(6, seed=seed, dtype=dtype, report=report)
    raise InvalidInput(f"no model is called {name!r}: choose one of {', '.join(MODEL_NAMES)}")


def ready_tinyllama(layers: int, *, seed: int = 0, dtype: str = "bfloat16", report: Report = ignore) -> ReadyModel:
    most = TINYLLAMA_SHAPE["num_hidden_layers"]
    words = f"a model of TinyLlama-1.1B's shape{f' but {layers} of its {most} layers' if layers != most else ''}"
    model = build_tinyllama(seed, dtype=dtype, layers=layers, report=report)
    return ReadyModel(model, train_tokenizer(4096), f"{words} (random weights)")


# A tokenizer without a download: byte-level BPE trained on the shipped text, or a saved tokenizer.


_UNKNOWN, _BEGIN, _END = "<unk>", "<s>", "</s>"


def train_tokenizer(vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most ``vocab_size`` tokens on the shipped document; texts begin with ``<s>``."""
    smallest = 256 + 3
    if vocab_size < smallest:
        raise InvalidInput(f"a byte-level tokenizer needs at least {smallest} tokens, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_UNKNOWN, _BEGIN, _END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([shipped_document()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BEGIN} $A", pair=f"{_BEGIN} $A {_BEGIN} $B", special_tokens=[(_BEGIN, tokenizer.token_to_id(_BEGIN))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=_UNKNOWN,
        bos_token=_BEGIN,
        eos_token=_END,
        pad_token=_UNKNOWN,
        model_input_names=["input_ids", "attention_mask"],
    )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    if not Path(path).is_dir():
        raise InvalidInput(f"no tokenizer in {str(path)!r}: expected a folder that save_pretrained wrote")
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidInput(f"the tokenizer in {str(path)!r} cannot be loaded: {error}") from error
