"""Builds the optional native helper; without a C compiler the pure-Python twin serves instead."""

from setuptools import Extension, setup

SOURCES = "_fast crc crc_calls acks answers headers segments runs landing packets serve sha macs slices take udp"

setup(
    ext_modules=[
        Extension(
            "skymemory.native._fast",
            sources=[f"src/skymemory/native/{name}.c" for name in SOURCES.split()],
            depends=[f"src/skymemory/native/{name}.h" for name in ("fast", "packet", "answers", "udp", "serve", "sha")],
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra", "-Wno-unused-parameter"],
            libraries=["dl"],
            optional=True,
        )
    ]
)
