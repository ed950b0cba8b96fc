"""Records at Weights & Biases, with a module that stands for the package."""

import importlib.machinery
import io
import json
import sys
import types

import pytest
from rich.console import Console

from lazyjax.training import setup, wandb_log
from lazyjax.training.wandb_log import WandbError, WandbLog
from tests.training.test_setup import small  # noqa: F401  (a fixture)


class FakeRun:
    def __init__(self, fails_at: int | None) -> None:
        self.lines: list[tuple[int, dict]] = []
        self.finished = False
        self.fails_at = fails_at

    def log(self, values, step):
        if step == self.fails_at:
            raise ConnectionError("the service is gone")
        self.lines.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    """The module; `run` is what was begun, with what it was asked for in `asked`."""
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    module.fails_at, module.refuses = None, False

    def init(**asked):
        if module.refuses:
            raise RuntimeError("no network")
        module.run, module.asked = FakeRun(module.fails_at), asked
        return module.run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_every_record_is_mirrored(small, tmp_path, wandb):  # noqa: F811
    summary = setup.train(
        small(run__name="run", run__wandb="tries", run__save_model="false"), Console(file=io.StringIO())
    )
    folder = tmp_path / "runs" / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step for step, _ in wandb.run.lines] == [line["step"] for line in lines]
    assert wandb.run.lines[1][1]["train/loss"] == lines[1]["loss"]
    assert wandb.run.finished
    assert (wandb.asked["project"], wandb.asked["name"], wandb.asked["resume"]) == ("tries", "run", "allow")
    assert wandb.asked["config"]["data"]["rows"] == 4
    assert (folder / "wandb.id").read_text().strip() == wandb.asked["id"]
    assert summary["status"] == "finished"


def test_a_service_that_fails_ends_no_run(small, tmp_path, wandb):  # noqa: F811
    wandb.fails_at = 2
    said = []
    log = WandbLog(small(run__wandb="tries"), tmp_path, said.append)
    for step in range(4):
        log.record("train", step, {"loss": 1.0, "step": step})
    log.close()
    assert wandb.run.lines == [(0, {"train/loss": 1.0}), (1, {"train/loss": 1.0})]
    assert said == ["WARNING: run.wandb: the service is gone; the run goes on without it"]
    # A run that goes on keeps its identity.
    first = wandb.asked["id"]
    WandbLog(small(run__wandb="tries"), tmp_path, said.append)
    assert wandb.asked["id"] == first


def test_what_cannot_begin_there_leaves_no_run(small, tmp_path, wandb, monkeypatch):  # noqa: F811
    wandb.refuses = True
    with pytest.raises(WandbError, match=r"run.wandb: no network \(WANDB_MODE=offline"):
        setup.train(small(run__name="run", run__wandb="tries"), Console(file=io.StringIO()))
    assert not (tmp_path / "runs" / "run").exists()
    monkeypatch.setattr(wandb_log.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WandbError, match=r"pip install 'lazyjax\[wandb\]'"):
        setup.train(small(run__name="run", run__wandb="tries"), Console(file=io.StringIO()))
