"""Checks of model names, folders and documents without torch, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from skymemory.errors import InvalidInput, MissingExtra, cannot_read, missing_extra
from skymemory.files import read_text
from skymemory.installation import find_checkout, small_model_command

MODEL_NAMES = ("small", "small-random", "tinyllama-random", "tinyllama-6-random")
SHIPPED_DOCUMENT = "operators-handbook.txt"
_DOCUMENT_LIMIT_BYTES = 256 << 20


def shipped_document() -> str:
    """Return the handbook of an imaginary constellation, about 33 KB."""
    text = resources.files("skymemory").joinpath("engine", "texts", SHIPPED_DOCUMENT)
    return text.read_text(encoding="utf-8")


def read_document(path: str | Path) -> str:
    """Return a file's text; raise InvalidInput if missing, empty, too large or not UTF-8."""
    file = Path(path)
    if not file.is_file():
        raise InvalidInput(f"no document at {str(path)!r}: expected a text file")
    if file.stat().st_size > _DOCUMENT_LIMIT_BYTES:
        raise InvalidInput(f"{str(path)!r} has {file.stat().st_size} bytes: the limit is {_DOCUMENT_LIMIT_BYTES}")
    try:
        text = read_text(file, _DOCUMENT_LIMIT_BYTES)
    except OSError as error:
        raise InvalidInput(cannot_read(path, error)) from error
    if "\0" in text:
        raise InvalidInput(f"{str(path)!r} is not text: it contains zero bytes")
    if not text.strip():
        raise InvalidInput(f"{str(path)!r} is empty: expected a text to use as context")
    return text


def small_model_folder() -> Path:
    """Return the folder of the small model (6.5 million parameters): in a checkout, or of the distribution. Raises
    MissingExtra.
    """
    if (checkout := find_checkout()) is not None:
        folder = checkout / "models" / "small" / "skymemory_small_model"
        if (folder / "config.json").is_file():
            return folder
    spec = find_spec("skymemory_small_model")
    if spec is None or spec.origin is None:
        raise MissingExtra(f"the small model is not installed: {small_model_command()}")
    return Path(spec.origin).parent


def is_model_name(name: str) -> bool:
    """Return True for a name in ``MODEL_NAMES``; ``./small`` means a folder."""
    return name in MODEL_NAMES


def check_model(name: str) -> None:
    if not is_model_name(name) and not (Path(name) / "config.json").is_file():
        raise InvalidInput(
            f"no model {name!r}: expected a folder with config.json, as save_pretrained writes, or one of "
            f"{', '.join(MODEL_NAMES)}"
        )


def check_model_folder(path: str | Path) -> None:
    if not (Path(path) / "config.json").is_file():
        raise InvalidInput(f"no model in {str(path)!r}: expected a folder with config.json, as save_pretrained writes")


def check_engine_installed(
    model: str | None = None, what: str = "a model", more: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Raise ``MissingExtra`` with all missing packages at once, importing none; ``more``: packages by extra."""
    absent = {
        extra: [name for name in names if find_spec(name) is None]
        for extra, names in {"hf": ("torch", "transformers"), **(more or {})}.items()
    }
    missing = []
    if extras := [extra for extra, names in absent.items() if names]:
        packages = ", ".join(name for names in absent.values() for name in names)
        missing.append(str(missing_extra(what, packages, *extras)))
    if model == "small":
        try:
            small_model_folder()
        except MissingExtra as error:
            missing.append(str(error))
    if missing:
        raise MissingExtra("\n".join(missing))  # a command ends each line
