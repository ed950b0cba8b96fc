"""A stopped run goes on as if it had not been stopped: every later number, bit for bit."""

from __future__ import annotations

import io
import json
import pathlib
import shutil
import threading
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from rich.console import Console

from lazyjax.config import Config, dump_config, load_config
from lazyjax.huggingface.tensor_files import CheckpointError
from lazyjax.training import inputs, setup
from lazyjax.training.checkpoints import ResumeError, list_checkpoints, open_checkpoint
from lazyjax.training.resume import read_resume
from lazyjax.training.run_folder import RunFolderError
from tests.training.test_setup import ARCHITECTURE

STEPS = 6
#: What may differ between two runs of the same arithmetic.
TIMES = (
    "step_seconds", "compile_seconds", "other_cpu_seconds", "tokens_per_second", "model_tflops", "host_bytes",
    "seconds",
)  # fmt: skip


def write_data(path: pathlib.Path, rows: int = 40) -> None:
    """Short sums of different lengths: tokenized in no time."""
    pairs = [
        {
            "query": "What is " + " plus ".join(str(n) for n in range(i % 7 + 2)) + "?",
            "response": f"It is {i}.",
        }
        for i in range(rows)
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Iterator[pathlib.Path]:
    """Model and data of all runs, and the runs that were not stopped."""
    folder = tmp_path_factory.mktemp("resume")
    # All runs here compile the same few kernels.
    keys = {
        "jax_compilation_cache_dir": str(folder / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {key: getattr(jax.config, key) for key in keys}
    for key, value in keys.items():
        jax.config.update(key, value)
    (folder / "small.json").write_text(json.dumps(ARCHITECTURE | {"num_hidden_layers": 1}))
    write_data(folder / "data.jsonl")
    yield folder
    for key, value in before.items():
        jax.config.update(key, value)


@pytest.fixture
def words(base, tmp_path):
    """Gives the arguments of a small run that saves after every second step."""
    fixed = {
        "model.architecture": base / "small.json", "model.compute-dtype": "float32",
        "data.source": base / "data.jsonl", "data.sequence-length": 64, "data.rows": 4,
        "data.batching": "padded", "data.train-fraction": 0.8, "optimizer.threads": 1,
        "optimizer.learning-rate": 1e-2, "optimizer.schedule": "linear", "optimizer.warmup-steps": 2,
        "plan.microbatches": 2, "plan.planner": "recompute_all", "training.steps": STEPS,
        "training.evaluate-rows": 4, "training.evaluate-every": 2, "checkpoints.every-steps": 2,
        "run.folder": tmp_path / "runs", "run.save-model": "false",
    }  # fmt: skip

    def make(**changed) -> list[str]:
        given = fixed | {key.replace("__", ".").replace("_", "-"): value for key, value in changed.items()}
        return [str(word) for key, value in given.items() for word in (f"--{key}", value)]

    return make


@pytest.fixture
def whole(words, base):
    """Gives what a run that was not stopped records and ends with; each kind runs once."""

    def run(kind: str = "8 bits, deferred", **keys):
        folder, name = base / "runs", kind.replace(" ", "-").replace(",", "")
        if name not in _WHOLE or not (folder / name).exists():
            config = load_config(None, words(run__name=name, run__folder=folder, **keys))
            _WHOLE[name] = trained(config)
        return records(folder / name), *_WHOLE[name]

    return run


#: Outcomes of the runs in the module's folder, by name.
_WHOLE: dict[str, tuple[dict, list[bytes]]] = {}


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def records(run: pathlib.Path) -> list[dict]:
    """What was recorded, without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def trained(config: Config, resume=None, *, stop_after: int | None = None, said: Console | None = None):
    """Runs; gives the summary and the bytes of all parameters and states. Stops as a signal would."""
    with setup.prepare(config, said or console(), resume) as prepared:
        trainer, executor = prepared.trainer, prepared.executor
        if stop_after is not None:
            step = executor.train_step

            def stopping(batch, rate):
                result = step(batch, rate)
                if executor.counts.applied + executor.counts.skipped == stop_after:
                    trainer._context.stop.time_is_up()
                return result

            executor.train_step = stopping
        summary = trainer.run()
        layers = range(len(prepared.store.layers))
        contents = [a.tobytes() for slabs in prepared.store.layers for a in (slabs.hi, slabs.lo)]
        contents += [a.tobytes() for i in layers for a in executor.updates.read_state(i).values()]
        return summary, contents


KINDS = {
    "8 bits, deferred": {},
    "float32, immediate": {"optimizer__name": "fp32_adamw", "plan__update": "immediate"},
    "bucketed, several epochs": {"data__batching": "bucketed", "data__rows": 8},
    "packed, bfloat16": {"data__batching": "packed", "model__compute_dtype": "bfloat16"},
    "everything on NVMe": {"nvme": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_goes_on_bit_for_bit(words, whole, tmp_path, kind):
    """Stopped after step 3, not at a save: the checkpoint of the stop is what it goes on from."""
    keys = dict(KINDS[kind])
    if keys.pop("nvme", False):
        keys |= {"plan__file": nvme_plan(words, tmp_path), "plan__nvme_folder": tmp_path / "nvme"}
    recorded, expected, weights = whole(kind, **keys)
    stopped = trained(load_config(None, words(run__name="stopped", **keys)), stop_after=3)
    run = tmp_path / "runs" / "stopped"
    assert (stopped[0]["status"], stopped[0]["reason"]) == ("interrupted", "time limit")
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000003"]
    assert len([record for record in records(run) if record["kind"] == "train"]) == 3
    config, resume = read_resume(run)
    summary, contents = trained(config, resume)
    assert records(run) == recorded
    assert contents == weights
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    for key in ("first_loss", "last_loss", "first_evaluation_loss", "last_evaluation_loss", "plan"):
        assert summary[key] == expected[key]


def nvme_plan(words, tmp_path) -> pathlib.Path:
    """A plan with boundaries and all that layers own on the drive."""
    from lazyjax.models.registry import build_template
    from lazyjax.planning.plan.document import Boundary
    from lazyjax.specs import Part
    from lazyjax.training.start_plan import choose_plan

    config = load_config(None, words())
    plan = choose_plan(config, build_template(inputs.read_architecture(config)[0]))
    layers = [layer.with_on_nvme(frozenset(Part)) for layer in plan.layers]
    layers[1:-1] = [layer.model_copy(update={"boundary": Boundary.NVME}) for layer in layers[1:-1]]
    plan.model_copy(update={"layers": tuple(layers), "prediction": None}).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_run_that_was_killed_goes_on_from_what_it_saved_last(words, whole, tmp_path):
    """As after kill -9: records beyond the checkpoint are there, and are written again, once."""
    recorded, _, weights = whole()
    trained(load_config(None, words(run__name="run", checkpoints__keep_last=9)), stop_after=5)
    run = tmp_path / "runs" / "run"
    for path in list_checkpoints(run / "checkpoints"):
        if path.name != "step-00000004":
            path.rename(tmp_path / path.name)
    assert records(run)[-1]["step"] == 5
    _, contents = trained(*read_resume(run))
    assert records(run) == recorded
    assert contents == weights


def test_a_damaged_checkpoint_is_skipped_and_said(words, whole, tmp_path):
    recorded, _, weights = whole()
    trained(load_config(None, words(run__name="run", checkpoints__keep_last=3)), stop_after=5)
    run = tmp_path / "runs" / "run"
    newest, middle, oldest = list_checkpoints(run / "checkpoints")
    (newest / "manifest.json").write_text("torn")
    array = next(file for file in sorted(middle.rglob("0")) if file.is_file())
    content = array.read_bytes()
    array.write_bytes(content[:40] + bytes([content[40] ^ 4]) + content[41:])
    config, resume = read_resume(run)
    said = console()
    _, contents = trained(config, resume, said=said)
    text = said.file.getvalue()
    assert f"skipped: {newest / 'manifest.json'}: damaged" in text
    assert f"skipped: {middle / 'layers' / '0000'}" in text
    assert f"resumed after step 2 from {oldest}" in text
    assert records(run) == recorded
    assert contents == weights


def test_where_nothing_is_whole_nothing_is_trained(words, tmp_path):
    trained(load_config(None, words(run__name="run")), stop_after=2)
    run = tmp_path / "runs" / "run"
    (checkpoint,) = list_checkpoints(run / "checkpoints")
    array = next(file for file in sorted(checkpoint.rglob("0")) if file.is_file())
    array.write_bytes(b"\0" * array.stat().st_size)
    config, resume = read_resume(run)
    with pytest.raises(ResumeError, match=r"no checkpoint is whole\n .*layers/0000"):
        trained(config, resume)
    array.unlink()
    with pytest.raises(ResumeError, match=r"no checkpoint is whole\n .*is missing"):
        read_resume(run)


def test_another_plan_gives_the_same_arithmetic(words, whole, tmp_path):
    recorded, _, _ = whole("epsilon", optimizer__epsilon=1e-3)
    expected = [record["loss"] for record in recorded]
    trained(load_config(None, words(run__name="run", optimizer__epsilon=1e-3)), stop_after=3)
    run = tmp_path / "runs" / "run"
    for change in ("microbatches=4", "planner=keep_all", "update=immediate", "devices=2"):
        again = run.with_name(change)
        shutil.copytree(run, again)
        trained(*read_resume(again, [f"--plan.{change}"]))
        # Some orders of summation apart.
        np.testing.assert_allclose([record["loss"] for record in records(again)], expected, rtol=1e-4)
        assert (again / "config-until-step-3.yaml").exists()
        assert (again / "plan-until-step-3.json").exists() == (change != "devices=2")


def test_what_may_not_change_is_refused_by_name(words, base, tmp_path):
    trained(load_config(None, words(run__name="run")), stop_after=2)
    run = tmp_path / "runs" / "run"
    for key, value in (("optimizer.name", "fp32_adamw"), ("data.rows", "8"), ("training.seed", "7")):
        with pytest.raises(ResumeError, match=rf"{key}: the run was begun with .*, {value} is asked for"):
            read_resume(run, [f"--{key}", value])
    architecture = (base / "small.json").read_text()
    (base / "small.json").write_text(json.dumps(ARCHITECTURE | {"num_hidden_layers": 2}))
    before = records(run)
    with pytest.raises(ResumeError, match="saved with another model: 3 layers, now 4"):
        trained(*read_resume(run))
    (base / "small.json").write_text(architecture)
    assert records(run) == before
    with pytest.raises(ResumeError, match="no run to resume"):
        read_resume(tmp_path / "absent")


def test_a_finished_run_is_not_written_to_and_can_be_made_longer(words, tmp_path):
    """More steps of a constant rate: as if it had been longer from the beginning."""
    keys = {"optimizer__schedule": "constant", "optimizer__warmup_steps": 0, "training__steps": 4}
    longer = trained(load_config(None, words(run__name="longer", **keys | {"training__steps": 5})))
    trained(load_config(None, words(run__name="run", **keys)))
    run = tmp_path / "runs" / "run"
    with pytest.raises(ResumeError, match=r"finished run and is never written to; set run\.name"):
        read_resume(run, ["--training.steps", "8"])
    config, resume = read_resume(run, ["--run.name", "more"])
    with pytest.raises(ResumeError, match=r"has 4 of 4 steps; ask for more with training\.steps"):
        trained(config, resume)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    _, contents = trained(*read_resume(run, ["--run.name", "more", "--training.steps", "5"]))
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert contents == longer[1]
    more = [r for r in records(tmp_path / "runs" / "more") if r["kind"] == "train"]
    assert more == [r for r in records(tmp_path / "runs" / "longer") if r["kind"] == "train"]


def test_a_finished_run_without_checkpoints_says_that_it_has_none(words, tmp_path):
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(load_config(None, words(run__name="run"))))
    (run / "summary.json").write_text('{"status": "finished"}')
    with pytest.raises(ResumeError, match=r"no checkpoint \(set checkpoints\.every_steps"):
        read_resume(run)


def test_two_processes_do_not_write_one_run(words, tmp_path):
    trained(load_config(None, words(run__name="run")), stop_after=2)
    run = tmp_path / "runs" / "run"
    with (
        setup.prepare(*_with_console(read_resume(run))),
        pytest.raises(RunFolderError, match="another process is writing this run"),
    ):
        trained(*read_resume(run))


def _with_console(pair):
    config, resume = pair
    return config, console(), resume


def test_the_model_of_an_interrupted_run_is_kept(words, tmp_path):
    keys = {"run__name": "run", "run__save_model": "true"}
    trained(load_config(None, words(**keys)), stop_after=2)
    run = tmp_path / "runs" / "run"
    weights = (run / "model" / "model.safetensors").read_bytes()
    trained(*read_resume(run))
    assert (run / "model-until-step-2" / "model.safetensors").read_bytes() == weights
    assert (run / "model" / "model.safetensors").read_bytes() != weights


def test_training_goes_on_while_a_checkpoint_is_written(words, whole, tmp_path, monkeypatch):
    """A save that takes until the next step's loss is known still holds its own step."""
    from lazyjax.training import checkpoints

    recorded, _, weights = whole()
    save_arrays, step_done = checkpoints._save_arrays, threading.Event()
    late = []

    def slow(folder, arrays):
        if "step-00000002" in str(folder):
            late.append(step_done.wait(60))
        save_arrays(folder, arrays)

    monkeypatch.setattr(checkpoints, "_save_arrays", slow)
    config = load_config(None, words(run__name="run", plan__update="deferred", checkpoints__keep_last=9))
    with setup.prepare(config, console()) as prepared:
        step = prepared.executor.train_step

        def noting(batch, rate):
            result = step(batch, rate)
            if prepared.executor.counts.applied == 3:
                step_done.set()
            return result

        prepared.executor.train_step = noting
        prepared.trainer.run()
    # Step 3 ended before any layer of step 2 was written.
    assert late == [True] * 3
    run = tmp_path / "runs" / "run"
    assert records(run) == recorded
    paths = {path.name: path for path in list_checkpoints(run / "checkpoints")}
    for name in set(paths) - {"step-00000002"}:
        paths[name].rename(tmp_path / name)
    (run / "summary.json").unlink()
    assert open_checkpoint(paths["step-00000002"]).position.applied_steps == 2
    _, contents = trained(*read_resume(run))
    assert contents == weights
    assert records(run) == recorded


def test_a_disk_without_room_for_checkpoints_is_refused_before_training(words, tmp_path, monkeypatch):
    monkeypatch.setattr(inputs.shutil, "disk_usage", lambda path: inputs.shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(
        (inputs.SetupError, CheckpointError), match=r"2 checkpoints of .*checkpoints\.every_steps"
    ):
        trained(load_config(None, words(run__name="run")))
    assert not (tmp_path / "runs").exists()
