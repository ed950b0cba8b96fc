"""Records the rotary frequencies that Transformers computes, for the tests.

Needs PyTorch and Transformers, which the project itself does not depend on. From the repository's root, in
an environment that has them:

    python experiments/record_rope.py tests/golden/rope.json

One entry per case: `config` (a config.json), `length` (tokens of the text, which dynamic NTK depends on),
`frequencies` (radians per position of each pair) and `attention_factor`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

#: What config.json files of released long-context models say, at their head sizes.
SCALINGS: list[tuple[dict[str, Any], int]] = [
    ({"rope_type": "linear", "factor": 4.0}, 9000),
    ({"rope_type": "dynamic", "factor": 2.0}, 100),
    ({"rope_type": "dynamic", "factor": 2.0}, 4096),
    ({"rope_type": "dynamic", "factor": 4.0}, 20_000),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        100,
    ),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 100),
    ({"rope_type": "yarn", "factor": 4.0}, 100),
    (
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
        100,
    ),
    (
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
            "attention_factor": 1.25,
        },
        100,
    ),
]
SHAPES = [(1e6, 128, 1.0), (1e4, 64, 1.0), (5e5, 256, 0.25)]


def _record(
    scaling: dict[str, Any], length: int, theta: float, head_dim: int, partial: float
) -> dict[str, Any]:
    rope = {**scaling, "rope_theta": theta, "partial_rotary_factor": partial}
    document = {
        "model_type": "qwen3",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "rope_parameters": rope,
    }
    config = transformers.Qwen3Config(**json.loads(json.dumps(document)))
    function = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    frequencies, factor = function(config, "cpu", seq_len=length)
    return {
        "config": document,
        "length": length,
        "frequencies": [float(value) for value in frequencies],
        "attention_factor": float(factor),
    }


def main() -> None:
    """Writes the file named on the command line."""
    cases = [_record(scaling, length, *shape) for scaling, length in SCALINGS for shape in SHAPES]
    found = {"transformers_version": transformers.__version__, "cases": cases}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
