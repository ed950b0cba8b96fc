"""Host optimizers by the name that configurations use."""

from __future__ import annotations

import functools
from collections.abc import Callable

from lazyjax.config.names import OPTIMIZER_NAMES
from lazyjax.hardware import process
from lazyjax.optim.adamw import Bf16AdamW, Fp32AdamW
from lazyjax.optim.base import HostOptimizer
from lazyjax.optim.host8bit import Hybrid8bit

#: Makers by name; each takes the settings of `make_host_optimizer`.
OPTIMIZERS: dict[str, Callable[..., HostOptimizer]] = {
    "bf16_adamw": Bf16AdamW,
    "fp32_adamw": Fp32AdamW,
    "hybrid8bit": Hybrid8bit,
    # The share of 8-bit state that LazyTrain reports (arXiv 2608.11919): to compare with.
    "hybrid8bit_2percent": functools.partial(Hybrid8bit, eight_bit_fraction=0.02),
}


def register(name: str, maker: Callable[..., HostOptimizer]) -> None:
    """Adds an optimizer from outside the package; configurations and commands may then name it.

    Args:
        maker: called with the settings of `make_host_optimizer` by keyword. What it makes has `name`; how
            long an update takes follows from the bytes that it touches (`base.touched_bytes`).

    Raises:
        ValueError: there is an optimizer of that name.
    """
    OPTIMIZER_NAMES.add(name)
    OPTIMIZERS[name] = maker


def make_host_optimizer(
    name: str,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    threads: int = 0,
    cpus: tuple[int, ...] = (),
    path: str = "auto",
) -> HostOptimizer:
    """An optimizer from its settings.

    Args:
        name: a key of `OPTIMIZERS`.
        threads: of the update; 0 takes every CPU that this process may use.
        cpus: thread i is bound to cpus[i % len(cpus)]; empty: not bound.
        path: `auto`, `pure`, `portable`, `avx2` or `avx512`.

    Raises:
        ValueError: an unknown name, or a setting out of its range.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"there is no optimizer {name!r}; there are {', '.join(sorted(OPTIMIZERS))}")
    return OPTIMIZERS[name](
        b1=b1,
        b2=b2,
        eps=eps,
        weight_decay=weight_decay,
        threads=threads or usable_cpus(),
        cpus=cpus,
        path=path,
    )


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(process.usable_cpus())
