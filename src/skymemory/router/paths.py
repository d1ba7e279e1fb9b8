"""Paths that both front ends know, and the treatment of all others (``unknown_paths``)."""

from __future__ import annotations

from collections.abc import Container

from skymemory.router.api_error import OF_CLIENT, ApiError
from skymemory.router.prompts.reader import PROMPT_PATHS

OWN = frozenset(("/health", "/ready", "/metrics", "/v1/models"))
FORWARDED = frozenset(
    (
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/pooling",
        "/classify",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/tokenize",
        "/detokenize",
    )
)
"""Paths forwarded to the server with the least load: they have no prefix to cache."""
_STORED = "the router stores no responses: each request carries its whole conversation"
# Paths whose state belongs to a single server.
_REFUSED = {
    "/v1/responses": f"{_STORED}; POST it to /v1/responses",
    "/v1/conversations": f"{_STORED}; POST it to /v1/responses or /v1/chat/completions",
    "/v1/messages/batches": "the router takes no batches; send their messages one by one",
    "/v1/assistants": "the router serves no assistants; use /v1/chat/completions",
    "/v1/threads": "the router serves no threads; use /v1/chat/completions",
    "/v1/files": "the router keeps no files",
    "/v1/batches": "the router takes no batches; send their requests one by one",
    "/v1/fine_tuning": "the router trains nothing",
    "/v1/load_lora_adapter": "adapters are loaded at each server, not through the router",
    "/v1/unload_lora_adapter": "adapters are unloaded at each server, not through the router",
}
_HINTS = {
    "/v1/images": "the router passes on no images to be made",
    "/generate": "the router serves OpenAI's and Anthropic's APIs only; use /v1/completions",
    "/inference": "the router serves OpenAI's and Anthropic's APIs only; use /v1/completions",
}
_SERVED = (
    "it serves /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /v1/models, /v1/embeddings and the "
    'like, /health, /ready and /metrics; `unknown_paths = "load"` sends all others to the server with the least load'
)


def is_own(path: str) -> bool:
    return path in OWN or path.startswith("/v1/models/")


def refusal(path: str, method: str, headers: Container[str], by_load: bool) -> ApiError | None:
    """Return the error of a request that is not served, or None. ``by_load``: unknown paths are forwarded."""
    if method == "POST" and path in PROMPT_PATHS:
        return None
    if "sec-websocket-key" in headers or path.startswith("/v1/realtime"):
        api = "the Realtime API" if path.startswith("/v1/realtime") else "WebSockets"
        return ApiError(
            501, f"the router does not serve {api}; send requests by HTTP, with `stream` for pieces", kind=OF_CLIENT
        )
    if path in PROMPT_PATHS:
        return ApiError(405, f"{path} takes POST, not {method}")
    if path in FORWARDED or (is_own(path) and method in ("GET", "HEAD")):
        return None
    if path in OWN:
        return ApiError(405, f"{path} takes GET, not {method}")
    for known, why in _REFUSED.items():
        if path == known or path.startswith(known + "/"):
            return ApiError(404, why)
    return None if by_load else unknown(path)


def goes_to_server(path: str, by_load: bool) -> bool:
    return path in PROMPT_PATHS or path in FORWARDED or (by_load and not is_own(path))


def unknown(path: str) -> ApiError:
    for known, why in _HINTS.items():
        if path == known or path.startswith(known + "/"):
            return ApiError(404, why)
    short_path = path if len(path) <= 100 else path[:100] + "…"
    return ApiError(404, f"the router does not serve {short_path}; {_SERVED}")


def is_known_end(path: str) -> bool:
    """Return True for a known end: a gateway may strip the prefix later."""
    return path.endswith((*PROMPT_PATHS, *FORWARDED, *OWN)) or "/v1/models/" in path
