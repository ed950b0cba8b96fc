"""Whether the tests' outcome depends on the machine's load, on their order, or on how they are spread.

Command:  python -m experiments.benchmarks.test_stability [--busy 4] [--random-order] [--workers 1,4]
              [--together [--at-once]] [--repeats 3] [--seed 0] [--save|--append] [TESTS ...]
Whole runs of the suite (or of TESTS): beside busy loops, in random order, and with several numbers of
worker processes; each condition only where it is asked for, all three where none is. With --together every
run is made under all conditions at once, one run per number of workers: harder, and fewer runs; with
--at-once these runs are beside each other, too. A run is green when nothing failed and the run itself
ended. Random order: folders' files in an order drawn by the seed, the tests of a file likewise (fixtures of
a file then are made once). Expected: green, about as long as one run of the suite each, busy ones several
times that.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from experiments.benchmarks.provenance import ROOT, provenance

RESULT = pathlib.Path(__file__).parent / "results" / "test_stability.md"
SOURCES = ("lazyjax", "tests", "experiments/benchmarks/test_stability.py")
_TITLE = "# Runs of the tests under load, in random order, and spread differently"
#: The seed of the order, for this module as a plugin of pytest in every worker process.
_ORDER = "LAZYJAX_TEST_ORDER"


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """A hook of pytest: puts the tests in an order drawn by the seed, file by file."""
    if _ORDER not in os.environ:
        return
    rng = random.Random(int(os.environ[_ORDER]))
    files = sorted({item.nodeid.partition("::")[0] for item in items})
    rng.shuffle(files)
    keys = {item.nodeid: (files.index(item.nodeid.partition("::")[0]), rng.random()) for item in items}
    items.sort(key=lambda item: keys[item.nodeid])


class Condition(NamedTuple):
    """How one run is made.

    Attributes:
        busy: processes that compute beside it.
        order: seed of a random order; None keeps pytest's.
        workers: processes that run tests.
        others: whole runs beside it.
    """

    busy: int = 0
    order: int | None = None
    workers: int = 2
    others: int = 0

    def __str__(self) -> str:
        words = [f"{self.workers} workers"]
        words += [f"beside {self.busy} busy loops"] if self.busy else []
        words += [f"and {self.others} other run{'s' * (self.others > 1)}"] if self.others else []
        words += [] if self.order is None else [f"random order, seed {self.order}"]
        return ", ".join(words)


class Outcome(NamedTuple):
    """What came of one run; `bad` names tests that failed or could not run."""

    passed: int
    skipped: int
    bad: tuple[str, ...]
    code: int
    seconds: float

    @property
    def green(self) -> bool:
        """Nothing failed, and pytest says so too."""
        return self.code == 0 and not self.bad and self.passed > 0


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    # They end with their parent, however that ends.
    program = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    loops = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_tests(condition: Condition, tests: Sequence[str]) -> Outcome:
    """One run of pytest in a process of its own, beside whatever is there."""
    environment = dict(os.environ)
    environment.pop(_ORDER, None)
    if condition.order is not None:
        environment[_ORDER] = str(condition.order)
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "experiments.benchmarks.test_stability"]
        command += ["-n", str(condition.workers), "--dist", "worksteal", f"--junitxml={report}"]
        start = time.monotonic()
        code = subprocess.run([*command, *tests], cwd=ROOT, env=environment, check=False).returncode
        seconds = time.monotonic() - start
        passed, skipped, bad = read_report(report) if report.exists() else (0, 0, ())
    return Outcome(passed, skipped, bad, code, seconds)


def read_report(path: pathlib.Path) -> tuple[int, int, tuple[str, ...]]:
    """Tests that passed, tests that were skipped, and the names of the others, in a JUnit report."""
    cases = list(xml.etree.ElementTree.parse(path).getroot().iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None and case not in bad]
    names = tuple(sorted({f"{case.get('classname')}::{case.get('name')}" for case in bad}))
    return len(cases) - len(bad) - len(skipped), len(skipped), names


def conditions(options: argparse.Namespace) -> list[Condition]:
    """The runs that the options ask for; all kinds where they name none."""
    everything = not (options.busy or options.random_order or options.workers)
    busy = options.busy or (4 if everything else 0)
    counts = [int(count) for count in (options.workers or ("1,4" if everything else "")).split(",") if count]
    if options.together:
        counts = counts or [Condition().workers]
        orders = [options.seed + number if options.random_order else None for number in range(len(counts))]
        return [Condition(busy, *rest) for rest in zip(orders, counts, strict=True)]
    runs = [Condition(busy=busy)] * options.repeats if busy else []
    if options.random_order or everything:
        runs += [Condition(order=options.seed + number) for number in range(options.repeats)]
    return runs + [Condition(workers=count) for count in counts]


def outcomes(
    runs: Sequence[Condition], tests: Sequence[str], *, at_once: bool
) -> Iterator[tuple[Condition, Outcome]]:
    """Makes the runs, one after another or all beside each other and the same busy loops."""
    if at_once:
        runs = [run._replace(others=len(runs) - 1) for run in runs]
        busy = max(run.busy for run in runs)
        with busy_loops(busy), concurrent.futures.ThreadPoolExecutor(len(runs)) as pool:
            asked = {pool.submit(run_tests, run, tests): run for run in runs}
            for ended in concurrent.futures.as_completed(asked):
                yield asked[ended], ended.result()
        return
    for run in runs:
        print(f"=== {run}", flush=True)
        with busy_loops(run.busy):
            yield run, run_tests(run, tests)


def table(results: Sequence[tuple[Condition, Outcome]]) -> str:
    """A Markdown table, one line per run, and the tests that were not green."""
    fastest = min(outcome.seconds for _, outcome in results)
    lines = [
        "| run | passed | skipped | failed | outcome | time, times the shortest |",
        "|---|---|---|---|---|---|",
    ]
    for condition, outcome in results:
        word = "green" if outcome.green else f"NOT GREEN (exit code {outcome.code})"
        counts = f"{outcome.passed} | {outcome.skipped} | {len(outcome.bad)}"
        lines.append(f"| {condition} | {counts} | {word} | {outcome.seconds / fastest:.1f} |")
    for condition, outcome in results:
        lines += [f"\n{condition}: {name}" for name in outcome.bad]
    return "\n".join(lines)


def main() -> int:
    """Command line; the exit code says whether all runs were green."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside the runs")
    parser.add_argument("--random-order", action="store_true", help="runs in random order")
    parser.add_argument("--workers", default="", help="numbers of worker processes, e.g. 1,4")
    parser.add_argument("--together", action="store_true", help="each run under all conditions named")
    parser.add_argument("--at-once", action="store_true", help="the runs of --together beside each other")
    parser.add_argument("--repeats", type=int, default=3, help="runs per kind (of --workers: one each)")
    parser.add_argument("--seed", type=int, default=0, help="of the first random order")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--append", action="store_true", help="add to it")
    parser.add_argument("tests", nargs="*", default=["tests"], help="what to run instead of all tests")
    options = parser.parse_args()
    before = f"{_TITLE}\n"
    if options.append and RESULT.exists():
        before = RESULT.read_text()
    results = []
    for condition, outcome in outcomes(conditions(options), options.tests, at_once=options.at_once):
        results.append((condition, outcome))
        # After every run: what a killed benchmark has found is not lost.
        text = table(results)
        if options.save or options.append:
            asked = " ".join(sys.argv[1:])
            RESULT.write_text(f"{before}\n{provenance(*SOURCES)}\n\nOptions: `{asked}`\n\n{text}\n")
    print(text)
    return 0 if all(outcome.green for _, outcome in results) else 1


if __name__ == "__main__":
    sys.exit(main())
