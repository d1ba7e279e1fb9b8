"""What an endpoint picker says to Envoy, message by message, and what it reads out of Envoy's.

The protocol is the Gateway API inference extension's "endpoint picker protocol" (its proposal 004, v1.0.0) on top of
Envoy's external processing service (``envoy.service.ext_proc.v3``). Nothing here keeps state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpHeaders,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct, Value

from skymemory.router.bad_request import error_body

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS, READINESS = "liveness", "readiness"
"""Names under which health is told, beside ``SERVICE``."""
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
METADATA_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
ATTRIBUTES_NAMESPACE = "envoy.filters.http.ext_proc"
UPSTREAM_ADDRESS, CODE_DETAILS = "upstream.address", "response.code_details"
FROM_UPSTREAM = "via_upstream"
PIECE_BYTES = 62_000
"""Of a body, what goes into one message: Envoy recommends no more than 64 KiB, with the message around it."""

OVERWRITE = HeaderValueOption.HeaderAppendAction.Value("OVERWRITE_IF_EXISTS_OR_ADD")
BODY_MODE = ProcessingMode.BodySendMode
NONE, FULL_DUPLEX = BODY_MODE.Value("NONE"), BODY_MODE.Value("FULL_DUPLEX_STREAMED")
BUFFERED = BODY_MODE.Value("BUFFERED")


def headers_of(headers: HttpHeaders) -> dict[str, str]:
    """Names in lower case, as Envoy sends them. Of a header that is there twice, the values joined by commas."""
    found: dict[str, str] = {}
    for header in headers.headers.headers:
        value = header.raw_value.decode("latin-1") if header.raw_value else header.value
        found[header.key] = f"{found[header.key]},{value}" if header.key in found else value
    return found


def subset_of(message: ProcessingRequest) -> frozenset[str] | None:
    """The endpoints one of which must be picked; None where all may be. An empty subset is one that allows none.

    The protocol has a list; a string with commas, which other data planes send, is read as one.
    """
    metadata = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in metadata or SUBSET not in metadata[SUBSET_NAMESPACE].fields:
        return None
    value = metadata[SUBSET_NAMESPACE].fields[SUBSET]
    entries = [entry.string_value for entry in value.list_value.values] or [value.string_value]
    return frozenset(part.strip() for entry in entries for part in entry.split(",") if part.strip())


def served_of(message: ProcessingRequest) -> str:
    """The endpoint that served the request, by the metadata of the protocol, else by Envoy's own attribute;
    empty where neither says.
    """
    metadata = message.metadata_context.filter_metadata
    if METADATA_NAMESPACE in metadata and SERVED in metadata[METADATA_NAMESPACE].fields:
        return str(metadata[METADATA_NAMESPACE].fields[SERVED].string_value)
    return _attribute(message, UPSTREAM_ADDRESS)


def is_envoys_own(message: ProcessingRequest) -> bool | None:
    """Whether Envoy made up the response itself, having none from a server; None where it does not say."""
    details = _attribute(message, CODE_DETAILS)
    return details != FROM_UPSTREAM if details else None


def _attribute(message: ProcessingRequest, name: str) -> str:
    attributes = message.attributes
    if ATTRIBUTES_NAMESPACE not in attributes or name not in attributes[ATTRIBUTES_NAMESPACE].fields:
        return ""
    return str(attributes[ATTRIBUTES_NAMESPACE].fields[name].string_value)


def destination(endpoints: str) -> tuple[HeaderMutation, Struct]:
    """The same ``ip:port[,ip:port]`` as a header and as metadata, for data planes that read the one or the other."""
    inner = Struct(fields={DESTINATION: Value(string_value=endpoints)})
    metadata = Struct(fields={METADATA_NAMESPACE: Value(struct_value=inner)})
    return HeaderMutation(set_headers=[_header(DESTINATION, endpoints)]), metadata


def request_headers(mutation: HeaderMutation | None = None, metadata: Struct | None = None) -> ProcessingResponse:
    return ProcessingResponse(request_headers=_headers(mutation), dynamic_metadata=metadata)


def response_headers(added: Mapping[str, str]) -> ProcessingResponse:
    mutation = HeaderMutation(set_headers=[_header(*item) for item in added.items()]) if added else None
    return ProcessingResponse(response_headers=_headers(mutation))


def request_body(mutation: HeaderMutation | None = None, metadata: Struct | None = None) -> ProcessingResponse:
    """The answer where Envoy keeps the body itself: it goes on as it came."""
    return ProcessingResponse(
        request_body=BodyResponse(response=CommonResponse(header_mutation=mutation)), dynamic_metadata=metadata
    )


def response_body() -> ProcessingResponse:
    return ProcessingResponse(response_body=BodyResponse())


def streamed_request(body: bytes, end: bool) -> Iterator[ProcessingResponse]:
    return (ProcessingResponse(request_body=piece) for piece in _pieces(body, end))


def streamed_response(body: bytes, end: bool) -> Iterator[ProcessingResponse]:
    return (ProcessingResponse(response_body=piece) for piece in _pieces(body, end))


def request_trailers() -> ProcessingResponse:
    return ProcessingResponse(request_trailers=TrailersResponse())


def response_trailers() -> ProcessingResponse:
    return ProcessingResponse(response_trailers=TrailersResponse())


def immediate(status: int, message: str, retry_after_s: int | None = None) -> ProcessingResponse:
    """An answer that goes to the client at once, with an error as the OpenAI API writes it."""
    headers = {"content-type": "application/json"}
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=status),
            headers=HeaderMutation(set_headers=[_header(*item) for item in headers.items()]),
            body=error_body(status, message),
            details="skymemory_endpoint_picker",
        )
    )


def _headers(mutation: HeaderMutation | None) -> HeadersResponse:
    return HeadersResponse(response=CommonResponse(header_mutation=mutation))


def _header(name: str, value: str) -> HeaderValueOption:
    """One that replaces what the client, or the server, sent by that name."""
    return HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode()), append_action=OVERWRITE)


def _pieces(body: bytes, end: bool) -> Iterator[BodyResponse]:
    for start in range(0, max(1, len(body)), PIECE_BYTES):
        piece = body[start : start + PIECE_BYTES]
        last = end and start + PIECE_BYTES >= len(body)
        streamed = StreamedBodyResponse(body=piece, end_of_stream=last)
        yield BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=streamed)))
