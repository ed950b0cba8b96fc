"""The in-memory training that the SmolLM2 run is compared with, against the oracle."""

from __future__ import annotations

import pathlib

import numpy as np

from experiments.in_memory import masters, train_in_memory
from experiments.smollm2 import draw_losses
from lazyjax.config import OptimizerConfig
from tests import reference, tiny


def test_in_memory_training_is_the_oracles(tmp_path: pathlib.Path) -> None:
    model = tiny.template("qwen2", tied=True, blocks=2)
    parameters = reference.random_parameters(model, seed=0)
    batches = [reference.random_batch(seed, 4, 16, tiny.VOCABULARY) for seed in range(3)]
    config = OptimizerConfig(epsilon=1e-3, clip_norm=0.5)
    rates = np.asarray([1e-2, 1e-2, 1e-2], np.float32)
    expected, _ = reference.train(
        model,
        parameters,
        batches,
        learning_rate=1e-2,
        clip_norm=0.5,
        weight_decay=config.weight_decay,
        eps=1e-3,
    )
    start = masters(model, tiny.filled_store(model, parameters))
    losses, _ = train_in_memory(model, start, iter(batches), rates, config)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] != losses[0]
    draw_losses({"streamed": losses, "in memory": expected}, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 1000
