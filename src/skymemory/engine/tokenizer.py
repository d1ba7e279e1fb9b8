"""A tokenizer without a download: byte-level BPE trained on the text the package ships, or one from a path."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from skymemory.errors import InvalidInput

SHIPPED_DOCUMENT = "operators-handbook.txt"
_UNKNOWN, _BEGIN, _END = "<unk>", "<s>", "</s>"
_DOCUMENT_LIMIT_BYTES = 256 << 20


def shipped_document() -> str:
    """The handbook of an imaginary constellation, about 33 KB of English: the demo's context."""
    text = resources.files("skymemory").joinpath("engine", "texts", SHIPPED_DOCUMENT)
    return text.read_text(encoding="utf-8")


def read_document(path: str | Path) -> str:
    """The text in a file; InvalidInput if it is missing, empty, too large or not UTF-8 text."""
    file = Path(path)
    if not file.is_file():
        raise InvalidInput(f"no document at {str(path)!r}: expected a text file")
    if file.stat().st_size > _DOCUMENT_LIMIT_BYTES:
        raise InvalidInput(f"{str(path)!r} has {file.stat().st_size} bytes: the limit is {_DOCUMENT_LIMIT_BYTES}")
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{str(path)!r} is not UTF-8 text (byte {error.start}): convert it to text first") from None
    if "\0" in text:
        raise InvalidInput(f"{str(path)!r} is not text: it contains zero bytes")
    if not text.strip():
        raise InvalidInput(f"{str(path)!r} is empty: expected a text to use as context")
    return text


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
        tokenizer_object=tokenizer, unk_token=_UNKNOWN, bos_token=_BEGIN, eos_token=_END, pad_token=_UNKNOWN
    )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """A tokenizer saved by transformers in the folder ``path``; nothing is fetched from anywhere."""
    if not Path(path).is_dir():
        raise InvalidInput(f"no tokenizer in {str(path)!r}: expected a folder that save_pretrained wrote")
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidInput(f"the tokenizer in {str(path)!r} cannot be loaded: {error}") from error
