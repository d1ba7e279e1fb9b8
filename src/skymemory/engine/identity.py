"""What makes two KV caches of transformers models different, and which models we can serve faithfully."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, DynamicLayer

from skymemory.errors import InvalidInput, UnsupportedModel
from skymemory.kv.layout import ITEM_BYTES, KVLayout

TESTED_TRANSFORMERS = 5
"""Major version of transformers that this adapter is tested with."""

_PIECE_BYTES = 32 << 20
_NOT_IDENTITY = (
    "_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures",
    "return_dict", "output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type",
)  # fmt: skip
"""Fields of a configuration that say nothing of the numbers in the cache (dtype is in the layout)."""
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_supported(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel unless block i of the cache depends on tokens 0..i alone and is kept whole."""
    name = type(model).__name__
    major = int(transformers.__version__.partition(".")[0])
    if major != TESTED_TRANSFORMERS:
        raise UnsupportedModel(
            f"transformers {transformers.__version__}: this adapter is tested with {TESTED_TRANSFORMERS}.x"
        )
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or not model.can_generate():
        raise UnsupportedModel(f"{name} is not a decoder-only language model: its cache is not a token prefix")
    layers = DynamicCache(config=config).layers
    odd = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if odd or not layers or not model._supports_default_dynamic_cache():
        raise UnsupportedModel(
            f"{name} has layers that do not keep every token ({', '.join(odd) or 'no standard cache'}): "
            "sliding-window, chunked and hybrid models are not supported, only full attention in every layer"
        )
    implementation = getattr(model.generation_config, "cache_implementation", None)
    if implementation not in (None, "dynamic"):
        raise UnsupportedModel(
            f"{name} generates with cache_implementation={implementation!r}: set it to None, since a cache is passed in"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise UnsupportedModel(
            f"{name} scales its positions with the length of the text (rope type {rope_type!r}): a block then has no "
            "single value that could be cached"
        )
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        raise UnsupportedModel(f"{name} looks ahead: a block then depends on the tokens behind it")
    if len(set(map(str, (getattr(model, "hf_device_map", None) or {"": model.device}).values()))) > 1:
        raise UnsupportedModel(f"{name} is spread over several devices: only one is supported")
    if model.training and any(isinstance(part, torch.nn.Dropout) and part.p for part in model.modules()):
        raise InvalidInput(f"{name} is in training mode and drops out at random: call model.eval() first")


def probe_layout(model: PreTrainedModel, block_tokens: int) -> KVLayout:
    """The layout that the model really writes, seen by running it over two tokens."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    shapes = {
        (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
        if tensor is not None
    }
    if len(shapes) != 1:
        raise UnsupportedModel(
            f"{type(model).__name__} writes tensors of several shapes {sorted(shapes)}: every layer's keys and values "
            "must be alike"
        )
    (shape, dtype) = shapes.pop()
    if len(shape) != 4 or shape[0] != 1 or shape[2] != 2 or dtype not in ITEM_BYTES:
        raise UnsupportedModel(
            f"{type(model).__name__} writes {dtype} tensors of shape {shape} for two tokens: expected "
            f"(1, kv_heads, 2, head_dim) in {', '.join(ITEM_BYTES)}"
        )
    return KVLayout(len(cache.layers), shape[1], shape[3], block_tokens, dtype)


def model_identity(model: PreTrainedModel) -> str:
    """``type:digest`` of the configuration without names, paths and versions: the same wherever it was loaded from."""
    fields = {
        key: value
        for key, value in model.config.to_dict().items()
        if key not in _NOT_IDENTITY and not key.startswith("_attn")
    }
    text = json.dumps(fields, sort_keys=True, default=str)
    return f"{model.config.model_type}:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 over every byte of every parameter and buffer, with names, shapes and dtypes.

    A tree of pieces of 32 MiB, hashed on all processors: about 3 GB/s on two cores with SHA instructions, so 2.2 GB
    take under a second. Weights changed after this are not noticed: make a new manager.
    """
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole = hashlib.sha256(b"skymemory weights 1")
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        pieces = {name: [pool.submit(_sha256, piece) for piece in _pieces(t)] for name, t in tensors.items()}
        for name in sorted(tensors):
            tensor = tensors[name]
            whole.update(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
            for piece in pieces[name]:
                whole.update(piece.result())
    return f"sha256:{whole.hexdigest()}"


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """SHA-256 of everything that decides which ids a text becomes; "token ids" where there is no tokenizer."""
    if tokenizer is None:
        return "token ids"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts: dict[str, Any] = {
        "class": type(tokenizer).__name__,
        "model": backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "settings": {
            name: str(getattr(tokenizer, name, None))
            for name in ("add_bos_token", "add_eos_token", "do_lower_case", "legacy", "chat_template")
        },
    }
    return f"sha256:{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()}"


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    flat = tensor.detach().contiguous().reshape(-1)
    return list(flat.view(torch.uint8).split(_PIECE_BYTES)) if flat.numel() else []


def _sha256(piece: torch.Tensor) -> bytes:
    return hashlib.sha256(piece.cpu().numpy()).digest()
