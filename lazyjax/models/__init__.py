"""Model families: their configs, layers and templates. `register` adds one from outside the package."""

from lazyjax.models.families import Family, register

__all__ = ["Family", "register"]
