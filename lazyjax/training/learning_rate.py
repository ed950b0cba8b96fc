"""Learning rates of all steps, from optax's schedules."""

from __future__ import annotations

import jax
import numpy as np
import optax
from jaxtyping import Float32

from lazyjax.config import OptimizerConfig


def learning_rates(config: OptimizerConfig, steps: int) -> Float32[np.ndarray, " steps"]:
    """The learning rate of every step; entry i belongs to step i + 1.

    Warm-up is linear and reaches the peak with step `warmup_steps`; the decay starts at the peak
    one step later and would reach `final_fraction` of it one step after the last.

    Raises:
        ValueError: the warm-up leaves no step.
    """
    warmup = config.warmup_steps
    if warmup >= steps:
        raise ValueError(f"optimizer.warmup_steps ({warmup}) leaves nothing of the run's {steps} steps")
    peak, decay_steps = config.learning_rate, steps - warmup
    match config.schedule:
        case "constant":
            decay = optax.constant_schedule(peak)
        case "linear":
            decay = optax.linear_schedule(peak, peak * config.final_fraction, decay_steps)
        case "cosine":
            decay = optax.cosine_decay_schedule(peak, decay_steps, alpha=config.final_fraction)
    # Computed once for all steps and off the accelerator: a schedule call per step would put a
    # transfer and a synchronisation into the loop.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        rates = np.empty(steps, np.float32)
        rates[:warmup] = optax.linear_schedule(0.0, peak, warmup)(np.arange(1, warmup + 1)) if warmup else 0
        rates[warmup:] = decay(np.arange(decay_steps))
    return rates
