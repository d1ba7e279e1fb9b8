"""Answers of the engine as OpenAI's protocol has them: whole, or as chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid

from skymemory.serving.generation import Generation, Step

END_OF_STREAM = b"data: [DONE]\n\n"


def event(content: dict[str, object]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class AnswerWriter:
    """The objects of one answer; all of them have its number and its time."""

    def __init__(self, model: str, generation: Generation) -> None:
        self._model = model
        self._chat = generation.chat
        self._prompt_tokens = len(generation.ids)
        self._id = f"{'chatcmpl' if generation.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, text: str, last: Step) -> dict[str, object]:
        """The answer in one piece."""
        said: dict[str, object] = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return self._object(
            "chat.completion" if self._chat else "text_completion",
            [{"index": 0, **said, "logprobs": None, "finish_reason": last.finish}],
            usage=self.usage(last),
        )

    def chunk(self, step: Step, first: bool) -> dict[str, object]:
        """What a step adds. The first chunk of a chat names the role."""
        said: dict[str, object]
        if self._chat:
            said = {"delta": {"role": "assistant", "content": step.text} if first else {"content": step.text}}
        else:
            said = {"text": step.text}
        return self._object(self._chunk_kind, [{"index": 0, **said, "logprobs": None, "finish_reason": step.finish}])

    def usage_chunk(self, last: Step) -> dict[str, object]:
        """The chunk behind the last, where usage was asked for: without a choice."""
        return self._object(self._chunk_kind, [], usage=self.usage(last))

    def usage(self, last: Step) -> dict[str, object]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": last.completion_tokens,
            "total_tokens": self._prompt_tokens + last.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": last.cached_tokens},
        }

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _object(self, kind: str, choices: list[dict[str, object]], **more: object) -> dict[str, object]:
        return {
            "id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices, **more
        }  # fmt: skip
