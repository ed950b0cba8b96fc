"""What programs are traced for: XLA:CPU wants some things written differently.

XLA:CPU runs the bodies of loops on one thread, and rounds partial sums of some bfloat16 products. The cost
model and tests trace a program as an accelerator gets it, whatever this process runs on.

A fused kernel of a library cannot be traced where the library or its device is missing, nor does its trace
say what it costs. Where a program is only described, `describes` is true, and such kernels make way for
functions of the same operands and results.

Where data decide which turns of a loop compute something, a trace does not say how many do. Such a turn is a
`lax.cond` in the scope `SKIPPABLE`, so that the cost model can tell both kinds of turn apart.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

#: `jax.named_scope` of a condition that turns of a loop may fail, and then compute nothing.
SKIPPABLE = "skippable_turn"

_for_accelerator = contextvars.ContextVar("for_accelerator", default=False)
_describes = contextvars.ContextVar("describes", default=False)


def traces_for_cpu() -> bool:
    """Whether programs traced now will run on this process's CPU."""
    return not _for_accelerator.get() and jax.default_backend() == "cpu"


@contextlib.contextmanager
def for_accelerator() -> Iterator[None]:
    """Programs traced within it are those that an accelerator gets."""
    token = _for_accelerator.set(True)
    try:
        yield
    finally:
        _for_accelerator.reset(token)


def describes() -> bool:
    """Whether programs traced now are only described, and never run."""
    return _describes.get()


@contextlib.contextmanager
def for_description() -> Iterator[None]:
    """Programs traced within it are described as an accelerator gets them, and never run."""
    token = _describes.set(True)
    try:
        with for_accelerator():
            yield
    finally:
        _describes.reset(token)
