"""Families of models that are not part of the package: `register` makes one known.

A family is described by plain data and functions, so that nothing of the package needs to be changed or
copied. `lazyjax.models.hf_config` reads its config.json, `lazyjax.models.registry` builds its template, and
`lazyjax.huggingface.key_maps` finds its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from lazyjax.models.architecture import Architecture, ArchitectureError
from lazyjax.models.template import LayerKind

#: The names of `lazyjax.huggingface.key_maps.Transform`.
TransformName = Literal["identity", "transpose", "convolution"]


class Family(NamedTuple):
    """What the package has to know of a family.

    Attributes:
        name: `family` of its architecture class.
        model_types: `model_type` in config.json of the models that belong to it.
        read_config: (config.json, name of the model) -> an instance of a subclass of `Architecture`. Raises
            `ArchitectureError` for what is not implemented.
        write_config: the inverse, for models that were not started from a Hugging Face folder.
        blocks: (architecture, form of attention) -> the kinds of block, and the name of every block's kind.
        keys: parameter of a block -> (key behind `model.layers.N.`, how the stored array is laid out). A
            block uses those that it has.
        zero_centered: form of the final norm, see `lazyjax.models.layers.RMSNorm`.
    """

    name: str
    model_types: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any], str], Architecture]
    write_config: Callable[[Any], dict[str, Any]]
    blocks: Callable[[Any, str], tuple[tuple[LayerKind, ...], tuple[str, ...]]]
    keys: Mapping[str, tuple[str, TransformName]]
    zero_centered: bool = False


_registered: dict[str, Family] = {}
#: Names and model types that the package itself has.
_OWN = ("qwen2", "qwen3", "qwen3_5", "llama", "qwen3_5_text")


def register(family: Family) -> None:
    """Makes a family known to this process; the same one may be registered again.

    Raises:
        ArchitectureError: its name or a model type is taken.
    """
    taken = [*_OWN]
    for other in _registered.values():
        if other.name != family.name:
            taken += [other.name, *other.model_types]
    for name in (family.name, *family.model_types):
        if name in taken:
            raise ArchitectureError(f"family {family.name!r}: the name {name!r} is taken")
    _registered[family.name] = family


def registered(name: str) -> Family:
    """The registered family of that name.

    Raises:
        ArchitectureError: there is none.
    """
    if name not in _registered:
        raise ArchitectureError(f"there is no family {name!r}; lazyjax.models.register makes one known")
    return _registered[name]


def family_of(model_type: str) -> Family | None:
    """The registered family that a config.json's `model_type` belongs to."""
    return next((family for family in _registered.values() if model_type in family.model_types), None)


def registered_model_types() -> tuple[str, ...]:
    """Of all registered families."""
    return tuple(name for family in _registered.values() for name in family.model_types)
