"""PyTorch's and DeepSpeed's CPU AdamW, one step per line of standard input.

Run by `host_update.py` with an interpreter that has torch (and deepspeed); imports nothing of this
project. Prints the names it can run, then per line `name` read the seconds of one step.
"""

import sys
import time

import torch

ELEMENTS, THREADS = int(sys.argv[1]), int(sys.argv[2])
CLIP_NORM = 1.0


def parameter() -> torch.nn.Parameter:
    """A parameter with a gradient whose norm is above the clip norm."""
    tensor = torch.nn.Parameter(torch.randn(ELEMENTS // 1024, 1024))
    tensor.grad = torch.randn_like(tensor)
    return tensor


def reset_gradient(tensor: torch.nn.Parameter) -> None:
    """Undoes clipping, outside the measured time, so that every round has the same work."""
    tensor.grad.mul_(2.0)


torch.set_num_threads(THREADS)
tensor = parameter()
optimizers = {"torch": torch.optim.AdamW([tensor], lr=1e-5, weight_decay=0.01, fused=True)}
try:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizers["deepspeed"] = DeepSpeedCPUAdam([tensor], lr=1e-5, weight_decay=0.01, adamw_mode=True)
except Exception as error:
    print(f"deepspeed is left out: {error!r}", file=sys.stderr)

for optimizer in optimizers.values():
    optimizer.step()  # allocates the state
print("ready", *optimizers, torch.__version__, flush=True)
for line in sys.stdin:
    name, clip = line.split()
    reset_gradient(tensor)
    start = time.perf_counter()
    if clip == "clip":
        torch.nn.utils.clip_grad_norm_([tensor], CLIP_NORM)
    optimizers[name].step()
    print(time.perf_counter() - start, flush=True)
