"""Builds the optional native helper; without a C compiler the pure-Python twin serves instead."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "skymemory.native._fast",
            sources=[
                f"src/skymemory/native/{name}.c"
                for name in (
                    "_fast",
                    "crc",
                    "crc_calls",
                    "headers",
                    "segments",
                    "runs",
                    "udp",
                    "answers",
                    "serve",
                    "take",
                )  # fmt: skip
            ],
            depends=[f"src/skymemory/native/{name}.h" for name in ("fast", "packet", "answers", "udp", "serve")],
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra", "-Wno-unused-parameter"],
            optional=True,
        )
    ]
)
