"""Builds the host update kernels as an optional part of the package (the rest is in pyproject.toml).

The library has a C interface and is loaded with ctypes, so it is independent of the Python version;
it is built like an extension module because that is what installs compile. Without a C++ compiler the
install succeeds and updates run in their pure paths, with one warning.
"""

from setuptools import Extension, setup

NATIVE = "lazyjax/optim/native"

setup(
    ext_modules=[
        Extension(
            "lazyjax.optim.native._hostupdate",
            sources=[
                f"{NATIVE}/{name}.cpp" for name in ("hostupdate", "path_portable", "path_avx2", "path_avx512")
            ],
            depends=[f"{NATIVE}/hostupdate.h", f"{NATIVE}/kernel.h"],
            language="c++",
            # No contraction: products and sums round separately, so that all paths give the same bits.
            # Scheduling before register allocation is worth 3-7 % here.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-pthread",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fschedule-insns",
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
