"""Tokens of a prompt from tokens of its pieces, which prompts share: each piece is tokenized once.

Most of a prompt was seen before, in the turn before it or behind the same instructions. A text is cut where its tokens
fall apart whatever stands around: between a letter and a space. That holds for tokenizers that first split text by
one of the patterns below and then merge bytes within each part (BPE, as GPT-2, Llama 3, Qwen and gpt-oss do): no
alternative of theirs matches a letter and a space behind it, none looks back, and what looks ahead looks no further
than behind white space, which no cut follows. Any other tokenizer is not cut: it reads each text whole.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

PIECE_LETTERS = 512
"""A piece ends at the first cut behind so many."""
MOST_BYTES = 64 << 20
"""Of pieces and their tokens that are kept; beyond, the one that was used longest ago goes."""
MOST_PIECE_LETTERS = 65_536
"""A longer piece (no letter before a space for so long) is not kept."""
_CUT = re.compile("[A-Za-z] ")
_S, _W = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHER = r" ?[^\s\p{L}\p{N}]+"
_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
KNOWN_PATTERNS = frozenset(
    (
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        *(rf"{_S}|{_W}\p{{L}}+|\p{{N}}{digits}|{_OTHER}[\r\n]*{_SPACE}" for digits in ("", "{1,3}")),
        rf"{_W}{_UPPER}*{_LOWER}+{_S}?|{_W}{_UPPER}+{_LOWER}*{_S}?|\p{{N}}{{1,3}}|{_OTHER}[\r\n/]*{_SPACE}",
        rf"{_W}{_UPPER}*{_LOWER}+|{_W}{_UPPER}+{_LOWER}*|\p{{N}}|{_OTHER}[\r\n/]*{_SPACE}",
    )
)
"""GPT-2's in both spellings, Qwen 2's and Llama 3's, o200k's (gpt-oss) and Tekken's (Mistral)."""
_PROBE = "Sky box's 12345  moves\n\n  to the east; \tñandú 你好 where it's  kept.  And on "


class NotKnown(Exception):
    """More of a text is new than was asked to be tokenized."""


class Pieces:
    """``encode``: token numbers of each of several texts, without special ones around them.

    ``cuts``: whether texts may be cut (``can_cut``). For any number of threads.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[str]], list[list[int]]],
        cuts: bool,
        piece_letters: int = PIECE_LETTERS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._encode = encode
        self._piece_letters = piece_letters
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self.kept_bytes = 0
        self.cuts = cuts
        if cuts:  # what its file promises is tried once
            self._piece_letters = 8
            self.cuts = self.tokens(_PROBE) == _packed(encode([_PROBE])[0])
            self._piece_letters = piece_letters
            self._known.clear()
            self.kept_bytes = 0

    def tokens(self, text: str, salt: str = "", most_new: int | None = None) -> bytes:
        """Token numbers of ``text``, as ``bodies.token_bytes`` packs them.

        ``salt``: pieces are shared under the same one only, since time tells what was seen before.

        Raises:
            NotKnown: more letters than ``most_new`` are in no piece that is known.
        """
        pieces = self.cut(text)
        found = self._look_up(pieces, salt)
        new = [at for at, tokens in enumerate(found) if tokens is None]
        if new:
            if most_new is not None and sum(len(pieces[at]) for at in new) > most_new:
                raise NotKnown
            for at, ids in zip(new, self._encode([pieces[at] for at in new]), strict=True):
                found[at] = _packed(ids)
            self._keep(pieces, found, salt)
        return b"".join(tokens for tokens in found if tokens is not None)

    def cut(self, text: str) -> list[str]:
        """``text`` in pieces; texts that begin alike begin with the same ones."""
        pieces, begin = [], 0
        while self.cuts and (place := _CUT.search(text, begin + self._piece_letters)) is not None:
            end = place.start() + 1
            pieces.append(text[begin:end])
            begin = end
        if begin < len(text):
            pieces.append(text[begin:])
        return pieces

    def _look_up(self, pieces: Sequence[str], salt: str) -> list[bytes | None]:
        found: list[bytes | None] = []
        with self._lock:
            for piece in pieces:
                tokens = self._known.get((salt, piece))
                if tokens is not None:
                    self._known.move_to_end((salt, piece))
                found.append(tokens)
        return found

    def _keep(self, pieces: Sequence[str], found: Sequence[bytes | None], salt: str) -> None:
        with self._lock:
            for piece, tokens in zip(pieces, found, strict=True):
                if tokens is None or len(piece) > MOST_PIECE_LETTERS or (salt, piece) in self._known:
                    continue
                self._known[salt, piece] = tokens
                self.kept_bytes += _size(salt, piece, tokens)
            while self.kept_bytes > self._most_bytes:
                (old_salt, old), tokens = self._known.popitem(last=False)
                self.kept_bytes -= _size(old_salt, old, tokens)


def can_cut(tokenizer_json: str) -> bool:
    """Whether the tokenizer is one whose texts can be cut; by what its file says."""
    read: Mapping[str, Any] = json.loads(tokenizer_json)
    model, normalizer = read.get("model") or {}, read.get("normalizer")
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and (normalizer is None or normalizer.get("type") == "NFC")
        and _splits_known(read.get("pre_tokenizer") or {})
        and all(_stands_alone(added) for added in read.get("added_tokens") or ())
    )


def _splits_known(pre: Mapping[str, Any]) -> bool:
    """Split by a known pattern, then bytes; perhaps digits apart before."""
    steps = pre.get("pretokenizers", []) if pre.get("type") == "Sequence" else [pre]
    split = False
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel":
            if step.get("add_prefix_space") or step is not steps[-1]:
                return False
            split = split or bool(step.get("use_regex", True))
        elif kind == "Split":
            pattern = (step.get("pattern") or {}).get("Regex")
            if pattern not in KNOWN_PATTERNS or step.get("behavior") != "Isolated" or step.get("invert"):
                return False
            split = True
        elif kind != "Digits":
            return False
    return split and bool(steps) and steps[-1].get("type") == "ByteLevel"


def _stands_alone(added: Mapping[str, Any]) -> bool:
    """A token that is found in a text as it stands, without regard to what is around it, and not across a cut."""
    around = added.get("lstrip") or added.get("rstrip") or added.get("single_word")
    return not around and not _CUT.search(str(added.get("content", "")))


def _packed(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def _size(salt: str, piece: str, tokens: bytes) -> int:
    """With what a dictionary's entry takes, about."""
    return sys.getsizeof(piece) + sys.getsizeof(tokens) + len(salt) + 200
