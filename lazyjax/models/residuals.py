"""Splitting a layer's forward from its backward, with named residuals in between.

`jax.vjp` of a checkpointed layer returns its pullback as a pytree: the arguments verbatim
(`args_res`) and whatever else the policy saved (`opaque_residuals`). Leaves that are inputs are
left out, so that what crosses from the forward to the backward program is exactly the named
tensors. The backward program traces the same split again and puts the stored tensors in place
of the freshly traced ones; the forward that produced those is then dead code and is removed.

Both the executor's kernels and the planner's cost model use this, and so agree on what a set of
names means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array

Apply = Callable[[Any, Array, Any], Array]

#: What `checkpoint_name` calls its operation with `jax_remat3`, inside a primitive for all such operations.
_NAMES_OF_REMAT3 = frozenset({"CheckpointName", "CheckpointNameFwd"})


def _pullback(apply: Apply, names: Sequence[str], params: Any, x: Array, context: Any) -> tuple[Array, Any]:
    """Output and pullback, whose `opaque_residuals` are the named tensors, in the order of their use."""
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    layer = jax.checkpoint(apply, policy=policy, prevent_cse=False)
    pullback: Any
    # The context is an argument so that it is no residual; its gradients are dead code.
    y, pullback = jax.vjp(layer, params, x, context)
    kept = len(pullback.opaque_residuals)
    if kept != len(names):
        raise ValueError(
            f"saving {list(names)} keeps {kept} tensors: each name must stand for one tensor "
            "that the backward pass needs"
        )
    return y, pullback


def _split(
    apply: Apply, names: Sequence[str], params: Any, x: Array, context: Any
) -> tuple[Array, Any, list[int]]:
    """As `_pullback`, with the position of each of `names` among the residuals."""
    y, pullback = _pullback(apply, names, params, x, context)
    if len(names) < 2:
        return y, pullback, list(range(len(names)))
    found = _names_of_residuals(apply, names, params, x, context)
    return y, pullback, [found.index(name) for name in names]


def _names_of_residuals(apply: Apply, names: Sequence[str], params: Any, x: Array, context: Any) -> list[str]:
    def residuals(params: Any, x: Array, context: Any) -> list[Array]:
        kept: list[Array] = _pullback(apply, names, params, x, context)[1].opaque_residuals
        return kept

    arguments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, x, context))
    jaxpr = jax.make_jaxpr(residuals)(*arguments).jaxpr
    found = [_name_of(jaxpr, variable) for variable in jaxpr.outvars]
    if sorted(found) != sorted(names):
        raise ValueError(f"saving {list(names)} keeps tensors called {found}")
    return found


def _name_of(jaxpr: Any, variable: Any) -> str:
    """The name given to `variable`, looking through what JAX wraps around a saved tensor."""
    for equation in jaxpr.eqns:
        if variable not in equation.outvars:
            continue
        if equation.primitive.name == "name":
            return str(equation.params["name"])
        wrapped = equation.params.get("_prim")
        if type(wrapped).__name__ in _NAMES_OF_REMAT3:
            return str(wrapped.name)
        if equation.primitive.name in ("jit", "pjit", "closed_call", "checkpoint", "remat2"):
            inner = equation.params["jaxpr"]
            inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            return _name_of(inner, inner.outvars[equation.outvars.index(variable)])
        if len(equation.invars) == 1:
            return _name_of(jaxpr, equation.invars[0])
    return ""


def forward_keeping(
    apply: Apply, names: Sequence[str], params: Any, x: Array, context: Any
) -> tuple[Array, tuple[Array, ...]]:
    """As `forward_saving`, with the tensors in JAX's own order, which spares a second tracing."""
    y, pullback = _pullback(apply, names, params, x, context)
    return y, tuple(pullback.opaque_residuals)


def forward_saving(
    apply: Apply, names: Sequence[str], params: Any, x: Array, context: Any
) -> tuple[Array, tuple[Array, ...]]:
    """The layer's output and the tensors called `names`.

    Args:
        apply: pure function (params, x, context) -> y.
        names: in the order in which the layer computes them.

    Raises:
        ValueError: a name stands for no tensor, for several, or for one that backward never uses.
    """
    y, pullback, saved = _split(apply, names, params, x, context)
    return y, tuple(pullback.opaque_residuals[i] for i in saved)


def backward_from(
    apply: Apply,
    names: Sequence[str],
    params: Any,
    x: Array,
    context: Any,
    residuals: Sequence[Array],
    y_gradient: Array,
) -> tuple[Any, Array]:
    """Gradients with respect to params and x, recomputing all that is not in `residuals`."""
    _, pullback, saved = _split(apply, names, params, x, context)
    stored = list(pullback.opaque_residuals)
    for position, residual in zip(saved, residuals, strict=True):
        stored[position] = residual
    pullback.opaque_residuals = stored
    params_gradient, x_gradient, _ = pullback(y_gradient)
    return params_gradient, x_gradient


def residual_shapes(
    apply: Apply, names: Sequence[str], params: Any, x: Any, context: Any
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the tensors called `names`, without computing anything."""
    traced: tuple[jax.ShapeDtypeStruct, ...] = jax.eval_shape(
        lambda p, x, c: forward_saving(apply, names, p, x, c)[1], params, x, context
    )
    return traced
