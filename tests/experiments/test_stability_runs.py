"""The benchmark that runs the tests: what it asks for, and what it takes for green."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import threading
import types

from experiments.benchmarks import test_stability as stability
from experiments.benchmarks.test_stability import Condition, Outcome, conditions, read_report, table

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="good"/>
<testcase classname="a" name="left out"><skipped/></testcase>
<testcase classname="a" name="wrong"><failure/></testcase>
<testcase classname="b" name="broken"><error/></testcase>
</testsuite></testsuites>"""


def options(**changed: object) -> argparse.Namespace:
    given = {"busy": 0, "random_order": False, "workers": "", "repeats": 2, "seed": 5, "together": False}
    return argparse.Namespace(**given | changed)


def test_all_conditions_unless_some_are_asked_for():
    busy, orders = [Condition(busy=4)] * 2, [Condition(order=5), Condition(order=6)]
    assert conditions(options()) == [*busy, *orders, Condition(workers=1), Condition(workers=4)]
    assert conditions(options(random_order=True)) == orders
    assert conditions(options(busy=1, workers="3")) == [*[Condition(busy=1)] * 2, Condition(workers=3)]


def test_together_every_run_is_under_all_conditions():
    both = [Condition(3, 5, 1), Condition(3, 6, 4)]
    assert conditions(options(together=True, busy=3, random_order=True, workers="1,4")) == both
    assert conditions(options(together=True, busy=3)) == [Condition(busy=3)]


def test_runs_at_once_share_the_busy_loops(monkeypatch):
    """All of them are under way before the first one ends."""
    loops, together = [], threading.Barrier(2)

    def run(condition: Condition, tests: list[str]) -> Outcome:
        together.wait(timeout=600)
        return Outcome(len(tests), 0, (), 0, float(condition.workers))

    monkeypatch.setattr(stability, "run_tests", run)
    monkeypatch.setattr(stability, "busy_loops", lambda count: contextlib.nullcontext(loops.append(count)))
    asked = [Condition(busy=4, workers=1), Condition(busy=4, workers=4)]
    found = dict(stability.outcomes(asked, ["one"], at_once=True))
    assert found == {run._replace(others=1): Outcome(1, 0, (), 0, float(run.workers)) for run in asked}
    assert loops == [4]
    assert "and 1 other run" in str(next(iter(found)))


def test_a_report_is_counted_and_names_what_went_wrong(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    assert read_report(tmp_path / "report.xml") == (1, 1, ("a::wrong", "b::broken"))


def test_green_needs_tests_that_passed_and_a_run_that_ended_well():
    assert Outcome(3, 1, (), 0, 1.0).green
    assert not Outcome(3, 1, (), 3, 1.0).green
    assert not Outcome(0, 0, (), 0, 1.0).green
    text = table(
        [(Condition(), Outcome(3, 0, ("a::wrong",), 1, 2.0)), (Condition(busy=4), Outcome(4, 0, (), 0, 6.0))]
    )
    assert "| 2 workers | 3 | 0 | 1 | NOT GREEN (exit code 1) | 1.0 |" in text
    assert "| 2 workers, beside 4 busy loops | 4 | 0 | 0 | green | 3.0 |" in text
    assert "2 workers: a::wrong" in text


def test_the_seed_gives_the_order_and_files_stay_together(monkeypatch):
    def drawn(seed: str) -> list[str]:
        monkeypatch.setenv("LAZYJAX_TEST_ORDER", seed)
        items = [
            types.SimpleNamespace(nodeid=f"{file}.py::{number}") for file in "abcd" for number in range(5)
        ]
        stability.pytest_collection_modifyitems(items)
        return [item.nodeid for item in items]

    assert drawn("1") == drawn("1")
    assert drawn("1") != drawn("2")
    assert sorted(drawn("1")) == sorted(drawn("2"))
    files = [name[0] for name in drawn("1")]
    assert len([one for one, other in itertools.pairwise(files) if one != other]) == 3
