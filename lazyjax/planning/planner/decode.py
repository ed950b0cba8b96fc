"""What of a model stays on the device for decoding, and how many rows go together.

More rows share one stream of the parameters, but their states take the memory in which layers could stay. The
choice is small enough to try: every batch that fits, each with as many layers resident as then fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from lazyjax.planning.costs.decode import DecodeCosts, DecodeSizes
from lazyjax.planning.plan.decode import DecodePlan


def plan_decoding(
    costs: DecodeCosts,
    *,
    device_bytes: int,
    most_rows: int = 1024,
    batch_rows: int | None = None,
    prefetch: int = 2,
) -> DecodePlan:
    """The plan with the most tokens per second among the batches that fit.

    For every batch as many layers stay as fit beside its states, spread evenly over the model so that the
    link has something to fetch while they compute.

    Args:
        device_bytes: that may be used.
        batch_rows: fixes the batch.

    Raises:
        DecodeMemoryError: nothing fits.
    """
    best: tuple[float, DecodePlan] | None = None
    devices = costs.profile.devices
    for count in (batch_rows,) if batch_rows is not None else batch_sizes(most_rows, devices):
        plan = most_resident(costs.sizes, count, device_bytes, prefetch)
        if plan is None:
            continue
        rate = count / costs.predict(plan).step_seconds
        if best is None or rate > best[0] * (1 + 1e-9):
            best = rate, plan
    if best is None:
        raise costs.sizes.too_large(device_bytes, devices if batch_rows is None else batch_rows)
    return best[1]


def batch_sizes(most: int, devices: int = 1) -> tuple[int, ...]:
    """Up to `most`: small ones, then eight steps per doubling; multiples of the devices."""
    sizes = {most, 1, 2, 4}
    base = 8
    while base <= most:
        sizes.update(base + step * base // 8 for step in range(8))
        base *= 2
    rounded = {-(-size // devices) * devices for size in sizes}
    return tuple(sorted(size for size in rounded if size <= most))


def most_resident(
    sizes: DecodeSizes, batch_rows: int, device_bytes: int, prefetch: int = 2
) -> DecodePlan | None:
    """The plan for `batch_rows` rows with the most layers resident; None if the rows alone do not fit."""

    def at(count: int) -> DecodePlan:
        return DecodePlan(batch_rows, sizes.tokens, spread(sizes.uses, count), prefetch)

    def fits(count: int) -> bool:
        return sizes.device_bytes(at(count)) <= device_bytes

    if fits(len(sizes.uses)):
        return at(len(sizes.uses))
    if not fits(0):
        return None
    low, high = 0, len(sizes.uses)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return at(low)


def spread(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` of the layers, evenly apart."""
    total = len(layers)
    return tuple(sorted(layers[(2 * index + 1) * total // (2 * count)] for index in range(count)))
