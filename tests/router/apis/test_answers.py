"""Chat completions of engines that leave something out, as answers of the other APIs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from skymemory.router.apis import messages, responses
from skymemory.router.apis.chat import UnreadableAnswer

APIS = [messages, responses]


@pytest.mark.parametrize("api", APIS)
def test_an_answer_without_an_id_gets_one_of_its_own(api: ModuleType) -> None:
    answer: dict[str, Any] = {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}
    assert len({api.whole({"model": "m"}, answer)["id"] for _ in range(3)}) == 3


@pytest.mark.parametrize("api", APIS)
def test_no_choice_is_no_answer(api: ModuleType) -> None:
    with pytest.raises(UnreadableAnswer, match="`choices` is empty"):
        api.whole({"model": "m"}, {"id": "chatcmpl-1", "choices": []})
