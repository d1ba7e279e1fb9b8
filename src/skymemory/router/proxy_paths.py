"""Paths of engines and of OpenAI's API that are not prompts: which are passed on, and why the others are not."""

from __future__ import annotations

PASSED_ON = frozenset(
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
"""To the server with the least load: they have no prefix that a cache could hold."""

_WHY_NOT = {
    "/v1/responses": "the router does not serve /v1/responses: it keeps state at one server; use /v1/chat/completions",
    "/v1/conversations": "the router keeps no conversations; send the turns with /v1/chat/completions",
    "/v1/assistants": "the router serves no assistants; use /v1/chat/completions",
    "/v1/threads": "the router serves no threads; use /v1/chat/completions",
    "/v1/files": "the router keeps no files",
    "/v1/batches": "the router takes no batches; send their requests one by one",
    "/v1/fine_tuning": "the router trains nothing",
    "/v1/images": "the router passes on no images to be made",
    "/v1/messages": "the router does not speak Anthropic's API; use /v1/chat/completions",
    "/generate": "the router serves OpenAI's API only; use /v1/completions",
    "/inference": "the router serves OpenAI's API only; use /v1/completions",
    "/v1/load_lora_adapter": "adapters are loaded at each server, not through the router",
    "/v1/unload_lora_adapter": "adapters are unloaded at each server, not through the router",
}
_OWN = frozenset(("/health", "/ready", "/metrics", "/v1/models"))


def why_not(path: str, method: str) -> tuple[int, str]:
    """Status and sentence for a request that is not served."""
    if path in _OWN:
        return 405, f"{path} takes GET, not {method}"
    for known, why in _WHY_NOT.items():
        if path == known or path.startswith(known + "/"):
            return 404, why
    shown = path if len(path) <= 100 else path[:100] + "…"
    return 404, (
        f"the router does not serve {shown}; it serves /v1/completions, /v1/chat/completions, /v1/models, "
        "/v1/embeddings and their like, /health, /ready and /metrics"
    )
