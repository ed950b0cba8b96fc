"""The same run by one process and by several: losses, parameters, exports, bytes, resuming, a kill.

Command:  python -m experiments.benchmarks.process_runs [--quick] [--only TABLE ...] [--save]
CPU processes with gloo collectives, started on this machine, each with virtual devices. A small Qwen3 in
float32 takes five steps from the same weights, of which each process imports its part; every row compares
with the run of one process and one device. Expected: losses within 1e-6 of themselves, parameters within
1e-5, exported folders equal (all files to those of the single process but the weights, and these to the
masters that one process exports from the checkpoint that several have saved), slab bytes of a process 1/n of
all, and one line that names the killed process within 60 s. About 15 minutes on two cores; `--quick` takes
two processes and the first case.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from experiments.benchmarks.provenance import provenance

RESULT = pathlib.Path(__file__).parent / "results" / "process_runs.md"
SOURCES = ("lazyjax", "experiments/benchmarks/process_runs.py")
ARCHITECTURE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 2048, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "rms_norm_eps": 1e-6, "initializer_range": 0.02, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
STEPS = 5
#: Processes and devices of each.
LAYOUTS = ((1, 2), (2, 1), (2, 2), (4, 1), (4, 2))
#: Where the last bit of a gradient decides between two codes of 8-bit state, the parameter moves by another
#: share of the learning rate: this is the default one.
_CODED = {"optimizer.name": "hybrid8bit", "optimizer.learning-rate": "1e-5"}
#: Case -> keys that differ.
CASES: dict[str, dict[str, str]] = {
    "float32 state, tied": {"optimizer.name": "fp32_adamw"},
    "8-bit state, untied": _CODED | {"model": "untied"},
    "8-bit state on NVMe": _CODED | {"plan.on-nvme": "state,lo,gradient,hi"},
    "packed": {"optimizer.name": "fp32_adamw", "data.batching": "packed"},
}
#: Of the loss itself, which is about 7.6 here, where float32 numbers are 4.8e-7 apart; and absolute.
LOSS_LIMIT, PARAMETER_LIMIT = 1e-6, 1e-5


class Ended(NamedTuple):
    """A process that has ended: its exit code, what it wrote to both streams, and when."""

    code: int
    text: str
    seconds: float


def write_inputs(folder: pathlib.Path) -> None:
    """Architectures with and without a tied table, weights of both, and rows to learn."""
    rows = [
        {"query": "What is " + " plus ".join(map(str, range(i % 7 + 2))) + "?", "response": f"It is {i}."}
        for i in range(120)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, tied in (("tied", True), ("untied", False)):
        (folder / f"{name}.json").write_text(json.dumps(ARCHITECTURE | {"tie_word_embeddings": tied}))


def arguments(folder: pathlib.Path, name: str, keys: Mapping[str, str]) -> list[str]:
    """The command line of one run; `model` among the keys is `tied` or `untied`."""
    keys = dict(keys)
    model = keys.pop("model", "tied")
    settings = {
        "model.compute-dtype": "float32", "optimizer.gradient-dtype": "float32",
        "data.source": folder / "data.jsonl", "data.sequence-length": 64, "data.rows": 16,
        "data.batching": "padded", "data.train-fraction": 0.9, "optimizer.threads": 1,
        "optimizer.learning-rate": 1e-4, "plan.planner": "recompute_all", "plan.microbatches": 2,
        "training.steps": STEPS, "training.evaluate-rows": 8, "run.folder": folder / "runs", "run.name": name,
    }  # fmt: skip
    weights = folder / "runs" / f"start-{model}" / "model"
    if weights.exists() and "model.architecture" not in keys:
        settings |= {"model.folder": weights}
    else:
        settings |= {"model.architecture": folder / f"{model}.json"}
    settings |= keys
    if "plan.on-nvme" in settings:
        settings |= {"plan.nvme-folder": folder / "nvme"}
    return [str(word) for key, value in settings.items() for word in (f"--{key}", value)]


def start(
    words: Sequence[str], *, count: int, devices: int, dump: pathlib.Path | None = None
) -> list[subprocess.Popen[str]]:
    """Starts the processes of one run."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "experiments.benchmarks.process_runs", "--process", str(dump or "")]
    started = []
    for index in range(count):
        place = ["--distributed.coordinator", f"localhost:{port}", "--distributed.processes", str(count)]
        place += ["--distributed.process", str(index)]
        started.append(
            subprocess.Popen(
                [*command, *words, *(place if count > 1 else ())],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    return started


def finish(started: Sequence[subprocess.Popen[str]], seconds: float = 300) -> list[Ended]:
    """Waits for all; what is left after `seconds` is killed."""
    begun, ended = time.monotonic(), []
    try:
        for process in started:
            text, _ = process.communicate(timeout=max(1, seconds - (time.monotonic() - begun)))
            ended.append(Ended(process.returncode, text, time.monotonic() - begun))
    finally:
        for process in started:
            process.kill()
            process.wait()
    return ended


def run(
    folder: pathlib.Path, name: str, keys: Mapping[str, str], *, count: int = 1, devices: int = 1
) -> Outcome:
    """One run to its end.

    Raises:
        RuntimeError: a process failed; says what it wrote.
    """
    dump = folder / "dumps" / name
    dump.mkdir(parents=True)
    ended = finish(start(arguments(folder, name, keys), count=count, devices=devices, dump=dump))
    return outcome(folder, name, dump, ended)


class Outcome(NamedTuple):
    """What came of a run.

    Attributes:
        losses: of the steps, as recorded.
        parameters: float32, of every layer's slab without its padding.
        slab_bytes, state_bytes: by process, of its parts of slabs and of the optimizer's state.
        resident_bytes: by process, of the pages of both that are in memory.
        process_bytes: by process, all that is resident.
        exported: digest by file of the exported model.
    """

    losses: list[float]
    parameters: list[np.ndarray]
    slab_bytes: list[int]
    state_bytes: list[int]
    resident_bytes: list[int]
    process_bytes: list[int]
    exported: dict[str, str]


def outcome(
    folder: pathlib.Path, name: str, dump: pathlib.Path, ended: Sequence[Ended]
) -> Outcome:
    """Reads what a run and its processes have left."""
    for index, process in enumerate(ended):
        if process.code:
            raise RuntimeError(f"{name}: process {index} ended with {process.code}:\n{process.text}")
    facts = [json.loads((dump / f"{index}.json").read_text()) for index in range(len(ended))]
    parts = [np.load(dump / f"{index}.npz") for index in range(len(ended))]
    parameters = [
        np.concatenate([part[f"layer-{layer}"] for part in parts])[: facts[0]["elements"][layer]]
        for layer in range(len(facts[0]["elements"]))
    ]
    place = folder / "runs" / name
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    model = place / "model"
    return Outcome(
        [line["loss"] for line in lines if line["kind"] == "train"],
        parameters,
        [one["slab_bytes"] for one in facts],
        [one["state_bytes"] for one in facts],
        [one["resident_bytes"] for one in facts],
        [one["process_bytes"] for one in facts],
        {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (sorted(model.iterdir()) if model.exists() else ())
        },
    )


def process(dump: pathlib.Path | None, words: Sequence[str]) -> int:
    """One process of a run; leaves its part of the parameters and its host bytes in `dump`."""
    from rich.console import Console

    from lazyjax.cli import guarded
    from lazyjax.config import load_config
    from lazyjax.training import setup
    from lazyjax.training.interrupt import exit_status
    from lazyjax.training.resume import read_resume

    def body() -> int:
        if words[0] == "--resume":
            config, resume = read_resume(pathlib.Path(words[1]), words[2:])
        else:
            config, resume = load_config(None, words), None
        with setup.prepare(config, Console(width=200), resume) as prepared:
            summary = prepared.trainer.run()
            if dump is not None:
                _leave(prepared, dump)
        return exit_status(summary["reason"])

    return guarded(body)


def _leave(prepared: Any, dump: pathlib.Path) -> None:
    from lazyjax.storage.master import join_master
    from lazyjax.training.metrics import resident_host_bytes

    store, updates = prepared.store, prepared.executor.updates
    index = prepared.folder.process
    parameters: dict[str, Any] = {}
    slab_bytes = state_bytes = 0
    for layer in range(len(store.layouts)):
        with updates.reading(layer) as (slabs, state):
            parameters[f"layer-{layer}"] = join_master(slabs.hi, slabs.lo)
            slab_bytes += sum(a.nbytes for a in (slabs.hi, slabs.lo, store.layers[layer].gradient))
            state_bytes += sum(array.nbytes for name, array in state.items() if name != "version")
    facts = {
        "slab_bytes": slab_bytes,
        "state_bytes": state_bytes,
        "resident_bytes": resident_slabs(),
        "process_bytes": resident_host_bytes(),
        "elements": [last.offset + last.elements for last in (w.segments[-1] for w in store.whole_layouts)],
    }
    np.savez(dump / f"{index}.npz", **parameters)
    (dump / f"{index}.json").write_text(json.dumps(facts))


def resident_slabs() -> int:
    """Bytes of slabs that are in RAM: they alone are shared mappings (`lazyjax.storage.memory`)."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return 1024 * int(line.split()[1])
    raise OSError("/proc/self/status has no RssShmem")


# What is compared


class Difference(NamedTuple):
    """How far two runs are apart.

    Attributes:
        loss, parameter: the most that one differs, of the loss and absolute.
        exports_equal: whether all files of the exported models are equal but for the weights, and the weights
            those that one process exports from the checkpoint.
    """

    loss: float
    parameter: float
    exports_equal: bool

    @property
    def within(self) -> bool:
        """Whether they count as equal."""
        return self.loss <= LOSS_LIMIT and self.parameter <= PARAMETER_LIMIT and self.exports_equal


def difference(folder: pathlib.Path, one: Outcome, other: Outcome, name: str) -> Difference:
    """How far two runs are apart, of which `name` is the other's."""
    assert len(one.losses) == len(other.losses)
    parameters = (
        float(np.abs(a - b).max()) for a, b in zip(one.parameters, other.parameters, strict=True)
    )
    losses = (abs(a - b) / a for a, b in zip(one.losses, other.losses, strict=True))
    files = [
        {name: digest for name, digest in run.exported.items() if name != WEIGHTS} for run in (one, other)
    ]
    equal = files[0] == files[1] and _exports_its_masters(folder, name)
    return Difference(max(losses), max(parameters), equal)


WEIGHTS = "model.safetensors"


def _exports_its_masters(folder: pathlib.Path, name: str) -> bool:
    """Whether a run's model is, rounded, what one process exports of its checkpoint in float32."""
    from lazyjax.cli import main
    from lazyjax.huggingface.tensor_files import read_header, read_tensor

    exported = folder / "exported" / name
    options = ["--dtype", "float32", "--checkpoint", "last"]
    if main(["export", str(folder / "runs" / name), str(exported), *options]):
        raise RuntimeError(f"{name}: its checkpoint cannot be exported")
    masters, model = (read_header(path / WEIGHTS) for path in (exported, folder / "runs" / name / "model"))
    return masters.keys() == model.keys() and all(
        np.array_equal(read_tensor(masters[key]).astype(ml_dtypes.bfloat16), read_tensor(model[key]))
        for key in model
    )


def make_weights(folder: pathlib.Path, models: Sequence[str]) -> None:
    """Folders with weights, as a run of one step has written them."""
    for model in models:
        keys = {"model": model, "training.steps": "1", "training.evaluate-rows": "0"}
        run(folder, f"start-{model}", keys)


def equality(
    folder: pathlib.Path, cases: Sequence[str], layouts: Sequence[tuple[int, int]]
) -> tuple[bool, list[str]]:
    """Every case by every layout against one process with one device."""
    rows, good = ["| case | processes x devices | loss | parameter | exports | slab bytes |"], True
    rows.append("|---|---|---|---|---|---|")
    for number, case in enumerate(cases):
        keys = CASES[case] | {"checkpoints.every-steps": str(STEPS)}
        alone = run(folder, f"{number}-alone", keys)
        for count, devices in layouts:
            name = f"{number}-{count}x{devices}"
            # One process takes one device where nothing is said.
            shared = keys | {"plan.devices": str(count * devices)}
            several = run(folder, name, shared, count=count, devices=devices)
            apart = difference(folder, alone, several, name)
            equal_shares = set(several.slab_bytes) == {sum(several.slab_bytes) // count}
            # With more devices slabs are padded to longer ones, state of a few float32 tensors is not even.
            equal_shares = equal_shares and sum(several.state_bytes) >= sum(alone.state_bytes)
            good = good and apart.within and equal_shares
            rows.append(
                f"| {case} | {count} x {devices} | {apart.loss:.1e} | {apart.parameter:.1e} | "
                f"{'equal' if apart.exports_equal else 'DIFFER'} | "
                f"{'1/' + str(count) if equal_shares else 'NOT EQUAL'} each |"
            )
    return good, rows


#: Of the model whose host bytes are measured: 27 M parameters, 16 bytes each.
LARGER = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
          "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip


def host_bytes(folder: pathlib.Path, counts: Sequence[int]) -> tuple[bool, list[str]]:
    """Resident bytes by the number of processes."""
    (folder / "larger.json").write_text(json.dumps(ARCHITECTURE | LARGER))
    keys = {
        "model.architecture": str(folder / "larger.json"), "optimizer.name": "fp32_adamw",
        "training.steps": "2", "training.evaluate-rows": "0", "run.save-model": "false",
    }  # fmt: skip
    rows = ["| processes | slab bytes each | state bytes | resident of both | x n / one | resident in all |"]
    rows.append("|---|---|---|---|---|---|")
    good, first = True, 0
    for count in counts:
        found = run(folder, f"bytes-{count}", keys, count=count)
        most = max(found.resident_bytes)
        first = first or most
        share = most * count / first
        good = good and abs(share - 1) <= 0.05
        rows.append(
            f"| {count} | {max(found.slab_bytes):,} | {max(found.state_bytes):,} | {most / 1e6:.1f} MB | "
            f"{share:.3f} | {max(found.process_bytes) / 1e6:.0f} MB |"
        )
    return good, rows


def resuming(folder: pathlib.Path, counts: Sequence[int]) -> tuple[bool, list[str]]:
    """Saved by the first number of processes, resumed by each of them; against the run that went on."""
    keys = {"optimizer.name": "hybrid8bit", "checkpoints.every-steps": "2", "checkpoints.keep-last": "9"}
    longer, first = {"training.steps": str(STEPS + 3)}, counts[0]
    run(folder, "saved", keys, count=first)
    whole = run(folder, "whole", keys | longer, count=first)
    rows, good = ["| saved after step | processes | losses of the rest apart by |", "|---|---|---|"], True
    for count in counts:
        name = f"resumed-{count}"
        dump = folder / "dumps" / name
        dump.mkdir()
        # Under another name: what is saved stays as it is for the next one.
        words = ["--resume", str(folder / "runs" / "saved"), "--run.name", name]
        words += [word for key, value in longer.items() for word in (f"--{key}", value)]
        found = outcome(folder, name, dump, finish(start(words, count=count, devices=1, dump=dump)))
        apart = max(abs(a - b) / a for a, b in zip(found.losses, whole.losses, strict=True))
        good = good and (apart == 0 if count == first else apart <= LOSS_LIMIT)
        rows.append(f"| {STEPS} | {first} -> {count} | {apart:.1e} |")
    return good, rows


def stopping(folder: pathlib.Path, count: int, asked: int) -> tuple[bool, list[str]]:
    """One process gets SIGTERM, under a plan that process 0 has solved: all stop after the same step."""
    name = f"stopped-{asked}"
    keys = {
        "checkpoints.every-steps": "2", "training.steps": "100000",
        "plan.planner": "milp", "plan.time-limit-seconds": "2",
    }  # fmt: skip
    started = start(arguments(folder, name, keys), count=count, devices=1)
    wait_for_checkpoint(folder / "runs" / name, started)
    started[asked].send_signal(signal.SIGTERM)
    codes = [process.code for process in finish(started)]
    summary = json.loads((folder / "runs" / name / "summary.json").read_text())
    saved = max(int(path.name[5:]) for path in (folder / "runs" / name / "checkpoints").glob("step-*"))
    good = (
        codes == [128 + signal.SIGTERM] * count
        and (summary["status"], summary["reason"]) == ("interrupted", "SIGTERM")
        and saved == summary["steps"]
    )
    words = (
        f"SIGTERM to process {asked} of {count}: exit codes {codes}, status {summary['status']} "
        f"({summary['reason']}) after step {summary['steps']}, checkpoint of step {saved}"
    )
    return good, [words]


def wait_for_checkpoint(place: pathlib.Path, started: Sequence[subprocess.Popen[str]]) -> None:
    """Waits until a run has saved one.

    Raises:
        RuntimeError: it has none after two minutes, or a process has ended; none is left, and the message is
            what they wrote.
    """
    deadline = time.monotonic() + 120
    while not list((place / "checkpoints").glob("step-*")):
        if time.monotonic() > deadline or any(process.poll() is not None for process in started):
            for process in started:
                process.kill()
            words = [f"{one.code}:\n{one.text}" for one in finish(started)]
            raise RuntimeError("\n".join([f"{place}: no checkpoint", *words]))
        time.sleep(0.1)


def killing(
    folder: pathlib.Path, count: int, victim: int, how: signal.Signals = signal.SIGKILL
) -> tuple[bool, list[str]]:
    """One process is killed or frozen after a checkpoint: the others end with a line, and the run goes on."""
    keys = {
        "optimizer.name": "hybrid8bit", "checkpoints.every-steps": "2", "training.steps": "100000",
        "training.evaluate-rows": "0",
    }  # fmt: skip
    name = f"{how.name}-{victim}"
    started = start(arguments(folder, name, keys), count=count, devices=1)
    place = folder / "runs" / name / "checkpoints"
    wait_for_checkpoint(place.parent, started)
    started[victim].send_signal(how)
    begun = time.monotonic()
    others = [process for index, process in enumerate(started) if index != victim]
    ended = finish(others)
    seconds = time.monotonic() - begun
    started[victim].kill()
    finish([started[victim]])
    # With process 0 its coordination service dies, and JAX ends the others at once, in its own words.
    words = f"process {victim} " if victim else "the leader task"
    named = all(words in process.text for process in ended)
    failed = all(process.code != 0 for process in ended)
    resumed = ["--resume", str(folder / "runs" / name), "--run.name", f"{name}-again"]
    step = max(int(path.name[5:]) for path in place.glob("step-*"))
    resumed += ["--training.steps", str(step + 2)]
    (again,) = finish(start(resumed, count=1, devices=1))
    lines = ended[0].text.splitlines()
    shown = [line for line in lines if words in line][:1] if named else lines[-20:]
    rows = [
        f"process {victim} of {count} got {how.name}: the others ended after {seconds:.1f} s, "
        f"{'naming it' if named else 'WITHOUT NAMING IT'}; the checkpoint of step {step} "
        f"{'goes on in one process' if again.code == 0 else 'CANNOT BE RESTORED'}",
        *(f"    {line}" for line in shown),
    ]
    return named and failed and seconds < 60 and again.code == 0, rows


TABLES = ("equality", "bytes", "resume", "stop", "kill", "kill-first", "freeze")


def main() -> int:
    """Command line."""
    if sys.argv[1:2] == ["--process"]:
        return process(pathlib.Path(sys.argv[2]) if sys.argv[2] else None, sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two processes, the first case")
    parser.add_argument("--only", nargs="*", choices=TABLES, default=TABLES)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    cases = list(CASES)[:1] if options.quick else list(CASES)
    layouts = ((2, 1),) if options.quick else LAYOUTS
    counts = (2, 1) if options.quick else (4, 2, 1)
    good, lines = True, []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_inputs(folder)
        make_weights(folder, ("tied", "untied"))
        tables = {
            "equality": lambda: equality(folder, cases, layouts),
            "bytes": lambda: host_bytes(folder, counts[::-1]),
            "resume": lambda: resuming(folder, counts),
            "stop": lambda: stopping(folder, counts[0], counts[0] - 1),
            "kill": lambda: killing(folder, counts[0], counts[0] - 1),
            "kill-first": lambda: killing(folder, counts[0], 0),
            "freeze": lambda: killing(folder, counts[0], 1, signal.SIGSTOP),
        }
        for table in options.only:
            passed, rows = tables[table]()
            good = good and passed
            lines += [f"## {table}: {'as expected' if passed else 'NOT AS EXPECTED'}", "", *rows, ""]
            print("\n".join(lines[-len(rows) - 3 :]), flush=True)
    if options.save:
        title = "# One run by several processes"
        RESULT.write_text(f"{title}\n\n{provenance(*SOURCES)}\n\n" + "\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
