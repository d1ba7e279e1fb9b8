"""Documents made ready for training: repeated paragraphs dropped, a fixed part held out, a tokenizer, token ids."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.small_model.sources import Document, read_sources

VOCAB_SIZE = 8192
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
HELD_OUT_ONE_IN = 50
_SHORT_PARAGRAPH_CHARS = 60
_SHORTEST_CHARS = 200


@dataclass(frozen=True, slots=True)
class Split:
    """Documents to learn from, and documents to be measured on which share no long paragraph with them."""

    train: list[Document]
    held_out: list[Document]


def is_held_out(name: str) -> bool:
    """Whether the document of this name is held out: one in fifty, by its name's hash, so the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def split(documents: Iterable[Document]) -> Split:
    """Divide ``documents``, less their furniture, keeping every paragraph longer than a line only once.

    Held-out documents come first: what they contain is then dropped from the training text, never the reverse.
    """
    return _divide(without_furniture(list(documents)))


def _divide(documents: list[Document]) -> Split:
    seen: set[bytes] = set()
    parts: dict[bool, list[Document]] = {True: [], False: []}
    for held_out in (True, False):
        for document in documents:
            if is_held_out(document.name) is held_out:
                text = "\n\n".join(_new_paragraphs(document.text, seen))
                if len(text) >= _SHORTEST_CHARS:
                    parts[held_out].append(Document(document.name, text))
    return Split(parts[False], parts[True])


def held_out_documents() -> list[Document]:
    """The documents that no training has seen, as ``split`` leaves them: for measuring."""
    documents = without_furniture(list(read_sources()))
    return _divide([document for document in documents if is_held_out(document.name)]).held_out


def without_furniture(documents: list[Document]) -> list[Document]:
    """The documents without what is on more than a fifth of a package's web pages: menus, headers and footers."""
    pages: Counter[str] = Counter()
    found: Counter[tuple[str, str]] = Counter()
    for document in documents:
        if document.name.endswith(".html"):
            package = document.name.partition(":")[0]
            pages[package] += 1
            found.update((package, paragraph) for paragraph in set(document.text.split("\n\n")))
    furniture = {key for key, count in found.items() if count > max(5, pages[key[0]] / 5)}
    return [
        Document(document.name, "\n\n".join(kept))
        for document in documents
        for package in [document.name.partition(":")[0]]
        for kept in [[part for part in document.text.split("\n\n") if (package, part) not in furniture]]
    ]


def _new_paragraphs(text: str, seen: set[bytes]) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        normal = " ".join(paragraph.split())
        if len(normal) >= _SHORT_PARAGRAPH_CHARS:
            digest = hashlib.blake2b(normal.encode(), digest_size=12).digest()
            if digest in seen:
                continue
            seen.add(digest)
        yield paragraph


def train_tokenizer(documents: Iterable[Document], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Byte-level BPE: any text in and out, ``<s>`` before every text."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[UNKNOWN, BEGIN, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)])
    return tokenizer


def token_ids(tokenizer: Tokenizer, documents: list[Document]) -> list[np.ndarray]:
    """The ids of every document, each beginning with ``<s>``: uint16, one array per document."""
    encoded = tokenizer.encode_batch_fast([document.text for document in documents])
    return [np.array(encoding.ids, dtype=np.uint16) for encoding in encoded]
