"""A scripted engine that speaks chat completions, and other APIs if they are named, and counts what it would cache.

Its answer is made of the last turn: ``say WORDS`` is answered with them, ``call NAME {ARGUMENTS}`` by a call of a tool,
``think WORDS`` by reasoning and then ``done``, a tool's result by ``heard RESULT``; anything else by ``ok``. Its
one model is ``small``.

``python -m tests.router.chat_engine NAME [PATH ...]`` runs one as a process with these paths, and prints its port.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

from tests.router.mock_engine import MockEngine, _chunk

from skymemory.router.apis.translation import API_PATHS, Translation

CHAT = "/v1/chat/completions"
LETTERS_PER_TOKEN = 4
BLOCK_LETTERS = 16 * LETTERS_PER_TOKEN


@dataclass(eq=False)
class ChatEngine(MockEngine):
    has: frozenset[str] = frozenset((CHAT,))
    """Its paths; all others are 404, as FastAPI's."""
    missing_status: int = 404
    breaks: str = ""
    """How a stream ends: "error" with an event of one, "early" without a reason, "garbage" unreadably, "dies" with its
    connection, "lingers" after its last event; else well.
    """
    finish: str = "stop"
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Path and body of what was served."""
    refused: list[str] = field(default_factory=list)
    """Paths of what was 404."""
    _blocks: set[str] = field(default_factory=set)
    prompt_letters: int = 0
    cached_letters: int = 0

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = path.partition("?")[0]
        if method == "GET":
            await self._get(path, writer)
            return True
        self.seen.append({"path": path, "headers": headers, "body": body})
        if path not in self.has:
            self.refused.append(path)
            self._reply(writer, self.missing_status, b'{"detail":"Not Found"}')
            return True
        self.asked.append((path, json.loads(body)))
        own = Translation(path, body) if path in API_PATHS else None
        asked = json.loads(body if own is None else own.body)
        if asked.get("model") != "small":
            words = {"error": {"message": f"no model `{asked.get('model')}`", "type": "NotFoundError", "code": 404}}
            answer = json.dumps(words).encode()
            self._reply(writer, 404, answer if own is None else own.error(404, answer))
        elif asked.get("stream"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            chunks, made = self._chunks(asked), None if own is None else own.stream()
            for chunk in chunks:
                writer.write(_chunk(chunk if made is None else made.read(chunk) or b": ping\n\n"))
                await writer.drain()
            if self.breaks == "lingers":
                await self.release.wait()
            if self.breaks == "dies":
                return False
            writer.write(b"0\r\n\r\n")
        else:
            answer = json.dumps(self._whole(asked)).encode()
            self._reply(writer, 200, answer if own is None else own.answer(answer))
        return True

    def _usage_of(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompt = "".join(
            f"<{turn['role']}>{turn.get('content')}{turn.get('tool_calls', '')}" for turn in asked["messages"]
        )
        begins = range(BLOCK_LETTERS, len(prompt) + 1, BLOCK_LETTERS)
        cached = max((end for end in begins if prompt[:end] in self._blocks), default=0)
        self._blocks.update(prompt[:end] for end in begins)
        self.prompt_letters += len(prompt)
        self.cached_letters += cached
        tokens, made = -(-len(prompt) // LETTERS_PER_TOKEN), 3
        return {
            "prompt_tokens": tokens,
            "completion_tokens": made,
            "total_tokens": tokens + made,
            "prompt_tokens_details": {"cached_tokens": cached // LETTERS_PER_TOKEN},
        }

    def _message(self, asked: dict[str, Any]) -> dict[str, Any]:
        last = asked["messages"][-1]
        content = last.get("content") or ""
        said = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        verb, _, words = said.partition(" ")
        if last["role"] == "tool":
            return {"role": "assistant", "content": f"heard {said}"}
        if verb == "call":
            calls = []
            for at, each in enumerate(words.split(" and ")):
                name, _, arguments = each.partition(" ")
                function = {"name": name, "arguments": arguments or "{}"}
                calls.append({"id": f"call_{at}", "type": "function", "function": function})
            return {"role": "assistant", "content": None, "tool_calls": calls}
        if verb == "think":
            return {"role": "assistant", "reasoning": words, "content": "done"}
        return {"role": "assistant", "content": words if verb == "say" else "ok"}

    def _base(self, kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-1", "object": kind, "created": 1_700_000_000, "model": "small"}

    def _whole(self, asked: dict[str, Any]) -> dict[str, Any]:
        message = self._message(asked)
        finish = "tool_calls" if message.get("tool_calls") else self.finish
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return {**self._base("chat.completion"), "choices": [choice], "usage": self._usage_of(asked)}

    def _chunks(self, asked: dict[str, Any]) -> list[bytes]:
        message = self._message(asked)
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning": piece} for piece in _pieces(message.get("reasoning") or "")]
        deltas += [{"content": piece} for piece in _pieces(message.get("content") or "")]
        for at, call in enumerate(message.get("tool_calls") or ()):
            begun = {**call, "index": at, "function": {"name": call["function"]["name"], "arguments": ""}}
            deltas.append({"tool_calls": [begun]})
            for piece in _pieces(call["function"]["arguments"]):
                deltas.append({"tool_calls": [{"index": at, "function": {"arguments": piece}}]})
        base = self._base("chat.completion.chunk")
        events = [{**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        if self.breaks not in ("", "lingers"):
            lost = {"garbage": b"data: {no json\n\n", "error": b'data: {"error":{"message":"lost"}}\n\n'}
            return [*map(_event, events), *([lost[self.breaks]] if self.breaks in lost else [])]
        finish = "tool_calls" if message.get("tool_calls") else self.finish
        events.append({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        if (asked.get("stream_options") or {}).get("include_usage"):
            events.append({**base, "choices": [], "usage": self._usage_of(asked)})
        return [*map(_event, events), b"data: [DONE]\n\n"]


def _pieces(text: str) -> list[str]:
    return [text[at : at + 5] for at in range(0, len(text), 5)]


def _event(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


async def _main(name: str, paths: list[str]) -> None:
    engine = ChatEngine(name, has=frozenset((CHAT, *paths)))
    await engine.start()
    print(engine.port, flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2:]))
