"""The devices that JAX sees, or one line about why it sees none."""

from __future__ import annotations

import os

import jax


class DeviceError(ValueError):
    """JAX finds no device of the kind that was asked for."""


def visible_devices() -> list[jax.Device]:
    """All devices of the default backend.

    Raises:
        DeviceError: JAX_PLATFORMS names a backend that is unknown or has no device here.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        asked = os.environ["JAX_PLATFORMS"] if "JAX_PLATFORMS" in os.environ else ""
        why = str(error).partition(" (set JAX_PLATFORMS")[0].split("\n")[0]
        raise DeviceError(
            f"JAX finds no device for JAX_PLATFORMS={asked!r}{f' ({why})' if why else ''}: unset it to take "
            "what is there, or install the JAX of that accelerator"
        ) from error
