"""Whether more sets of saved tensors per layer kind would give better plans.

Command:  python -m experiments.benchmarks.save_sets [--first 0] [--count 20] [--save]
Plans twenty questions (models x machines x batches) with as many sets as the planner weighs and with
twice as many. Expected: no period improves by more than 0.5 %. About 20 s a question on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import unittest.mock

from experiments.benchmarks.provenance import provenance
from experiments.ours import request_for
from experiments.sheet import Sheet, simulated_cell
from lazyjax.hardware.profile import load_profile
from lazyjax.planning.costs import layers
from lazyjax.planning.planner.search import SearchResult, find_plan

MODELS = ("Qwen2.5-7B", "Qwen2.5-14B", "Qwen3.6-27B", "Qwen3-32B", "Llama-3.1-8B")
MACHINES = ("h100-sxm", "rtx4090")
BATCHES = (8, 32)
QUESTIONS = tuple(itertools.product(MODELS, MACHINES, BATCHES))
RESULTS = pathlib.Path(__file__).parent / "results"


def searched(model: str, machine: str, rows: int, most: int) -> SearchResult:
    """The search with at most so many sets."""
    with unittest.mock.patch.object(layers, "MOST_SAVE_SETS", most):
        request = request_for(model, load_profile(machine), rows)
        return find_plan(request, time_limit_seconds=30.0, relative_gap=0.005)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=len(QUESTIONS))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    usual = layers.MOST_SAVE_SETS
    columns = ["model", "machine", "rows", f"step s, {usual} sets", f"step s, {2 * usual} sets", "gain"]
    sheet = Sheet("Sets of saved tensors", columns)
    gains = []
    for model, machine, rows in QUESTIONS[options.first : options.first + options.count]:
        found = [searched(model, machine, rows, most) for most in (usual, 2 * usual)]
        plans = [result.plan for result in found]
        if any(plan is None or plan.prediction is None for plan in plans):
            sheet.add(model, machine, str(rows), "does not fit", "", "")
            continue
        few, many = (plan.prediction.period_seconds for plan in plans)  # type: ignore[union-attr]
        gains.append(1 - many / few)
        sheet.add(
            model, machine, str(rows), simulated_cell(few, 3), simulated_cell(many, 3), f"{gains[-1]:+.2%}"
        )
        print(" | ".join(sheet.rows[-1]), flush=True)
    sheet.notes.append(
        f"Largest gain of twice as many sets: {max(gains, default=0.0):+.2%}, of {len(gains)} questions that "
        "fit. Searches end at a gap of 0.5 % or after 30 s, so differences of that size are the search's. "
        f"{provenance()}"
    )
    print(sheet.markdown())
    if options.save:
        sheet.write(RESULTS, "save_sets")


if __name__ == "__main__":
    main()
