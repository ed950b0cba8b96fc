"""When checkpoints are saved, and how training goes on meanwhile.

A save is of one step: pending updates are applied first, then a thread writes layer after layer while the
next step already runs. An update of a layer that is not written yet waits for it (`fence`), so nothing is
copied. A save that fails leaves those before it as they were, says so and is tried again when the next
is due.
"""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lazyjax.config import CheckpointsConfig
from lazyjax.distributed.processes import Processes, alone
from lazyjax.planning.plan.document import Plan
from lazyjax.specs import ModelSpec
from lazyjax.training import checkpoints
from lazyjax.training.checkpoints import CheckpointWriteError, Identity, Position, ReadLayer


class _AbandonedError(Exception):
    """The save is given up between two layers."""


class Saver:
    """Saves a run's checkpoints into one folder.

    Args:
        folder: of the checkpoints; made with the first one.
        read_layer: opens a layer with its optimizer state.
        data_state: the loader's position.
        plan: the one in use.
        seed, config: what the run was configured with.
        attention: the form that runs.
        devices: that share every slab.
        processes: that save together; the first one says so, and deletes old ones.
        say: tells the user, from another thread too.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        spec: ModelSpec,
        read_layer: ReadLayer,
        identity: Identity,
        policy: CheckpointsConfig,
        *,
        data_state: Callable[[], Mapping[str, Any]],
        plan: Callable[[], Plan],
        seed: Mapping[str, int],
        config: Mapping[str, Any],
        attention: str,
        say: Callable[[str], None],
        devices: int | None = None,
        processes: Processes | None = None,
    ) -> None:
        self._folder, self._spec, self._read_layer = folder, spec, read_layer
        self._identity, self._policy, self._config, self._say = identity, policy, config, say
        self._attention, self._devices = attention, devices
        # The thread decides by itself, beside what the main one does.
        self._processes = processes or alone()
        self._channel = self._processes.channel("checkpoint")
        self.data_state, self._plan, self.seed = data_state, plan, seed
        self._thread: threading.Thread | None = None
        self._saved: Sequence[threading.Event] = ()
        self._abandoned = False
        self._last_begun = time.monotonic()
        self.last_step: int | None = None

    @property
    def enabled(self) -> bool:
        """Whether the run asks for checkpoints at all."""
        return self._policy.enabled

    def resumed(self, step: int, *, here: bool) -> None:
        """The run goes on after `step`, from a checkpoint of this folder or of another."""
        if here:
            self.last_step = step

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be saved after `step`."""
        steps, minutes = self._policy.every_steps, self._policy.every_minutes
        if steps is not None and step % steps == 0:
            return True
        return minutes is not None and time.monotonic() - self._last_begun >= 60 * minutes

    def begin(self, position: Position) -> None:
        """Starts saving; what is pending must have been applied. Waits for a save that goes on."""
        self.wait()
        self._last_begun = time.monotonic()
        self._saved = [threading.Event() for _ in self._spec.layers]
        self._thread = threading.Thread(target=self._save, args=(position, self._plan()), name="checkpoint")
        self._thread.start()

    def fence(self, layer: int) -> None:
        """Waits until a layer may change."""
        saved = self._saved
        if saved:
            saved[layer].wait()

    def wait(self) -> None:
        """Waits for the save that goes on, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread, self._saved = None, ()

    def abandon(self) -> None:
        """Gives up the save that goes on, at the next layer."""
        self._abandoned = True
        self.wait()

    def _save(self, position: Position, plan: Plan) -> None:
        def layer_saved(layer: int) -> None:
            self._saved[layer].set()
            if self._processes.watch is not None:
                self._processes.watch.advance()
            if self._abandoned:
                raise _AbandonedError

        try:
            start = time.perf_counter()
            path = checkpoints.save(
                self._folder,
                self._spec,
                self._read_layer,
                position,
                self._identity,
                plan=plan.model_dump(mode="json"),
                config=self._config,
                attention=self._attention,
                devices=self._devices,
                layer_saved=layer_saved,
                channel=self._channel,
            )
            self.last_step = position.step
            self._say(f"checkpoint {path} ({time.perf_counter() - start:.1f} s)")
            if self._channel.leads:
                checkpoints.prune(
                    self._folder, keep_last=self._policy.keep_last, keep_best=self._policy.keep_best
                )
        except _AbandonedError:
            if self._channel.leads:
                checkpoints.clean(self._folder)
        except CheckpointWriteError as error:
            self._say(f"WARNING: {error.strerror}; training goes on, checkpoints before it are whole")
        except OSError as error:
            self._say(f"WARNING: old checkpoints in {self._folder} cannot be deleted ({error.strerror})")
        finally:
            for event in self._saved:
                event.set()
