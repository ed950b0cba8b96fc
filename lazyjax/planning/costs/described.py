"""Models that can be planned but not run: described by their matrix products instead of a template.

The one shipped is GPT-OSS-120B (36 mixture-of-experts layers). A layer streams all its experts and
computes with the few that each token is routed to, so bytes follow the total parameters and FLOPs
the active ones. Sizes and work are the same types that templates give, so the planner does not
know the difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from lazyjax.hardware.profile import HardwareProfile
from lazyjax.optim.base import HostOptimizer, touched_bytes
from lazyjax.planning.costs.layers import SaveSet
from lazyjax.planning.costs.seconds import Costs, with_state_bytes
from lazyjax.planning.costs.sizes import BATCH_BYTES_PER_TOKEN
from lazyjax.planning.costs.trace import Kernel, Work
from lazyjax.planning.program.schedule import Action, LayerSizes, ModelSizes
from lazyjax.specs import LayerSpec, ModelSpec, TensorSpec, slab_layout

_BF16_BYTES = 2


@dataclasses.dataclass(frozen=True)
class MixtureOfExperts:
    """A decoder whose every block is attention and a mixture of gated experts.

    Source of the defaults: `config.json` of openai/gpt-oss-120b. Biases and attention sinks are
    counted; sliding windows are not (every layer attends over the whole sequence).
    """

    name: str = "GPT-OSS-120B"
    layers: int = 36
    hidden_size: int = 2880
    intermediate_size: int = 2880
    query_heads: int = 64
    key_value_heads: int = 8
    head_dim: int = 64
    experts: int = 128
    experts_per_token: int = 4
    vocabulary_size: int = 201088


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix product of a layer, per token.

    Attributes:
        output: name of its result; what is saved under this name is not computed again.
        flops: per token.
        weight_bytes: read once per call.
        read_elements, written_elements: activations per token.
    """

    output: str
    flops: int
    weight_bytes: int
    read_elements: int
    written_elements: int

    def kernel(self, tokens: int) -> Kernel:
        """The product on `tokens` tokens."""
        moved = (self.read_elements + self.written_elements) * tokens * _BF16_BYTES
        return Kernel(self.flops * tokens, self.weight_bytes + moved)


def model_spec(model: MixtureOfExperts) -> ModelSpec:
    """Shapes of every layer."""
    hidden, inner, experts = model.hidden_size, model.intermediate_size, model.experts
    query, key = model.query_heads * model.head_dim, model.key_value_heads * model.head_dim

    def tensor(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name, shape, "float32")

    block = (
        tensor("input_layernorm", hidden),
        tensor("q_proj.kernel", hidden, query), tensor("q_proj.bias", query),
        tensor("k_proj.kernel", hidden, key), tensor("k_proj.bias", key),
        tensor("v_proj.kernel", hidden, key), tensor("v_proj.bias", key),
        tensor("o_proj.kernel", query, hidden), tensor("o_proj.bias", hidden),
        tensor("sinks", model.query_heads),
        tensor("post_attention_layernorm", hidden),
        tensor("router.kernel", hidden, experts), tensor("router.bias", experts),
        tensor("experts.gate_up", experts, hidden, 2 * inner),
        tensor("experts.gate_up_bias", experts, 2 * inner),
        tensor("experts.down", experts, inner, hidden), tensor("experts.down_bias", experts, hidden),
    )  # fmt: skip
    table = tensor("table", model.vocabulary_size, hidden)
    layers = [LayerSpec("embed", "embed", (table,))]
    layers += [LayerSpec(f"layers.{index}", "mixture", block) for index in range(model.layers)]
    layers.append(LayerSpec("head", "head", (tensor("norm", hidden), table)))
    return ModelSpec(model.name, "plan_only", hidden, model.vocabulary_size, False, tuple(layers))


def block_products(model: MixtureOfExperts, sequence_length: int) -> tuple[Product, ...]:
    """The block's products in order; the result of the last is not needed by the backward pass."""
    hidden, inner, active = model.hidden_size, model.intermediate_size, model.experts_per_token
    query, key = model.query_heads * model.head_dim, model.key_value_heads * model.head_dim

    def dense(output: str, columns: int, rows: int = hidden) -> Product:
        return Product(output, 2 * rows * columns, rows * columns * _BF16_BYTES, rows, columns)

    gate_up_bytes = model.experts * hidden * 2 * inner * _BF16_BYTES
    down_bytes = model.experts * inner * hidden * _BF16_BYTES
    scores = model.query_heads * sequence_length
    return (
        dense("query", query),
        dense("key", key),
        dense("value", key),
        # Scores and their sum over values; float32 scores are written and read once each way.
        Product("attention_out", 4 * sequence_length * query, 0, query + 2 * key + 4 * scores, query),
        dense("post_mixer", hidden, query),
        dense("router", model.experts),
        Product("gate_up", active * 2 * hidden * 2 * inner, gate_up_bytes, hidden, active * 2 * inner),
        Product("", active * 2 * inner * hidden, down_bytes, active * inner, hidden),
    )


@dataclasses.dataclass(frozen=True)
class DescribedWork:
    """Work of `model` for `device_rows` rows, one device's part of a microbatch; see `costs.WorkSource`.

    Element-wise work is left out: a mixture's time is its products and its streamed bytes.
    """

    model: MixtureOfExperts
    device_rows: int
    sequence_length: int

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch."""
        return self.device_rows * self.sequence_length

    def work(self, kind: str, phase: Action, saved: tuple[str, ...], head_chunk: int | None = None) -> Work:
        """Backward: two products for each of the forward ones, and again what is not saved.

        The head is its products, in however many chunks it runs.
        """
        del head_chunk
        kernels: dict[Kernel, int] = {}

        def add(kernel: Kernel, times: int) -> None:
            kernels[kernel] = times + (kernels[kernel] if kernel in kernels else 0)

        if kind == "embed":
            add(Kernel(0, 2 * self.tokens * self.model.hidden_size * _BF16_BYTES), 1)
        elif kind == "head":
            add(self._table().kernel(self.tokens), 3)
        else:
            for product in block_products(self.model, self.sequence_length):
                if phase in (Action.FORWARD, Action.RECOMPUTE):
                    add(product.kernel(self.tokens), 1)
                else:
                    again = product.output != "" and product.output not in saved
                    add(product.kernel(self.tokens), 3 if again else 2)
        return Work(kernels)

    def working_bytes(
        self, kind: str, phase: Action, saved: tuple[str, ...], head_chunk: int | None = None
    ) -> int:
        """Stated model: the activations that exist at once, and weight gradients before their sum.

        Forward: input and output of the widest product. Backward: what was recomputed, the
        gradients of the widest product's operands, and all bf16 weight gradients.
        """
        del head_chunk
        if kind == "embed":
            return 0
        if kind == "head":
            return 2 * 4 * self.model.vocabulary_size * self.model.hidden_size
        products = block_products(self.model, self.sequence_length)
        widest = max(p.read_elements + p.written_elements for p in products) * self.tokens * _BF16_BYTES
        if phase in (Action.FORWARD, Action.RECOMPUTE):
            return widest
        again = sum(p.written_elements for p in products if p.output and p.output not in saved)
        return widest + again * self.tokens * _BF16_BYTES + sum(p.weight_bytes for p in products)

    def save_sets(self, kind: str, seconds: Callable[[Work], float]) -> tuple[SaveSet, ...]:
        """Nothing, then more and more in the order of seconds saved per byte."""
        found = [SaveSet((), 0, seconds(self.work(kind, Action.BACKWARD, ())))]
        if kind != "mixture":
            return tuple(found)
        products = [p for p in block_products(self.model, self.sequence_length) if p.output]

        def saved_per_element(product: Product) -> float:
            return seconds(Work({product.kernel(self.tokens): 1})) / product.written_elements

        products.sort(key=saved_per_element, reverse=True)
        sizes = self.residual_bytes()
        for count in range(1, len(products) + 1):
            kept = {p.output for p in products[:count]}
            names = tuple(name for name in sizes if name in kept)
            backward = seconds(self.work(kind, Action.BACKWARD, names))
            found.append(SaveSet(names, sum(sizes[name] for name in names), backward))
        return tuple(found)

    def residual_bytes(self) -> dict[str, int]:
        """Bytes of every named tensor, in the order in which the block computes them."""
        products = block_products(self.model, self.sequence_length)
        return {p.output: p.written_elements * self.tokens * _BF16_BYTES for p in products if p.output}

    def _table(self) -> Product:
        hidden, vocabulary = self.model.hidden_size, self.model.vocabulary_size
        return Product("", 2 * hidden * vocabulary, hidden * vocabulary * _BF16_BYTES, hidden, 2 * vocabulary)


def described_costs(
    model: MixtureOfExperts,
    profile: HardwareProfile,
    *,
    microbatch_rows: int,
    sequence_length: int,
    optimizer: HostOptimizer,
) -> Costs:
    """Costs of microbatches of `microbatch_rows` (over all devices) x `sequence_length` tokens, in bf16."""
    spec, devices = model_spec(model), profile.devices
    if microbatch_rows % devices:
        raise ValueError(f"microbatch of {microbatch_rows} rows cannot be split over {devices} devices")
    source = DescribedWork(model, microbatch_rows // devices, sequence_length)
    residuals: Mapping[str, Mapping[str, int]] = {
        "embed": {},
        "mixture": source.residual_bytes(),
        "head": {},
    }
    layers = []
    for index, layer in enumerate(spec.layers):
        length = slab_layout(layer.parameters, devices=devices).length // devices
        layers.append(
            LayerSizes(
                parameter_bytes=length * _BF16_BYTES,
                accumulator_bytes=length * 4,
                gradient_bytes=length * _BF16_BYTES,
                input_bytes=source.tokens * model.hidden_size * _BF16_BYTES if index else 0,
                residual_bytes=residuals[layer.kind],
                half_bytes=length * 2,
            )
        )
    sizes = ModelSizes(tuple(layers), source.tokens * BATCH_BYTES_PER_TOKEN, spec.tied, devices=devices)
    return Costs(
        spec=spec,
        profile=profile,
        optimizer=optimizer.name,
        update_bytes=touched_bytes(optimizer, "bfloat16"),
        microbatch_rows=microbatch_rows,
        sequence_length=sequence_length,
        sizes=with_state_bytes(sizes, spec, optimizer, devices=devices),
        source=source,
    )


def lazytrain_host_bytes(parameters: int, eight_bit_share: float) -> float:
    """Host bytes of LazyTrain's training state: bf16 weights 2, bf16 gradients 2, m and v 8 or 2.

    For GPT-OSS-120B this gives 1292.6 GiB at 2 % and 652.8 GiB at 100 % of 8-bit state, where the
    paper (table 6) has 1321.38 and 683.41 GiB: 12.14 and 6.28 bytes per parameter. The rest, 29-31 GiB
    in both, does not grow with the state; staging buffers would be of that size.
    """
    return parameters * (2 + 2 + 8 * (1 - eight_bit_share) + 2 * eight_bit_share)
