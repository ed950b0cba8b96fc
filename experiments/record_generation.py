"""Records what Transformers writes greedily with the SmolLM2 weights, for the tests.

Needs PyTorch and Transformers, which the project itself does not depend on, and a folder made by
`experiments.convert_smollm2`. From the repository's root, in an environment that has them:

    python experiments/record_generation.py SMOLLM2_FOLDER tests/golden/smollm2_generation.npz

Takes about two minutes on 2 cores. The file holds, for R prompts, N = 64 tokens each (no stop token is
heeded, so that all have as many):

    prompts_RT, lengths_R    token ids of the prompts, written by the model's chat template, padded at the end
    tokens_RN                what `generate` writes, float32, greedy, each prompt alone
    margins_RN               largest minus second largest logit where each of these was chosen
    gguf_sha256              of the file that the weights were decoded from
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

NEW_TOKENS = 64
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many legs do 13 ducks and 11 tigers have in total?",
    "Explain in simple words why the sky is blue.",
    "Solve for x: 3x + 5 = 20",
    "List three uses of copper.",
    "What is 59 * 64?",
    "Translate 'good morning' into Spanish.",
    "Xavier buys 4 pens for $7 each and pays with $50. How much change does Xavier get?",
    "Who wrote Romeo and Juliet, and roughly when?",
    "Give me a short recipe for pancakes with the amounts of flour, milk and eggs that I need for four "
    "people, and say in which order they are mixed and how hot the pan has to be.",
    "Hi",
    "Name the planets of the solar system in order.",
    "What does a compiler do?",
    "Simplify the fraction 50/130.",
    "Write a haiku about autumn leaves.",
    "Why do we have leap years? Answer in two sentences.",
    "What is the difference between a virus and a bacterium?",
    "Ines buys a set of notebooks. The price of $60 falls by 50%. What is the new price?",
    "Summarise: The Seine is a river in northern France. It is 777 km long and flows through Paris. In "
    "spring, people walk along its banks and look at the bridges, and boats carry visitors past churches.",
)


def main(folder: Path, target: Path) -> None:
    """Writes `target` from the model in `folder`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    prompts = [
        tokenizer(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )["input_ids"]
        for question in QUESTIONS
    ]
    prompts_RT = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    tokens_RN = np.zeros((len(prompts), NEW_TOKENS), np.int32)
    margins_RN = np.zeros((len(prompts), NEW_TOKENS), np.float32)
    for row, prompt in enumerate(prompts):
        prompts_RT[row, : len(prompt)] = prompt
        written = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens_RN[row] = written.sequences[0, len(prompt) :].numpy()
        top = torch.topk(torch.stack(written.logits)[:, 0], 2).values
        margins_RN[row] = (top[:, 0] - top[:, 1]).numpy()
        print(row, repr(tokenizer.decode(tokens_RN[row])), f"least margin {margins_RN[row].min():.4f}")
    np.savez_compressed(
        target,
        prompts_RT=prompts_RT,
        lengths_R=np.array([len(prompt) for prompt in prompts], np.int32),
        tokens_RN=tokens_RN,
        margins_RN=margins_RN,
        gguf_sha256=np.array(json.loads((folder / "conversion.json").read_text())["sha256"]),
        transformers_version=np.array(transformers.__version__),
        torch_version=np.array(torch.__version__),
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python experiments/record_generation.py SMOLLM2_FOLDER TARGET.npz")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
