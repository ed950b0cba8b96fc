"""The main run: a Qwen3.6-style hybrid model fine-tuned on math problems, streamed from host memory.

    python -m experiments.qwen27b                                   # smoke (small, any machine)
    python -m experiments.qwen27b full --model FOLDER --data FILE   # the paper's setup, needs a GPU

Presets are the files in `configs/`; every key can be set on the command line (`--help`). `full` takes
a Hugging Face folder of Qwen3.6-27B or Qwen3.5-27B and MetaMathQA-395K.json.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from rich.console import Console

from lazyjax.cli import guarded, quiet_libraries

CONFIGS = pathlib.Path(__file__).parent / "configs"
PRESETS = {name: CONFIGS / f"qwen27b_{name}.yaml" for name in ("full", "smoke")}

_INTRODUCTION = """
LazyJAX fine-tunes all weights of models that do not fit on the GPU. Weights and
optimizer state stay in host memory; layers pass through the device one at a
time. A plan decides beforehand what each layer keeps on the device, what waits
on the host and what is computed again; it is simulated, executed, and compared
with what was measured. What follows:

  1. simulated: the plan for the full model, Qwen3.6-27B, on a GPU that is not
     here (one H800, as in the LazyTrain paper), beside published rules
  2. measured: this machine trains a small model of the same architecture on
     word problems, under a plan that LazyJAX makes for it; its device may use
     45 MB only, so that the plan has to choose
  3. what the plan predicted beside what was measured, the loss on held-out
     problems, and a folder with it all

The full run, on a GPU:
  python -m experiments.qwen27b full --model FOLDER --data MetaMathQA-395K.json
"""


def choose_preset(arguments: Sequence[str], platform: str) -> tuple[str, str, Sequence[str]]:
    """The preset, the sentence that says why, and the arguments that are left.

    Args:
        arguments: of the command line; the first may name a preset.
        platform: of the default device, `cpu` where there is no accelerator.
    """
    if arguments and arguments[0] in PRESETS:
        name = arguments[0]
        return name, f"Preset `{name}`, as asked, on {platform}.", arguments[1:]
    if platform == "cpu":
        reason = "No accelerator found: running `smoke`, a small model of the same architecture, on the CPU."
        return "smoke", reason, arguments
    if any(argument.partition("=")[0] in ("--model", "--model.folder") for argument in arguments):
        return "full", f"Preset `full` on {platform}.", arguments
    reason = f"An accelerator ({platform}), but no --model FOLDER: running `smoke`, a small model."
    return "smoke", reason, arguments


def run(arguments: Sequence[str]) -> int:
    """Chooses the preset, predicts the full run, trains."""
    from lazyjax.config import load_config

    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)

    from lazyjax.hardware.devices import visible_devices

    platform = visible_devices()[0].platform
    preset, reason, overrides = choose_preset(arguments, platform)
    if "--help" not in overrides and "-h" not in overrides:
        say(reason)
    if preset == "full" and platform == "cpu":
        say("Without an accelerator a step of the full model takes hours; Ctrl-C stops it.")
    config = load_config(PRESETS[preset], overrides)

    from experiments.prediction import print_prediction
    from lazyjax.training import setup
    from lazyjax.training.interrupt import exit_status

    if preset == "smoke":
        say(_INTRODUCTION)
        print_prediction(console)
    summary = setup.train(config, console)
    before, after = summary["first_evaluation_loss"], summary["last_evaluation_loss"]
    if summary["status"] == "finished" and before is not None:
        say(f"evaluation loss {before:.4f} -> {after:.4f} ({1 - after / before:.0%} lower)")
    return exit_status(summary["reason"])


def main() -> int:
    """Command line."""
    quiet_libraries()
    words = [argument for argument in sys.argv[1:] if argument != "--debug"]
    return guarded(lambda: run(words), debug="--debug" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
