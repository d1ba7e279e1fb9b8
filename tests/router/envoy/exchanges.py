"""What Envoy would send, for tests of the exchange that need no Envoy; and a service with plain strategies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, Metadata
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct

from skymemory.conductor.picker import Fleet, Picker, Scorer
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.scheduler import Scheduler
from skymemory.conductor.strategies.simple import RoundRobin
from skymemory.router.api_error import ApiError
from skymemory.router.backends import Backends
from skymemory.router.envoy import ext_proc
from skymemory.router.envoy.endpoints import endpoint
from skymemory.router.envoy.ext_proc import PickerService
from skymemory.router.envoy.messages import (
    ATTRIBUTES_NAMESPACE,
    DESTINATION,
    METADATA_NAMESPACE,
    SERVED,
    SUBSET,
    SUBSET_NAMESPACE,
)
from skymemory.router.settings import PickerSettings

NOTHING = np.empty(0, np.uint64)
GET = {":method": "GET", ":path": "/v1/models"}
POST = {":method": "POST", ":path": "/v1/completions"}


class SmallReader:
    """A prompt's tokens are a quarter of its characters; bodies that are no JSON are refused."""

    def read(self, path: str, headers: Mapping[str, str], body: bytes) -> Request:
        try:
            decision = json.loads(body)
        except ValueError as error:
            raise ApiError(400, "the body is not JSON") from error
        return Request(
            Prompt(NOTHING, NOTHING, 16.0, len(str(decision.get("prompt", ""))) // 4), model=decision.get("model", "")
        )


def a_service(
    servers: int = 3, scorer: Scorer | None = None, most_body_bytes: int = 16 << 20, **settings: Any
) -> PickerService:
    picker = Picker(Fleet(), scorer or RoundRobin())
    backends = Backends(picker, are_checked=False)
    backends.set([endpoint(f"10.0.0.{number}:8000") for number in range(servers)])
    return PickerService(Scheduler(picker), SmallReader(), backends, PickerSettings(**settings), most_body_bytes)  # type: ignore[arg-type]


def header_map(headers: Mapping[str, str]) -> HeaderMap:
    return HeaderMap(headers=[HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()])


def structs(**namespaces: Any) -> dict[str, Struct]:
    return {name: ParseDict(value, Struct()) for name, value in namespaces.items()}


def request_headers(
    headers: Mapping[str, str] | None = None, *, end: bool = False, subset: Any = None, config: Any = None
) -> ProcessingRequest:
    metadata = None if subset is None else Metadata(filter_metadata=structs(**{SUBSET_NAMESPACE: {SUBSET: subset}}))
    return ProcessingRequest(
        request_headers=HttpHeaders(headers=header_map(POST if headers is None else headers), end_of_stream=end),
        metadata_context=metadata,
        protocol_config=None if config is None else ProtocolConfiguration(**config),
    )


def request_body(body: bytes, *, end: bool = True) -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=end))


def request_trailers() -> ProcessingRequest:
    return ProcessingRequest(request_trailers=HttpTrailers())


def response_headers(
    status: int = 200,
    *,
    kind: str = "application/json",
    served: str = "",
    attribute: str = "",
    details: str = "",
    end: bool = False,
) -> ProcessingRequest:
    metadata = Metadata(filter_metadata=structs(**{METADATA_NAMESPACE: {SERVED: served}})) if served else None
    decision = {"upstream.address": attribute, "response.code_details": details}
    attributes = structs(**{ATTRIBUTES_NAMESPACE: {name: value for name, value in decision.items() if value}})
    headers = {":status": str(status), "content-type": kind}
    return ProcessingRequest(
        response_headers=HttpHeaders(headers=header_map(headers), end_of_stream=end),
        metadata_context=metadata,
        attributes=attributes,
    )


def response_body(body: bytes, *, end: bool = True) -> ProcessingRequest:
    return ProcessingRequest(response_body=HttpBody(body=body, end_of_stream=end))


def response_trailers() -> ProcessingRequest:
    return ProcessingRequest(response_trailers=HttpTrailers())


def a_completion(prompt: str = "Say this is a test") -> bytes:
    return json.dumps({"model": "m", "prompt": prompt}).encode()


def header_destination(answer: ProcessingResponse) -> str | None:
    """The endpoints in the header that an answer to headers, or to a body, sets."""
    common = getattr(answer, str(answer.WhichOneof("response"))).response
    found = [h.header for h in common.header_mutation.set_headers if h.header.key == DESTINATION]
    return found[0].raw_value.decode() if found else None


def metadata_destination(answer: ProcessingResponse) -> str | None:
    fields = answer.dynamic_metadata.fields
    if METADATA_NAMESPACE not in fields:
        return None
    return str(fields[METADATA_NAMESPACE].struct_value.fields[DESTINATION].string_value)


def kinds(answers: Sequence[ProcessingResponse]) -> list[str]:
    return [str(answer.WhichOneof("response")) for answer in answers]


class Exchange(ext_proc.ExtProcExchange):
    """One whose answers are objects, as Envoy reads them."""

    def receive(self, message: ProcessingRequest, now_s: float, read: Any = None) -> Any:
        return tuple(map(ProcessingResponse.FromString, super().receive(message, now_s, read)))
