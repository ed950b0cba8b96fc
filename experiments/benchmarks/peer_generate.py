"""Transformers' `generate`, a batch per line of standard input.

Run by `decode_speed.py` with an interpreter that has torch and transformers; imports nothing of this project.
Arguments: model folder, rows, prompt tokens, new tokens, threads. Prints "ready" and the versions, then per
line read the seconds and CPU seconds of one call.
"""

import sys
import time

import torch
import transformers

FOLDER = sys.argv[1]
ROWS, PROMPT_TOKENS, NEW_TOKENS, THREADS = (int(word) for word in sys.argv[2:6])

torch.set_num_threads(THREADS)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True)
model.generation_config.eos_token_id = model.config.eos_token_id = None
prompts = torch.randint(100, model.config.vocab_size, (ROWS, PROMPT_TOKENS))


def generate() -> None:
    """One batch, greedy, every row to its last token."""
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
    )


generate()
print("ready", torch.__version__, transformers.__version__, flush=True)
for _ in sys.stdin:
    start, used = time.perf_counter(), time.process_time()
    generate()
    print(time.perf_counter() - start, time.process_time() - used, flush=True)
