"""Names that a key may take, of which code outside the package may add more.

The configuration is read before anything that the names stand for is imported, so it knows the names and
nothing else. Whoever registers something under a name adds it here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pydantic
from pydantic_core import CoreSchema, core_schema


class Names:
    """The names of one key, in the order in which they were added; metadata of an annotated `str`."""

    def __init__(self, *names: str) -> None:
        self._names = list(names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def add(self, name: str) -> None:
        """Takes one more name.

        Raises:
            ValueError: there is such a name.
        """
        if name in self._names:
            raise ValueError(f"there is a {name!r} already")
        self._names.append(name)

    def check(self, value: str) -> str:
        """The value, if it is a name.

        Raises:
            ValueError: it is none; the message lists the names.
        """
        if value not in self._names:
            *others, last = map(repr, self._names)
            raise ValueError(f"must be one of {', '.join(others)} or {last}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))


#: Host optimizers; `lazyjax.optim.make.register` adds one.
OPTIMIZER_NAMES = Names("hybrid8bit", "hybrid8bit_2percent", "fp32_adamw", "bf16_adamw")
#: The solver and the baselines; `lazyjax.planning.plan.baselines.register` adds one.
PLANNER_NAMES = Names("recompute_all", "keep_all", "megatrain", "lazytrain", "milp")
