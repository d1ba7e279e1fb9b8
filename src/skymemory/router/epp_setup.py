"""An endpoint picker as settings ask for it: the desk and what stands around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from skymemory.conductor.fleet import Fleet
from skymemory.conductor.picker import Picker
from skymemory.errors import InvalidInput
from skymemory.keys import KeyRing
from skymemory.router.certificates import from_files, self_signed
from skymemory.router.desk import Desk, DeskSettings
from skymemory.router.endpoints import FileSource, NameSource, SettingsSource, Source
from skymemory.router.endpoints_known import Endpoints
from skymemory.router.epp import EndpointPicker
from skymemory.router.ext_proc_server import Certificate
from skymemory.router.fleet_adapters import FleetAdapters
from skymemory.router.knowledge import Knowledge
from skymemory.router.picker_settings import PickerSettings
from skymemory.router.prompt_reader import prompt_reader
from skymemory.router.proxy_events import event_index
from skymemory.router.settings import Settings

TOKENIZED_ELSEWHERE_BYTES = 16 << 10
"""About 5 ms of a tokenizer's time: a thread costs a twentieth of that."""
_TAKEN_UP = {"refresh_s", "events_port", "replay_port", "model", "fallbacks", "max_requests", "max_streams",
             "tell_decisions"}  # fmt: skip


def endpoint_picker(settings: Settings, say: Callable[[str], None], keys: KeyRing | None = None) -> EndpointPicker:
    """
    Raises:
        InvalidInput: what cannot be meant, or a file that cannot be read.
    """
    source = _source(settings, say)
    if settings.admission.rule != "all" or settings.admission.fair:
        raise InvalidInput("admission: the endpoint picker has no rules of admission; `max_requests` is its limit")
    fleet = Fleet()
    knowledge = Knowledge(settings, fleet, keys)
    _check_events(settings, knowledge)
    picker = Picker(fleet, knowledge.scorer, settings.seed)
    endpoints = Endpoints(picker)
    reader = prompt_reader(settings, FleetAdapters(fleet, lambda: endpoints.adapters))
    beside = None if settings.prompts.tokenizer is None else TOKENIZED_ELSEWHERE_BYTES
    desk = Desk(picker, reader, desk_settings(settings), reads_elsewhere_bytes=beside, serving=endpoints.serving)
    return EndpointPicker(desk, source, settings, say, endpoints, knowledge, _certificate(settings.picker))


def desk_settings(settings: Settings) -> DeskSettings:
    picker = settings.picker
    return DeskSettings(
        fallbacks=picker.fallbacks,
        most_body_bytes=settings.limits.max_body_bytes,
        most_streams=picker.max_streams,
        most_requests=picker.max_requests or None,
        tell_decisions=picker.tell_decisions,
    )


def needs_restart(now: Settings, then: Settings) -> list[str]:
    """What differs between the two, and cannot be taken up by a picker that runs."""
    parts = ("strategy", "options", "prompts", "seed", "state", "cost", "replicas", "admission")
    fixed = [name for name in parts if getattr(now, name) != getattr(then, name)]
    if now.limits.max_body_bytes > then.limits.max_body_bytes:
        fixed.append("limits: max_body, above what it was at the start")
    return fixed + [
        f"picker: {each.metadata['key']}"
        for each in fields(PickerSettings)
        if each.name not in _TAKEN_UP and getattr(now.picker, each.name) != getattr(then.picker, each.name)
    ]


def _source(settings: Settings, say: Callable[[str], None]) -> Source:
    picker = settings.picker
    if [bool(settings.backends), picker.endpoints is not None, bool(picker.discover)].count(True) != 1:
        raise InvalidInput(
            "name the model servers in one way: --endpoint IP:PORT (or [[backends]]), --endpoints FILE or "
            "--discover NAME:PORT"
        )
    if picker.endpoints is not None:
        try:
            return FileSource(picker.endpoints, say)
        except OSError as error:
            raise InvalidInput(f"endpoints: {str(picker.endpoints)!r}: {error.strerror}") from error
    return NameSource(picker.discover, say) if picker.discover else SettingsSource(settings.backends)


def _check_events(settings: Settings, knowledge: Knowledge) -> None:
    """A strategy that goes by events needs them; the others have no use for them."""
    picker, name = settings.picker, knowledge.scorer.name
    if event_index(knowledge.scorer) is None:
        if picker.events_port or picker.replay_port:
            raise InvalidInput(f"strategy {name!r} has no use for events (--kv-events)")
        return
    own = picker.endpoints is not None or any(backend.events for backend in settings.backends)
    if not own and not picker.events_port:
        raise InvalidInput(
            f"strategy {name!r} goes by the events of engines' caches: say where endpoints publish them, each its own "
            "(`events`), or all at one port (--kv-events PORT)"
        )
    unnamed = [backend.url for backend in settings.backends if not backend.models]
    if not picker.model and (unnamed or picker.discover):
        raise InvalidInput(f"strategy {name!r} goes by events: say which model endpoints serve (--model, or `models`)")


def _certificate(picker: PickerSettings) -> Certificate | None:
    if picker.tls_cert is not None and picker.tls_key is not None:
        return from_files(picker.tls_cert, picker.tls_key, picker.tls_client_ca)
    return self_signed() if picker.self_signed else None
