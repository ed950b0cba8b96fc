"""How a real training becomes an outcome."""

import json

import pytest

from experiments.sweeping.attempt import can_resume, finished_summary
from experiments.sweeping.folder import State
from experiments.sweeping.trial import run
from lazyjax.config import dump_config
from tests.training.test_setup import small  # noqa: F401  (a fixture)


@pytest.fixture
def outcome_of(small, tmp_path):  # noqa: F811
    def outcome(**keys):
        path = tmp_path / "trial.yaml"
        path.write_text(dump_config(small(run__name="run", run__save_model="false", **keys)))
        return run(path, None)

    return outcome


def test_a_budget_that_no_plan_fits_is_a_result_in_the_planner_s_words(outcome_of, tmp_path):
    keys = {"plan__planner": "milp", "plan__hardware": "h800-paper", "plan__device_bytes": "1000"}
    outcome = outcome_of(**keys)
    assert outcome.state is State.INFEASIBLE
    assert "no plan fits 4 rows" in outcome.message
    assert "device memory" in outcome.message
    assert not (tmp_path / "runs").exists()


def test_a_mistake_is_a_failure_with_its_message(outcome_of, tmp_path):
    outcome = outcome_of(data__source=tmp_path / "nowhere.jsonl")
    assert outcome.state is State.FAILED
    assert "nowhere.jsonl" in outcome.message
    # No memory is missing where a folder cannot be used.
    (tmp_path / "file").write_text("")
    outcome = outcome_of(run__folder=tmp_path / "file" / "below")
    assert outcome.state is State.FAILED
    assert "run.folder" in outcome.message


def test_an_interrupted_run_goes_on_and_a_finished_one_is_recognised(outcome_of, tmp_path):
    folder = tmp_path / "runs" / "run"
    outcome = outcome_of(checkpoints__every_steps=1, training__max_hours=1e-9)
    assert outcome.state is State.INTERRUPTED
    assert finished_summary(folder) is None
    assert can_resume(folder)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("max_hours: 1.0e-09", "max_hours: null"))
    outcome = run(tmp_path / "trial.yaml", folder)
    assert outcome.state is State.SUCCEEDED
    assert outcome.summary["steps"] == 3
    assert finished_summary(folder) == json.loads((folder / "summary.json").read_text())
    assert not can_resume(folder)
    assert not can_resume(tmp_path)
