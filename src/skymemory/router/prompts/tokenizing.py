"""Tokenization of prompts with the engine's tokenizer and chat template, from the model's folder.

``PieceCache`` tokenizes each piece of text once. Texts are cut between a letter and a space, if tokens there split
independently of the surrounding text. That holds for BPE on bytes after a split by one of ``KNOWN_PATTERNS``: no
alternative matches a letter and a space after it, none looks back, and lookahead ends at the character after white
space.

transformers is not used: its import takes seconds and needs torch. Templates run in Jinja's sandbox.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from skymemory.errors import InvalidInput, missing_extra
from skymemory.files import MAX_TABLE_BYTES, MAX_TOKENIZER_BYTES, read_json, read_text

try:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox
    from tokenizers import Tokenizer
except ImportError as error:
    raise missing_extra("a router with a tokenizer", "jinja2 and tokenizers", "router") from error

PIECE_LETTERS = 512
"""Letters after which a piece ends at the first possible cut."""
MAX_CACHE_BYTES = 64 << 20
MAX_PIECE_LETTERS = 65_536
"""Limit of a cached piece; a longer piece has no possible cut."""
BATCH_LETTERS = 131_072
SLICE_LETTERS = 1 << 20
"""Size of the slices of a piece without a possible cut, which bounds memory. Tokens after a slice may differ from the
engine's."""
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
"""Patterns of GPT-2 (two spellings), Qwen 2, Llama 3, o200k and Tekken."""
_PROBE = "Sky box's 12345  moves\n\n  to the east; \tñandú 你好 where it's  kept.  And on "


class TooMuchNewText(Exception): ...


class PieceCache:
    """Cache of the tokens of pieces of text; thread-safe. ``encode`` adds no special tokens; ``cuts``: ``can_cut``."""

    def __init__(
        self,
        encode: Callable[[Sequence[str]], list[list[int]]],
        cuts: bool,
        piece_letters: int = PIECE_LETTERS,
        most_bytes: int = MAX_CACHE_BYTES,
    ) -> None:
        self._encode = encode
        self._piece_letters = piece_letters
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self.kept_bytes = 0
        self.cuts = cuts
        if cuts:
            # `can_cut` judges the tokenizer's file, which may hold more than it knows. So try it once.
            self._piece_letters = 8
            self.cuts = self.tokens(_PROBE) == _packed(encode([_PROBE])[0])
            self._piece_letters = piece_letters
            self._known.clear()
            self.kept_bytes = 0

    def tokens(self, text: str, salt: str = "", most_new: int | None = None) -> bytes:
        """Return the token numbers of ``text``, 4 bytes each.

        Only an equal ``salt`` shares pieces: response times would reveal what others sent.

        Raises:
            TooMuchNewText: more than ``most_new`` letters are in no cached piece.
        """
        pieces = self.cut(text)
        token_lists = self._look_up(pieces, salt)
        missing = [index for index, tokens in enumerate(token_lists) if tokens is None]
        if missing:
            if most_new is not None and sum(len(pieces[index]) for index in missing) > most_new:
                raise TooMuchNewText
            for batch in _batches(missing, pieces):
                for index, tokens in zip(batch, self._encoded([pieces[index] for index in batch]), strict=True):
                    token_lists[index] = tokens
            self._keep(pieces, token_lists, salt)
        return b"".join(tokens for tokens in token_lists if tokens is not None)

    def _encoded(self, pieces: Sequence[str]) -> Iterator[bytes]:
        for piece, ids in zip(pieces, self._encode([piece[:SLICE_LETTERS] for piece in pieces]), strict=True):
            tokens = [_packed(ids)]
            for at in range(SLICE_LETTERS, len(piece), SLICE_LETTERS):
                tokens.append(_packed(self._encode([piece[at : at + SLICE_LETTERS]])[0]))
            yield b"".join(tokens)

    def cut(self, text: str) -> list[str]:
        """Split ``text``; texts with a common beginning begin with the same pieces."""
        pieces, begin = [], 0
        while self.cuts and (place := _CUT.search(text, begin + self._piece_letters)) is not None:
            end = place.start() + 1
            pieces.append(text[begin:end])
            begin = end
        if begin < len(text):
            pieces.append(text[begin:])
        return pieces

    def _look_up(self, pieces: Sequence[str], salt: str) -> list[bytes | None]:
        token_lists: list[bytes | None] = []
        with self._lock:
            for piece in pieces:
                tokens = self._known.get((salt, piece))
                if tokens is not None:
                    self._known.move_to_end((salt, piece))
                token_lists.append(tokens)
        return token_lists

    def _keep(self, pieces: Sequence[str], piece_tokens: Sequence[bytes | None], salt: str) -> None:
        with self._lock:
            for piece, tokens in zip(pieces, piece_tokens, strict=True):
                if tokens is None or len(piece) > MAX_PIECE_LETTERS or (salt, piece) in self._known:
                    continue
                self._known[salt, piece] = tokens
                self.kept_bytes += _size(salt, piece, tokens)
            while self.kept_bytes > self._most_bytes:
                (old_salt, old), tokens = self._known.popitem(last=False)
                self.kept_bytes -= _size(old_salt, old, tokens)


def can_cut(tokenizer_json: str) -> bool:
    """Return True if tokens beside a cut are independent."""
    settings: Mapping[str, Any] = json.loads(tokenizer_json)
    model, normalizer = settings.get("model") or {}, settings.get("normalizer")
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and (normalizer is None or normalizer.get("type") == "NFC")
        and _splits_known(settings.get("pre_tokenizer") or {})
        and all(_stands_alone(added) for added in settings.get("added_tokens") or ())
    )


def _splits_known(pre: Mapping[str, Any]) -> bool:
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
    """Return True if it is matched independently of the text around it, and never across a cut."""
    around = added.get("lstrip") or added.get("rstrip") or added.get("single_word")
    return not around and not _CUT.search(str(added.get("content", "")))


def _batches(indices: Sequence[int], pieces: Sequence[str]) -> Iterator[list[int]]:
    """Split what is encoded at once: the tokenizer takes about a hundred bytes per token until a call ends."""
    batch: list[int] = []
    letters = 0
    for index in indices:
        batch.append(index)
        letters += len(pieces[index])
        if letters >= BATCH_LETTERS:
            yield batch
            batch, letters = [], 0
    if batch:
        yield batch


def _packed(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def _size(salt: str, piece: str, tokens: bytes) -> int:
    return sys.getsizeof(piece) + sys.getsizeof(tokens) + len(salt) + 200


class PromptTokenizer:
    def __init__(self, path: Path, piece_letters: int = PIECE_LETTERS) -> None:
        """Load a tokenizer.

        Args:
            path: a ``tokenizer.json``, or its folder; ``chat_template.jinja`` there takes precedence over
            ``tokenizer_config.json``.
            piece_letters: minimum length of a piece.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise InvalidInput(f"no tokenizer at {str(path)!r}: expected a tokenizer.json or a folder with one")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself
            raise InvalidInput(f"the tokenizer {str(file)!r} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _json(file.parent / "tokenizer_config.json")
        self._words = {name: _word(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        self._template = _template(file.parent, config)
        described = read_text(file, MAX_TOKENIZER_BYTES)
        self._pieces = PieceCache(self._encode, can_cut(described), piece_letters)
        self._around = self._special_around()

    def of_text(self, text: str, special: bool = True) -> list[int]:
        """Return token numbers; ``special`` adds those that the tokenizer puts around a text (``<s>``)."""
        # A batch of one text releases the GIL, and does not compute the offsets of tokens.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def text_tokens(self, text: str, special: bool = True, salt: str = "", most_new: int | None = None) -> bytes:
        """Return the packed tokens of ``text``, using cached pieces.

        Raises:
            TooMuchNewText: more than ``most_new`` letters would have to be tokenized.
        """
        if special and self._around is None:
            if most_new is not None and len(text) > most_new:
                raise TooMuchNewText
            rest = self._pieces.tokens(text[SLICE_LETTERS:], salt) if len(text) > SLICE_LETTERS else b""
            return _packed(self.of_text(text[:SLICE_LETTERS])) + rest
        before, after = self._around if special and self._around is not None else (b"", b"")
        return before + self._pieces.tokens(text, salt, most_new) + after

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _special_around(self) -> tuple[bytes, bytes] | None:
        """Return what the tokenizer puts around every text; None if that varies."""
        surroundings = set()
        for text in ("a", "The box b"):
            full, inner = self.of_text(text), self.of_text(text, special=False)
            index = next((index for index in range(len(full)) if full[index : index + len(inner)] == inner), None)
            surroundings.add(None if index is None else (_packed(full[:index]), _packed(full[index + len(inner) :])))
        return surroundings.pop() if len(surroundings) == 1 else None

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Render a chat up to the assistant's turn; None: there is no template, or it fails."""
        if self._template is None:
            return None
        variables = {"add_generation_prompt": True, **self._words, **(more or {})}
        try:
            return self._template.render(messages=[_flat(message) for message in messages], tools=tools, **variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError):
            return None


def _flat(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        return {**message, "content": "\n".join(str(part["text"]) for part in content)}
    return message


def _json(file: Path) -> dict[str, Any]:
    return read_json(file, "a tokenizer's settings", MAX_TABLE_BYTES) if file.is_file() else {}


def _word(token: object) -> str:
    word = token.get("content") if isinstance(token, dict) else token
    return word if isinstance(word, str) else ""


def _template(folder: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    file = folder / "chat_template.jinja"
    source: object = read_text(file, MAX_TABLE_BYTES) if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        templates = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = templates.get("default")
    if not isinstance(source, str):
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise InvalidInput(f"the chat template in {str(folder)!r} is not valid Jinja: {error}") from error


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **_: Any) -> str:
    """Format JSON without the HTML escapes of Jinja's filter, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """Extension that ignores ``{% generation %}``, which marks the text that a model is trained on."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja has it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
