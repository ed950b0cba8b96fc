"""Records what Transformers computes with tiny random models, for the parity tests.

Needs PyTorch and Transformers, which the project itself does not depend on. From the repository's
root, in an environment that has them:

    python experiments/record_reference.py tests/golden/models

Takes about 10 s on 2 cores. One file per model, B rows of at most T tokens, padded at the end:

    config                   the model's config.json
    tokens_BT, lengths_B     token ids (0 in the padding), and how far each row goes
    logits_BTV               logits; those of the padding mean nothing
    loss                     mean cross-entropy of the next token over all real targets, nats
    weight/KEY               every parameter under its Hugging Face key
    gradient/KEY             the loss's gradient with respect to it
    transformers_version, torch_version

Weights are rounded to bfloat16 and stored as float32, which halves the compressed files. Everything
is computed in float64, also where the models cast to float32 by themselves, and rounded to float32
at the end: in float32 the hybrid's own gradients are off by up to 8e-5.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 61
#: Not multiples of the chunk of 64, one beyond it, all but one padded.
LENGTHS = (77, 66, 9)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
#: Wavelengths of the smallest model fall into all three ranges of this scaling.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_HYBRID = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {**_PLAIN_ROPE, "partial_rotary_factor": 0.25},
}

#: File name -> config class, model class, keys beyond the common ones.
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False, "rope_parameters": _PLAIN_ROPE}),
    "qwen2_tied": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"tie_word_embeddings": True, "rope_parameters": _PLAIN_ROPE},
    ),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False, "rope_parameters": _PLAIN_ROPE}),
    "llama3_rope_tied": (
        LlamaConfig,
        LlamaForCausalLM,
        {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE},
    ),
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"tie_word_embeddings": False, "rope_parameters": _PLAIN_ROPE, "head_dim": 16},
    ),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, {"tie_word_embeddings": False, **_HYBRID}),
    "qwen3_5_tied": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, {"tie_word_embeddings": True, **_HYBRID}),
}


def main(folder: Path) -> None:
    """Writes one file per model into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, (config_class, model_class, keys)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = model_class(config_class(**(_COMMON | keys))).float().train()
        _randomize(model)
        target = folder / f"{name}.npz"
        with _casts_to_float64():
            arrays = _record(model.double())
        np.savez_compressed(target, **arrays)
        print(f"{target}: {target.stat().st_size / 1e3:.0f} kB, loss {arrays['loss']:.4f}")


def _randomize(model: torch.nn.Module) -> None:
    """Weights far enough from their initial values that every parameter matters."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.5 if "conv1d" in key else 0.2)
            elif key.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.1, 8.0).log())
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if key.endswith("dt_bias"):
                # Slow decays, as trained models have them: states live for many tokens.
                parameter.sub_(3.0)
            parameter.copy_(parameter.to(torch.bfloat16).float())


@contextlib.contextmanager
def _casts_to_float64() -> Iterator[None]:
    """Makes float64 of what models cast to float32 (norms, rotary angles, the delta rule)."""
    kept = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = kept


def _record(model: torch.nn.Module) -> dict[str, Any]:
    longest = max(LENGTHS)
    tokens_BT = torch.randint(1, VOCABULARY, (len(LENGTHS), longest))
    real_BT = torch.arange(longest)[None] < torch.tensor(LENGTHS)[:, None]
    tokens_BT = tokens_BT * real_BT
    logits_BTV = model(input_ids=tokens_BT, attention_mask=real_BT.long(), use_cache=False).logits
    # A target counts where it is real, and so is what predicts it.
    counted = real_BT[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits_BTV[:, :-1][counted], tokens_BT[:, 1:][counted])
    loss.backward()
    arrays: dict[str, Any] = {
        "config": np.array(json.dumps(model.config.to_dict())),
        "tokens_BT": tokens_BT.numpy().astype(np.int32),
        "lengths_B": np.array(LENGTHS, np.int32),
        "logits_BTV": logits_BTV.detach().numpy().astype(np.float32),
        "loss": np.array(loss.item(), np.float32),
        "transformers_version": np.array(transformers.__version__),
        "torch_version": np.array(torch.__version__),
    }
    for key, parameter in model.named_parameters():
        arrays[f"weight/{key}"] = parameter.detach().numpy().astype(np.float32)
        arrays[f"gradient/{key}"] = parameter.grad.numpy().astype(np.float32)
    return arrays


if __name__ == "__main__":
    main(Path(sys.argv[1]))
