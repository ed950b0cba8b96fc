"""The loop's bookkeeping, with an executor whose every answer is known beforehand."""

import dataclasses
import errno
import io
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import numpy as np
import pytest
from rich.console import Console

from lazyjax.batch import Batch
from lazyjax.execution.executor import NonFiniteStepsError, StepResult
from lazyjax.timeline import Event, Resource, Timeline
from lazyjax.training import model_file
from lazyjax.training.display import Display
from lazyjax.training.examination import NonFiniteModelError
from lazyjax.training.interrupt import STOPPING, StoppedAtOnce, exit_status
from lazyjax.training.loop import Trainer
from lazyjax.training.run_context import TrainingSchedule
from lazyjax.training.run_folder import RunFolder

ROWS, LENGTH = 2, 4


def make_batch() -> Batch:
    tokens = np.zeros((ROWS, LENGTH), np.int32)
    segments = np.ones((ROWS, LENGTH), np.int32)
    segments[:, -1] = 0
    return Batch(tokens, tokens, segments > 0, segments, tokens)


class KnownExecutor:
    """Answers from formulas and notes the calls."""

    def __init__(self, on_step=None):
        self.calls = []
        self.on_step = on_step

    def train_step(self, batch: Batch, learning_rate: float) -> StepResult:
        self.calls.append(("train", learning_rate))
        step = sum(name == "train" for name, _ in self.calls)
        if self.on_step is not None:
            self.on_step(step)
        return StepResult(
            loss=4.0 / step,
            gradient_norm=1.0,
            skipped=False,
            target_tokens=batch.target_tokens,
            real_tokens=batch.real_tokens,
            padded_tokens=batch.rows * batch.sequence_length,
            seconds=0.5,
            peak_device_bytes=1000 + step,
        )

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        step = sum(name == "train" for name, _ in self.calls)
        self.calls.append(("evaluate", step))
        return 6.0 / (1 + step), batch.target_tokens

    def flush(self) -> None:
        self.calls.append(("flush", None))

    def timeline(self) -> Timeline:
        return Timeline("measured", (Event(1, 0, "forward", Resource.COMPUTE, 0, 0, 0.0, 1.0),))


def make_trainer(
    tmp_path, executor, *, steps=4, evaluate_every=2, evaluation_batches=2, output=None, save_model=None
):
    output = io.StringIO() if output is None else output
    console = Console(file=output, width=200)
    schedule = TrainingSchedule(
        np.linspace(0.1, 0.4, steps, dtype=np.float32), evaluate_every, steps_per_epoch=2
    )
    trainer = Trainer(
        executor,
        itertools.repeat(make_batch()),
        lambda: [make_batch()] * evaluation_batches,
        schedule,
        parameter_count=1000,
        folder=RunFolder(tmp_path),
        display=Display(console, steps=steps, log_every=1),
        facts={"model": "known"},
        save_model=save_model,
    )
    return trainer, output


def records(tmp_path, kind):
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_order_of_steps_evaluations_and_flush(tmp_path):
    executor = KnownExecutor()
    make_trainer(tmp_path, executor)[0].run()
    names = [name for name, _ in executor.calls]
    evaluation = ["evaluate"] * 2
    assert names == evaluation + ["train"] * 2 + evaluation + ["train"] * 2 + ["flush"] + evaluation
    rates = [rate for name, rate in executor.calls if name == "train"]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_records_hold_every_step_and_evaluation(tmp_path):
    make_trainer(tmp_path, KnownExecutor())[0].run()
    steps = records(tmp_path, "train")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert [step["loss"] for step in steps] == [4.0, 2.0, 4.0 / 3, 1.0]
    assert [step["epoch"] for step in steps] == [0.5, 1.0, 1.5, 2.0]
    for step in steps:
        assert (step["real_tokens"], step["padded_tokens"], step["target_tokens"]) == (6, 8, 6)
        # The two throughputs stand in the fixed ratio of their conventions.
        assert step["model_tflops"] * 1e12 / (6 * 1000) / step["tokens_per_second"] == pytest.approx(8 / 6)
        assert step["host_bytes"] > 2**20
    evaluations = records(tmp_path, "evaluation")
    assert [entry["step"] for entry in evaluations] == [0, 2, 4]
    # Sum over batches divided by the sum of target tokens.
    assert evaluations[0]["loss"] == pytest.approx(1.0)
    assert evaluations[-1]["loss"] == pytest.approx(1 / 5)
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_summary_and_timeline(tmp_path):
    returned = make_trainer(tmp_path, KnownExecutor())[0].run()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == returned
    assert (summary["status"], summary["reason"], summary["model"]) == ("finished", None, "known")
    assert (summary["first_loss"], summary["last_loss"]) == (4.0, 1.0)
    assert summary["last_evaluation_loss"] == pytest.approx(summary["first_evaluation_loss"] / 5)
    assert summary["peak_device_bytes"] == 1004
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert any(event["ph"] == "X" for event in trace["traceEvents"])


def test_no_evaluation_rows_no_evaluation(tmp_path):
    summary = make_trainer(tmp_path, KnownExecutor(), evaluation_batches=0)[0].run()
    assert summary["first_evaluation_loss"] is None
    assert not records(tmp_path, "evaluation")


def test_printed_line_names_its_units(tmp_path):
    trainer, output = make_trainer(tmp_path, KnownExecutor())
    trainer.run()
    line = next(line for line in output.getvalue().splitlines() if line.startswith("step 1/4"))
    words = ["loss 4.0000", "grad norm 1", "lr 1.00e-01"]
    words += ["tokens/s", "model TFLOPS", "device", "host", "left"]
    assert [word for word in words if word not in line] == []


def send(number, seen, words):
    """Sends a signal to this process and waits until `words` are shown.

    A process has many threads and any of them may take the signal; the main thread runs Python's handler
    some time after that, and a second signal that comes before merges with the first.
    """
    shown = seen.getvalue().count(words)
    os.kill(os.getpid(), number)
    wait_for(seen, words, shown)


def wait_for(seen, words, shown=0):
    """Until `words` are shown once more than `shown` times."""
    give_up = time.monotonic() + 60
    while seen.getvalue().count(words) == shown:
        assert time.monotonic() < give_up, f"{words!r} is not shown"
        time.sleep(0.001)


@pytest.mark.parametrize("number", STOPPING)
def test_signal_finishes_the_step_and_writes_everything(tmp_path, number):
    executor = KnownExecutor()
    before = signal.getsignal(number)
    trainer, output = make_trainer(tmp_path, executor, steps=9, evaluate_every=0)
    executor.on_step = lambda step: step == 3 and send(number, output, "stopping after this step")
    summary = trainer.run()
    assert exit_status(summary["reason"]) == 128 + number
    assert signal.getsignal(number) is before
    assert (summary["status"], summary["reason"]) == ("interrupted", signal.Signals(number).name)
    assert [step["step"] for step in records(tmp_path, "train")] == [1, 2, 3]
    assert executor.calls[-1] == ("flush", None)
    assert (tmp_path / "timeline.json").exists()


def test_second_interrupt_ends_at_once(tmp_path):
    executor = KnownExecutor()
    trainer, output = make_trainer(tmp_path, executor)

    def twice(step):
        send(signal.SIGINT, output, "stopping after this step")
        send(signal.SIGINT, output, "never shown while this goes on")

    executor.on_step = twice
    with pytest.raises(StoppedAtOnce):
        trainer.run()
    assert ("flush", None) not in executor.calls
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_signals_count_while_the_main_thread_cannot_look(tmp_path):
    """As in a long compilation: Python alone would take the two for one, and answer neither."""
    executor, seen = KnownExecutor(), threading.Lock()
    trainer, output = make_trainer(tmp_path, executor)

    def press_twice():
        send(signal.SIGINT, output, "stopping after this step")
        send(signal.SIGINT, output, "stopping at once")
        seen.release()

    def busy(step):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        seen.acquire()
        threading.Thread(target=press_twice).start()
        seen.acquire()

    executor.on_step = busy
    try:
        with pytest.raises(StoppedAtOnce) as stopped:
            trainer.run()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    assert stopped.value.exit_status == 130
    assert len(records(tmp_path, "train")) == 0


def test_signals_change_nothing_while_the_model_is_written(tmp_path):
    seen = io.StringIO()

    def save():
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            send(number, seen, "the model is being written; that ends by itself")
        (tmp_path / "model").mkdir()
        return tmp_path / "model"

    trainer, _ = make_trainer(tmp_path, KnownExecutor(), output=seen, save_model=save)
    summary = trainer.run()
    assert (summary["status"], summary["model_folder"]) == ("finished", "model")
    assert f"model written to {tmp_path / 'model'}" in seen.getvalue()


def test_a_signal_cuts_the_last_evaluation_short_and_loses_nothing(tmp_path):
    executor, seen = KnownExecutor(), io.StringIO()

    def evaluate(batch):
        send(signal.SIGTERM, seen, "SIGTERM: the model is evaluated, then saved")
        send(signal.SIGTERM, seen, "SIGTERM: the model is evaluated, then saved")
        return 1.0, 1

    executor.on_step = lambda step: step == 4 and setattr(executor, "evaluate", evaluate)
    trainer, _ = make_trainer(tmp_path, executor, output=seen, save_model=lambda: tmp_path / "model")
    summary = trainer.run()
    assert (summary["status"], summary["reason"]) == ("interrupted", "SIGTERM")
    assert (summary["steps"], summary["model_folder"]) == (4, "model")
    assert [entry["step"] for entry in records(tmp_path, "evaluation")] == [0, 2]


def test_a_hangup_that_was_ignored_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        executor = KnownExecutor(on_step=lambda step: os.kill(os.getpid(), signal.SIGHUP))
        assert make_trainer(tmp_path, executor)[0].run()["status"] == "finished"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_pipe_silences_and_training_goes_on(tmp_path):
    """The reader leaves after the first line; the exit code is that of a finished run."""
    program = textwrap.dedent(
        """
        import pathlib, sys
        from rich.console import Console
        from lazyjax.cli import guarded
        from lazyjax.training import interrupt, streams
        from tests.training.test_loop import KnownExecutor, make_trainer

        console = Console()
        streams.silence_when_closed(console)
        print("ready", file=console.file, flush=True)
        sys.stdin.readline()
        trainer, _ = make_trainer(pathlib.Path(sys.argv[1]), KnownExecutor(), output=console.file)
        sys.exit(guarded(lambda: interrupt.exit_status(trainer.run()["reason"])))
        """
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], text=True, **pipes)
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    process.stdin.write("go on\n")
    process.stdin.close()
    assert (process.stderr.read(), process.wait()) == ("", 0)
    process.stderr.close()
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"
    assert len(records(tmp_path, "train")) == 4


def test_the_summary_is_there_from_the_beginning_and_true(tmp_path):
    seen = []

    def look(*_):
        seen.append(json.loads((tmp_path / "summary.json").read_text()))

    def save():
        look()
        return tmp_path / "model"

    make_trainer(tmp_path, KnownExecutor(on_step=look), save_model=save)[0].run()
    look()
    assert [summary["status"] for summary in seen] == ["running"] * 4 + ["saving", "finished"]
    # Evaluations bring it up to date: before training, after step 2 and at the end.
    assert [summary["steps"] for summary in seen] == [0, 0, 2, 2, 4, 4]
    assert [summary["process"] for summary in seen] == [os.getpid()] * 5 + [None]


def test_non_finite_steps_are_recorded_with_the_third_and_the_model_is_saved(tmp_path):
    class Diverging(KnownExecutor):
        def train_step(self, batch, learning_rate):
            result = super().train_step(batch, learning_rate)
            if sum(name == "train" for name, _ in self.calls) == 1:
                return result
            result = dataclasses.replace(result, loss=math.nan, gradient_norm=math.inf, skipped=True)
            if sum(name == "train" for name, _ in self.calls) == 4:
                raise NonFiniteStepsError("three in a row", result)
            return result

    trainer, output = make_trainer(tmp_path, Diverging(), steps=9, save_model=lambda: tmp_path / "model")
    with pytest.raises(NonFiniteStepsError):
        trainer.run()
    steps = records(tmp_path, "train")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(
        (step["loss"], step["gradient_norm"], step["skipped"]) == (None, None, True) for step in steps[1:]
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["skipped_steps"]) == ("failed", 3)
    assert (summary["last_loss"], summary["model_folder"]) == (4.0, "model")
    assert "NonFiniteStepsError: three in a row" in summary["reason"]
    assert "SKIPPED" in output.getvalue()


def test_a_model_without_room_waits_for_some(tmp_path, monkeypatch):
    monkeypatch.setattr(model_file, "_ROOM_SECONDS", (0.0, 0.0))
    tries = []

    def save():
        tries.append(json.loads((tmp_path / "summary.json").read_text())["status"])
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return tmp_path / "model"

    trainer, output = make_trainer(tmp_path, KnownExecutor(), save_model=save)
    assert trainer.run()["model_folder"] == "model"
    assert tries == ["saving"] * 3
    assert output.getvalue().count("No space left on device); it is tried again") == 2


def test_a_model_that_cannot_be_written_fails_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(model_file, "_ROOM_SECONDS", (0.0,))

    def save():
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        make_trainer(tmp_path, KnownExecutor(), save_model=save)[0].run()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["model_folder"], summary["steps"]) == ("failed", None, 4)


def test_a_signal_gives_up_waiting_for_room(tmp_path, monkeypatch):
    monkeypatch.setattr(model_file, "_ROOM_SECONDS", (600.0,))
    seen = io.StringIO()
    waits = threading.Thread(target=lambda: wait_for(seen, "tried again") or send(signal.SIGTERM, seen, "gi"))

    def save():
        waits.start()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        make_trainer(tmp_path, KnownExecutor(), output=seen, save_model=save)[0].run()
    waits.join()


def test_steps_that_compile_are_told_apart(tmp_path):
    compiled = []

    def compile_something(step):
        if step in (1, 3):
            size = 7 + len(compiled)
            compiled.append(jax.jit(lambda x: x * 2 + size)(np.ones(size)))

    summary = make_trainer(tmp_path, KnownExecutor(on_step=compile_something))[0].run()
    steps = records(tmp_path, "train")
    assert [step["compile_seconds"] > 0 for step in steps] == [True, False, True, False]
    assert summary["timed_steps"] == 2
    assert summary["mean_step_seconds"] == pytest.approx(
        (steps[1]["step_seconds"] + steps[3]["step_seconds"]) / 2
    )
    assert summary["compile_seconds"] == pytest.approx(sum(step["compile_seconds"] for step in steps))


def test_finished_steps_survive_a_killed_process(tmp_path):
    program = textwrap.dedent(
        """
        import os, pathlib, signal, sys
        from tests.training.test_loop import KnownExecutor, make_trainer
        kill = lambda step: step == 3 and os.kill(os.getpid(), signal.SIGKILL)
        make_trainer(pathlib.Path(sys.argv[1]), KnownExecutor(on_step=kill))[0].run()
        """
    )
    process = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert process.returncode == -signal.SIGKILL
    assert [step["step"] for step in records(tmp_path, "train")] == [1, 2]


class LostExecutor(KnownExecutor):
    """Losses that are not finite from the call `first` on, counted over steps and evaluations."""

    def __init__(self, first, kind):
        super().__init__()
        self.first, self.kind = first, kind

    def lost(self, kind):
        return kind == self.kind and len(self.calls) >= self.first

    def train_step(self, batch, learning_rate):
        result = super().train_step(batch, learning_rate)
        return dataclasses.replace(result, loss=math.nan, skipped=True) if self.lost("train") else result

    def evaluate(self, batch):
        loss, tokens = super().evaluate(batch)
        return (math.nan if self.lost("evaluate") else loss), tokens


@pytest.mark.parametrize(("kind", "evaluations"), [("evaluate", 2), ("train", 0)])
@pytest.mark.parametrize("tensors", [("a.weight (1 NaN)",), ()])
def test_a_run_that_begins_without_a_finite_loss_ends_there(tmp_path, kind, evaluations, tensors):
    executor = LostExecutor(0, kind)
    saved = []
    trainer, _ = make_trainer(
        tmp_path, executor, evaluation_batches=evaluations, save_model=lambda: saved.append(1)
    )
    trainer._examination._find_nonfinite = lambda: tensors
    words = "a.weight" if tensors else "compute_dtype float32"
    with pytest.raises(NonFiniteModelError, match=f"of the first .* is nan: nothing can .*{words}"):
        trainer.run()
    assert not saved
    assert len([call for call in executor.calls if call[0] == "train"]) == (kind == "train")
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["status"] == "failed"


@pytest.mark.parametrize("kind", ["evaluate", "train"])
def test_a_later_loss_that_is_not_finite_ends_nothing(tmp_path, kind):
    trainer, _ = make_trainer(tmp_path, LostExecutor(3, kind))
    assert trainer.run()["status"] == "finished"
