"""The line a request leaves in the log."""

from __future__ import annotations

from skymemory.router.proxy_attempt import Told


def request_line(method: str, path: str, told: Told, took_s: float) -> str:
    """``POST /v1/completions 200 answered server=… matched=512/600 cached=496/600 ttft_ms=41.2 ms=845.0 …``."""
    parts = [method, path, str(told.status or "-"), told.outcome]
    decision = told.decision
    if decision is not None:
        parts.append(f"server={decision.server}")
        parts.append(f"matched={decision.matched_tokens}/{decision.request.prompt.tokens}")
    if told.usage is not None and told.usage.cached_tokens is not None:
        parts.append(f"cached={told.usage.cached_tokens}/{told.usage.prompt_tokens}")
    if told.ttft_s is not None:
        parts.append(f"ttft_ms={told.ttft_s * 1e3:.1f}")
    parts.append(f"ms={took_s * 1e3:.1f}")
    parts.append(f"bytes={told.bytes_out}")
    if told.retries:
        parts.append(f"retries={told.retries}")
    if told.why:
        parts.append("why=" + repr(told.why[:200]))
    return " ".join(parts)
