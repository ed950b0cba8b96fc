"""Records what Transformers computes with the SmolLM2 weights on real text, for the tests.

Needs PyTorch and Transformers, which the project itself does not depend on, and a folder made by
`experiments.convert_smollm2`. From the repository's root, in an environment that has them:

    python experiments/record_smollm2.py SMOLLM2_FOLDER tests/golden/smollm2_logits.npz

Takes about 10 s on 2 cores. The file holds, for R texts of at most T tokens (rows padded at the
end; `lengths_R` says how far each goes):

    texts_R, tokens_RT       the texts and their token ids
    top_ids_RT5              ids of the five largest fp32 logits, largest first
    top_logits_RT5           those logits
    margins_RT               largest minus second largest
    bf16_top_logits_RT5      the same five ids' logits when Transformers computes in bf16
    losses_R                 mean next-token cross-entropy of each text, nats, fp32
    gguf_sha256              of the file that the weights were decoded from
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

TEXTS = (
    "The capital of France is Paris, and the river that runs through it is called the Seine. "
    "In spring, people walk along its banks and look at the bridges.",
    "Question: Natalia sold clips to 48 of her friends in April, and then she sold half as many "
    "clips in May. How many clips did she sell altogether?\nAnswer: In May she sold 48 / 2 = 24 "
    "clips. Altogether she sold 48 + 24 = 72 clips.",
    "Water boils at 100 degrees Celsius at sea level. At higher altitudes the air pressure is "
    "lower, so it boils at a lower temperature.",
)


def main(folder: Path, target: Path) -> None:
    """Writes `target` from the model in `folder`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    logits = {dtype: _logits(folder, rows, dtype) for dtype in (torch.float32, torch.bfloat16)}
    longest = max(len(row) for row in rows)
    tokens_RT = np.zeros((len(rows), longest), np.int32)
    top_ids_RT5 = np.zeros((len(rows), longest, 5), np.int32)
    top_logits_RT5 = np.zeros((len(rows), longest, 5), np.float32)
    bf16_top_logits_RT5 = np.zeros((len(rows), longest, 5), np.float32)
    losses_R = np.zeros(len(rows), np.float32)
    for i, row in enumerate(rows):
        length = len(row)
        logits_TV = logits[torch.float32][i]
        top = torch.topk(logits_TV, 5)
        tokens_RT[i, :length] = row
        top_ids_RT5[i, :length] = top.indices.numpy()
        top_logits_RT5[i, :length] = top.values.numpy()
        bf16_top_logits_RT5[i, :length] = logits[torch.bfloat16][i].gather(1, top.indices).numpy()
        losses_R[i] = torch.nn.functional.cross_entropy(logits_TV[:-1], torch.tensor(row[1:])).item()
    np.savez_compressed(
        target,
        texts_R=np.array(TEXTS),
        lengths_R=np.array([len(row) for row in rows], np.int32),
        tokens_RT=tokens_RT,
        top_ids_RT5=top_ids_RT5,
        top_logits_RT5=top_logits_RT5,
        margins_RT=top_logits_RT5[..., 0] - top_logits_RT5[..., 1],
        bf16_top_logits_RT5=bf16_top_logits_RT5,
        losses_R=losses_R,
        gguf_sha256=np.array(json.loads((folder / "conversion.json").read_text())["sha256"]),
        transformers_version=np.array(transformers.__version__),
        torch_version=np.array(torch.__version__),
    )
    noise = np.abs(bf16_top_logits_RT5 - top_logits_RT5).max()
    print(f"{target}: {sum(map(len, rows))} tokens, losses {losses_R}, bf16 noise at most {noise:.3f}")


def _logits(folder: Path, rows: list[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
    """fp32 copies of the [T, V] logits of every row, each row alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    with torch.no_grad():
        return [model(torch.tensor([row])).logits[0].float() for row in rows]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python experiments/record_smollm2.py SMOLLM2_FOLDER TARGET.npz")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
