"""Messages to and from Envoy, in the endpoint picker protocol of the Gateway API inference extension (proposal 004,
v1.0.0) on ``envoy.service.ext_proc.v3``.

Pieces of bodies are encoded by hand: protobuf took as long as picking a server.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

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

from skymemory.router.prefillers import HEADER, LATER_HEADER

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS, READINESS = "liveness", "readiness"
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
METADATA_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
ATTRIBUTES_NAMESPACE = "envoy.filters.http.ext_proc"
UPSTREAM_ADDRESS, CODE_DETAILS = "upstream.address", "response.code_details"
FROM_UPSTREAM = "via_upstream"
PIECE_BYTES = 62_000
"""Bytes of a body per message. Envoy recommends at most 64 KiB in all."""

OVERWRITE = HeaderValueOption.HeaderAppendAction.Value("OVERWRITE_IF_EXISTS_OR_ADD")
BODY_MODE = ProcessingMode.BodySendMode
NONE, FULL_DUPLEX = BODY_MODE.Value("NONE"), BODY_MODE.Value("FULL_DUPLEX_STREAMED")
BUFFERED = BODY_MODE.Value("BUFFERED")


def headers_of(headers: HttpHeaders) -> dict[str, str]:
    """Return headers by lower-case names; repeated values are joined by commas."""
    values: dict[str, str] = {}
    for header in headers.headers.headers:
        value = header.raw_value.decode("latin-1") if header.raw_value else header.value
        values[header.key] = f"{values[header.key]},{value}" if header.key in values else value
    return values


def some_headers(headers: HttpHeaders, names: Collection[str]) -> dict[str, str]:
    return {
        key: header.raw_value.decode("latin-1") or header.value
        for header in headers.headers.headers
        if (key := header.key) in names
    }


def subset_of(message: ProcessingRequest) -> frozenset[str] | None:
    """Return the endpoints that may be picked; None: all. Some data planes send a string instead of a list."""
    metadata = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in metadata or SUBSET not in metadata[SUBSET_NAMESPACE].fields:
        return None
    value = metadata[SUBSET_NAMESPACE].fields[SUBSET]
    entries = [entry.string_value for entry in value.list_value.values] or [value.string_value]
    return frozenset(part.strip() for entry in entries for part in entry.split(",") if part.strip())


def served_of(message: ProcessingRequest) -> str:
    """Return the endpoint that served the request, or nothing."""
    metadata = message.metadata_context.filter_metadata
    if METADATA_NAMESPACE in metadata and SERVED in metadata[METADATA_NAMESPACE].fields:
        return str(metadata[METADATA_NAMESPACE].fields[SERVED].string_value)
    return _attribute(message, UPSTREAM_ADDRESS)


def is_envoys_own(message: ProcessingRequest) -> bool | None:
    """Return True if Envoy itself made the response; None: unknown."""
    details = _attribute(message, CODE_DETAILS)
    return details != FROM_UPSTREAM if details else None


def _attribute(message: ProcessingRequest, name: str) -> str:
    attributes = message.attributes
    if ATTRIBUTES_NAMESPACE not in attributes or name not in attributes[ATTRIBUTES_NAMESPACE].fields:
        return ""
    return str(attributes[ATTRIBUTES_NAMESPACE].fields[name].string_value)


def is_unconnected(message: ProcessingRequest) -> bool:
    details = _attribute(message, CODE_DETAILS)
    return any(word in details for word in ("connection_failure", "connection_timeout", "no_healthy_upstream"))


def response_headers(added: Mapping[str, str] | None = None) -> bytes:
    if not added:
        return _RESPONSE_HEADERS
    mutation = HeaderMutation(set_headers=[_header(*item) for item in added.items()])
    return _encoded(ProcessingResponse(response_headers=_headers(mutation)))


def streamed_request(body: bytes, end: bool) -> Iterator[bytes]:
    return _pieces(_REQUEST_PIECE, body, end)


def streamed_response(body: bytes, end: bool) -> Iterator[bytes]:
    return _pieces(_RESPONSE_PIECE, body, end)


def immediate(status: int, body: bytes, retry_after_s: int | None = None) -> bytes:
    headers = {"content-type": "application/json"}
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    return _encoded(
        ProcessingResponse(
            immediate_response=ImmediateResponse(
                status=HttpStatus(code=status),
                headers=HeaderMutation(set_headers=[_header(*item) for item in headers.items()]),
                body=body,
                details="skymemory_endpoint_picker",
            )
        )
    )


def _encoded(response: ProcessingResponse) -> bytes:
    return bytes(response.SerializeToString())


def _headers(mutation: HeaderMutation | None) -> HeadersResponse:
    return HeadersResponse(response=CommonResponse(header_mutation=mutation))


def _header(name: str, value: str) -> HeaderValueOption:
    return HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode()), append_action=OVERWRITE)


def _destination(endpoints: str, prefiller: str | None) -> tuple[HeaderMutation | None, Struct | None]:
    """Return the endpoints as header and metadata, with the prefill server's header."""
    if not endpoints:
        return None, None
    inner = Struct(fields={DESTINATION: Value(string_value=endpoints)})
    metadata = Struct(fields={METADATA_NAMESPACE: Value(struct_value=inner)})
    headers = [_header(DESTINATION, endpoints)]
    if prefiller:
        headers.append(_header(HEADER, prefiller))
    # A client's own header would direct the sidecar to any server of the client's choice.
    removed = [LATER_HEADER] if prefiller else [HEADER, LATER_HEADER]
    return HeaderMutation(set_headers=headers, remove_headers=removed if prefiller is not None else ()), metadata


@lru_cache(maxsize=4096)
def request_headers(endpoints: str = "", prefiller: str | None = None) -> bytes:
    """Return the answer to a request's headers.

    Args:
        endpoints: ``ip:port[,ip:port]``, as header and metadata: data planes read either.
        prefiller: server for the sidecar's prefill; empty: none; None: no sidecars.
    """
    mutation, metadata = _destination(endpoints, prefiller)
    return _encoded(ProcessingResponse(request_headers=_headers(mutation), dynamic_metadata=metadata))


@lru_cache(maxsize=4096)
def request_body(endpoints: str = "", prefiller: str | None = None) -> bytes:
    mutation, metadata = _destination(endpoints, prefiller)
    body = BodyResponse(response=CommonResponse(header_mutation=mutation))
    return _encoded(ProcessingResponse(request_body=body, dynamic_metadata=metadata))


_RESPONSE_HEADERS = _encoded(ProcessingResponse(response_headers=_headers(None)))
RESPONSE_BODY = _encoded(ProcessingResponse(response_body=BodyResponse()))
REQUEST_TRAILERS = _encoded(ProcessingResponse(request_trailers=TrailersResponse()))
RESPONSE_TRAILERS = _encoded(ProcessingResponse(response_trailers=TrailersResponse()))


def _tag(message: Any, name: str, wire_type: int = 2) -> bytes:
    """Encode a field's number and wire type (2: length-delimited)."""
    return _varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | wire_type)


def _varint(number: int) -> bytes:
    coded = bytearray()
    while number >= 128:
        coded.append(number & 127 | 128)
        number >>= 7
    coded.append(number)
    return bytes(coded)


def _piece_tags(kind: str) -> tuple[bytes, ...]:
    """Return the tags around a body's piece, innermost first."""
    return (
        _tag(StreamedBodyResponse, "body"),
        _tag(BodyMutation, "streamed_response"),
        _tag(CommonResponse, "body_mutation"),
        _tag(BodyResponse, "response"),
        _tag(ProcessingResponse, kind),
    )


_REQUEST_PIECE, _RESPONSE_PIECE = _piece_tags("request_body"), _piece_tags("response_body")
_LAST_PIECE = _tag(StreamedBodyResponse, "end_of_stream", 0) + b"\x01"


@lru_cache(maxsize=4096)
def _before(tags: tuple[bytes, ...], size: int, following_bytes: int) -> bytes:
    """Return the message up to a piece of ``size`` bytes; ``following_bytes`` follow."""
    innermost, *outer = tags
    prefix = innermost + _varint(size) if size else b""  # protobuf omits empty fields
    for tag in outer:
        prefix = tag + _varint(len(prefix) + size + following_bytes) + prefix
    return prefix


def _pieces(tags: tuple[bytes, ...], body: bytes, end: bool) -> Iterator[bytes]:
    for start in range(0, max(1, len(body)), PIECE_BYTES):
        piece = body if len(body) <= PIECE_BYTES else body[start : start + PIECE_BYTES]
        suffix = _LAST_PIECE if end and start + PIECE_BYTES >= len(body) else b""
        yield _before(tags, len(piece), len(suffix)) + piece + suffix
