"""Chat completions of engines that leave something out, as answers of the other APIs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from skymemory.router.api_error import ApiError
from skymemory.router.apis import messages, responses
from skymemory.router.apis.chat import UnreadableAnswer
from skymemory.router.apis.translation import COUNT_TOKENS, MESSAGES, Translation

APIS = [messages, responses]


@pytest.mark.parametrize("api", APIS)
def test_an_answer_without_an_id_gets_one_of_its_own(api: ModuleType) -> None:
    answer: dict[str, Any] = {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}
    assert len({api.translate_answer({"model": "m"}, answer)["id"] for _ in range(3)}) == 3


def test_messages_without_a_limit_are_refused() -> None:
    with pytest.raises(ApiError, match="`max_tokens` is missing"):
        Translation(MESSAGES, b'{"model":"m","messages":[{"role":"user","content":"x"}]}')
    Translation(COUNT_TOKENS, b'{"model":"m","messages":[{"role":"user","content":"x"}]}')


def test_a_count_without_usage_is_no_count() -> None:
    answer = {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}
    with pytest.raises(UnreadableAnswer, match="no usage"):
        messages.count(answer)
    assert messages.count({**answer, "usage": {"prompt_tokens": 7}}) == {"input_tokens": 7}


@pytest.mark.parametrize("api", APIS)
def test_no_choice_is_no_answer(api: ModuleType) -> None:
    with pytest.raises(UnreadableAnswer, match="`choices` is empty"):
        api.translate_answer({"model": "m"}, {"id": "chatcmpl-1", "choices": []})
