"""Builds the optional native helper; without a C compiler the pure-Python twin serves instead."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "skymemory.native._fast",
            sources=["src/skymemory/native/_fast.c"],
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra", "-Wno-unused-parameter"],
            optional=True,
        )
    ]
)
