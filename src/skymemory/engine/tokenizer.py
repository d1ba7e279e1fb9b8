"""A tokenizer without a download: byte-level BPE trained on the text the package ships, or one from a path."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from skymemory.engine.inputs import shipped_document
from skymemory.errors import InvalidInput

_UNKNOWN, _BEGIN, _END = "<unk>", "<s>", "</s>"


def train_tokenizer(vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most ``vocab_size`` tokens, any text in and out, trained on the shipped document.

    Begins every text with ``<s>``, as Llama's does. Nothing is written anywhere.
    """
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
        single=f"{_BEGIN} $A",
        pair=f"{_BEGIN} $A {_BEGIN} $B",
        special_tokens=[(_BEGIN, tokenizer.token_to_id(_BEGIN))],
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
    """A tokenizer saved by transformers in the folder ``path``; nothing is fetched from anywhere."""
    if not Path(path).is_dir():
        raise InvalidInput(f"no tokenizer in {str(path)!r}: expected a folder that save_pretrained wrote")
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidInput(f"the tokenizer in {str(path)!r} cannot be loaded: {error}") from error
