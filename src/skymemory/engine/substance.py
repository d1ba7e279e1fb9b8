"""What a model's numbers come from: its tensors and settings, told apart by a digest, and watched for changes.

A digest takes a second, a look takes some 0.1 ms: so the look comes at each use, and only what has changed is digested
anew.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from skymemory.errors import UnsupportedModel

_PIECE_BYTES = 32 << 20
_SETTING = (bool, int, float, str, type(None), torch.dtype)
_OF_TORCH = frozenset(torch.nn.Module().__dict__) | {
    "name_or_path", "warnings_issued", "_is_hf_initialized", "_hf_hook", "layer_idx", "max_seq_len_cached",
    "_keep_in_fp32_modules_set", "_no_split_modules", "_tp_plan", "_ep_plan", "_pp_plan", "model_tags",
}  # fmt: skip
"""Attributes of a module that say nothing of what it computes."""

_HARMLESS = "transformers.utils.output_capturing"
"""Whose hooks stay once hidden states were asked for."""

_Look = tuple[object, ...]


@dataclass(slots=True)
class _Digested:
    """A tensor as it was when it was digested."""

    tensor: weakref.ref[torch.Tensor]
    look: _Look
    pieces: list[bytes]


class _Seen:
    """All of a model as it was when it was digested, in rows that are compared as fast as Python can."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._sizes: list[tuple[Sized, int]] = []
        """Dictionaries of children and tensors, with how many they had."""
        self._held: list[tuple[dict[str, Any], str, object]] = []
        """Children, by identity."""
        self._tensors: list[tuple[dict[str, Any], str, torch.Tensor, _Look]] = []
        self._settings: list[tuple[dict[str, Any], str, object]] = []
        for module in _modules(model):
            attributes = module.__dict__
            for name in ("_modules", "_parameters", "_buffers"):
                self._sizes.append((attributes[name], len(attributes[name])))
            for name, child in module._modules.items():
                self._held.append((module._modules, name, child))
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        self._tensors.append((tensors, name, tensor, _look(tensor)))
            for name, value in (*_settings(module).items(), ("training", module.training)):
                self._settings.append((attributes, name, value))

    def same(self) -> bool:
        for sized, size in self._sizes:
            if len(sized) != size:
                return False
        for holder, name, child in self._held:
            if holder[name] is not child:
                return False
        for holder, name, kept, look in self._tensors:
            tensor = holder[name]
            if tensor is not kept or _look(tensor) != look:
                return False
        for holder, name, value in self._settings:
            now = holder.get(name)
            if now is not value and now != value:
                return False
        return True


class Substance:
    """Of ``model``: ``digest`` says what it is made of, ``changed`` whether it has been touched since that was asked.

    In the digest are every byte of parameters, buffers and other state (packed weights too), with names, shapes and
    dtypes, and every setting that a module holds: norm epsilons, attention scalings, an adapter's scaling and whether
    it is switched on. Not in it are hooks (see ``foreign_hook``).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._known: dict[str, _Digested] = {}
        self.name = ""
        """What ``digest`` or ``watch`` called it last."""
        self._seen: _Seen | None = None

    def changed(self) -> bool:
        """Whether ``digest`` would have to be asked again. Looks at no number."""
        return self._seen is None or not self._seen.same()

    def watch(self, name: str) -> str:
        """Call it by this name as it is now; nothing is digested."""
        self._seen = _Seen(self._model)
        self.name = name
        return name

    def digest(self) -> str:
        """``sha256:…``. A tree of pieces of 32 MiB, on all processors: 2.2 GB take under a second."""
        self._seen = _Seen(self._model)
        whole = hashlib.sha256(b"skymemory substance 1")
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
            if settings := _settings(module):
                whole.update(f"|{name}|{_text(settings)}|".encode())
        self.name = f"sha256:{whole.hexdigest()}"
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
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for hook in hooks.values():
                if not isinstance(getattr(hook, "__self__", hook), ours) and hook.__module__ != _HARMLESS:
                    return type(module).__name__
    return ""


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
    try:
        return tensor.data_ptr(), tensor._version, tensor.dtype
    except RuntimeError:  # a wrapper around other tensors, or made in inference mode: it has no such thing
        return id(tensor), 0, tensor.dtype


def _settings(module: torch.nn.Module) -> dict[str, object]:
    """What the module holds beside tensors and modules, as far as it is plain; packed weights by their identity."""
    own: dict[str, object] = {}
    for name, value in module.__dict__.items():
        if name in _OF_TORCH or isinstance(module, PreTrainedModel):
            continue
        if isinstance(value, (*_SETTING, torch.ScriptObject)):
            own[name] = value
        elif type(value) in (list, tuple, dict, set) and _plain(value):
            own[name] = value.copy() if type(value) is not tuple else value
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
        raise UnsupportedModel(f"the model's state has {name}, a {type(value).__name__}: it cannot be told apart")


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
    flat = tensor.contiguous().reshape(-1)
    return list(flat.view(torch.uint8).split(_PIECE_BYTES)) if flat.numel() else []


def _sha256(piece: torch.Tensor) -> bytes:
    return hashlib.sha256(piece.cpu().numpy()).digest()
