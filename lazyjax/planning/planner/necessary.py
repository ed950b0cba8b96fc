"""What every plan needs, whatever it decides: bytes that sizes alone tell, in milliseconds.

A refusal that follows from these needs no solver, and settings that fail them are not looked at. What
meets them may still not fit.
"""

from __future__ import annotations

import dataclasses

from lazyjax.planning.planner.question import Request, settings_of
from lazyjax.planning.program.operations import Action, Buffer, BufferRole, ModelSizes
from lazyjax.specs import Tier


def necessary_shortfall(request: Request, microbatch_rows: int | None = None) -> dict[Tier, int]:
    """Bytes missing per tier for certain; empty where these conditions hold.

    Where the token chunk is open, those of the chunk that needs least.

    Args:
        microbatch_rows: of one microbatch; by default as few as can be.
    """
    if request.chunked is not None:
        settings = settings_of(dataclasses.replace(request, microbatches=_finest(request)))
        fixed = {setting.token_chunk: request.at(setting) for setting in settings}
        return min(
            (necessary_shortfall(question, microbatch_rows) for question in fixed.values()),
            key=lambda missing: sum(missing.values()),
        )
    if microbatch_rows is None:
        microbatch_rows = -(-request.batch_rows // _finest(request))
    sizes = request.sizes(microbatch_rows)
    host, nvme = request.capacity[Tier.HOST], request.capacity[Tier.NVME]
    state = sum(layer.state_bytes for layer in sizes.layers)
    # What layers own is on the host unless NVMe takes it.
    needed = {
        Tier.DEVICE: _least_device_bytes(request, sizes, microbatch_rows),
        Tier.HOST: max(0, request.static_host_bytes + state - nvme),
        Tier.NVME: 0,
    }
    missing = {
        Tier.DEVICE: needed[Tier.DEVICE] - request.capacity[Tier.DEVICE],
        Tier.HOST: needed[Tier.HOST] - host,
    }
    return {tier: size for tier, size in missing.items() if size > 0}


def _finest(request: Request) -> int:
    return request.microbatches or request.batch_rows // request.devices


def _least_device_bytes(request: Request, sizes: ModelSizes, microbatch_rows: int) -> int:
    """The largest layer's backward pass: slab, gradient, input, both input gradients, working set.

    Where devices share slabs, also the whole layer, and the gradient of a device's rows in place of its part.
    """
    working_bytes = request.costs(microbatch_rows).working_bytes
    known: dict[str, int] = {}
    most = 0
    for index in range(1, len(sizes.layers) - 1):
        layer, kind = sizes.layers[index], request.spec.layers[index].kind
        if kind not in known:
            names = tuple(layer.residual_bytes)
            # With residuals kept, they are there instead of being made on the way.
            known[kind] = min(
                working_bytes(Action.BACKWARD, index, ()),
                working_bytes(Action.BACKWARD, index, names) + sum(layer.residual_bytes.values()),
            )
        own = layer.parameter_bytes + 3 * layer.input_bytes
        if sizes.shared:
            own += sizes.of(Buffer(BufferRole.WHOLE, index)) + sizes.of(Buffer(BufferRole.PARTIAL, index))
        else:
            own += layer.gradient_bytes
        most = max(most, own + known[kind])
    return most
