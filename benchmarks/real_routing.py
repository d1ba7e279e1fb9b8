"""The router's estimates beside what real engines say of themselves: `python benchmarks/real_routing.py`.

Two engines with one model (``skymemory serve``, or ``--engine vllm``) behind ``skymemory route`` with its defaults, and
then behind Envoy with ``skymemory epp``; no speed is given, and none is known at first. A few conversations of several
turns begin with one of two system prompts; each turn has all that was said before it. Of the answers 0, 50 and 100 %
come whole, the others as streams.

Each request asks for the decision and receives the estimated time to its first token, what of that is computing, and
the tokens believed to be cached. Against that stand:

- for a stream the first byte of its answer at the client;
- for a whole answer the engine's own ``vllm:time_to_first_token_seconds``: engines take prompts in the order in which
  they come, so the k-th that an engine counts is the k-th that was sent to it (read ``LOOK_S`` apart: of several in
  one look each is given their mean);
- for learned speeds ``vllm:request_prefill_time_seconds`` by ``vllm:request_prefill_kv_computed_tokens``, and of our
  own engine what prefills took of a processor, which other programs beside it do not lengthen;
- for tokens believed to be cached ``cached_tokens`` of the answer's usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from _bench import print_table, write_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.end_to_end.envoy import envoy_binary, running_envoy, running_picker
from tests.vllm.server import PYTHON as VLLM_PYTHON
from tests.vllm.server import Vllm

from skymemory.engine.inputs import shipped_document
from skymemory.errors import connection_reason
from skymemory.router.engines.engine_metrics import samples
from skymemory.router.envoy.config import Entrance, bootstrap
from skymemory_lab.demo.processes import service

ENGINES = 2
SYSTEM_WORDS, TURN_WORDS = 400, (100, 400)
VLLM_OPTIONS = ("--max-num-seqs", "8", "--max-model-len", "8192", "--num-gpu-blocks-override", "640")
LOOK_S = 0.05
PATIENCE_S = 120.0
TTFT, PREFILL, COMPUTED, PROCESSOR = (
    "vllm:time_to_first_token_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_prefill_kv_computed_tokens",
    "skymemory:prefill_processor_seconds_total",
)
_WORDS = re.compile(r"\S+")


@dataclass(slots=True)
class Turn:
    """One request, what was believed of it, and what was so."""

    conversation: int
    streams: bool
    new_tokens: int
    sent_s: float = 0.0
    engine: str = ""
    believed_tokens: int = 0
    """Of its prompt, by the router."""
    believed_cached: int = 0
    estimated_ttft_s: float = 0.0
    estimated_compute_s: float = 0.0
    tokens: int = 0
    """By the engine, as all that follows."""
    cached: int = 0
    client_ttft_s: float | None = None
    """Of a stream."""
    engine_ttft_s: float | None = None
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        return self.client_ttft_s if self.streams else self.engine_ttft_s


@dataclass(slots=True)
class Looks:
    """One engine's own account: each first token that it counted, and its sums after each look."""

    ttfts_s: list[float] = field(default_factory=list)
    sums: list[tuple[float, float, float, float]] = field(default_factory=list)
    """When, tokens that were computed, seconds of those prefills, and of a processor (0 where that is not reported)."""
    _before: tuple[float, float] = (0.0, 0.0)

    def add(self, at_s: float, text: bytes) -> None:
        count, seconds = _sum(text, f"{TTFT}_count"), _sum(text, f"{TTFT}_sum")
        new = round(count - self._before[0])
        if not self.sums:
            new = 0  # what was before we came
        if new:
            self.ttfts_s += [(seconds - self._before[1]) / new] * new
        self._before = count, seconds
        sums = (_sum(text, f"{COMPUTED}_sum"), _sum(text, f"{PREFILL}_sum"), _sum(text, PROCESSOR))
        self.sums.append((at_s, *sums))

    def per_token_s(self, since_s: float) -> tuple[float | None, float | None]:
        """What prefills that ended since took, by each token that was computed, and what of a processor."""
        before = next((each for each in reversed(self.sums) if each[0] <= since_s), self.sums[0])
        tokens, took_s, processor_s = (now - then for now, then in zip(self.sums[-1][1:], before[1:], strict=True))
        if not tokens:
            return None, None
        return took_s / tokens, processor_s / tokens or None


def _sum(text: bytes, name: str) -> float:
    return sum(sample.value for sample in samples(text, name))


class Talk:
    """Conversations, drawn in advance: equal seeds ask the same at the same time."""

    def __init__(
        self, conversations: int, turns: int, whole: float, rate: float, seed: int, answers: Sequence[int]
    ) -> None:
        """``whole``: part of the requests whose answers do. ``answers``: the least and the most tokens of one."""
        dice = random.Random(seed)
        words = _WORDS.findall(shipped_document())

        def text(count: int) -> str:
            at = dice.randrange(len(words) - count)
            return " ".join(words[at : at + count])

        system = [text(SYSTEM_WORDS) for _ in range(2)]
        self.openings = [dice.choice(system) for _ in range(conversations)]
        self.said = [[text(dice.randint(*TURN_WORDS)) for _ in range(turns)] for _ in range(conversations)]
        count = conversations * turns
        kinds = [number < round(whole * count) for number in range(count)]
        dice.shuffle(kinds)
        order = [
            conversation for _ in range(turns) for conversation in dice.sample(range(conversations), conversations)
        ]
        self.turns = [
            Turn(conversation, not kind, dice.randint(*answers))
            for conversation, kind in zip(order, kinds, strict=True)
        ]
        self.at_s: list[float] = []
        at_s = 0.0
        for _ in self.turns:
            self.at_s.append(at_s)
            at_s += dice.expovariate(rate)


async def converse(client: aiohttp.ClientSession, door: str, talk: Talk) -> list[Turn]:
    """Each turn at its time, or once the one before it in its conversation is answered, if that is later."""
    began_s = time.monotonic()
    texts = list(talk.openings)
    locks = [asyncio.Lock() for _ in texts]
    next_of = [iter(each) for each in talk.said]

    async def one(turn: Turn, at_s: float) -> None:
        await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
        async with locks[turn.conversation]:
            texts[turn.conversation] += f"\n\nQuestion: {next(next_of[turn.conversation])}\n\nAnswer:"
            texts[turn.conversation] += await ask(client, door, texts[turn.conversation], turn)

    async with asyncio.TaskGroup() as group:
        for turn, at_s in zip(talk.turns, talk.at_s, strict=True):
            group.create_task(one(turn, at_s))
    return talk.turns


async def ask(client: aiohttp.ClientSession, door: str, prompt: str, turn: Turn) -> str:
    """The answer's text; what is learnt of it goes into ``turn``."""
    body: dict[str, Any] = {"model": "small", "prompt": prompt, "max_tokens": turn.new_tokens, "temperature": 0}
    body["ignore_eos"] = True
    if turn.streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    turn.sent_s = began_s = time.monotonic()
    headers = {"x-skymemory-decision": "1"}
    said: list[str] = []
    usage: dict[str, Any] = {}
    try:
        async with client.post(f"{door}/v1/completions", json=body, headers=headers) as answer:
            if answer.status != 200:
                raise ValueError(f"{answer.status}: {(await answer.text())[:200]}")
            decision = json.loads(answer.headers["x-skymemory-decision"])
            async for line in answer.content if turn.streams else _whole(answer):
                if not line.startswith((b"data: {", b"{")):
                    continue
                if turn.streams and turn.client_ttft_s is None:
                    turn.client_ttft_s = time.monotonic() - began_s
                piece = json.loads(line.removeprefix(b"data: "))
                said += [choice["text"] for choice in piece["choices"]]
                usage = piece.get("usage") or usage
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        turn.error = f"{type(error).__name__}: {connection_reason(error)}"
        return ""
    turn.engine = decision["server"]
    turn.believed_tokens, turn.believed_cached = decision["prompt_tokens"], decision["matched_tokens"]
    turn.estimated_ttft_s = decision["estimated_ttft_s"]
    turn.estimated_compute_s = decision["estimated_compute_s"]
    turn.tokens = usage["prompt_tokens"]
    turn.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return "".join(said)


async def _whole(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    yield await answer.read()


async def look_on(client: aiohttp.ClientSession, looks: dict[str, Looks]) -> None:
    while True:
        await look(client, looks)
        await asyncio.sleep(LOOK_S)


async def look(client: aiohttp.ClientSession, looks: dict[str, Looks]) -> None:
    for url, account in looks.items():
        async with client.get(f"{url}/metrics") as page:
            account.add(time.monotonic(), b"\n" + await page.read())


async def run(door: str, urls: Sequence[str], talk: Talk) -> tuple[list[Turn], dict[str, Looks]]:
    """All of ``talk`` through ``door``, beside what the engines behind it say."""
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as client:
        for url in urls:
            async with client.post(f"{url}/reset_prefix_cache") as answer:
                answer.raise_for_status()
        looks = {url: Looks() for url in urls}
        await look(client, looks)
        looking = asyncio.create_task(look_on(client, looks))
        turns = await converse(client, door, talk)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await asyncio.sleep(0.2)
        await look(client, looks)
    for url, account in looks.items():
        mine = sorted((turn for turn in turns if _address(turn.engine) == _address(url)), key=lambda turn: turn.sent_s)
        if len(mine) == len(account.ttfts_s):
            for turn, ttft_s in zip(mine, account.ttfts_s, strict=True):
                turn.engine_ttft_s = ttft_s
    return turns, looks


def _address(name: str) -> str:
    return name.removeprefix("http://").rstrip("/")


@asynccontextmanager
async def engines(kind: str, folder: Path) -> AsyncIterator[list[str]]:
    if kind == "vllm":
        servers = [Vllm(folder, f"v{number}", *VLLM_OPTIONS) for number in range(ENGINES)]
        try:
            for server in servers:
                server.start()
                server.wait()
            yield [server.url for server in servers]
        finally:
            for server in servers:
                server.stop()
        return
    words = ("serve", "--model", "small", "--engines", str(ENGINES), "--listen", "127.0.0.1:0", "--threads", "1")
    async with service("the engines", ENGINES, *words) as urls:
        yield urls


@asynccontextmanager
async def entrance(kind: str, urls: Sequence[str], folder: Path, unread: bool) -> AsyncIterator[str]:
    """A router that has learnt nothing, and where it is asked. ``unread``: it does not look at the engines' metrics."""
    if kind == "route":
        settings = folder / "route.toml"
        settings.write_text('[health]\nmetrics_path = ""\n' if unread else "")
        named = [word for url in urls for word in ("--backend", url)]
        async with service(
            "the router", 1, "route", "--listen", "127.0.0.1:0", *named, "--settings", str(settings)
        ) as (door,):
            yield door
        return
    addresses = tuple(_address(url) for url in urls)
    named = [word for address in addresses for word in ("--endpoint", address)]
    quiet = '\nhealth.metrics_path = ""' if unread else ""
    with running_picker(*named, settings=f"picker.tell_decisions = true{quiet}") as picker:
        config = bootstrap([Entrance("door", f"127.0.0.1:{picker.port}", endpoints=addresses)])
        with running_envoy(config, folder) as envoy:
            yield f"http://127.0.0.1:{envoy.ports['door']}"


def errors(turns: Sequence[Turn]) -> dict[str, float | int | None]:
    """Of the estimated times to first token, relative to what they were."""
    found = sorted(abs(turn.estimated_ttft_s / turn.ttft_s - 1.0) for turn in turns if turn.ttft_s)
    if not found:
        return {"requests": 0, "median": None, "p90": None, "mean_ratio": None}
    ratio = sum(turn.estimated_ttft_s for turn in turns if turn.ttft_s) / sum(turn.ttft_s or 0.0 for turn in turns)
    p90 = found[min(len(found) - 1, int(0.9 * len(found)))]
    return {"requests": len(found), "median": statistics.median(found), "p90": p90, "mean_ratio": ratio}


def learned(turns: Sequence[Turn], account: Looks) -> dict[str, float | None]:
    """Of one engine's last third: the seconds that a token of the engine's was believed to take, and those it took.

    A token of the router's, which has no tokenizer, is four bytes.
    """
    believed = sum(
        (turn.believed_tokens - turn.believed_cached) * turn.tokens / max(1, turn.believed_tokens) for turn in turns
    )
    own_s, processor_s = account.per_token_s(min((turn.sent_s for turn in turns), default=0.0))
    learned_s = sum(turn.estimated_compute_s for turn in turns) / believed if believed else None
    ratio = None if learned_s is None or not own_s else learned_s / own_s
    return {"learned_s": learned_s, "engine_s": own_s, "processor_s": processor_s, "ratio": ratio}


def summary(turns: list[Turn], looks: dict[str, Looks]) -> dict[str, Any]:
    """What is printed of one run. ``SystemExit`` where a request was not answered."""
    failed = [turn.error for turn in turns if turn.error]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, such as: {failed[0]}")
    turns = sorted(turns, key=lambda turn: turn.sent_s)
    third = len(turns) // 3
    parts = {"first third": turns[:third], "last third": turns[-third:]}
    reported = sum(turn.tokens for turn in turns)
    return {
        "errors": {
            part: {
                kind: errors([turn for turn in those if turn.streams == streams])
                for kind, streams in (("streams", True), ("whole", False))
            }
            for part, those in parts.items()
        },
        "per_engine": {
            f"engine {at}": {
                "requests": sum(_address(turn.engine) == _address(url) for turn in turns),
                **learned([turn for turn in turns[-third:] if _address(turn.engine) == _address(url)], account),
                **{
                    part: errors([turn for turn in those if _address(turn.engine) == _address(url)])
                    for part, those in parts.items()
                },
            }
            for at, (url, account) in enumerate(looks.items())
        },
        "cached_believed": sum(turn.believed_cached * turn.tokens / max(1, turn.believed_tokens) for turn in turns)
        / reported,
        "cached_reported": sum(turn.cached for turn in turns) / reported,
        "tokens_believed": sum(turn.believed_tokens for turn in turns) / reported,
    }


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def show(rows: Sequence[dict[str, Any]]) -> None:
    kinds = [(part, kind) for part in ("first third", "last third") for kind in ("streams", "whole")]
    print_table(
        "error of the estimated time to first token: median / 90th percentile (requests)",
        ("behind, whole answers", *(f"{kind}, {part}" for part, kind in kinds)),
        [
            [
                f"{row['door']}, {row['whole']:.0%}",
                *(
                    f"{_percent(found['median'])} / {_percent(found['p90'])} ({found['requests']})"
                    for part, kind in kinds
                    for found in [row["errors"][part][kind]]
                ),
            ]
            for row in rows
        ],
    )
    print_table(
        "learned, in the last third, beside what engines say",
        (
            "behind, whole answers, engine",
            "requests",
            "learned ms/token",
            "engine's ms/token",
            "of a processor",
            "ratio",
            "error, last",
        ),
        [
            [
                f"{row['door']}, {row['whole']:.0%}, {name}",
                str(of["requests"]),
                *(
                    "–" if of[key] is None else f"{of[key] * 1e3:.3f}"
                    for key in ("learned_s", "engine_s", "processor_s")
                ),
                "–" if of["ratio"] is None else f"{of['ratio']:.2f}",
                _percent(of["last third"]["median"]),
            ]
            for row in rows
            for name, of in row["per_engine"].items()
        ],
    )
    print_table(
        "tokens cached, of all",
        ("behind, whole answers", "believed", "reported by engines", "tokens, believed by reported"),
        [
            [
                f"{row['door']}, {row['whole']:.0%}",
                _percent(row["cached_believed"]),
                _percent(row["cached_reported"]),
                f"{row['tokens_believed']:.2f}",
            ]
            for row in rows
        ],
    )


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sky-real-")))
        urls = await stack.enter_async_context(engines(args.engine, folder))
        warm = Talk(2, 2, 0.5, 4.0, args.seed + 1, args.answers)
        async with entrance("route", urls, folder, args.unread) as door:
            await run(door, urls, warm)  # what is slow only the first time
        for kind in args.doors:
            for whole in args.whole:
                talk = Talk(args.conversations, args.turns, whole, args.rate, args.seed, args.answers)
                async with entrance(kind, urls, folder, args.unread) as door:
                    turns, looks = await run(door, urls, talk)
                row = {"door": kind, "engine": args.engine, "whole": whole, "rate": args.rate}
                row |= {"metrics": "unread" if args.unread else "read", **summary(turns, looks)}
                print(f"{kind}, {whole:.0%} whole: {len(turns)} requests", file=sys.stderr)
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("serve", "vllm"), default="serve")
    parser.add_argument("--doors", nargs="+", choices=("route", "envoy"), default=["route", "envoy"])
    parser.add_argument("--whole", nargs="+", type=float, default=[0.0, 0.5, 1.0], help="part of the answers")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6, help="of each")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second, all together (default: 2)")
    parser.add_argument("--answers", nargs=2, type=int, default=[4, 24], metavar="TOKENS", help="least and most of one")
    parser.add_argument("--unread", action="store_true", help="routers do not look at engines' metrics")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.engine == "vllm" and not VLLM_PYTHON.exists():
        raise SystemExit("vLLM is not installed: `make test-vllm` does it")
    if "envoy" in args.doors:
        try:
            envoy_binary()
        except FileNotFoundError as why:
            print(f"skipped, behind Envoy: {why}", file=sys.stderr)
            args.doors.remove("envoy")
    rows = asyncio.run(measure(args))
    show(rows)
    write_json(args.json, "real_routing", args.seed, rows)


if __name__ == "__main__":
    main()
