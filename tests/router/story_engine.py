"""An engine whose next token is a function of the text before it, and which dies in the middle of its streams.

So any engine of the kind goes on with a text as the one before would have, and what a client gets of a stream that
broke can be compared with the whole one.
"""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from dataclasses import dataclass, field
from typing import Any

from tests.router.mock_engine import MockEngine

VOCABULARY = (" alpha;", " beta;", " gamma;", " dé;", " 東;", "\n")
_TOKEN = re.compile(r"<\w+>| \w+;|\n|.", re.DOTALL)
ENDS_AFTER = 19


def tokens_of(text: str) -> list[str]:
    return _TOKEN.findall(text)


def next_token(text: str) -> str | None:
    """None: the answer ends."""
    drawn = zlib.crc32(text.encode())
    return None if drawn % ENDS_AFTER == 0 else VOCABULARY[drawn // ENDS_AFTER % len(VOCABULARY)]


def chat_text(messages: list[dict[str, Any]], continues: bool, trims: bool) -> str:
    """The prompt of a chat, by a template that may cut off what is blank at the end of a turn, as many do."""
    turns = [f"<{each['role']}>{each['content'].rstrip() if trims else each['content']}" for each in messages]
    return "".join(turns) + ("" if continues else "<assistant>")


@dataclass(eq=False)
class StoryEngine(MockEngine):
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "small", "owned_by": "vllm"}])
    deaths: list[tuple[int, str]] = field(default_factory=list)
    """Shared by engines. Of the next streams: the event at which it dies, "before" it or "in" the middle of it; or what
    it "says" in its place, as vLLM does whose engine has died behind its API server.
    """
    trims: bool = True
    ends_apart: bool = False
    """The reason of the end comes in a chunk of its own."""
    reports_usage: bool = False
    """In every chunk."""

    async def _stream(self, writer: asyncio.StreamWriter, reader: asyncio.StreamReader, mock: dict[str, Any]) -> bool:
        asked = json.loads(self.seen[-1]["body"])
        if asked.get("refuse_rest") and asked.get("continue_final_message"):
            self._reply(writer, 400, b'{"error": {"message": "no"}}')
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        at, kind = self.deaths.pop(0) if self.deaths else (1 << 30, "")
        for number, event in enumerate(self.events_of(asked)):
            if number == at and kind == "says":
                said = (
                    b'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}\n\n'
                )
                said += b"data: [DONE]\n\n"
                writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(said), said))
                return True
            if number == at:
                half = event[: len(event) // 2] if kind == "in" else b""
                if half:
                    writer.write(b"%x\r\n%b\r\n" % (len(half), half))
                await writer.drain()
                await asyncio.sleep(0.005)
                return False
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        return True

    def events_of(self, asked: dict[str, Any]) -> list[bytes]:
        """All events of the stream."""
        is_chat = "messages" in asked
        if is_chat:
            continues = bool(asked.get("continue_final_message"))
            assert continues != asked.get("add_generation_prompt", True), "vLLM refuses this"
            prompt = chat_text(asked["messages"], continues, self.trims)
        else:
            prompt = asked["prompt"]
        limit = asked.get("max_completion_tokens") or asked.get("max_tokens") or (1000 if is_chat else 16)
        base = {"id": f"id-{self.name}-{len(self.seen)}", "created": len(self.seen), "model": f"small-{self.name}"}
        deltas: list[tuple[str, str | None]] = []
        text, finish, prompt_tokens = prompt, "", len(tokens_of(prompt))
        while not finish:
            token = next_token(text)
            if token is None:
                finish, token = "stop", ""
            text += token
            made = len(deltas) + (finish != "stop")
            finish = finish or ("length" if made == limit else "")
            if finish and self.ends_apart and token:
                deltas += [(token, None), ("", finish)]
            else:
                deltas.append((token, finish or None))
        made = sum(bool(token) for token, _ in deltas)
        events = [self._event(base, is_chat, {"role": "assistant", "content": ""}, None, None)] if is_chat else []
        so_far = 0
        for token, end in deltas:
            so_far += bool(token)
            usage = self._usage_of(prompt_tokens, so_far) if self.reports_usage else None
            events.append(self._event(base, is_chat, {"content": token}, end, usage))
        if (asked.get("stream_options") or {}).get("include_usage"):
            last = {**base, "choices": [], "usage": self._usage_of(prompt_tokens, made)}
            events.append(f"data: {json.dumps(last)}\n\n".encode())
        return [*events, b"data: [DONE]\n\n"]

    def _event(self, base: dict[str, Any], is_chat: bool, delta: dict[str, str], end: str | None, usage: Any) -> bytes:
        content: dict[str, Any] = {"delta": delta} if is_chat else {"text": delta["content"]}
        chunk = {**base, "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": end}]}
        if usage is not None:
            chunk["usage"] = usage
        return f"data: {json.dumps(chunk)}\n\n".encode()

    def _usage_of(self, prompt_tokens: int, made: int) -> dict[str, Any]:
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": made,
            "total_tokens": prompt_tokens + made,
            "prompt_tokens_details": {"cached_tokens": prompt_tokens // 2},
        }
