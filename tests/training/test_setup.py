"""A whole run from its configuration: real data, real executor, and the oracle beside it."""

import io
import itertools
import json
import shutil

import numpy as np
import pytest
from rich.console import Console

from lazyjax.config import Config, ConfigError, load_config
from lazyjax.data.batches import read_batches
from lazyjax.data.chat import load_tokenizer
from lazyjax.execution.build import checked_schedules
from lazyjax.execution.kernels import Kernels, data_mesh
from lazyjax.hardware.load import CpuReading
from lazyjax.hardware.memory import HostMemory
from lazyjax.huggingface.checkpoint import load_into
from lazyjax.models.registry import build_template, init_parameters
from lazyjax.planning.plan.document import Boundary, PlanError, load_plan
from lazyjax.specs import Part, Tier
from lazyjax.storage.host import allocate_host_store
from lazyjax.training import capacity, inputs, setup, stepping
from lazyjax.training.capacity import CapacityError
from lazyjax.training.inputs import SetupError, read_architecture
from lazyjax.training.reserves import NOTHING_BESIDE
from lazyjax.training.start_plan import choose_plan
from tests import reference

ARCHITECTURE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
STEPS, RATE = 3, 1e-2
#: Well above the rounding of gradients, which AdamW would otherwise blow up to whole steps.
EPSILON = 1e-3


@pytest.fixture
def small(tmp_path):
    """Gives a configuration of a small run, in float32 so that the oracle is met closely."""
    (tmp_path / "small.json").write_text(json.dumps(ARCHITECTURE))
    fixed = {
        "--model.architecture": tmp_path / "small.json",
        "--model.compute-dtype": "float32",
        "--data.sequence-length": 128,
        "--data.rows": 4,
        # All of the packaged rows take seconds to tokenize, every time.
        "--data.take": 60,
        "--data.batching": "padded",
        "--optimizer.name": "fp32_adamw",
        "--optimizer.learning-rate": RATE,
        "--optimizer.epsilon": EPSILON,
        "--optimizer.gradient-dtype": "float32",
        "--plan.planner": "recompute_all",
        "--plan.microbatches": 2,
        "--training.steps": STEPS,
        "--training.evaluate-rows": 6,
        "--run.folder": tmp_path / "runs",
    }

    def make(**overrides) -> Config:
        words = fixed | {"--" + key.replace("__", ".").replace("_", "-"): v for key, v in overrides.items()}
        return load_config(None, [str(word) for pair in words.items() for word in pair])

    return make


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def metrics(folder, kind):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_a_run_follows_the_oracle_and_its_record_repeats_it(small, tmp_path):
    config = small(run__name="first")
    console = quiet()
    summary = setup.train(config, console)
    folder = tmp_path / "runs" / "first"
    assert summary["status"] == "finished"
    assert (summary["attention"], summary["attention_reason"]) == ("blockwise", "a cpu has no other")
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "plan.json",
        "metrics.jsonl",
        "timeline.json",
        "tensorboard",
        "summary.json",
        "model",
    }

    template = build_template(read_architecture(config)[0])
    assert load_plan(folder / "plan.json") == choose_plan(config, template)
    parameters = reference_parameters(template, config.training.seed)
    batches = read_batches(config.data, load_tokenizer(), config.training.evaluate_rows)
    training = [next(batches.training) for _ in range(STEPS)]
    losses, trained = reference.train(
        template, parameters, training, learning_rate=RATE, clip_norm=1.0, weight_decay=0.01, eps=EPSILON
    )
    np.testing.assert_allclose([step["loss"] for step in metrics(folder, "train")], losses, rtol=1e-5)
    for record, state in zip(metrics(folder, "evaluation"), (parameters, trained), strict=True):
        held_out = list(batches.evaluation_batches())
        targets = [batch.target_tokens for batch in held_out]
        losses = [reference.loss(template, state, batch) for batch in held_out]
        assert record["loss"] == pytest.approx(np.average(losses, weights=targets), rel=1e-5)
        assert record["target_tokens"] == sum(targets)

    exported = load_config(None, ["--model", str(folder / "model"), "--model.compute-dtype", "float32"])
    model, checkpoint = read_architecture(exported)
    assert model == template.config.model_copy(update={"name": "model"})
    written = allocate_host_store(template.spec)
    load_into(checkpoint, template, written)
    for slabs, layer, values in zip(written.layers, template.spec.layers, trained, strict=True):
        for tensor, value in zip(layer.parameters, values, strict=True):
            # bfloat16 rounds by at most 2^-9; steps of 1e-2 agree to 1e-4 of themselves.
            np.testing.assert_allclose(slabs.master(tensor.name), value, rtol=2**-8, atol=1e-6)
    assert load_tokenizer(folder / "model").get_vocab() == load_tokenizer().get_vocab()

    again = load_config(folder / "config.yaml", ["--run.name", "again"])
    setup.train(again, quiet())
    repeated = metrics(tmp_path / "runs" / "again", "train")
    for first, second in zip(metrics(folder, "train"), repeated, strict=True):
        assert (first["loss"], first["gradient_norm"]) == (second["loss"], second["gradient_norm"])


def reference_parameters(template, seed):
    import jax

    key = jax.random.key(seed)
    parameters = []
    for index, layer in enumerate(template.spec.layers):
        values = init_parameters(template, index, key)
        parameters.append(tuple(jax.numpy.asarray(values[tensor.name]) for tensor in layer.parameters))
    return parameters


def test_epochs_give_the_steps(small):
    config = small(training__steps="null", training__epochs=0.5)
    batches = read_batches(config.data, load_tokenizer(), 0)
    schedule = inputs.make_training_schedule(config, batches.training)
    assert schedule.steps == round(batches.training.batches_in_epoch() / 2)
    assert batches.evaluation is None


def test_a_run_under_the_planners_plan_says_whose_it_is_and_ends_with_predicted_beside_measured(
    small, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Others take thousands of seconds of CPU time whenever someone looks.
    seconds = itertools.count()
    monkeypatch.setattr(stepping, "read_cpus", lambda: CpuReading(next(seconds), 1e3 * next(seconds)))
    console = quiet()
    keys = {"training__evaluate_rows": 0, "run__save_model": "false", "run__name": "planned"}
    setup.train(small(plan__planner="milp", plan__hardware="h800-paper", **keys), console)
    text = console.file.getvalue()
    for words in (
        "found for this run by the planner (milp)",
        "predicted: ",
        "warning: the plan is for NVIDIA H800",
        "predicted and measured",
        "another kind of machine",
        "the machine was busy: of its ",
    ):
        assert words in text, words
    plan = load_plan(tmp_path / "runs" / "planned" / "plan.json")
    assert (plan.optimizer, plan.compute_dtype, plan.hardware) == ("fp32_adamw", "float32", "h800-paper")


def test_the_first_lines_say_what_runs(small):
    console = quiet()
    setup.train(small(training__steps=1, training__evaluate_rows=0), console)
    text = console.file.getvalue()
    for word in ("M parameters", "data ", "plan ", "recompute_all", "host ", "device ", "records in"):
        assert word in text


def test_nothing_is_written_before_everything_was_checked(small, tmp_path):
    short = {"training__epochs": 0.0001, "training__steps": "null"}
    refusals = [
        (small(data__rows=6, plan__file=tmp_path / "absent.json"), PlanError, "absent.json"),
        (small(plan__devices=64), SetupError, "plan.devices is 64"),
        (small(optimizer__warmup_steps=2, **short), ValueError, "warmup"),
    ]
    for config, kind, words in refusals:
        with pytest.raises(kind, match=words):
            setup.train(config, quiet())
    assert not (tmp_path / "runs").exists()


def test_a_plan_file_decides_and_must_fit_the_batch(small, tmp_path):
    config = small()
    template = build_template(read_architecture(config)[0])
    plan = choose_plan(small(plan__planner="megatrain", plan__microbatches=4), template)
    assert (plan.update, plan.microbatches) == ("immediate", 4)
    plan.save(tmp_path / "plan.json")
    assert choose_plan(small(plan__file=tmp_path / "plan.json"), template) == plan
    with pytest.raises(PlanError, match=r"rows is 4, but data\.rows is 8"):
        choose_plan(small(plan__file=tmp_path / "plan.json", data__rows=8), template)
    for words in ({"optimizer__name": "hybrid8bit"}, {"optimizer__gradient_dtype": "bfloat16"}):
        with pytest.raises(PlanError, match=r"plan\.json: made for (optimizer fp32|gradient_dtype float32)"):
            choose_plan(small(plan__file=tmp_path / "plan.json", **words), template)
    layers = list(plan.layers)
    layers[2] = layers[2].model_copy(update={"boundary": Boundary.NVME})
    plan.model_copy(update={"layers": tuple(layers)}).save(tmp_path / "nvme.json")
    with pytest.raises(PlanError, match=r"plan\.nvme_folder"):
        choose_plan(small(plan__file=tmp_path / "nvme.json"), template)
    with pytest.raises(PlanError, match=r"plan\.devices \(4\) does not divide the 2 rows"):
        choose_plan(small(plan__devices=4), template)


def test_a_key_says_what_lives_on_nvme(small, tmp_path):
    template = build_template(read_architecture(small())[0])
    drive = {"plan__nvme_folders": f"{tmp_path / 'one'},{tmp_path / 'two'}"}
    for words, parts in (("all", set(Part)), ("lo, gradient", {Part.LO, Part.GRADIENT}), ("none", set())):
        plan = choose_plan(small(plan__on_nvme=words, **drive), template)
        assert [layer.on_nvme for layer in plan.layers] == [parts] * len(plan.layers)
    with pytest.raises(ConfigError, match="on_nvme"):
        small(plan__on_nvme="all")
    with pytest.raises(ConfigError, match=r"plan\.on_nvme"):
        small(plan__on_nvme="weights", **drive)
    with pytest.raises(ConfigError, match="nvme_folder and nvme_folders exclude each other"):
        small(plan__nvme_folder=tmp_path / "one", **drive)


def test_more_host_memory_than_was_promised_is_refused_with_the_difference(small, tmp_path):
    words = {"plan__host_bytes": 2_000_000}
    with pytest.raises(CapacityError, match=r"plan\.host_bytes: .* more than the 1\.9 MiB that it may use"):
        setup.train(small(**words), quiet())
    assert not (tmp_path / "runs").exists()


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(small, tmp_path):
    (tmp_path / "narrow.json").write_text(json.dumps(ARCHITECTURE | {"vocab_size": 100}))
    with pytest.raises(SetupError, match=r"ids up to 2047, narrow only 100.*data\.tokenizer"):
        setup.train(small(model__architecture=tmp_path / "narrow.json"), quiet())


def test_a_disk_without_room_for_the_model_is_refused_before_training(small, tmp_path, monkeypatch):
    monkeypatch.setattr(inputs.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(SetupError, match=r"run\.save_model"):
        setup.train(small(), quiet())
    assert not (tmp_path / "runs").exists()


def test_memory_that_is_not_there_is_refused_with_the_amount(small, tmp_path, monkeypatch):
    monkeypatch.setattr(capacity, "host_memory", lambda: HostMemory(2**30, "the limit in memory.max"))
    match = (
        r"of host memory, 1\.00 GiB are available by the limit in memory\.max "
        r"\(parameters and gradients .*, optimizer state .*, Python and JAX 1\.00 GiB\): .*plan\.nvme_folder"
    )
    with pytest.raises(CapacityError, match=match):
        setup.train(small(), quiet())
    assert not (tmp_path / "runs").exists()


def test_memory_is_checked_against_the_plan(small, tmp_path):
    """What a plan keeps on NVMe takes no host memory, but room on the drive."""
    config = small()
    template = build_template(read_architecture(config)[0])
    optimizer = inputs.make_optimizer(config)
    kernels = Kernels(template, data_mesh(), gradient_dtype="float32")
    schedules = checked_schedules(kernels, optimizer)
    plan = choose_plan(config, template)
    there = tuple(layer.model_copy(update={"state": "nvme"}) for layer in plan.layers)

    def needed(plan):
        schedule = schedules(plan, plan.sequence_length)
        return capacity.needed_bytes(schedule, NOTHING_BESIDE, devices=1)

    host, nvme = needed(plan), needed(plan.model_copy(update={"layers": there}))
    whole = inputs.training_state_bytes(template.spec, optimizer, gradient_dtype="float32")
    counted = host["parameters and gradients"][Tier.HOST] + host["optimizer state"][Tier.HOST]
    assert counted == whole
    moved = host["optimizer state"][Tier.HOST]
    assert nvme["optimizer state"][Tier.NVME] == moved
    # A few layers' copies pass through the host.
    copies = "activations and copies of what lives on NVMe"
    assert host[copies][Tier.HOST] < nvme[copies][Tier.HOST] <= host[copies][Tier.HOST] + moved
    assert nvme["optimizer state"][Tier.HOST] == 0
    huge = {"optimizer state": {Tier.HOST: 0, Tier.NVME: 2**60}}
    with pytest.raises(CapacityError, match=r"of the drive, .* has room for .*another plan\.nvme_folder"):
        capacity.check_capacity(huge, optimizer_name="hybrid8bit", nvme_folders=[tmp_path / "not yet"])


def test_state_bytes_are_those_allocated(small):
    config = small()
    template = build_template(read_architecture(config)[0])
    optimizer = inputs.make_optimizer(config)
    store = allocate_host_store(template.spec, gradient_dtype="float32")
    allocated = sum(
        slabs.hi.nbytes
        + slabs.lo.nbytes
        + slabs.gradient.nbytes
        + sum(array.nbytes for array in optimizer.create_state(slabs.layout).values())
        for slabs in store.layers
    )
    assert inputs.training_state_bytes(template.spec, optimizer, gradient_dtype="float32") == allocated


def test_microbatches_must_be_filled_by_rows(small):
    with pytest.raises(ConfigError, match=r"plan\.microbatches \(3\) of 2 rows.*data\.rows \(4\)"):
        small(plan__microbatches=3)
