"""From a template, a hardware profile and a batch to the planner's question."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from lazyjax.hardware.profile import HardwareProfile, dump_profile
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.make import make_host_optimizer
from lazyjax.planning.costs.packing import Packing
from lazyjax.planning.costs.seconds import Costs, static_host_bytes, template_costs
from lazyjax.planning.plan.cache import content_key
from lazyjax.planning.planner.question import CostModel, Request, Tables
from lazyjax.planning.program.schedule import ModelSizes
from lazyjax.specs import Tier


def build_request(
    template: ModelTemplate,
    profile: HardwareProfile,
    *,
    batch_rows: int,
    sequence_length: int,
    optimizer: str = "hybrid8bit",
    compute_dtype: str = "bfloat16",
    gradient_dtype: str = "bfloat16",
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    nvme_bytes: int | None = None,
    costs: Callable[[int], CostModel] | None = None,
    packing: Packing | None = None,
    identity: str = "",
) -> Request:
    """What to plan for `batch_rows` x `sequence_length` tokens on a machine.

    Args:
        optimizer: name of the host optimizer, for the size of its state and its speed.
        device_bytes, host_bytes, nvme_bytes: instead of the profile's capacities.
        costs: microbatch_rows -> costs; by default from the profile's rates. Where neither they nor the
            template say otherwise, the token chunk is open.
        packing: of rows with several segments (see `template_costs`).
        identity: names `costs` in the cache's key, where they are not the profile's.
    """
    spec, devices = template.spec, profile.devices
    tables = _tables_by_chunk(
        template,
        profile,
        sequence_length=sequence_length,
        optimizer=make_host_optimizer(optimizer, threads=1, path="pure"),
        compute_dtype=compute_dtype,
        gradient_dtype=gradient_dtype,
        packing=packing,
    )
    sizes, profile_costs = tables(template.token_chunk)
    made_for = {
        "optimizer": optimizer,
        "compute_dtype": compute_dtype,
        "gradient_dtype": gradient_dtype,
        "hardware": profile.name,
        "device": profile.device,
        "token_chunk": template.token_chunk,
    }
    return Request(
        spec=spec,
        batch_rows=batch_rows,
        sequence_length=sequence_length,
        sizes=sizes,
        costs=profile_costs if costs is None else costs,
        capacity=_capacity(profile, device_bytes, host_bytes, nvme_bytes),
        static_host_bytes=static_host_bytes(spec, gradient_dtype=gradient_dtype, devices=devices) // devices,
        token_chunk=template.token_chunk,
        chunked=tables if costs is None and template.token_chunk is None else None,
        devices=devices,
        hosts=profile.hosts,
        identity=_identity(template, profile, packing, identity, made_for),
        made_for=made_for,
    )


def _tables_by_chunk(
    template: ModelTemplate, profile: HardwareProfile, **fixed: Any
) -> Callable[[int | None], Tables]:
    """token_chunk -> bytes and costs from the profile's rates; everything is worked out once.

    Args:
        fixed: further arguments of `template_costs`, besides the rows of a microbatch.
    """

    @functools.cache
    def tables(width: int | None) -> Tables:
        chunked = template.in_chunks(width)

        @functools.cache
        def costs(microbatch_rows: int) -> Costs:
            return template_costs(chunked, profile, microbatch_rows=microbatch_rows, **fixed)

        @functools.cache
        def sizes(microbatch_rows: int) -> ModelSizes:
            return costs(microbatch_rows).sizes

        return Tables(sizes, costs)

    return tables


def _capacity(
    profile: HardwareProfile, device_bytes: int | None, host_bytes: int | None, nvme_bytes: int | None
) -> dict[Tier, int]:
    """Bytes per device: the profile's, unless others are given; devices of a host share what it has."""
    sharing = profile.devices_per_host
    return {
        Tier.DEVICE: profile.device_bytes if device_bytes is None else device_bytes,
        Tier.HOST: (profile.host_bytes if host_bytes is None else host_bytes) // sharing,
        Tier.NVME: (profile.nvme_bytes if nvme_bytes is None else nvme_bytes) // sharing,
    }


def _identity(
    template: ModelTemplate,
    profile: HardwareProfile,
    packing: Packing | None,
    costs: str,
    made_for: Mapping[str, str | int | None],
) -> str:
    """A digest of the model, the machine and whatever else costs follow from."""
    layers = [[layer.kind, *([t.name, *t.shape] for t in layer.parameters)] for layer in template.spec.layers]
    facts = {
        "layers": layers,
        "model": template.config.model_dump(mode="json"),
        "profile": dump_profile(profile),
        "packing": None if packing is None else packing.batches,
        "costs": costs,
        "made_for": made_for,
        # Tells forms of attention apart.
        "residuals": [list(kind.residual_names) for kind in template.kinds.values()],
    }
    return content_key(facts)


def request_key(request: Request) -> str:
    """The cache key: everything an answer depends on."""
    content: dict[str, Any] = {
        "identity": request.identity,
        "batch_rows": request.batch_rows,
        "sequence_length": request.sequence_length,
        "capacity": {tier.value: size for tier, size in request.capacity.items()},
    }
    content["token_chunk_is_open"] = request.chunked is not None
    for field in ("microbatches", "prefetch", "backward_prefetch", "interlayer_home", "update"):
        content[field] = getattr(request, field)
    content["head_chunks"] = list(request.head_chunks)
    content["on_nvme"] = None if request.on_nvme is None else sorted(request.on_nvme)
    return content_key(content)
