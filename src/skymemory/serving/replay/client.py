"""A client of one OpenAI endpoint: streams answers and says when their pieces came."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.serving.replay.ask import Ask
from skymemory.serving.replay.hearing import BadAnswer, Hearing
from skymemory.serving.replay.outcome import REFUSALS, Outcome, Status
from skymemory.serving.replay.prompts import Prompt

_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
FEATURES: tuple[dict[str, Any], ...] = ({**_USAGE, "ignore_eos": True}, _USAGE, {})
"""Asked for beside the answer, from most to least: some servers refuse fields that OpenAI's protocol has not."""
_AFTER_DONE_S = 1.0
"""For the end of a stream that has said that it is done; the connection can then be used again."""
_WORDS_OF_ERROR = 300

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask, and how."""

    url: str
    """Without /v1."""
    model: str
    chat: bool = False
    patience_s: float = 300.0
    """For a whole answer."""
    features: dict[str, Any] = field(default_factory=lambda: FEATURES[0])

    @property
    def door(self) -> str:
        return f"{self.url}/v1/{'chat/completions' if self.chat else 'completions'}"

    def body(self, prompt: Prompt, output_tokens: int) -> bytes:
        """A request that is answered greedily, in a stream."""
        what = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        asked = {"max_tokens": output_tokens, "temperature": 0, "stream": True, **self.features}
        return json.dumps({"model": self.model, **what, **asked}).encode()


def base_url(text: str) -> str:
    """An address as people write it, without /v1 and what follows.

    Raises:
        InvalidInput: it is no http address.
    """
    url = text.rstrip("/")
    for ending in ("/chat/completions", "/completions", "/v1"):
        url = url.removesuffix(ending)
    if not url.startswith(("http://", "https://")) or len(url.partition("://")[2]) < 1:
        raise InvalidInput(f"{text!r}: expected an address such as http://127.0.0.1:8000")
    return url


class Client:
    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self._session = session
        self.target = target

    async def ask(
        self, ask: Ask, body: bytes, clock: Clock, heard: Callable[[Outcome], object], held_up_s: float = 0.0
    ) -> None:
        """Send it and tell ``heard`` of what came of it, once, whatever that is: also when this is cancelled."""
        sent_s = clock()
        hearing = Hearing()
        found: dict[str, Any] = {"status": Status.INTERRUPTED}
        try:
            await self._exchange(body, clock, hearing, found)
            found["status"] = Status.COMPLETED
        except _Refused as refusal:
            found |= {"status": Status.REFUSED, "error": str(refusal), "retry_after_s": refusal.retry_after_s}
        except BadAnswer as error:
            found |= {"status": Status.FAILED, "error": str(error)}
        except TimeoutError:
            what = "no token" if math.isnan(hearing.first_s) else "no end of the answer"
            found |= {"status": Status.FAILED, "error": f"{what} in time: within {self.target.patience_s:g} s"}
        except aiohttp.ClientConnectorError as error:
            found |= {"status": Status.FAILED, "error": f"no connection: {error}"}
        except (aiohttp.ClientError, OSError) as error:
            found |= {"status": Status.FAILED, "error": f"connection broken: {type(error).__name__} {error}".rstrip()}
        finally:
            heard(
                Outcome(
                    number=ask.number, due_s=ask.due_s, sent_s=sent_s, held_up_s=held_up_s,
                    wanted_prompt_tokens=ask.prompt_tokens, wanted_output_tokens=ask.output_tokens,
                    first_s=hearing.first_s, end_s=found.pop("end_s", clock()), gaps_s=tuple(hearing.gaps_s),
                    prompt_tokens=hearing.prompt_tokens, cached_tokens=hearing.cached_tokens,
                    output_tokens=hearing.output_tokens, whole=hearing.done, **found,
                )
            )  # fmt: skip

    async def probe(self, prompt: Prompt, output_tokens: int, clock: Clock) -> Outcome:
        """One request outside of any schedule."""
        got: list[Outcome] = []
        wanted = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        ask = Ask(0, clock(), (), wanted, output_tokens)
        await self.ask(ask, self.target.body(prompt, output_tokens), clock, got.append)
        return got[0]

    async def models(self) -> list[tuple[str, int | None]]:
        """What the endpoint lists: names, and how many tokens each takes where that is told.

        Raises:
            SkyMemoryError: there is no list; with what there was instead.
        """
        where = f"{self.target.url}/v1/models"
        try:
            timeout = aiohttp.ClientTimeout(total=min(10.0, self.target.patience_s))
            async with self._session.get(where, timeout=timeout, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise SkyMemoryError(f"{where} answered {answer.status}: {await _words(answer)}")
                listed = await answer.json(content_type=None)
            return [(str(one["id"]), _tokens(one.get("max_model_len"))) for one in listed["data"]]
        except TimeoutError as error:
            raise SkyMemoryError(f"{where} did not answer in time") from error
        except aiohttp.InvalidURL as error:
            raise InvalidInput(f"{where} is no address") from error
        except (aiohttp.ClientError, OSError) as error:
            raise SkyMemoryError(f"{where} cannot be reached: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SkyMemoryError(f"{where} lists no models as OpenAI's endpoints do") from error

    async def _exchange(self, body: bytes, clock: Clock, hearing: Hearing, found: dict[str, Any]) -> None:
        """Raises what ``ask`` tells apart."""
        async with self._session.post(
            self.target.door,
            data=body,
            headers={"Content-Type": "application/json", "Accept": "text/event-stream"},
            timeout=aiohttp.ClientTimeout(total=self.target.patience_s),
            allow_redirects=False,
        ) as answer:
            found["http_status"] = answer.status
            if answer.status in REFUSALS:
                raise _Refused(answer.status, await _words(answer), _seconds(answer.headers.get("Retry-After")))
            if answer.status != 200:
                raise BadAnswer(f"status {answer.status}: {await _words(answer)}")
            if answer.content_type != "text/event-stream":
                raise BadAnswer(f"not a stream: the answer is {answer.content_type}, {await _words(answer)}")
            async for piece in answer.content.iter_any():
                hearing.feed(piece, clock())
                if hearing.done:
                    break
            hearing.close()
            found["end_s"] = clock()
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(_AFTER_DONE_S):
                    await answer.content.read()


class _Refused(Exception):
    def __init__(self, status: int, words: str, retry_after_s: float | None) -> None:
        super().__init__(f"refused {status}: {words}")
        self.retry_after_s = retry_after_s


async def _words(answer: aiohttp.ClientResponse) -> str:
    """The message of an OpenAI error, or the beginning of whatever it is, in one line."""
    text = (await answer.content.read(1 << 16)).decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        told = json.loads(text)
        error = told.get("error", told)
        text = str(error["message"] if isinstance(error, dict) else error)
    return " ".join(text.split())[:_WORDS_OF_ERROR] or "without a word"


def _seconds(header: str | None) -> float | None:
    """Of a Retry-After in seconds; one that is a date counts as told, with 0."""
    if header is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(header))
    return 0.0


def _tokens(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
