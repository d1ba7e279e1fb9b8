"""Identity of a model in the context of its blocks, and checks for changes of the model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PretrainedConfig

from skymemory.engine.transformers.kv_cache import LayerGroup, groups_of
from skymemory.engine.transformers.probe import check_goes_on, check_supported, kinds_of, probe_layout
from skymemory.engine.transformers.states import States
from skymemory.errors import UnsupportedModel
from skymemory.kv.block import KVLayout
from skymemory.kv.context import CacheContext

if TYPE_CHECKING:
    from transformers import ProcessorMixin

# Fields that do not affect keys and values (dtype is in the layout).
_NOT_IDENTITY = (
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "architectures",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "id2label",
    "label2id",
    "problem_type",
)
# Implementations of the same attention; others are part of the identity.
_ATTENTIONS = {None, "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"}
_EXPERTS = {None, "eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe"}


class Care(IntEnum):
    """Thoroughness of a check for changes of a model, each with those before it."""

    STEP = 0
    """Settings, such as active adapters: before a decoding step."""
    CALL = 1
    """Also modules and tensors: the same objects, not written to."""
    USE = 2
    """Also additions, modes, code, and samples of the numbers: before loaded tokens are used."""


class Identity:
    """Current context of ``model``. ``weights``: a revision that names them; after a change their digest is used."""

    def __init__(
        self,
        model: PreTrainedModel,
        block_tokens: int,
        weights: str | None,
        our_hooks: tuple[type, ...],
        context_of: Callable[[KVLayout, str, str], CacheContext],
    ) -> None:
        self._model = model
        self._block_tokens = block_tokens
        self._our_hooks = our_hooks
        self._context_of = context_of
        self._fingerprint = Fingerprint(model)
        self._conditions = conditions()
        self._probe()
        self.context = self._context(
            self._fingerprint.digest() if weights is None else self._fingerprint.watch(weights)
        )

    def renew(self) -> bool:
        """Recompute the context if the model has changed; returns True if it differs. Raises UnsupportedModel or
        InvalidInput if the model can no longer be served.
        """
        now = conditions()
        self._check_hooks()
        if now == self._conditions and not self._fingerprint.changed():
            return False
        before = self.context
        self._probe()
        self._conditions = now
        self.context = self._context(
            self._fingerprint.digest() if self._fingerprint.changed() else self._fingerprint.name
        )
        return self.context != before

    def _probe(self) -> None:
        # Check that the model can be served; determine the layout of its blocks.
        model = self._model
        check_supported(model)
        if where := foreign_code(model):
            raise UnsupportedModel(
                f"{type(model).__name__} runs replaced code on a {where}, whose effect on the results is unknown: give "
                "the class a name of its own"
            )
        self._check_hooks()
        layout, states = probe_layout(model, self._block_tokens)
        kinds = kinds_of(model)
        check_goes_on(model, layout, kinds, states)
        self.layout, self.states = layout, states if states else None
        self.kinds, self.groups = kinds, groups_of(kinds)

    def same(self, context: CacheContext | None, care: Care = Care.USE) -> bool:
        """Return True if the model is unchanged and, with ``Care.USE``, has no foreign hooks."""
        untouched = conditions() == self._conditions and not self._fingerprint.changed(care)
        hooked = care >= Care.USE and foreign_hook(self._model, self._our_hooks)
        return untouched and context == self.context and not hooked

    def _context(self, weights: str) -> CacheContext:
        return self._context_of(self.layout, model_identity(self._model), weights + self._conditions)

    def context_of(self, group: LayerGroup) -> CacheContext:
        if len(self.groups) == 1:
            return self.context
        return dataclasses.replace(self.context, layout=group.describe(self.layout))

    def states_context(self, states: States) -> CacheContext:
        return dataclasses.replace(self.context, layout=states.describe(), kv_dtype="states", lossless=True)

    def _check_hooks(self) -> None:
        if where := foreign_hook(self._model, self._our_hooks):
            raise UnsupportedModel(
                f"{type(self._model).__name__} has a hook on a {where}, whose effect on the results is unknown: remove "
                "it, or do not use the cache meanwhile"
            )


def conditions() -> str:
    """Describe the global torch settings that change results; empty by default."""
    settings = [
        f"autocast {kind} {torch.get_autocast_dtype(kind)}".replace("torch.", "")
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        settings.append(f"float32 matmul {precision}")
    return "".join(f" ({setting})" for setting in settings)


def model_identity(model: PreTrainedModel) -> str:
    """Return the model's type and a digest of the settings that affect its keys and values."""
    fields = {
        key: value
        for key, value in model.config.to_dict().items()
        if key not in _NOT_IDENTITY and not key.startswith("_attn")
    }
    config = model.config.get_text_config(decoder=True)
    for name, usual in (("_attn_implementation", _ATTENTIONS), ("_experts_implementation", _EXPERTS)):
        if (implementation := getattr(config, name, None)) not in usual:
            fields[name] = implementation
    text = json.dumps(fields, sort_keys=True, default=str)
    return f"{model.config.model_type}:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None) -> str:
    """Return the SHA-256 of everything that determines a text's ids."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # the tokenizer of a processor
    if tokenizer is None:
        return "token ids"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts: dict[str, Any] = {
        "class": type(tokenizer).__name__,
        "model": _backend_text(backend) if backend is not None else sorted(tokenizer.get_vocab().items()),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "settings": {
            name: str(getattr(tokenizer, name, None))
            for name in ("add_bos_token", "add_eos_token", "do_lower_case", "legacy", "chat_template")
        },
    }
    return f"sha256:{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()}"


def _backend_text(backend: Any) -> str:
    fields = json.loads(backend.to_str())
    return json.dumps({name: value for name, value in fields.items() if name not in ("truncation", "padding")})


# --- fingerprint: the tensors and settings that determine a model's results ---

_PIECE_BYTES = 32 << 20
_SETTING = (bool, int, float, str, type(None), torch.dtype)
# Attributes that do not affect what a module computes.
_OF_TORCH = frozenset(torch.nn.Module().__dict__) | {
    "name_or_path",
    "warnings_issued",
    "_is_hf_initialized",
    "_hf_hook",
    "layer_idx",
    "max_seq_len_cached",
    "_keep_in_fp32_modules_set",
    "_no_split_modules",
    "_tp_plan",
    "_ep_plan",
    "_pp_plan",
    "model_tags",
}

# Modules whose hooks change nothing; transformers' stay after a request for hidden states.
_HARMLESS = {"transformers.utils.output_capturing", "skymemory.engine.transformers.layer_reports"}

# Packages whose replaced code gives the same results, or depends on tensors and settings.
_TRUSTED_CODE = {"torch", "transformers", "accelerate", "peft", "kernels"}

_SAMPLE = 16  # number of compared elements: uncounted writes (``.data``, numpy) mostly change the entire tensor.

_Look = tuple[object, ...]


@dataclass(slots=True)
class _Digested:
    """Hashes of a tensor's pieces, valid while its address and version (``look``) are the same."""

    tensor: weakref.ref[torch.Tensor]
    look: _Look
    pieces: list[bytes]


class _OneOf(frozenset[str]):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and other in self

    __hash__ = frozenset.__hash__


# Implementations of the same experts, between which ``generate`` switches on a GPU.
_SAME_EXPERTS = _OneOf(("grouped_mm", "batched_mm"))


class _Rows:
    """Values of attributes or items (holder, key, value), to find those replaced later."""

    def __init__(self, rows: Iterable[tuple[Any, Any, object]]) -> None:
        rows = list(rows)
        self._places = [(holder, key) for holder, key, _ in rows]
        self._before = [value for *_, value in rows]

    def get_unchanged(self) -> list[Any] | None:
        try:
            now = [holder[key] for holder, key in self._places]
        except (KeyError, IndexError):
            return None
        return now if all(map(is_, now, self._before)) else None

    def equal(self) -> bool:
        return [holder.get(key) for holder, key in self._places] == self._before


class _Snapshot:
    def __init__(self, model: torch.nn.Module) -> None:
        modules = _modules(model)
        parts = [part for module in modules for part in (module._modules, module._parameters, module._buffers)]
        self._parts: list[Sized] = parts
        self._sizes = list(map(len, parts))
        self._children = _Rows(
            (part._modules, name, child) for part in modules for name, child in part._modules.items()
        )
        tensors = [
            (holder, name, tensor)
            for module in modules
            for holder in (module._parameters, module._buffers)
            for name, tensor in holder.items()
            if tensor is not None
        ]
        tensors += [(holder, key, tensor) for module in modules for _, holder, key, tensor in _loose(module)]
        self._tensors = _Rows(tensors)
        is_counted = [_is_counted(tensor) for *_, tensor in tensors]
        self._counted = is_counted if not all(is_counted) else []
        self._looks = self._get_addresses_and_versions(tensor for *_, tensor in tensors)
        settings = [
            (module.__dict__, name, value)
            for module in modules
            if type(module) is not torch.nn.Linear  # Linear reads none of them
            for name, value in _settings(module).items()
        ]
        settings.append((model.__dict__, "training", model.training))
        for config in _configs(model):
            settings += [
                (vars(config), name, _SAME_EXPERTS if _computes_experts(name, value) else value)
                for name, value in _plain_of(vars(config)).items()
            ]
        self._settings = _Rows(settings)
        self._modes = _Rows(
            (module.__dict__, name, module.__dict__.get(name)) for module in modules for name in ("training", "forward")
        )
        self._code = [(kind, kind.forward) for kind in _classes(model)]
        views: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for *_, tensor in tensors:
            for view in _sampled(tensor):
                views.setdefault((view.dtype, view.device), []).append(view)
        self._samples = [(of_one_kind, _bytes_of(of_one_kind)) for of_one_kind in views.values()]

    def same(self, care: Care = Care.USE) -> bool:
        """Return True if nothing changed since, as far as ``care`` checks."""
        if not self._settings.equal():
            return False
        if care >= Care.CALL and not self._same_tensors():
            return False
        return care < Care.USE or self._same_numbers_and_code()

    def _same_tensors(self) -> bool:
        tensors = self._tensors.get_unchanged()
        return (
            tensors is not None
            and self._get_addresses_and_versions(tensors) == self._looks
            and self._children.get_unchanged() is not None
        )

    def _same_numbers_and_code(self) -> bool:
        if list(map(len, self._parts)) != self._sizes or not self._modes.equal():
            return False
        return all(kind.forward is code for kind, code in self._code) and self.same_numbers()

    def same_numbers(self) -> bool:
        return all(torch.equal(_bytes_of(views), before) for views, before in self._samples)

    def _get_addresses_and_versions(self, tensors: Iterable[torch.Tensor]) -> list[object]:
        if self._counted:
            tensors = [tensor for tensor, is_counted in zip(tensors, self._counted, strict=True) if is_counted]
        tensors = list(tensors)
        return [[tensor.data_ptr() for tensor in tensors], [tensor._version for tensor in tensors]]


class Fingerprint:
    """Digest of ``model`` and detection of later changes.

    Covers every byte of parameters, buffers and other state, and the class and settings of every module; not hooks and
    replaced code (``foreign_code``).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._known: dict[str, _Digested] = {}
        self.name = ""
        self._snapshot: _Snapshot | None = None

    def changed(self, care: Care = Care.USE) -> bool:
        return self._snapshot is None or not self._snapshot.same(care)

    def watch(self, name: str) -> str:
        self._snapshot = _Snapshot(self._model)
        self.name = name
        return name

    def digest(self) -> str:
        """Return ``sha256:…`` over all state, in parallel. Raises UnsupportedModel for state that cannot be hashed;
        ``changed`` then stays True.
        """
        if self._snapshot is not None and not self._snapshot.same_numbers():
            self._known = {}  # written without torch's knowledge: version counters are useless
        self._snapshot = None
        snapshot = _Snapshot(self._model)
        model_hash = hashlib.sha256(b"skymemory substance 2")
        tensors = dict(sorted(_state(self._model)))
        known: dict[str, _Digested] = {}
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            futures = {name: self._pieces(name, tensor, pool) for name, tensor in tensors.items()}
            for name, tensor in tensors.items():
                pieces = [piece.result() if isinstance(piece, Future) else piece for piece in futures[name]]
                known[name] = _Digested(weakref.ref(tensor), _get_address_and_version(tensor), pieces)
                model_hash.update(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode() + b"".join(pieces))
        self._known = known
        for name, module in self._model.named_modules(remove_duplicate=False):
            model_hash.update(f"|{name}|{type(module).__name__}|{_text(_settings(module))}|".encode())
        self.name = f"sha256:{model_hash.hexdigest()}"
        self._snapshot = snapshot
        return self.name

    def _pieces(self, name: str, tensor: torch.Tensor, pool: ThreadPoolExecutor) -> list[Future[bytes]] | list[bytes]:
        known = self._known.get(name)
        if known is not None and known.tensor() is tensor and known.look == _get_address_and_version(tensor):
            return known.pieces
        return [pool.submit(_sha256, piece) for piece in _split(tensor)]


def weights_digest(model: torch.nn.Module) -> str:
    return Fingerprint(model).digest()


def foreign_hook(model: torch.nn.Module, ours: tuple[type, ...]) -> str:
    """Return the class of a module with a hook not in ``ours``; or ""."""
    for module in _modules(model):
        if module._forward_hooks or module._forward_pre_hooks:  # few modules have any
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                if not isinstance(getattr(hook, "__self__", hook), ours) and hook.__module__ not in _HARMLESS:
                    return type(module).__name__
    return ""


def foreign_code(model: torch.nn.Module) -> str:
    """Return the class of a module with a ``forward`` of neither its class nor a trusted library; or ""."""
    for module in _modules(model):
        own = module.__dict__
        hook = own.get("_hf_hook")
        hooks = [type(item).__module__ for item in (hook, *getattr(hook, "hooks", ())) if item is not None]
        put_in = [_where(own[name]) for name in ("forward", "_old_forward") if name in own]
        if any(_package(module_name) not in _TRUSTED_CODE for module_name in (*hooks, *put_in)):
            return type(module).__name__
    for kind in _classes(model):
        home = next(base for base in kind.__mro__ if "forward" in vars(base))
        if _package(_where(home.forward)) not in {*_TRUSTED_CODE, _package(home.__module__)}:
            return str(kind.__name__)
    return ""


def _classes(model: torch.nn.Module) -> list[Any]:
    return list({type(module) for module in _modules(model)})


def _package(module: str) -> str:
    return module.partition(".")[0]


def _where(code: Any) -> str:
    while inner := code.func if isinstance(code, partial) else getattr(code, "_torchdynamo_orig_callable", None):
        code = inner
    return str(getattr(code, "__globals__", {}).get("__name__", "") or type(code).__module__)


def _modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return ``model.modules()``, several times as fast."""
    modules, at = [model], 0
    while at < len(modules):
        if children := modules[at]._modules:
            modules += [child for child in children.values() if child is not None]
        at += 1
    return modules


def _get_address_and_version(tensor: torch.Tensor) -> _Look:
    return (tensor.data_ptr(), tensor._version) if _is_counted(tensor) else (id(tensor), tensor.dtype)


def _is_counted(tensor: torch.Tensor) -> bool:
    """Return False for wrapper and inference-mode tensors, whose writes torch does not count."""
    try:
        return bool(tensor.data_ptr() >= 0 and tensor._version >= 0)
    except RuntimeError:
        return False


def _sampled(tensor: torch.Tensor) -> list[torch.Tensor]:
    # Return views of a few elements, in the middle and at the end.
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.layout is torch.strided
    if not is_plain or tensor.is_quantized or tensor.is_meta or not tensor.numel():
        return []
    middle = end = tensor.detach()
    while middle.dim() > 1:
        middle, end = middle[len(middle) // 2], end[-1]
    if not middle.dim():
        return [middle[None]]
    at = max(0, (len(middle) - _SAMPLE) // 2)
    return [middle[at : at + _SAMPLE], end[at : at + _SAMPLE]]


def _bytes_of(views: list[torch.Tensor]) -> torch.Tensor:
    """Return the views as bytes, so that NaN equals NaN."""
    return torch.cat(views).view(torch.uint8)


def _loose(module: torch.nn.Module) -> Iterator[tuple[str, Any, Any, torch.Tensor]]:
    # Yield tensors in attributes that torch does not register, with their name, holder and key.
    if isinstance(module, PreTrainedModel):  # state between calls
        return
    for name, value in module.__dict__.items():
        if name in _OF_TORCH:
            continue
        if isinstance(value, torch.Tensor):
            yield name, module.__dict__, name, value
        elif type(value) in (list, tuple, dict):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(item, torch.Tensor):
                    yield f"{name}.{key}", value, key, item


def _configs(model: torch.nn.Module) -> list[PretrainedConfig]:
    configs: dict[int, PretrainedConfig] = {}
    waiting = [module.__dict__.get("config") for module in _modules(model)]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PretrainedConfig) and id(config) not in configs:
            configs[id(config)] = config
            waiting += vars(config).values()
    return list(configs.values())


def _computes_experts(name: str, value: object) -> bool:
    return name.startswith("_experts_implementation") and isinstance(value, str) and value in _SAME_EXPERTS


def _settings(module: torch.nn.Module) -> dict[str, object]:
    if isinstance(module, PreTrainedModel):
        return {}
    return _plain_of({name: value for name, value in module.__dict__.items() if name not in _OF_TORCH})


def _plain_of(attributes: Mapping[str, object]) -> dict[str, object]:
    # Return copies of the attributes that are plain settings, such as numbers and texts.
    own: dict[str, object] = {}
    for name, value in attributes.items():
        if isinstance(value, (*_SETTING, torch.ScriptObject)):
            own[name] = value
        elif type(value) in (list, tuple, dict, set) and _has_only_settings(value):
            own[name] = value.copy() if isinstance(value, list | dict | set) else value
    return own


def _has_only_settings(value: Any) -> bool:
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return all(isinstance(item, _SETTING) for item in inner)


def _text(settings: Mapping[str, object]) -> str:
    fields = {
        name: sorted(map(repr, value)) if isinstance(value, set) else value
        for name, value in settings.items()
        if not isinstance(value, torch.ScriptObject)
    }
    return repr(sorted(fields.items(), key=lambda item: item[0]))


def _state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    # Yield all state of a model by name, as tensors.
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, value in model.state_dict(keep_vars=True).items():
        yield from _flat(name, value)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, _, _, tensor in _loose(module):
            yield f"{prefix}.{name}", tensor


def _flat(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    # Yield the tensors within a value of a state dict, however nested.
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _flat(f"{name}.{at}", item)
    elif isinstance(value, bytes | bytearray):
        yield name, torch.frombuffer(bytearray(value) or bytearray(1), dtype=torch.uint8)
    elif isinstance(value, _SETTING):
        yield name, torch.frombuffer(bytearray(repr(value).encode()), dtype=torch.uint8)
    else:
        raise UnsupportedModel(f"the model's state has {name}, a {type(value).__name__}, which cannot be hashed")


def _split(tensor: torch.Tensor) -> list[torch.Tensor]:
    # Return a tensor's bytes in pieces, to be hashed in parallel.
    tensor = tensor.detach()
    if hasattr(tensor, "__tensor_flatten__") and type(tensor) is not torch.Tensor:
        names, _ = tensor.__tensor_flatten__()
        return [piece for name in names for piece in _split(getattr(tensor, name))]
    if tensor.is_quantized:
        scales = tensor.q_per_channel_scales() if "channel" in str(tensor.qscheme()) else tensor.q_scale()
        zeros = tensor.q_per_channel_zero_points() if "channel" in str(tensor.qscheme()) else tensor.q_zero_point()
        parts = [tensor.int_repr(), torch.as_tensor(scales), torch.as_tensor(zeros)]
        return [piece for part in parts for piece in _split(part)]
    if tensor.is_meta:
        raise UnsupportedModel("some of the model's weights are offloaded and cannot be hashed")
    flat = tensor.contiguous().reshape(-1)
    return list(flat.view(torch.uint8).split(_PIECE_BYTES)) if flat.numel() else []


def _sha256(piece: torch.Tensor) -> bytes:
    return hashlib.sha256(piece.cpu().numpy()).digest()
