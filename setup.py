"""Builds the optional native helper; without a C compiler the pure-Python twin serves instead."""

from setuptools import Extension, setup

SOURCES = "_fast crc crc_calls acks answers hashes headers segments runs landing packets serve relay sha macs slices"
SOURCES += " take udp prefix_rows prefix_shelf prefix_table prefix_calls holders holders_walk under_way queues guard"
SOURCES += " delay_price ttft fit http_headers receive blocks block_calls cached"
HEADERS = "blocks crc fast packet answers udp serve sha prefix holders ttft"

setup(
    ext_modules=[
        Extension(
            "skymemory.native._fast",
            sources=[f"src/skymemory/native/{name}.c" for name in SOURCES.split()],
            depends=[f"src/skymemory/native/{name}.h" for name in HEADERS.split()],
            extra_compile_args=[
                "-O3",
                "-fvisibility=hidden",
                "-std=c11",
                "-Wall",
                "-Wextra",
                "-Wno-unused-parameter",
                "-ffp-contract=off",
            ],
            libraries=["dl", "m"],
            optional=True,
        )
    ]
)
