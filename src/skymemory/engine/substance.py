"""What a model's numbers come from: its tensors and settings, told apart by a digest, and watched for changes.

A digest takes a second, a look takes some 0.1 ms: so the look comes at each use, and only what has changed is digested
anew.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from operator import is_
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from skymemory.errors import UnsupportedModel

_PIECE_BYTES = 32 << 20
_SETTING = (bool, int, float, str, type(None), torch.dtype)
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
"""Attributes of a module that say nothing of what it computes."""

_HARMLESS = "transformers.utils.output_capturing"
"""Whose hooks stay once hidden states were asked for."""

_TRUSTED_CODE = {"torch", "transformers", "accelerate", "peft", "kernels"}
"""Packages that replace what a module runs by what gives the same numbers, or by what its tensors and settings say."""

_SAMPLE = 16
"""Numbers of each tensor that are looked at: most of what writes through ``.data`` or numpy, which torch does not
count, changes all of it.
"""

_Look = tuple[object, ...]


class Care(IntEnum):
    """How closely a model is looked at: the more, the more can have happened since the last time."""

    STEP = 0
    """Of decoding: whether settings, such as which adapters are on, are as they were."""
    CALL = 1
    """And whether it has the same parts and tensors, not written to."""
    USE = 2
    """And whether nothing was added, modes and code are as they were, and the numbers, as far as samples go."""


@dataclass(slots=True)
class _Digested:
    """A tensor as it was when it was digested."""

    tensor: weakref.ref[torch.Tensor]
    look: _Look
    pieces: list[bytes]


class _OneOf(frozenset[str]):
    """Equal to each that is in it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and other in self

    __hash__ = frozenset.__hash__


_SAME_EXPERTS = _OneOf(("grouped_mm", "batched_mm"))
"""Ways to compute the same experts: on a GPU ``generate`` changes from one to the other for decoding."""


class _Rows:
    """What is held in many places, compared as fast as Python can: a decoding step waits for it."""

    def __init__(self, rows: Iterable[tuple[Any, Any, object]]) -> None:
        """What holds it, its key there, and it."""
        rows = list(rows)
        self._places = [(holder, key) for holder, key, _ in rows]
        self._before = [value for *_, value in rows]

    def held(self) -> list[Any] | None:
        """What is there now, if it is the very same."""
        try:
            now = [holder[key] for holder, key in self._places]
        except (KeyError, IndexError):
            return None
        return now if all(map(is_, now, self._before)) else None

    def equal(self) -> bool:
        return [holder.get(key) for holder, key in self._places] == self._before


class _Seen:
    """All of a model as it was when it was digested."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = _modules(model)
        parts = [part for module in modules for part in (module._modules, module._parameters, module._buffers)]
        self._parts: list[Sized] = parts
        """Dictionaries of children and tensors."""
        self._sizes = list(map(len, parts))
        self._children = _Rows(
            (part._modules, name, child) for part in modules for name, child in part._modules.items()
        )
        tensors = [
            (held, name, tensor)
            for module in modules
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]
        tensors += [(holder, key, tensor) for module in modules for _, holder, key, tensor in _loose(module)]
        self._tensors = _Rows(tensors)
        counted = [_is_counted(tensor) for *_, tensor in tensors]
        self._counted = counted if not all(counted) else []
        """Of each tensor; empty: all are."""
        self._looks = self._look(tensor for *_, tensor in tensors)
        settings = [
            (module.__dict__, name, value)
            for module in modules
            if type(module) is not torch.nn.Linear  # it reads none of them
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
        """Classes, with what they run."""
        views: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for *_, tensor in tensors:
            for view in _sampled(tensor):
                views.setdefault((view.dtype, view.device), []).append(view)
        self._samples = [(of_one_kind, _bytes_of(of_one_kind)) for of_one_kind in views.values()]

    def same(self, care: Care = Care.USE) -> bool:
        if not self._settings.equal():
            return False
        if care >= Care.CALL and not self._same_tensors():
            return False
        return care < Care.USE or self._same_numbers_and_code()

    def _same_tensors(self) -> bool:
        tensors = self._tensors.held()
        return tensors is not None and self._look(tensors) == self._looks and self._children.held() is not None

    def _same_numbers_and_code(self) -> bool:
        if list(map(len, self._parts)) != self._sizes or not self._modes.equal():
            return False
        return all(kind.forward is code for kind, code in self._code) and self.same_numbers()

    def same_numbers(self) -> bool:
        return all(torch.equal(_bytes_of(views), before) for views, before in self._samples)

    def _look(self, tensors: Iterable[torch.Tensor]) -> list[object]:
        """Where their numbers lie, and how often they have been written."""
        if self._counted:
            tensors = [tensor for tensor, counted in zip(tensors, self._counted, strict=True) if counted]
        tensors = list(tensors)
        return [[tensor.data_ptr() for tensor in tensors], [tensor._version for tensor in tensors]]


class Substance:
    """Of ``model``: ``digest`` says what it is made of, ``changed`` whether it has been touched since that was asked.

    In the digest are every byte of parameters, buffers and other state (packed weights too), with names, shapes and
    dtypes, the class of every module and every setting that it holds: norm epsilons, attention scalings, an adapter's
    scaling and whether it is switched on. Not in it are hooks and other code that was put in (see ``foreign_code``).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._known: dict[str, _Digested] = {}
        self.name = ""
        """What ``digest`` or ``watch`` called it last."""
        self._seen: _Seen | None = None

    def changed(self, care: Care = Care.USE) -> bool:
        """Whether ``digest`` would have to be asked again."""
        return self._seen is None or not self._seen.same(care)

    def watch(self, name: str) -> str:
        """Call it by this name as it is now; nothing is digested."""
        self._seen = _Seen(self._model)
        self.name = name
        return name

    def digest(self) -> str:
        """``sha256:…``. A tree of pieces of 32 MiB, on all processors: 2.2 GB take under a second.

        Raises UnsupportedModel where that cannot be said: then it is asked for again.
        """
        if self._seen is not None and not self._seen.same_numbers():
            self._known = {}  # written to behind torch's back: their looks say nothing
        self._seen = None
        seen = _Seen(self._model)
        whole = hashlib.sha256(b"skymemory substance 2")
        tensors = dict(sorted(_state(self._model)))
        known: dict[str, _Digested] = {}
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            begun = {name: self._pieces(name, tensor, pool) for name, tensor in tensors.items()}
            for name, tensor in tensors.items():
                pieces = [one.result() if isinstance(one, Future) else one for one in begun[name]]
                known[name] = _Digested(weakref.ref(tensor), _look(tensor), pieces)
                whole.update(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode() + b"".join(pieces))
        self._known = known
        for name, module in self._model.named_modules(remove_duplicate=False):
            whole.update(f"|{name}|{type(module).__name__}|{_text(_settings(module))}|".encode())
        self.name = f"sha256:{whole.hexdigest()}"
        self._seen = seen
        return self.name

    def _pieces(self, name: str, tensor: torch.Tensor, pool: ThreadPoolExecutor) -> list[Future[bytes]] | list[bytes]:
        known = self._known.get(name)
        if known is not None and known.tensor() is tensor and known.look == _look(tensor):
            return known.pieces
        return [pool.submit(_sha256, piece) for piece in _split(tensor)]


def weights_digest(model: torch.nn.Module) -> str:
    """``Substance.digest`` of a model that nobody will change: to name it with ``weights=``."""
    return Substance(model).digest()


def foreign_hook(model: torch.nn.Module, ours: tuple[type, ...]) -> str:
    """The module of ``model`` on which there is a forward hook that is none of ``ours``, or empty: what it does to the
    numbers cannot be known.
    """
    for module in _modules(model):
        if module._forward_hooks or module._forward_pre_hooks:  # few have any
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                if not isinstance(getattr(hook, "__self__", hook), ours) and hook.__module__ != _HARMLESS:
                    return type(module).__name__
    return ""


def foreign_code(model: torch.nn.Module) -> str:
    """The module of ``model`` whose ``forward`` was replaced by code that is neither its class's nor of a library that
    keeps the numbers, or empty.
    """
    for module in _modules(model):
        own = module.__dict__
        hook = own.get("_hf_hook")
        hooks = [type(one).__module__ for one in (hook, *getattr(hook, "hooks", ())) if one is not None]
        put_in = [_where(own[name]) for name in ("forward", "_old_forward") if name in own]
        if any(_package(one) not in _TRUSTED_CODE for one in (*hooks, *put_in)):
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
    """The module that ``code`` was written in, whatever it has been wrapped in to look like."""
    while inner := code.func if isinstance(code, partial) else getattr(code, "_torchdynamo_orig_callable", None):
        code = inner
    return str(getattr(code, "__globals__", {}).get("__name__", "") or type(code).__module__)


def _modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """As ``model.modules()``, several times as fast; a module that is there twice comes twice."""
    found, at = [model], 0
    while at < len(found):
        if children := found[at]._modules:
            found += [child for child in children.values() if child is not None]
        at += 1
    return found


def _look(tensor: torch.Tensor) -> _Look:
    """What changes when the tensor's numbers do: where they lie, and how often they have been written."""
    return (tensor.data_ptr(), tensor._version) if _is_counted(tensor) else (id(tensor), tensor.dtype)


def _is_counted(tensor: torch.Tensor) -> bool:
    """Whether torch says where its numbers lie and counts what is written to it: not of a wrapper around others, nor of
    what was made in inference mode.
    """
    try:
        return bool(tensor.data_ptr() >= 0 and tensor._version >= 0)
    except RuntimeError:
        return False


def _sampled(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A few numbers from its middle and its end (where tokens are added to an embedding), where they lie."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or tensor.is_meta or not tensor.numel():
        return []
    middle = end = tensor.detach()
    while middle.dim() > 1:
        middle, end = middle[len(middle) // 2], end[-1]
    if not middle.dim():
        return [middle[None]]
    at = max(0, (len(middle) - _SAMPLE) // 2)
    return [middle[at : at + _SAMPLE], end[at : at + _SAMPLE]]


def _bytes_of(views: list[torch.Tensor]) -> torch.Tensor:
    """Not as numbers: NaN is what it was, too."""
    return torch.cat(views).view(torch.uint8)


def _loose(module: torch.nn.Module) -> Iterator[tuple[str, Any, Any, torch.Tensor]]:
    """Tensors that the module holds without torch's knowing: their name, what they are in, and their key there."""
    if isinstance(module, PreTrainedModel):  # what it keeps from call to call
        return
    for name, value in module.__dict__.items():
        if name in _OF_TORCH:
            continue
        if isinstance(value, torch.Tensor):
            yield name, module.__dict__, name, value
        elif type(value) in (list, tuple, dict):
            for key, one in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(one, torch.Tensor):
                    yield f"{name}.{key}", value, key, one


def _configs(model: torch.nn.Module) -> list[PretrainedConfig]:
    """Those of the model and its modules, and those in them: some settings are read at each pass."""
    found: dict[int, PretrainedConfig] = {}
    waiting = [module.__dict__.get("config") for module in _modules(model)]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PretrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += vars(config).values()
    return list(found.values())


def _computes_experts(name: str, value: object) -> bool:
    """Whether this setting of a configuration is one of the ways that are all the same."""
    return name.startswith("_experts_implementation") and isinstance(value, str) and value in _SAME_EXPERTS


def _settings(module: torch.nn.Module) -> dict[str, object]:
    """What the module holds beside tensors and modules, as far as it is plain; packed weights by their identity."""
    if isinstance(module, PreTrainedModel):
        return {}
    return _plain_of({name: value for name, value in module.__dict__.items() if name not in _OF_TORCH})


def _plain_of(attributes: Mapping[str, object]) -> dict[str, object]:
    own: dict[str, object] = {}
    for name, value in attributes.items():
        if isinstance(value, (*_SETTING, torch.ScriptObject)):
            own[name] = value
        elif type(value) in (list, tuple, dict, set) and _plain(value):
            own[name] = value.copy() if isinstance(value, list | dict | set) else value
    return own


def _plain(value: Any) -> bool:
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return all(isinstance(one, _SETTING) for one in inner)


def _text(settings: Mapping[str, object]) -> str:
    """The same in every process; packed weights are told by their state."""
    told = {
        name: sorted(map(repr, value)) if isinstance(value, set) else value
        for name, value in settings.items()
        if not isinstance(value, torch.ScriptObject)
    }
    return repr(sorted(told.items(), key=lambda item: item[0]))


def _state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model by name, those that are no parameters or buffers too."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, value in model.state_dict(keep_vars=True).items():
        yield from _flat(name, value)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, _, _, tensor in _loose(module):
            yield f"{prefix}.{name}", tensor


def _flat(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flat(f"{name}.{key}", one)
    elif isinstance(value, list | tuple):
        for at, one in enumerate(value):
            yield from _flat(f"{name}.{at}", one)
    elif isinstance(value, bytes | bytearray):
        yield name, torch.frombuffer(bytearray(value) or bytearray(1), dtype=torch.uint8)
    elif isinstance(value, _SETTING):
        yield name, torch.frombuffer(bytearray(repr(value).encode()), dtype=torch.uint8)
    else:
        raise UnsupportedModel(f"the model's state has {name}, a {type(value).__name__}: it cannot be hashed")


def _split(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Its bytes in pieces."""
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
        raise UnsupportedModel("some of the model's weights are elsewhere (offloaded): they cannot be hashed")
    flat = tensor.contiguous().reshape(-1)
    return list(flat.view(torch.uint8).split(_PIECE_BYTES)) if flat.numel() else []


def _sha256(piece: torch.Tensor) -> bytes:
    return hashlib.sha256(piece.cpu().numpy()).digest()
