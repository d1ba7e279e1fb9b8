"""What a codec does to text: the perplexity of the shipped small model behind a context that went through the codec.

A window of a held-out document: its first 1,024 tokens are computed in bfloat16, stored block by block by a
``KVCManager`` with the codec, and loaded again; then the model reads on, 256 tokens, and its loss on each next token
counts. Windows overlap, their 256 tokens do not.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from skymemory.engine.transformers.huggingface import KVCManager
from skymemory.engine.transformers.kv_cache import CacheSource
from skymemory.engine.transformers.models import ReadyModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tools stand beside the benchmarks, not in the package
from tools.small_model.corpus import held_out_documents
from tools.small_model.sources import missing_packages

CONTEXT_TOKENS, READ_TOKENS = 1024, 256
_WINDOWS_OF_ONE = 4
"""At most so many windows are of one document, evenly spread: a few documents are many times as long as the rest."""


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive tokens of a document: context, those that are read, and one more, int64."""

    document: str
    ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class Quality:
    """Perplexity of the windows with a codec; how much higher it is than with the lossless one, and its standard
    error by document, both in percent; and the numbers' bits as stored."""

    perplexity: float
    higher_percent: float
    error_percent: float
    bits: float


def windows(ready: ReadyModel, least_gap: int = READ_TOKENS, of_one: int = _WINDOWS_OF_ONE) -> list[Window]:
    """The windows of all held-out documents that are long enough; none, said aloud, where their text is missing."""
    missing = missing_packages()
    if missing:
        print(f"quality: not measured, held-out text needs apt-get install {' '.join(missing)}", file=sys.stderr)
        return []
    found: list[Window] = []
    size = CONTEXT_TOKENS + READ_TOKENS + 1
    for document in held_out_documents():
        ids = ready.tokenizer(document.text, return_tensors="pt").input_ids[0]
        count = min(of_one, (len(ids) - size) // least_gap + 1) if len(ids) >= size else 0
        for number in range(count):
            start = number * (len(ids) - size) // max(1, count - 1)
            found.append(Window(document.name, ids[start : start + size]))
    return found


@torch.inference_mode()
def contexts(model: PreTrainedModel, chosen: list[Window]) -> list[DynamicCache]:
    """The keys and values of every window's context, as the model computes them."""
    return [
        model.model(window.ids[None, :CONTEXT_TOKENS], past_key_values=DynamicCache(), use_cache=True).past_key_values
        for window in chosen
    ]


@torch.inference_mode()
def losses(ready: ReadyModel, codec: str, chosen: list[Window], computed: list[DynamicCache]) -> tuple[np.ndarray, int]:
    """Nats (windows, READ_TOKENS) behind contexts that went through ``codec``, and the bytes of their blocks."""
    found, size_bytes = [], 0
    with KVCManager(ready.model, ready.tokenizer, codec=codec, weights="as shipped") as kvc:
        for window, cache in zip(chosen, computed, strict=True):
            stored = kvc.add_blocks_ids(window.ids[:CONTEXT_TOKENS], cache)
            ours = kvc.get_cache_ids(window.ids[:-1])
            if (came := ours.begin()) != CONTEXT_TOKENS:
                raise SystemExit(f"{codec}: {came} of {CONTEXT_TOKENS} tokens came back")
            size_bytes += stored.size_bytes
            logits = ready.model(input_ids=window.ids[None, CONTEXT_TOKENS:-1], past_key_values=ours).logits[0]
            wanted = window.ids[CONTEXT_TOKENS + 1 :]
            found.append(torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="none").numpy())
    return np.stack(found), size_bytes


def quality(chosen: list[Window], lossless: np.ndarray, lossy: np.ndarray, bits: float) -> Quality:
    """The perplexity beside the lossless codec's; documents, not tokens, are what varies independently."""
    names = np.array([window.document for window in chosen])
    difference = (lossy - lossless).mean(axis=1)
    mean = float(difference.mean())
    by_document = np.array([(difference[names == name] - mean).sum() for name in np.unique(names)])
    documents = len(by_document)
    spread = math.sqrt(float(np.square(by_document).sum()) * documents / max(1, documents - 1)) / len(difference)
    return Quality(
        perplexity=float(np.exp(lossy.mean())),
        higher_percent=100 * math.expm1(mean),
        error_percent=100 * math.exp(mean) * spread,
        bits=bits,
    )


def context_blocks(kvc: KVCManager, caches: list[DynamicCache]) -> list[bytes]:
    """The second block of every context, as computed: the first has the attention sinks."""
    found = []
    for cache in caches:
        room = bytearray(kvc.layout.block_bytes)
        CacheSource(cache, kvc.layout).read(1, memoryview(room))
        found.append(bytes(room))
    return found
