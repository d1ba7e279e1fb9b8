"""Every number of a request to the engine is read, or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.drawn_numbers import VALUES

from skymemory.router.api_error import ApiError
from skymemory_lab.engine.requests import RequestReader

pytestmark = pytest.mark.engine
FIELDS = (
    *("max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "seed", "temperature", "top_p", "top_k"),
    *("min_p", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "priority"),
    *("stop_token_ids", "allowed_token_ids", "prompt", "stream_interval", "truncate_prompt_tokens", "user", "model"),
)
FORMS = ("{}", "[{}]", '{{"1": {}}}', '{{"{}": 1}}', '{{"do_remote_prefill": true, "sky_wait_ms": {}}}')
"""Of a field: the number, a list with it, an object with it, or with it for a name."""
WITH_FORMS = ("logit_bias", "kv_transfer_params", "stop_token_ids", "prompt", "stream_options")


@pytest.fixture(scope="module")
def reader(ready: Any) -> RequestReader:
    return RequestReader("small", ready.tokenizer, 8192, 8192, saves=True, loads=True)


@given(
    chat=st.booleans(),
    field=st.one_of(
        st.tuples(st.sampled_from(FIELDS), st.just("{}")),
        st.tuples(st.sampled_from(WITH_FORMS), st.sampled_from(FORMS)),
    ),
    value=VALUES,
)
def test_a_number_is_read_or_refused(reader: RequestReader, chat: bool, field: tuple[str, str], value: str) -> None:
    prompt = '"messages": [{"role": "user", "content": "a"}]' if chat else '"prompt": "a"'
    body = f'{{{prompt}, "{field[0]}": {field[1].format(value)}}}'.encode()
    try:
        generation = reader.read(body, chat)
    except ApiError as error:
        assert error.status in (400, 404) and len(error.message) < 20_000
        return
    assert 1 <= generation.max_tokens <= 8192 and 0 <= generation.min_tokens <= generation.max_tokens
