"""Every packaged model on every preset, and every batch of one model: that planning answers, and how fast.

Commands:  python -m experiments.coverage models [--presets NAME ...] [--limit 15]
           python -m experiments.coverage batches [--model NAME] [--machine PRESET] [--most 4096]
`models`: batch 8, one row per case with the seconds of processor time until the plan or the one-line
refusal. `batches`: throughput and step against batch, primes included, and a picture; both should be
monotone but for 2 %. Throughput is simulated, planning time measured.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from collections.abc import Sequence

from experiments import published
from experiments.benchmarks.provenance import provenance
from experiments.ours import planned, request_for
from experiments.sheet import Sheet, simulated_cell
from lazyjax.hardware.profile import load_profile, preset_names
from lazyjax.models.registry import architecture_names
from lazyjax.planning.planner.search import find_plan

RESULTS = pathlib.Path(__file__).parent / "results"
ROWS = 8


def models(folder: pathlib.Path, presets: Sequence[str], limit_seconds: float) -> Sheet:
    """One row per model and preset."""
    columns = ["model", "preset", "answer", "tokens/s", "planning s (measured)"]
    title = f"Planning every model on every preset, {ROWS} rows of {published.SEQUENCE_LENGTH} tokens"
    sheet = Sheet(title, columns)
    slowest, empty = 0.0, 0
    for preset in presets:
        for model in architecture_names():
            begun = time.process_time()
            request = request_for(model, load_profile(preset), ROWS)
            found = find_plan(request, time_limit_seconds=limit_seconds)
            seconds = time.process_time() - begun
            slowest = max(slowest, seconds)
            if found.plan is not None and found.plan.prediction is not None:
                rate = ROWS * published.SEQUENCE_LENGTH / found.plan.prediction.period_seconds
                sheet.add(model, preset, "plan", simulated_cell(rate, 0), f"{seconds:.1f}")
                continue
            missing = found.shortfall_bytes.items()
            short = ", ".join(f"{tier.value} {size / 1e9:.1f} GB" for tier, size in missing)
            empty += not short
            sheet.add(model, preset, f"short of {short}" if short else "no answer", "-", f"{seconds:.1f}")
    sheet.notes.append(
        f"Slowest case {slowest:.1f} s of this process (the solver's own process not counted); {empty} cases "
        f"without a plan or a reason. {provenance()}"
    )
    sheet.write(folder, "coverage_models")
    return sheet


def interesting_batches(most: int) -> list[int]:
    """Powers of two, their neighbours that are prime, and some between."""
    powers = [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]
    below = [next(n for n in range(power - 1, 0, -1) if _prime(n)) for power in powers if power > 4]
    between = [3 * power // 4 for power in powers if power >= 8]
    return sorted({*powers, *below, *between})


def _prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


def batches(folder: pathlib.Path, model: str, machine: str, most: int) -> Sheet:
    """Throughput against batch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = ["rows", "microbatches", "step s", "tokens/s", "planning s (measured)"]
    sheet = Sheet(f"Batches of {model} on {machine}", columns)
    points = list[tuple[int, float, float]]()
    for rows in interesting_batches(most):
        begun = time.monotonic()
        ours = planned(model, load_profile(machine), rows)
        seconds = time.monotonic() - begun
        if ours is None:
            sheet.add(str(rows), "-", "-", "does not fit", f"{seconds:.1f}")
            break
        points.append((rows, ours.tokens_per_second, ours.prediction.period_seconds))
        sheet.add(
            str(rows), str(ours.plan.microbatches), simulated_cell(ours.prediction.period_seconds),
            simulated_cell(ours.tokens_per_second, 0), f"{seconds:.1f}",
        )  # fmt: skip
        print(" | ".join(sheet.rows[-1]), flush=True)
    falls = [1 - late[1] / max(p[1] for p in points[: i + 1]) for i, late in enumerate(points)]
    shorter = [1 - late[2] / max(p[2] for p in points[: i + 1]) for i, late in enumerate(points)]
    sheet.notes.append(
        f"Throughput falls behind that of a smaller batch by at most {max(falls):.1%}, the step by "
        f"{max(shorter):.1%}."
    )
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.semilogx([p[0] for p in points], [p[1] for p in points], marker=".", base=2)
    axes.set_xlabel("rows of a batch")
    axes.set_ylabel(f"tokens/s, {model} on {machine} (simulated)")
    axes.set_ylim(bottom=0)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "coverage_batches.png", dpi=130)
    sheet.write(folder, "coverage_batches")
    return sheet


def main() -> None:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("models", "batches"))
    parser.add_argument("--presets", nargs="*", default=list(preset_names()))
    parser.add_argument("--limit", type=float, default=15.0, help="seconds for one search")
    parser.add_argument("--model", default="Qwen2.5-7B")
    parser.add_argument("--machine", default="h100-sxm")
    parser.add_argument("--most", type=int, default=4096)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    if options.what == "models":
        print(models(options.out, options.presets, options.limit).markdown())
    else:
        print(batches(options.out, options.model, options.machine, options.most).markdown())


if __name__ == "__main__":
    main()
