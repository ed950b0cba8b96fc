"""Byte sizes of everything a schedule moves, taken from the template itself.

Shapes come from tracing the layers; nobody types a size twice. Time is not known here
(see `lazyjax.planning.costs.seconds`).
"""

from __future__ import annotations

from lazyjax.models.template import ModelTemplate
from lazyjax.planning.costs.layers import CallShape, named_bytes
from lazyjax.planning.program.schedule import LayerSizes, ModelSizes
from lazyjax.specs import item_bytes, slab_layout

#: Tokens, targets, segments, positions as int32 and the loss mask as bool.
BATCH_BYTES_PER_TOKEN = 4 * 4 + 1


def model_sizes(
    template: ModelTemplate,
    *,
    microbatch_rows: int,
    sequence_length: int,
    compute_dtype: str = "bfloat16",
    gradient_dtype: str = "bfloat16",
    devices: int = 1,
) -> ModelSizes:
    """Sizes per device for one microbatch of `microbatch_rows` x `sequence_length` tokens.

    With several devices slabs are sharded and rows are split, so every size is the n-th part.
    In float32 compute both halves of the split master are streamed (4 bytes per parameter).

    Raises:
        ValueError: `microbatch_rows` is not a multiple of `devices`.
    """
    if microbatch_rows % devices:
        raise ValueError(f"microbatch of {microbatch_rows} rows cannot be split over {devices} devices")
    spec = template.spec
    shape = CallShape(spec.hidden_size, sequence_length, compute_dtype)
    residuals: dict[str, dict[str, int]] = {}
    for kind in template.kinds.values():
        named = named_bytes(kind, shape, microbatch_rows // devices) if kind.residual_names else {}
        residuals[kind.name] = {name: named[name] for name in kind.residual_names}
    hidden_bytes = microbatch_rows * sequence_length * spec.hidden_size * item_bytes(compute_dtype) // devices
    layers = []
    for index, layer in enumerate(spec.layers):
        length = slab_layout(layer.parameters, devices=devices).length // devices
        layers.append(
            LayerSizes(
                parameter_bytes=length * item_bytes(compute_dtype),
                accumulator_bytes=length * 4,
                gradient_bytes=length * item_bytes(gradient_dtype),
                input_bytes=hidden_bytes if index else 0,
                residual_bytes=residuals[layer.kind],
                half_bytes=length * 2,
            )
        )
    batch_bytes = microbatch_rows * sequence_length * BATCH_BYTES_PER_TOKEN // devices
    return ModelSizes(tuple(layers), batch_bytes, spec.tied, compute_dtype == "float32", devices)
