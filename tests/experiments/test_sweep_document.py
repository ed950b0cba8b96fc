import pathlib

import pytest

from experiments.sweeping.document import SweepError, read_sweep

ROOT = pathlib.Path(__file__).parents[2]
BASE = "model: {architecture: Qwen2.5-7B}\ntraining: {steps: 10}\n"


def write(folder: pathlib.Path, text: str) -> pathlib.Path:
    (folder / "base.yaml").write_text(BASE)
    path = folder / "sweep.yaml"
    path.write_text(text)
    return path


GOOD = """
base: base.yaml
set: {training.steps: 5}
trials:
  - {name: deferred}
  - {name: immediate, set: {plan.update: immediate}}
grid:
  optimizer.learning_rate: [1.0e-3, 2.0e-3]
seeds: [0, 1]
compare: {baseline: deferred learning_rate=0.001, metrics: [last_evaluation_loss]}
"""


def test_a_sweep_is_the_product_of_its_list_its_grid_and_its_seeds(tmp_path):
    sweep = read_sweep(write(tmp_path, GOOD))
    assert len(sweep.trials) == 2 * 2 * 2
    last = sweep.trials[-1]
    assert last.name == "immediate learning_rate=0.002"
    assert last.seed == 1
    assert last.config is not None
    assert last.config.training.seed == last.config.data.seed == 1
    assert last.config.training.steps == 5
    assert last.config.plan.update == "immediate"
    assert last.config.optimizer.learning_rate == 2e-3
    assert len({trial.folder_name for trial in sweep.trials}) == 8


def test_a_baseline_may_be_keys_that_each_trial_is_held_against(tmp_path):
    text = GOOD.replace(
        "baseline: deferred learning_rate=0.001", "baseline: {optimizer.learning_rate: 1.0e-3}"
    )
    sweep = read_sweep(write(tmp_path, text))
    pairs = {trial.name: trial.compared_with for trial in sweep.trials}
    assert pairs == {
        f"{name} learning_rate={rate}": f"{name} learning_rate=0.001"
        for name in ("deferred", "immediate")
        for rate in (0.001, 0.002)
    }
    with pytest.raises(SweepError, match=r"no trial is as 'deferred learning_rate=0.001' but for that"):
        read_sweep(write(tmp_path, text.replace("learning_rate: 1.0e-3}", "learning_rate: 0.5}")))


def test_a_trial_keeps_its_digest_whatever_the_file_says_besides(tmp_path):
    digests = {trial.digest for trial in read_sweep(write(tmp_path, GOOD)).trials}
    fewer = GOOD.replace("[1.0e-3, 2.0e-3]", "[1.0e-3]").replace("seeds: [0, 1]", "seeds: [1]")
    assert {trial.digest for trial in read_sweep(write(tmp_path, fewer)).trials} < digests
    elsewhere = GOOD.replace("{training.steps: 5}", "{training.steps: 5, run.folder: somewhere}")
    assert {trial.digest for trial in read_sweep(write(tmp_path, elsewhere)).trials} == digests
    longer = GOOD.replace("steps: 5", "steps: 6")
    assert not {trial.digest for trial in read_sweep(write(tmp_path, longer)).trials} & digests


def test_a_trial_that_the_configuration_refuses_is_kept_with_the_reason(tmp_path):
    text = GOOD.replace("[1.0e-3, 2.0e-3]", "[1.0e-3, -1.0]")
    refused = [trial for trial in read_sweep(write(tmp_path, text)).trials if trial.problem]
    assert len(refused) == 4
    assert all("optimizer.learning_rate" in str(trial.problem) for trial in refused)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("base: base.yaml", "base: nowhere.yaml", "nowhere.yaml: cannot be read"),
        ("seeds: [0, 1]", "seeds: []", "seeds"),
        ("seeds: [0, 1]", "sedes: [0, 1]", "sedes"),
        ("training.steps: 5", "steps: 5", "expected GROUP.KEY"),
        ("training.steps: 5", "trianing.steps: 5", "no such group"),
        ("baseline: deferred learning_rate=0.001", "baseline: nothing", "is no trial"),
        ("{plan.update: immediate}", "{}", "are the same configuration"),
        ("base: base.yaml", "- base", "sweep.yaml: not YAML"),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path, old, new, words):
    with pytest.raises(SweepError, match=r"(sweep|nowhere)\.yaml") as caught:
        read_sweep(write(tmp_path, GOOD.replace(old, new)))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments" / "sweeps").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_sweep_of_the_repository_can_be_read(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = read_sweep(path)
    assert [trial.problem for trial in sweep.trials if trial.problem] == []
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    words = {line.split()[1] for line in comments}
    assert {"command", "report", "time", "expected"} <= words
