"""Context of vLLM's blocks: all that makes two engines' keys and values different.

vLLM's block hashes name neither model nor data type; its packing depends on the attention backend. Engines log their
contexts (``EngineReport``) for `skymemory doctor`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from skymemory.engine.vllm.settings import STATES, PartOfModel
from skymemory.errors import InvalidInput
from skymemory.files import write_private
from skymemory.kv.block import OpaqueLayout
from skymemory.kv.context import CacheContext
from skymemory.testbed.open_store import without_password

_log = logging.getLogger("vllm.skymemory")  # vLLM shows lines of its own loggers only
_ENGINE, _ADAPTER = "SkyMemory: engine ", "SkyMemory: adapter "
_REFUSED = re.compile(r"skymemory\.errors\.\w+: (.+)")

_NOT_WEIGHTS = (".md", ".txt", ".png", ".jpg", ".gitattributes", ".lock", ".py", ".pyc", ".gguf.md")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_AS_FOLDER = "give the model as a folder with its weights"
_PIECE_BYTES = 8 << 20
_NOT_IDENTITY = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
_KEPT_DIGESTS = 4096
_KEPT_SEEDS = 65536


def context_of(config: Any, layouts: Sequence[OpaqueLayout]) -> CacheContext:
    """Return the context of a ``VllmConfig``, without adapter and salt; ``layouts`` by part."""
    model = config.model_config
    fields = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NOT_IDENTITY}
    kinds = [fields, str(model.quantization), str(getattr(model, "quantization_config", None)), *_other_kinds(model)]
    what = json.dumps(kinds, sort_keys=True, default=str)
    return CacheContext(
        model=f"vllm:{model.hf_config.model_type}:{hashlib.sha256(what.encode()).hexdigest()[:32]}",
        weights=weights_digest(model, config.load_config.load_format),
        tokenizer="token ids",
        kv_dtype=f"{model.dtype} {config.cache_config.cache_dtype}".replace("torch.", ""),
        layout=", beside ".join(layout.describe() for layout in layouts),
        block_tokens=layouts[0].block_tokens,
    )


def _other_kinds(model: Any) -> list[object]:
    """Return further facts: LongRoPE's factors depend on the longest prompt allowed, images on preprocessing."""
    kinds: list[object] = []
    rope = _find_field(model.hf_config.to_dict(), "rope_type") or _find_field(model.hf_config.to_dict(), "type")
    if rope == "longrope":
        original = _find_field(model.hf_config.to_dict(), "original_max_position_embeddings")
        kinds.append(["longrope", model.max_model_len > original if original else model.max_model_len])
    if prepared := getattr(getattr(model, "multimodal_config", None), "mm_processor_kwargs", None):
        kinds.append(["media", prepared])
    return kinds


def _find_field(fields: object, name: str) -> Any:
    if not isinstance(fields, dict):
        return None
    return fields.get(name) or next(filter(None, (_find_field(value, name) for value in fields.values())), None)


def layout_of(
    config: Any, kv_cache_config: Any, part: PartOfModel, blocks_per_value: int, version: str
) -> OpaqueLayout:
    """Return the layout of a part's values: all that changes how vLLM packs their bytes."""
    groups = [kv_cache_config.kv_cache_groups[number] for number in part.groups]
    spec = groups[0].kv_cache_spec
    layers = " + ".join(f"{len(group.layer_names)} layers" for group in groups)
    if part.has_states:
        kind = f"of states {spec.mamba_type.name} {spec.shapes} {spec.dtypes}, "
    else:
        kind = f"of {spec.num_kv_heads} heads of {spec.head_size}, "
        if part.window is not None:
            kind += f"a window of {part.window}, "
    how = _device() if part.has_states else f"{spec.dtype}, {_attention(config, spec)}"
    packing = (
        f"vllm {version.rpartition('.')[0]}, {layers} {kind}{blocks_per_value} x {spec.block_size} tokens, {how}, "
        f"{kv_cache_config.kv_cache_layout}, tp {config.parallel_config.tensor_parallel_size}"
    ).replace("torch.", "")
    block_bytes = sum(block_bytes_of(group.kv_cache_spec) * len(group.layer_names) for group in groups)
    return OpaqueLayout(packing, blocks_per_value * spec.block_size, blocks_per_value * block_bytes)


def block_bytes_of(spec: Any) -> int:
    """Return the bytes of a layer's block, without the padding of states."""
    states = type(spec).__name__ == STATES and spec.page_size_padded is not None
    return int((replace(spec, page_size_padded=None) if states else spec).page_size_bytes)


def _device() -> str:
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else str(current_platform.get_device_name())


def _attention(config: Any, spec: Any) -> str:
    # Return device and attention backend, which determine the packing.
    from vllm.platforms import current_platform

    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    name = getattr(backend, "name", backend) or "default"
    if not current_platform.is_cpu():
        return f"{current_platform.get_device_name()} {name}"
    from vllm.v1.attention.backends.cpu_attn import (
        _get_attn_isa,
    )

    isa = _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype)
    return f"cpu {name} {isa}"


def weights_digest(model: Any, load_format: object) -> str:
    """Return the digest of the model's files of weights."""
    load_format = str(getattr(load_format, "value", load_format))
    if load_format == "dummy":
        return f"dummy weights, seed {model.seed}"
    if elsewhere := getattr(model, "model_weights", ""):
        raise InvalidInput(f"the weights are at {elsewhere}, where their contents are not known: {_AS_FOLDER}")
    folder = Path(model.model)
    if not folder.is_dir():
        folder = _downloaded(model.model, model.revision)
    if not any(path.name.endswith(_WEIGHTS) for path in folder.iterdir()):
        raise InvalidInput(f"{folder} has no file of weights ({', '.join(_WEIGHTS)}): {_AS_FOLDER}")
    return f"{load_format} {folder_digest(folder, code=bool(model.trust_remote_code))}"


def _downloaded(name: str, revision: str | None) -> Path:
    from huggingface_hub import try_to_load_from_cache

    config = None
    with suppress(ValueError):  # not a name of the hub
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(config, str):
        raise InvalidInput(f"the files of {name!r} are not in the hub's cache: {_AS_FOLDER}")
    return Path(config).parent


def folder_digest(folder: Path, *, code: bool = False) -> str:
    """Return the SHA-256 of a folder's weights and settings, with ``code`` also of Python files; unchanged files are
    read once.
    """
    if not folder.is_dir():
        raise InvalidInput(f"{folder} is no folder: its files name the weights")
    digest = hashlib.sha256()
    known = _Digests()
    for path in sorted(_files(folder, code)):
        digest.update(f"{path.relative_to(folder)} {known.of(path)}\n".encode())
    known.keep()
    return f"sha256:{digest.hexdigest()}"


def _files(folder: Path, code: bool = False) -> Iterable[Path]:
    without = tuple(suffix for suffix in _NOT_WEIGHTS if not (code and suffix == ".py"))
    return (path for path in folder.iterdir() if path.is_file() and not path.name.endswith(without))


def _looks_of(folder: Path) -> str:
    stats = ((path.name, path.stat()) for path in sorted(_files(folder)))
    return repr([(name, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, at in stats])


class _Digests:
    """Digests of files in the user's cache folder, by path, inode, size and times. An inode's change time cannot be set
    back.
    """

    def __init__(self) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        self._path = Path(base, "skymemory", "digests.json").expanduser()
        self._known: dict[str, str] = {}
        with suppress(OSError, ValueError):
            read = json.loads(self._path.read_text("utf-8"))
            self._known = {str(key): str(value) for key, value in read.items()} if isinstance(read, dict) else {}
        self._before = dict(self._known)

    def of(self, path: Path) -> str:
        real = path.resolve()
        at = real.stat()
        key = f"{real}\n{at.st_dev} {at.st_ino}\n{at.st_size}\n{at.st_mtime_ns} {at.st_ctime_ns}"
        if key not in self._known:
            with real.open("rb") as file:
                digest = hashlib.sha256()
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
            self._known[key] = digest.hexdigest()
        return self._known[key]

    def keep(self) -> None:
        if self._known == self._before:
            return
        newest = dict(list(self._known.items())[-_KEPT_DIGESTS:])
        with suppress(OSError):  # then only a later start is slower
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_private(self._path, json.dumps(newest))


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Log entry of an engine's start, with the facts that decide its hits."""

    vllm: str
    skymemory: str
    store: str
    """Address without a password."""
    role: str
    """``kv_role``: kv_producer saves, kv_consumer loads, kv_both does both."""
    block_tokens: int
    value_tokens: int
    value_bytes: int
    longest_tokens: int
    context: dict[str, str | int | bool]
    """``CacheContext.describe``, without adapter and salt."""
    adapters: dict[str, str] = field(default_factory=dict)

    def log(self) -> None:
        without_secret = replace(self, store=without_password(self.store))
        _log.info("%s%s", _ENGINE, json.dumps(asdict(without_secret)))

    @classmethod
    def read(cls, lines: Iterable[str]) -> EngineReport:
        """Read the report of the last start in these lines of a log."""
        report: EngineReport | None = None
        refused = ""
        for line in lines:
            if (table := _json_behind(_ENGINE, line)) is not None:
                report = cls._of(table)
            elif report is not None and isinstance(named := _json_behind(_ADAPTER, line), dict):
                report.adapters.update(named)
            elif match := _REFUSED.search(line):
                refused = f": {match[1].strip()}"
        if report is None:
            raise InvalidInput(f"vLLM has not started with this connector{refused or _NO_LINE}")
        return report

    @classmethod
    def _of(cls, table: Any) -> EngineReport:
        try:
            report = cls(**table)
            if "digest" in report.context:
                return report
        except TypeError:
            pass
        raise InvalidInput(f"the line {_ENGINE.strip()!r} is damaged, or of another release: use its own doctor")


_NO_LINE = f": no line {_ENGINE.strip()!r} is in its log, which VLLM_LOGGING_LEVEL above INFO would hide"


def _json_behind(mark: str, line: str) -> Any:
    _, is_there, text = line.partition(mark)
    with suppress(ValueError):
        return json.JSONDecoder().raw_decode(text)[0] if is_there else None
    return None


class Seeds:
    """Digests of requests' contexts: the engine's context with adapter and salt.

    After weights are changed in place, the model's files no longer name them: vLLM resets its caches, and a new
    *generation* begins, a random number in the context, which shares nothing. The first is the empty string.
    """

    def __init__(self, context: CacheContext) -> None:
        self._context = context
        # Digests by adapter, salt and generation.
        self._known: dict[tuple[str, str, str], bytes] = {}
        # Digest of the files and their state, by id, name and folder.
        self._adapters: dict[tuple[int, str, str], tuple[str, str]] = {}
        # Adapters whose files have changed since: neither loaded nor saved.
        self._changed: set[tuple[int, str, str]] = set()
        # Adapters reloaded from other files: vLLM's cache has older blocks of these names.
        self._reloaded: set[tuple[int, str, str]] = set()
        self.generation = ""

    def reset(self) -> None:
        self.generation = os.urandom(16).hex()
        self._known.clear()
        self._reloaded.clear()

    def context(self, generation: str) -> CacheContext:
        if not generation:
            return self._context
        return replace(self._context, weights=f"{self._context.weights}, generation {generation}")

    def of(self, request: Any, generation: str = "") -> bytes | None:
        """Return the digest of a request's context; None if its tokens do not determine what is computed.

        ``generation``: of the prefilling engine; empty: of this engine.
        """
        generation = generation or self.generation
        if request.prompt_embeds is not None or request.prompt_token_ids is None or request.resumable:
            return None
        adapter = ""
        if (lora := request.lora_request) is not None:
            adapter = self._adapter(lora)
            if not adapter:
                return None
        salt = request.cache_salt or ""
        what = adapter, salt, generation
        if what not in self._known:
            if len(self._known) >= _KEPT_SEEDS:
                self._known.clear()
            context = replace(self.context(generation), adapter=adapter, tenant_salt=salt.encode())
            self._known[what] = context.digest()
        return self._known[what]

    def has_stale_blocks(self, request: Any) -> bool:
        lora = request.lora_request
        return lora is not None and (lora.lora_int_id, lora.lora_name, lora.lora_path) in self._reloaded

    def _adapter(self, lora: Any) -> str:
        """Return name and digest of an adapter's files as of the first request; empty if unreadable or changed."""
        known, folder = (lora.lora_int_id, lora.lora_name, lora.lora_path), Path(lora.lora_path)
        try:
            files = _looks_of(folder)
            if lora.load_inplace and known in self._adapters and files != self._adapters[known][1]:
                del self._adapters[known]
                self._changed.discard(known)
                self._reloaded.add(known)
            if known not in self._adapters:
                self._adapters[known] = f"{lora.lora_name} {folder_digest(folder)}", files
                _log.info("%s%s", _ADAPTER, json.dumps({lora.lora_name: self._adapters[known][0]}))
        except (OSError, InvalidInput):  # vLLM cannot read them again either
            return self._adapters.get(known, ("", ""))[0]
        digest, before = self._adapters[known]
        if known not in self._changed and files != before:
            self._changed.add(known)
            _log.warning(
                "the files of adapter %r have changed: its requests are neither loaded nor saved, until it is loaded "
                'with "load_inplace", by another name, or in a new engine',
                lora.lora_name,
            )
        return "" if known in self._changed else digest
