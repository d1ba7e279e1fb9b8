"""The trained model as the package ships it: bfloat16 weights, tokenizer, configuration, and where it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tools.small_model.corpus import BEGIN, END, UNKNOWN
from tools.small_model.sources import SOURCES
from tools.small_model.train import Plan, Progress

_ORIGIN = """\
The small model of SkyMemory
============================

A Llama of {parameters:.2f} million parameters with a byte-level BPE of {vocabulary} tokens, trained from nothing by
`make small-model` (tools/small_model in the repository; seeds and schedule are there) on English technical
documentation as packages of Debian 12 install it. It exists to have keys and values of a model that has learnt
something: for showing and measuring what caching and compressing them does to text. It knows no facts.

Held-out text: {bits_per_byte:.3f} bits per byte in bfloat16, as shipped.
  {held_out_documents} documents of the same packages, one in fifty by a hash of their names, {held_out_bytes} bytes,
  which share no paragraph of more than a line with the training text
Trained on: {tokens:.2f} million tokens, {wall_minutes:.0f} minutes, {cpu_minutes:.0f} minutes of processor time.
  training.json has the course

The text it was trained on, by package, with the licences of the text (see each package's
/usr/share/doc/PACKAGE/copyright; the text itself is not part of this package):

{sources}

The weights and the tokenizer's vocabulary are given under the licence of SkyMemory (Apache-2.0) as far as its authors
hold rights in them.
"""


def export(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    folder: Path,
    plan: Plan,
    progress: Progress,
    held_out: dict[str, Any],
) -> None:
    """Write everything into ``folder``. ``held_out``: its ``documents``, ``bytes`` and ``bits_per_byte``."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    # It never learnt to end: let every run have the length it asked for.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, bos_token=BEGIN, eos_token=END, pad_token=UNKNOWN
    )
    fast.save_pretrained(folder)
    for file in folder.iterdir():  # safetensors' own are for their writer alone
        file.chmod(0o644)
    width = max(len(source.package) for source in SOURCES)
    text = _ORIGIN.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        vocabulary=len(fast),
        held_out_documents=held_out["documents"],
        held_out_bytes=held_out["bytes"],
        bits_per_byte=held_out["bits_per_byte"],
        tokens=progress.tokens / 1e6,
        wall_minutes=progress.wall_seconds / 60,
        cpu_minutes=progress.cpu_seconds / 60,
        sources="\n".join(f"  {source.package:<{width}}  {source.licence}" for source in SOURCES),
    )
    (folder / "ORIGIN.txt").write_text(text, encoding="utf-8")
    course = {
        "seed": plan.seed,
        "tokens": progress.tokens,
        "wall_seconds": round(progress.wall_seconds),
        "cpu_seconds": round(progress.cpu_seconds),
        "held_out": held_out,
        "course_is_of": "a quarter of the held-out documents, weights in float32",
        "course": progress.history,
    }
    (folder / "training.json").write_text(json.dumps(course, indent=1) + "\n")
