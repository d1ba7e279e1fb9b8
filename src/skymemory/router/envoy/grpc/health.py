"""gRPC's health protocol (`grpc.health.v1`): Check and Watch, by service name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from skymemory.router.envoy.grpc.server import INTERNAL, NOT_FOUND, OK, UNAVAILABLE, Answers, Call

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN_SERVICE = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthBook:
    """The state of each service name, and its watchers."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {}
        self._watches: set[_Watch] = set()

    def methods(self) -> Mapping[str, Callable[[Answers], Call]]:
        service = "/grpc.health.v1.Health"
        return {
            f"{service}/Check": lambda answers: _Check(self, answers),
            f"{service}/Watch": lambda answers: _Watch(self, answers),
        }

    def set(self, name: str, state: int) -> None:
        if self._states.get(name) == state:
            return
        self._states[name] = state
        for watch in list(self._watches):
            if watch.name == name:
                watch.send_state()

    def state(self, name: str) -> int | None:
        return self._states.get(name)

    def close(self) -> None:
        """End all watches."""
        for watch in list(self._watches):
            watch.end()

    def join(self, watch: _Watch) -> None:
        self._watches.add(watch)

    def part(self, watch: _Watch) -> None:
        self._watches.discard(watch)


class _Check(Call):
    def __init__(self, book: HealthBook, answers: Answers) -> None:
        self._book, self._answers = book, answers

    def message(self, data: bytes) -> None:
        name = _requested(self._answers, data)
        if name is None:
            return
        state = self._book.state(name)
        if state is None:
            self._answers.finish(NOT_FOUND, "unknown service")
            return
        self._answers.send(_response(state))
        self._answers.finish(OK)

    def ended(self) -> None:
        self._answers.finish(INTERNAL, "the call had no request")

    def gone(self) -> None:
        pass


class _Watch(Call):
    name: str | None = None

    def __init__(self, book: HealthBook, answers: Answers) -> None:
        self._book, self._answers = book, answers

    def message(self, data: bytes) -> None:
        self.name = _requested(self._answers, data)
        if self.name is not None:
            self._book.join(self)
            self.send_state()

    def send_state(self) -> None:
        state = None if self.name is None else self._book.state(self.name)
        self._answers.send(_response(UNKNOWN_SERVICE if state is None else state))

    def end(self) -> None:
        self._answers.finish(UNAVAILABLE, "the picker stops")

    def ended(self) -> None:
        if self.name is None:
            self._answers.finish(INTERNAL, "the call had no request")

    def gone(self) -> None:
        self._book.part(self)


def _requested(answers: Answers, data: bytes) -> str | None:
    try:
        return str(health_pb2.HealthCheckRequest.FromString(data).service)
    except DecodeError:
        answers.finish(INTERNAL, "expected a HealthCheckRequest")
        return None


def _response(state: int) -> bytes:
    return bytes(health_pb2.HealthCheckResponse(status=state).SerializeToString())
