"""The plan: every decision about one training step, as a versioned document.

A plan says where each layer's input (its boundary) and its named residuals live between the
forward and the backward pass, which parameters stay on the device, where what a layer owns from
step to step lives, and how the batch is cut. Planners write plans,
`lazyjax.planning.program.schedule` expands them; nothing else interprets them. Layers are numbered
as in `ModelSpec.layers`: 0 is the embedding, then the blocks, last the head; boundary l is the
input of layer l.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import pydantic

from lazyjax.specs import Boundary as Boundary
from lazyjax.specs import ModelSpec, Part, Tier

PLAN_VERSION: Literal[6] = 6
#: Versions that can still be read. 3: without homes of gradients and of the halves of the master weights,
#: which were on the host. 3 and 4: `batch_rows` had the name `rows`. 3 to 5: without `head_chunk`, which was
#: `HEAD_CHUNK`.
_EARLIER_VERSIONS = (3, 4, 5)
_WITH_ROWS = (3, 4)
#: Tokens whose logits exist at once, where nobody decides it.
HEAD_CHUNK = 1024


#: Fields of a plan that say what it was made for, besides the machine.
MADE_FOR = ("architecture", "optimizer", "compute_dtype", "gradient_dtype")


class PlanError(ValueError):
    """A plan that cannot be read or does not fit the model; the message names the key."""


OwnedHome = Literal["host", "nvme"]


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class LayerPlan(_Model):
    """Decisions for one layer.

    Attributes:
        boundary: home of the layer's input. The embedding's input is the batch of tokens, which
            stays on the device; the head's is used at once and must be `device`.
        saved: home of each named residual that is kept; names left out are recomputed.
        resident: parameters stay on the device from the forward to the backward pass.
        state, lo, gradient, hi: homes of the optimizer state, of the gradient until the update, and of
            the two halves of the master weights.
    """

    boundary: Boundary = Boundary.DEVICE
    saved: Mapping[str, Tier] = pydantic.Field(default_factory=dict)
    resident: bool = False
    state: OwnedHome = "host"
    lo: OwnedHome = "host"
    gradient: OwnedHome = "host"
    hi: OwnedHome = "host"

    def owned_home(self, part: Part) -> Tier:
        """Where a part lives."""
        return Tier(getattr(self, part.value))

    @property
    def on_nvme(self) -> frozenset[Part]:
        """The parts that live on NVMe."""
        return frozenset(part for part in Part if self.owned_home(part) is Tier.NVME)

    def with_on_nvme(self, parts: Collection[Part]) -> LayerPlan:
        """The same decisions with `parts` on NVMe and the others on the host."""
        return self.model_copy(update=owned_homes(parts, Tier.NVME))


def owned_homes(parts: Collection[Part], home: Tier) -> dict[str, str]:
    """Fields of a `LayerPlan`: `parts` on `home`, the others on the host."""
    return {part.value: (home if part in parts else Tier.HOST).value for part in Part}


class Prediction(_Model):
    """What the planner expected: seconds per step, bytes per tier, and how sure it is.

    `period_seconds` is the replay's, microbatch by microbatch. At layer granularity, where plans are
    compared, `bound_seconds` is a proven lower bound of any plan's period, and `gap` is (this plan's
    period there - bound) / period.
    """

    period_seconds: float
    bound_seconds: float | None = None
    gap: float | None = None
    peak_bytes: Mapping[str, int] = pydantic.Field(default_factory=dict)
    solve_seconds: float | None = None


class Plan(_Model):
    """All decisions of one step.

    Attributes:
        batch_rows, sequence_length: the batch the plan was made for, over all devices. A shorter
            sequence runs under the same plan; other rows do not.
        microbatches: M; all M pass a layer before the next layer's parameters are needed. All have
            the same rows; where M does not divide the batch, rows of padding fill the last one.
        prefetch: parameter slabs on the device during the forward pass (1: none ahead).
        backward_prefetch: the same during the backward pass.
        reload_ahead: microbatches ahead at which residuals are brought back to the device. A slab
            on the same link may delay a reload by its whole transfer, so this covers that time.
        offload_window: microbatches after which a copy out must have left the device; more of them keep
            memory for longer and stall less where some layers send more than a link takes meanwhile.
        interlayer_home: where activations and their gradients wait between a layer and the next while
            other microbatches pass: with `host`, device memory does not grow with the batch.
        token_chunk: tokens of a row that a block computes at a time, so that its working memory does not
            grow with the row; None: the whole row.
        head_chunk: tokens of a microbatch (of those on one device) whose logits exist at once. Every chunk of
            them reads the table, and reads and writes the float32 sum of its gradient; logits take memory.
        recompute: `needed` recomputes the boundaries that were dropped; `segment` also runs the
            last layer of the segment, whose output nobody uses (what MegaTrain does).
        update: `deferred` runs the host update under the next step's forward pass; `immediate`
            finishes it before the step ends.
        model: the name of the model it was made with; any of the same `architecture` can run it.
        architecture: `ModelSpec.architecture`.
        optimizer, compute_dtype, gradient_dtype: which its sizes and times are for.
        hardware, device: profile that its times come from, and what that says the device is.
    """

    version: Literal[6] = PLAN_VERSION
    model: str
    architecture: str | None = None
    optimizer: str | None = None
    compute_dtype: str | None = None
    gradient_dtype: str | None = None
    hardware: str | None = None
    device: str | None = None
    planner: str
    batch_rows: int = pydantic.Field(ge=1)
    sequence_length: int = pydantic.Field(ge=1)
    microbatches: int = pydantic.Field(default=1, ge=1)
    prefetch: int = pydantic.Field(default=2, ge=1)
    backward_prefetch: int = pydantic.Field(default=2, ge=1)
    reload_ahead: int = pydantic.Field(default=1, ge=1)
    offload_window: int = pydantic.Field(default=2, ge=1)
    interlayer_home: Literal["device", "host"] = "device"
    token_chunk: int | None = pydantic.Field(default=None, ge=1)
    head_chunk: int = pydantic.Field(default=HEAD_CHUNK, ge=1)
    recompute: Literal["needed", "segment"] = "needed"
    update: Literal["deferred", "immediate"] = "deferred"
    layers: tuple[LayerPlan, ...]
    prediction: Prediction | None = None

    @property
    def microbatch_rows(self) -> int:
        """Rows of one microbatch over all devices, padding included."""
        return -(-self.batch_rows // self.microbatches)

    @property
    def executed_rows(self) -> int:
        """Rows of all microbatches, padding included."""
        return self.microbatches * self.microbatch_rows

    def fingerprint(self) -> str:
        """A short digest of the decisions (not of the prediction, nor of what it was made for)."""
        decisions = self.model_dump(mode="json", exclude={"prediction", *MADE_FOR, "hardware", "device"})
        return hashlib.sha256(json.dumps(decisions, sort_keys=True).encode()).hexdigest()[:12]

    def save(self, path: pathlib.Path) -> None:
        """Writes the plan as JSON."""
        path.write_text(self.model_dump_json(indent=1) + "\n")


def load_plan(path: pathlib.Path) -> Plan:
    """Reads a plan.

    Raises:
        PlanError: naming the file and the key that is missing, unknown or of the wrong type.
    """
    try:
        document: Any = json.loads(path.read_text())
    except OSError as error:
        raise PlanError(f"plan {path}: cannot be read ({error.strerror})") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"plan {path}: not JSON ({error})") from error
    return read_plan(document, f"plan {path}")


def read_plan(document: Any, where: str) -> Plan:
    """The plan that a JSON document holds, of this version or of one before that can still be read.

    Args:
        where: names the document in messages.

    Raises:
        PlanError: naming the key that is missing, unknown or of the wrong type.
    """
    found = document["version"] if isinstance(document, dict) and "version" in document else None
    if found not in (PLAN_VERSION, *_EARLIER_VERSIONS):
        earlier = ", ".join(map(str, _EARLIER_VERSIONS))
        raise PlanError(
            f"{where}: version {found}, this release reads version {PLAN_VERSION} "
            f"and plans of versions {earlier}"
        )
    if found in _WITH_ROWS and "rows" in document:
        document = {("batch_rows" if key == "rows" else key): value for key, value in document.items()}
    try:
        return Plan.model_validate({**document, "version": PLAN_VERSION})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise PlanError(f"{where}: {key}: {first['msg']}") from error


def check_made_for(plan: Plan, asked: Mapping[str, Any], where: str) -> None:
    """Checks that a plan was made for what it is going to run with.

    Args:
        asked: field of the plan -> what is asked for.
        where: names the plan in the message.

    Raises:
        PlanError: naming the field and both values. What a plan does not say is not checked.
    """
    for field, value in asked.items():
        known = getattr(plan, field)
        if known is not None and known != value:
            raise PlanError(f"{where}: made for {field} {known}, but {value} is asked for")


def leaves_one_empty(batch_rows: int, microbatches: int) -> bool:
    """Whether equal microbatches that hold `batch_rows` in all would leave the last without a row."""
    return batch_rows <= (microbatches - 1) * -(-batch_rows // microbatches)


def validate_plan(plan: Plan, spec: ModelSpec, residual_names: Sequence[Sequence[str]]) -> None:
    """Checks that `plan` can be executed for `spec`.

    Args:
        residual_names: the tensors each layer can save, in layer order.

    Raises:
        PlanError: naming the first key that does not fit.
    """
    if plan.architecture not in (None, spec.architecture):
        raise PlanError(f"architecture: the plan is for another than {spec.name}'s (made with {plan.model})")
    if len(plan.layers) != len(spec.layers):
        raise PlanError(f"layers: {len(plan.layers)} entries, the model has {len(spec.layers)}")
    if leaves_one_empty(plan.batch_rows, plan.microbatches):
        raise PlanError(
            f"microbatches: {plan.microbatches} of {plan.microbatch_rows} rows are more than batch_rows: "
            f"{plan.batch_rows} fill"
        )
    last = len(plan.layers) - 1
    for index, (layer, names) in enumerate(zip(plan.layers, residual_names, strict=True)):
        where = f"layers.{index} ({spec.layers[index].name})"
        unknown = sorted(set(layer.saved) - set(names))
        if unknown:
            raise PlanError(f"{where}.saved: unknown tensor {unknown[0]!r}; the layer can save {list(names)}")
        if index in (0, 1, last) and layer.boundary is Boundary.RECOMPUTE:
            raise PlanError(f"{where}.boundary: nothing earlier is kept to recompute it from")
        if index in (0, last) and layer.boundary is not Boundary.DEVICE:
            raise PlanError(f"{where}.boundary: must be 'device', it is {layer.boundary.value!r}")


def uses_nvme(plan: Plan) -> bool:
    """Whether anything of the plan lives on NVMe."""
    return any(
        layer.boundary is Boundary.NVME or Tier.NVME in layer.saved.values() or layer.on_nvme
        for layer in plan.layers
    )


def segment_start(plan: Plan, layer: int) -> int:
    """The last layer at or before `layer` whose input is kept."""
    while plan.layers[layer].boundary is Boundary.RECOMPUTE:
        layer -= 1
    return layer
