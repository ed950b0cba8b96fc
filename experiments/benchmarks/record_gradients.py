"""Records gradients of the smoke model, for `update_error.py`.

    python -m experiments.benchmarks.record_gradients --output gradients.npz

Trains the preset `qwen27b_smoke` with fp32 AdamW and keeps what its updates were given: of every tensor
with at least 4096 elements 8 blocks of 256, spread evenly, times the clip factor. Writes the array
`gradients` [steps, n] in float32. Takes a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import pathlib

import jax
import numpy as np

from lazyjax.config import load_config
from lazyjax.data.batches import read_batches
from lazyjax.data.chat import load_tokenizer
from lazyjax.execution.build import build_executor
from lazyjax.models.registry import build_template, init_parameters
from lazyjax.optim.adamw import Fp32AdamW
from lazyjax.optim.base import HostState, StateDescription
from lazyjax.optim.clipping import ClipRule
from lazyjax.optim.hybrid8bit import MIN_8BIT_SIZE
from lazyjax.specs import BLOCK_ELEMENTS, SlabLayout
from lazyjax.storage.host import LayerSlabs, allocate_host_store
from lazyjax.training.inputs import read_architecture
from lazyjax.training.learning_rate import learning_rates
from lazyjax.training.start_plan import choose_plan

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "qwen27b_smoke.yaml"
BLOCKS_PER_TENSOR = 8


class RecordingAdamW:
    """fp32 AdamW that keeps a sample of the clipped gradients of every step."""

    def __init__(self, optimizer: Fp32AdamW) -> None:
        self._optimizer = optimizer
        self.samples: dict[int, list[np.ndarray]] = {}

    @property
    def name(self) -> str:
        """Of the recorded optimizer."""
        return self._optimizer.name

    @property
    def master_bytes(self) -> int:
        """As the optimizer that records."""
        return self._optimizer.master_bytes

    @property
    def state_version(self) -> str:
        """Of the recorded optimizer."""
        return self._optimizer.state_version

    def describe_state(self, layout: SlabLayout) -> StateDescription:
        """As the recorded optimizer."""
        return self._optimizer.describe_state(layout)

    def create_state(self, layout: SlabLayout) -> HostState:
        """As the recorded optimizer."""
        return self._optimizer.create_state(layout)

    def update(
        self, slabs: LayerSlabs, state: HostState, *, learning_rate: float, count: int, scale: float
    ) -> None:
        """Keeps the sample, then updates."""
        step = self.samples.setdefault(count, [])
        for segment in slabs.layout.segments:
            if segment.elements >= MIN_8BIT_SIZE:
                blocks = np.linspace(0, segment.elements // BLOCK_ELEMENTS - 1, BLOCKS_PER_TENSOR).astype(int)
                for block in blocks:
                    begin = segment.offset + block * BLOCK_ELEMENTS
                    values = slabs.gradient[begin : begin + BLOCK_ELEMENTS].astype(np.float32)
                    step.append(values * np.float32(scale))
        self._optimizer.update(slabs, state, learning_rate=learning_rate, count=count, scale=scale)

    def gradients(self) -> np.ndarray:
        """All samples [steps, n]."""
        return np.stack([np.concatenate(self.samples[count]) for count in sorted(self.samples)])


def main() -> None:
    """Trains and writes the file."""
    parser = argparse.ArgumentParser(description="Records gradients of the smoke model.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    arguments = parser.parse_args()

    config = load_config(CONFIG, ["--training.steps", str(arguments.steps)])
    template = build_template(read_architecture(config)[0])
    store = allocate_host_store(template.spec, gradient_dtype=config.optimizer.gradient_dtype)
    for index, slabs in enumerate(store.layers):
        for name, value in init_parameters(template, index, jax.random.key(config.training.seed)).items():
            slabs.set_master(name, value)
    batches = read_batches(config.data, load_tokenizer(), evaluate_rows=0)
    recording = RecordingAdamW(Fp32AdamW(weight_decay=config.optimizer.weight_decay, threads=2))
    executor = build_executor(
        template,
        choose_plan(config, template),
        store,
        recording,
        compute_dtype=config.model.compute_dtype,
        clip=ClipRule(config.optimizer.clip, config.optimizer.clip_norm),
    )
    rates = learning_rates(config.optimizer, arguments.steps)
    for rate, batch in zip(rates, batches.training, strict=False):
        result = executor.train_step(batch, float(rate))
    executor.flush()
    executor.close()
    print(f"last loss {result.loss:.3f}")
    np.savez_compressed(arguments.output, gradients=recording.gradients())


if __name__ == "__main__":
    main()
