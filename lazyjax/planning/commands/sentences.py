"""What a plan decides and promises, in sentences; `lazyjax plan` and `lazyjax train` both open with them."""

from __future__ import annotations

import math

from lazyjax.planning.plan.document import Boundary, Plan
from lazyjax.planning.planner.question import Request
from lazyjax.planning.program.verify import Verification
from lazyjax.specs import Part, Tier

#: What layers own, in words.
PART_WORDS = {
    Part.STATE: "optimizer state",
    Part.LO: "low half of the master weights",
    Part.GRADIENT: "gradient",
    Part.HI: "high half of the master weights",
}


def decisions(plan: Plan) -> str:
    """What a plan decides, in one sentence."""
    blocks = plan.layers[1:-1]
    homes = [(home, sum(layer.boundary is home for layer in blocks)) for home in Boundary]
    words = {
        Boundary.DEVICE: "on the device",
        Boundary.HOST: "on the host",
        Boundary.NVME: "on NVMe",
        Boundary.RECOMPUTE: "computed again",
    }
    inputs = ", ".join(f"{count} {words[home]}" for home, count in homes if count)
    parts = [
        f"{plan.microbatches} microbatch{'es' if plan.microbatches > 1 else ''} of {plan.microbatch_rows} "
        f"rows x {plan.sequence_length} tokens",
        f"inputs of the {len(blocks)} blocks: {inputs}",
    ]
    kept = [tier for layer in blocks for tier in layer.saved.values()]
    where = [f"{kept.count(tier)} on the {tier.value}" for tier in Tier if tier in kept]
    parts.append(
        f"of what is inside them, tensors kept: {', '.join(where)}"
        if where
        else "everything inside them computed again"
    )
    residents = sum(layer.resident for layer in plan.layers)
    if residents:
        parts.append(f"parameters of {residents} layers stay on the device")
    for part, name in PART_WORDS.items():
        below = sum(part in layer.on_nvme for layer in plan.layers)
        if below:
            parts.append(f"{name} of {below} layers on NVMe")
    parts.append(f"parameter slabs on the device: {plan.prefetch} forward, {plan.backward_prefetch} backward")
    parts.append(f"logits of {plan.head_chunk} tokens at a time")
    if plan.microbatches > 1:
        parts.append(f"between layers activations wait on the {plan.interlayer_home}")
    parts.append(
        "the update runs under the next forward pass"
        if plan.update == "deferred"
        else "the update ends the step"
    )
    return "; ".join(parts)


def verdict(
    request: Request, plan: Plan, verification: Verification, *, hardware: str, epoch_rows: int | None = None
) -> str:
    """The sentences a plan opens with: it fits, what it takes in memory and on disk, how long an epoch lasts.

    Args:
        hardware: what the machine is called.
        epoch_rows: rows of the data, where they are known.
    """
    period = verification.period_seconds
    tokens = plan.batch_rows * plan.sequence_length / period
    words = _TIER_WORDS if request.devices == 1 else _TIER_WORDS_OF_EACH

    def amount(tier: Tier, device_bytes: int) -> str:
        return digits(request.in_one_place(tier, device_bytes) / 1e9)

    memory = " and ".join(
        f"{amount(tier, verification.peak_bytes[tier])} of {amount(tier, request.capacity[tier])} GB of "
        f"{words[tier]}"
        for tier in Tier
        if request.capacity[tier] and verification.peak_bytes[tier]
    )
    sentences = [
        f"{plan.model} on {hardware} fits: {plan.batch_rows} rows x {plan.sequence_length} tokens take "
        f"{digits(period)} s a step, {tokens:,.0f} tokens/s (simulated).",
        f"It takes {memory}, with the optimizer {plan.optimizer} and {plan.compute_dtype} compute, and "
        f"{digits(2 * request.spec.parameter_count / 1e9)} GB of disk for the trained model (bfloat16).",
    ]
    if epoch_rows is not None:
        hours = math.ceil(epoch_rows / plan.batch_rows) * period / 3600
        sentences.append(f"An epoch of {epoch_rows:,} rows takes {digits(hours)} hours.")
    return " ".join(sentences)


_TIER_WORDS = {Tier.DEVICE: "device memory", Tier.HOST: "host memory", Tier.NVME: "NVMe"}
_TIER_WORDS_OF_EACH = {
    Tier.DEVICE: "each device's memory",
    Tier.HOST: "each host's memory",
    Tier.NVME: "each host's NVMe",
}


def digits(value: float) -> str:
    """Three significant digits or more, never an exponent and never 0 for what is not 0."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    places = max(0, 2 - math.floor(math.log10(abs(value)))) if abs(value) < 100 else int(abs(value) < 1000)
    return f"{value:,.{places}f}"


def bound_sentence(plan: Plan) -> str | None:
    """How close to the best possible plan this one is known to be; None where nothing is known."""
    prediction = plan.prediction
    if prediction is None or prediction.bound_seconds is None or prediction.gap is None:
        return None
    solved = f" (searched for {prediction.solve_seconds:.1f} s)" if prediction.solve_seconds else ""
    return (
        f"No plan with the sets of tensors that are weighed takes less than "
        f"{digits(prediction.bound_seconds)} s where layers are not cut into microbatches; there this one is "
        f"within {max(0.0, prediction.gap):.2%} of that{solved}."
    )
