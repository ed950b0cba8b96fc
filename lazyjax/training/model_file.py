"""Writes the trained model, with patience: where the disk has no room, what was trained must not be lost."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from lazyjax.huggingface.tensor_files import CheckpointError
from lazyjax.training.interrupt import StopRequest

#: Waits between attempts to write the model where there is no room: an hour in all.
_ROOM_SECONDS = (10.0, 20.0, 30.0, *[60.0] * 59)


def write_model(
    save_model: Callable[[], pathlib.Path], stop: StopRequest, say: Callable[[str], None]
) -> pathlib.Path:
    """Writes the model and gives its folder; where the disk has no room, tries again.

    Args:
        stop: a signal ends the waiting.
    """
    for wait_seconds in (*_ROOM_SECONDS, None):
        try:
            path = save_model()
        except (OSError, CheckpointError) as error:
            if wait_seconds is None:
                raise
            say(
                f"WARNING: the model cannot be written ({error}); it is tried again in "
                f"{wait_seconds:g} s, a signal gives it up"
            )
            stop.writing("there is no room for the model: given up")
            if stop.wait(wait_seconds):
                raise
            stop.writing("the model is being written")
        else:
            say(f"model written to {path}")
            return path
    raise AssertionError("the last try returns or raises")
