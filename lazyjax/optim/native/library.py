"""Loads the compiled host kernels and passes numpy arrays to them.

The shared library is an optional part of the install. Without it callers get `None` and one warning
per process, and use their pure paths. ctypes releases the GIL during a call.

Environment: `LAZYJAX_HOST_KERNEL` = `avx512`, `avx2`, `portable` or `pure` replaces the choice that
`auto` would make.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import os
import pathlib
import warnings

import numpy as np

from lazyjax.storage.host import NUMPY_DTYPES, LayerSlabs

INTERFACE_VERSION = 2
#: Kernel paths in the numbering of hostupdate.cpp, slowest first.
PATHS = ("portable", "avx2", "avx512")
ENVIRONMENT_VARIABLE = "LAZYJAX_HOST_KERNEL"

HYBRID_8BIT, FP32_STATE, BF16 = 0, 1, 2

#: One run of whole blocks that a thread updates; mirrors `Chunk` in hostupdate.h.
CHUNK_DTYPE = np.dtype(
    [("begin", "<i8"), ("length", "<i8"), ("state_offset", "<i8"), ("decay", "<i4"), ("eight_bit", "<i4")],
    align=True,
)


class _Slabs(ctypes.Structure):
    _fields_ = [
        ("hi", ctypes.c_void_p),
        ("lo", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("m_codes", ctypes.c_void_p),
        ("v_codes", ctypes.c_void_p),
        ("m_scales", ctypes.c_void_p),
        ("v_scales", ctypes.c_void_p),
        ("m32", ctypes.c_void_p),
        ("v32", ctypes.c_void_p),
        ("gradient_is_f32", ctypes.c_int32),
    ]


class _Scalars(ctypes.Structure):
    _fields_ = [
        ("b1", ctypes.c_float),
        ("b2", ctypes.c_float),
        ("m_share", ctypes.c_float),
        ("step", ctypes.c_float),
        ("root_scale", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("decay_step", ctypes.c_float),
        ("gradient_scale", ctypes.c_float),
        ("count", ctypes.c_uint32),
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class StepScalars:
    """What one AdamW step multiplies by, computed in double precision and rounded to fp32 where used.

    The gradient is scaled so that its square is what v gains: v = b2 v + g^2, m = b1 m + m_share g.

    Attributes:
        m_share: (1 - b1) / sqrt(1 - b2).
        step: learning rate / (1 - b1^count).
        root_scale: 1 / sqrt(1 - b2^count).
        decay_step: learning rate * weight decay.
        gradient_scale: clip factor * sqrt(1 - b2), the product of both as fp32.
    """

    b1: float
    b2: float
    m_share: float
    eps: float
    step: float
    root_scale: float
    decay_step: float
    gradient_scale: float
    count: int

    @classmethod
    def of(
        cls,
        *,
        b1: float,
        b2: float,
        eps: float,
        weight_decay: float,
        learning_rate: float,
        count: int,
        scale: float,
    ) -> StepScalars:
        """Scalars of step `count` (from 1)."""
        return cls(
            b1=b1,
            b2=b2,
            m_share=(1 - b1) / math.sqrt(1 - b2),
            eps=eps,
            step=learning_rate / (1 - b1**count),
            root_scale=(1 - b2**count) ** -0.5,
            decay_step=learning_rate * weight_decay,
            gradient_scale=float(np.float32(scale) * np.float32(math.sqrt(1 - b2))),
            count=count,
        )


class Library:
    """The loaded kernels. Get it from `load_library`."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        self._create = handle.hostupdate_pool_create
        self._create.restype = ctypes.c_void_p
        self._create.argtypes = [ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32]
        self._run = handle.hostupdate_run
        self._run.restype = ctypes.c_int32
        self._run.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.POINTER(_Slabs),
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.POINTER(_Scalars),
        ]
        available = handle.hostupdate_path_available
        available.restype = ctypes.c_int32
        available.argtypes = [ctypes.c_int32]
        #: Paths that this processor can run, slowest first.
        self.paths = tuple(name for number, name in enumerate(PATHS) if available(number))

    def create_pool(self, threads: int, cpus: tuple[int, ...]) -> int | None:
        """Starts `threads` workers, worker i bound to cpus[i % len(cpus)] unless `cpus` is empty.

        Returns:
            A handle for `run`, kept until the process ends; None for one unbound thread, which is
            the caller itself.

        Raises:
            OSError: the threads could not be started or bound.
        """
        if threads == 1 and not cpus:
            return None
        pool = self._create(threads, (ctypes.c_int32 * len(cpus))(*cpus), len(cpus))
        if pool is None:
            raise OSError(f"could not start {threads} update threads on CPUs {cpus or 'any'}")
        return int(pool)

    def run(
        self,
        *,
        pool: int | None,
        path: str,
        method: int,
        slabs: LayerSlabs,
        state: dict[str, np.ndarray],
        chunks: np.ndarray,
        scalars: StepScalars,
    ) -> None:
        """Updates all chunks. The caller has checked every array (`lazyjax.optim.base`).

        Args:
            state: arrays under the names of `_Slabs`' fields; absent ones are not used by `method`.
            chunks: records of `CHUNK_DTYPE`.
        """
        pointers = {name: array.ctypes.data for name, array in state.items()}
        structure = _Slabs(
            hi=slabs.hi.ctypes.data,
            lo=slabs.lo.ctypes.data,
            gradient=slabs.gradient.ctypes.data,
            gradient_is_f32=int(slabs.gradient.dtype == NUMPY_DTYPES["float32"]),
            **pointers,
        )
        numbers = _Scalars(
            b1=scalars.b1,
            b2=scalars.b2,
            m_share=scalars.m_share,
            step=scalars.step,
            root_scale=scalars.root_scale,
            eps=scalars.eps,
            decay_step=scalars.decay_step,
            gradient_scale=scalars.gradient_scale,
            count=scalars.count & 0xFFFFFFFF,
        )
        failed = self._run(
            pool,
            PATHS.index(path),
            method,
            ctypes.byref(structure),
            chunks.ctypes.data,
            len(chunks),
            ctypes.byref(numbers),
        )
        if failed:
            raise ValueError(f"this processor has no {path} path; it has {', '.join(self.paths)}")


def library_file() -> pathlib.Path | None:
    """The shared library that the install built, if it did."""
    found = sorted(pathlib.Path(__file__).parent.glob("_hostupdate*.so"))
    return found[0] if found else None


@functools.cache
def load_library() -> Library | None:
    """The kernels, or None (with one warning) when they were not built or are of another version."""
    file = library_file()
    if file is None:
        reason = "it was not built (no C++ compiler at install time?)"
    else:
        try:
            handle = ctypes.CDLL(str(file))
            version = handle.hostupdate_interface_version()
        except (OSError, AttributeError) as error:
            reason = str(error)
        else:
            if version == INTERFACE_VERSION:
                return Library(handle)
            reason = f"it has interface version {version}, expected {INTERFACE_VERSION}; reinstall"
    warnings.warn(
        f"the native host update is not used: {reason}. Updates run in the slower pure path.",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


@functools.cache
def shared_pool(threads: int, cpus: tuple[int, ...]) -> int | None:
    """One pool per configuration and process, shared by all optimizers."""
    library = load_library()
    return None if library is None else library.create_pool(threads, cpus)


def choose_path(requested: str) -> str:
    """The path an update takes: `pure` or one of `PATHS`.

    Args:
        requested: `auto` for the fastest that can run, or a path by name.

    Raises:
        ValueError: an unknown path, or one that this install or processor lacks.
    """
    if requested == "auto":
        requested = os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    if requested == "pure":
        return "pure"
    library = load_library()
    if requested == "auto":
        return "pure" if library is None else library.paths[-1]
    available = () if library is None else library.paths
    if requested not in available:
        choices = ", ".join(("auto", "pure", *available))
        raise ValueError(f"host kernel path {requested!r} is not available here; available: {choices}")
    return requested
