"""Builds the optional native helper; without a C compiler the pure-Python twin serves instead."""

import shutil
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

SOURCES = "_fast crc crc_calls acks answers hashes headers segments runs landing packets serve relay sha macs nh slices"
SOURCES += " take udp prefix_rows prefix_shelf prefix_table prefix_calls holders holders_walk under_way queues guard"
SOURCES += " delay_price ttft fit http_headers json_counts receive blocks block_calls cached"
SOURCES += " host_map host_directory host_reader"
HEADERS = "blocks crc fast packet answers udp serve sha nh prefix holders ttft host"

# As in fast.h, which chooses the version.
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")


class FreshBuild(build_py):
    """Build without what an earlier release left in the folder ``build``."""

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(
    cmdclass={"build_py": FreshBuild},
    ext_modules=[
        Extension(
            "skymemory.native._fast",
            sources=[f"src/skymemory/native/{name}.c" for name in SOURCES.split()],
            depends=[f"src/skymemory/native/{name}.h" for name in HEADERS.split()],
            py_limited_api=STABLE_ABI,
            extra_compile_args=[
                "-O3",
                "-g0",
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
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
)
