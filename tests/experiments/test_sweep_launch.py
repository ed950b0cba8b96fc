"""What a sweep is expected to take, and workers as SLURM jobs."""

import sys
import types
from typing import ClassVar

import pytest
from rich.console import Console

from experiments.sweep import run
from experiments.sweeping.document import SweepError, read_sweep
from experiments.sweeping.folder import SweepFolder
from experiments.sweeping.predict import Predicted, predictions, predictions_table
from lazyjax.hardware.profile import load_profile


def write(folder, host_bytes: str = "4e9"):
    (folder / "base.yaml").write_text(
        "model: {architecture: Qwen2.5-0.5B}\n"
        "data: {rows: 4, sequence_length: 128}\n"
        "plan: {hardware: rtx3090}\n"
        "training: {steps: 10}\n"
        "checkpoints: {every_steps: 5}\n"
    )
    path = folder / "tried.yaml"
    path.write_text(
        "base: base.yaml\nseeds: [0, 1]\ntrials:\n"
        f"  - {{name: planned, set: {{plan.host_bytes: {host_bytes}}}}}\n"
        "  - {name: rule, set: {plan.planner: recompute_all}}\n"
        "  - {name: too much, set: {plan.host_bytes: 1e9}}\n"
        "compare: {baseline: planned, metrics: [median_step_seconds]}\n"
    )
    return path


def test_a_dry_run_predicts_every_trial_and_trains_nothing(tmp_path):
    sweep = read_sweep(write(tmp_path, "8e9"))
    profile = load_profile("rtx3090")
    answers = predictions(sweep, lambda config, template: profile)
    planned, rule, infeasible = (answers[name] for name in ("planned", "rule", "too much"))
    assert isinstance(planned, Predicted)
    assert isinstance(rule, Predicted)
    assert 0 < planned.step_seconds <= rule.step_seconds
    assert planned.total_seconds == pytest.approx(10 * planned.step_seconds)
    # bf16 weights and gradients at least; the model and two checkpoints of at least as much.
    assert planned.host_bytes > 2e9
    assert planned.disk_bytes > 3 * planned.host_bytes / 2
    assert "infeasible: no plan fits 4 rows" in infeasible
    folder = SweepFolder(tmp_path / "records")
    console = Console(width=120, record=True, quiet=True)
    console.print(predictions_table(sweep, folder, answers))
    assert not folder.path.exists()


class FakeExecutor:
    """Records what submitit would be asked for."""

    made: ClassVar[list["FakeExecutor"]] = []

    def __init__(self, folder, cluster):
        self.folder, self.cluster, self.parameters, self.commands = folder, cluster, {}, []
        FakeExecutor.made.append(self)

    def update_parameters(self, **parameters):
        self.parameters |= parameters

    def submit(self, command):
        self.commands.append(command)
        return types.SimpleNamespace(job_id=str(100 + len(self.commands)))


def test_workers_are_submitted_as_jobs(tmp_path, monkeypatch, capsys):
    fake = types.ModuleType("submitit")
    fake.AutoExecutor = FakeExecutor
    fake.helpers = types.SimpleNamespace(CommandFunction=lambda words: words)
    monkeypatch.setitem(sys.modules, "submitit", fake)
    words = ["--slurm", "--workers", "2", "--slurm-setting", "slurm_partition=gpu"]
    words += ["--slurm-setting", "timeout_min=60"]
    path = write(tmp_path)
    assert run([str(path), "--folder", str(tmp_path / "records"), *words]) == 0
    (executor,) = FakeExecutor.made
    assert executor.cluster == "slurm"
    assert executor.parameters == {"name": "sweep-records", "slurm_partition": "gpu", "timeout_min": 60}
    first, second = executor.commands
    assert first == second
    assert first[1:4] == ["-m", "experiments.sweep", str(path)]
    assert "--worker-cores" in first
    assert "101, 102" in capsys.readouterr().out


def test_what_slurm_lacks_is_one_message(tmp_path, monkeypatch):
    arguments = [str(write(tmp_path)), "--folder", str(tmp_path / "records"), "--slurm"]
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(SweepError, match=r"pip install 'lazyjax\[slurm\]'"):
        run(arguments)
    monkeypatch.setitem(sys.modules, "submitit", types.ModuleType("submitit"))
    with pytest.raises(SweepError, match="expected KEY=VALUE"):
        run([*arguments, "--slurm-setting", "gpu"])
