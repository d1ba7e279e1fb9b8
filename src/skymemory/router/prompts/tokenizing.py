"""Prompts as the engine will see them: its tokenizer and its chat template, read from the model's folder.

The `tokenizers` library and Jinja alone do it; transformers would take seconds to import and bring torch with it.
Templates run in Jinja's sandbox with what transformers gives them.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from skymemory.errors import InvalidInput, MissingExtra
from skymemory.files import MAX_TABLE_BYTES, MAX_TOKENIZER_BYTES, read_bounded
from skymemory.router.bodies import token_bytes
from skymemory.router.token_pieces import PIECE_LETTERS, NotKnown, Pieces, can_cut

try:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox
    from tokenizers import Tokenizer
except ImportError as error:
    raise MissingExtra("a router with a tokenizer needs the extra `router`: pip install 'skymemory[router]'") from error


class PromptTokenizer:
    """A tokenizer, and the chat template beside it if there is one."""

    def __init__(self, path: Path, piece_letters: int = PIECE_LETTERS) -> None:
        """
        Args:
            piece_letters: see `token_pieces`.
            path: a ``tokenizer.json``, or a folder that holds one (with ``tokenizer_config.json``, which names the
                special tokens and may hold the template, and ``chat_template.jinja``, which comes before it).

        Raises:
            InvalidInput: there is none, or it cannot be read.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise InvalidInput(f"no tokenizer at {str(path)!r}: expected a tokenizer.json or a folder that holds one")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself
            raise InvalidInput(f"the tokenizer {str(file)!r} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _json(file.parent / "tokenizer_config.json")
        self._words = {name: _word(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        self._template = _template(file.parent, config)
        described = read_bounded(file, MAX_TOKENIZER_BYTES).decode("utf-8")
        self._pieces = Pieces(self._encode, can_cut(described), piece_letters)
        self._around = self._special_around()

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def of_text(self, text: str, special: bool = True) -> list[int]:
        """Token numbers of ``text``, with those the tokenizer adds around it (``<s>``) if ``special``."""
        # A batch of one: it lets other threads run meanwhile, and leaves out the places of tokens in the text.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def text_tokens(self, text: str, special: bool = True, salt: str = "", most_new: int | None = None) -> bytes:
        """``of_text``, packed, from what is known of its pieces: see ``token_pieces.Pieces.tokens``.

        Raises:
            NotKnown: more than ``most_new`` letters would have to be tokenized.
        """
        if special and self._around is None:
            if most_new is not None and len(text) > most_new:
                raise NotKnown
            return token_bytes(self.of_text(text))
        before, after = self._around if special and self._around is not None else (b"", b"")
        return before + self._pieces.tokens(text, salt, most_new) + after

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _special_around(self) -> tuple[bytes, bytes] | None:
        """What the tokenizer puts before and behind every text; None where it does something else."""
        found = set()
        for text in ("a", "The box b"):
            whole, inner = self.of_text(text), self.of_text(text, special=False)
            at = next((at for at in range(len(whole)) if whole[at : at + len(inner)] == inner), None)
            found.add(None if at is None else (token_bytes(whole[:at]), token_bytes(whole[at + len(inner) :])))
        return found.pop() if len(found) == 1 else None

    def of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> list[int] | None:
        """Token numbers of a chat up to where the answer begins; None where ``chat_text`` is."""
        text = self.chat_text(messages, tools, more)
        return None if text is None else self.of_text(text, special=False)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> str | None:
        """A chat as the template writes it, special tokens and all, up to where the answer begins.

        None where there is no template, or where it refuses these messages (the engine's will too, and say why).
        """
        if self._template is None:
            return None
        given = {"add_generation_prompt": True, **self._words, **(more or {})}
        try:
            return self._template.render(messages=[_flat(message) for message in messages], tools=tools, **given)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError):
            return None


def _flat(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Contents in parts become one text, joined as vLLM joins them, where they are all text."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        return {**message, "content": "\n".join(str(part["text"]) for part in content)}
    return message


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        read = json.loads(read_bounded(file, MAX_TABLE_BYTES))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{str(file)!r} cannot be read: {error}") from error
    return read if isinstance(read, dict) else {}


def _word(token: object) -> str:
    """A special token stands there as a word, or as an object with its content."""
    word = token.get("content") if isinstance(token, dict) else token
    return word if isinstance(word, str) else ""


def _template(folder: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    file = folder / "chat_template.jinja"
    source: object = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default")
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
        raise InvalidInput(f"the chat template in {str(folder)!r} is not one: {error}") from error


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **_: Any) -> str:
    """Jinja's own escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what a model is trained on; to a reader it is nothing."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja has it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
