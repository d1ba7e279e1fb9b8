from collections.abc import Mapping, MutableMapping, Sequence, Set

from typing_extensions import Buffer

def crc32(data: Buffer, value: int = 0) -> int: ...
def crc32_combine(crc1: int, crc2: int, len2: int) -> int: ...
def crc32_chunks(value: Buffer, chunk_bytes: int) -> bytes: ...
def crc32_join(crcs: Buffer, chunk_bytes: int, value_bytes: int) -> int: ...
def crc_kind() -> str: ...
def crc_select(name: str) -> bool: ...
def seal_headers(headers: Buffer, header_bytes: int, sky_offset: int) -> None: ...
def verify_segments(data: Buffer, segment_bytes: int) -> bytes: ...
def place_segments(
    data: Buffer, segment_bytes: int, key: bytes, chunks: int, chunk_bytes: int, value_bytes: int, value_crc: int,
    out: Buffer, arrived: Buffer, crcs: Buffer,
) -> tuple[int, int, int, int]: ...  # fmt: skip
def bulk_headers(prefix: Buffer, refs: Buffer, sequence: int, sky_offset: int) -> bytearray: ...
def answer_get(
    packet: Buffer, shares: Mapping[bytes, dict[int, tuple[bytes, bytes]]],
    terms: tuple[int, int, int, int, int, int],
) -> tuple[bytes, bytearray, list[bytes]] | None: ...  # fmt: skip
def open_runs(
    runs: list[tuple[memoryview, int]], first: int
) -> tuple[list[int], list[tuple[bytes, bytes]], int, int] | None: ...
def serve(
    fd: int, scratch: Buffer, slots: int, addresses: Buffer, neighbours: Mapping[tuple[str, int], object],
    shares: MutableMapping[bytes, dict[int, tuple[bytes, bytes]]], settled: Set[bytes], room_bytes: int,
    terms: tuple[int, int, int, int, int, int],
) -> tuple[
    list[tuple[int, int, int, str, int]],
    list[tuple[int, bytes, int, tuple[str, int], int, int, int, tuple[bytearray, list[bytes] | None] | None]],
    int,
]: ...  # fmt: skip
def place_runs(
    runs: list[tuple[memoryview, int]], first: int, requests: set[int], key: bytes, chunks: int, chunk_bytes: int,
    value_bytes: int, value_crc: int, out: Buffer, arrived: Buffer, crcs: Buffer,
) -> list[tuple[int, int, int, int, int, int, int]]: ...  # fmt: skip
def recv_batch(fd: int, scratch: Buffer, slots: int) -> list[tuple[int, int, int, str, int]]: ...
def send_batch(
    fd: int, host: str, port: int, headers: Buffer, header_bytes: int, payloads: Sequence[Buffer] | None
) -> int: ...
