"""A plan is bound to what it was made for: an architecture, an optimizer, dtypes and a machine, no name."""

import dataclasses
import json

import pytest

from lazyjax.hardware.profile import load_profile
from lazyjax.models.registry import architecture, build_template
from lazyjax.planning.plan.baselines import recompute_all
from lazyjax.planning.plan.document import PLAN_VERSION, PlanError, check_made_for, load_plan, validate_plan
from lazyjax.planning.planner.question import settings_of
from lazyjax.planning.planner.request import build_request
from tests import tiny

TEMPLATE = tiny.template("qwen2", tied=False, blocks=2)
NAMES = tiny.residual_names(TEMPLATE)


def test_a_plan_runs_on_any_folder_of_its_architecture(tmp_path):
    plan = recompute_all(TEMPLATE.spec, NAMES, batch_rows=4, sequence_length=8)
    plan.save(tmp_path / "plan.json")
    renamed = dataclasses.replace(TEMPLATE.spec, name="model")
    validate_plan(load_plan(tmp_path / "plan.json"), renamed, NAMES)
    other = tiny.template("qwen2", tied=True, blocks=2)
    with pytest.raises(PlanError, match=f"architecture: the plan is for another than {other.spec.name}'s"):
        validate_plan(plan, other.spec, tiny.residual_names(other))


def test_the_digest_knows_what_a_plan_depends_on_and_nothing_else():
    base = architecture("Qwen2.5-0.5B")

    def digest(**changes):
        return build_template(base.model_copy(update=changes)).spec.architecture

    own = digest()
    assert digest(name="mine", rms_norm_eps=1e-5, initializer_range=0.5) == own
    others = [
        digest(hidden_size=base.hidden_size * 2),
        digest(vocab_size=base.vocab_size + 1),
        digest(num_hidden_layers=base.num_hidden_layers + 1),
        digest(tie_word_embeddings=not base.tie_word_embeddings),
        digest(num_attention_heads=base.num_attention_heads * 2, num_key_value_heads=4, head_dim=32),
    ]
    assert len({own, *others}) == 6


def test_a_plan_says_what_it_was_made_for_and_is_refused_with_another(tmp_path):
    request = build_request(
        TEMPLATE, load_profile("h200"), batch_rows=4, sequence_length=8, optimizer="fp32_adamw",
        compute_dtype="float32", gradient_dtype="float32", nvme_bytes=0,
    )  # fmt: skip
    settings_of(request)[0].save(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    made_for = {
        "optimizer": "fp32_adamw", "compute_dtype": "float32", "gradient_dtype": "float32",
        "hardware": "h200",
    }  # fmt: skip
    check_made_for(plan, made_for, "plan.json")
    for key, other in (("optimizer", "hybrid8bit"), ("compute_dtype", "bfloat16"), ("hardware", "rtx3090")):
        with pytest.raises(PlanError, match=f"plan.json: made for {key} {made_for[key]}, but {other}"):
            check_made_for(plan, made_for | {key: other}, "plan.json")


def test_a_plan_of_another_version_is_refused_by_name(tmp_path):
    plan = recompute_all(TEMPLATE.spec, NAMES, batch_rows=4, sequence_length=8)
    path = tmp_path / "plan.json"
    path.write_text(plan.model_dump_json().replace(f'"version":{PLAN_VERSION}', '"version":2'))
    with pytest.raises(PlanError, match=f"plan.json: version 2, this release reads version {PLAN_VERSION}"):
        load_plan(path)


def test_a_plan_from_before_has_everything_that_layers_own_on_the_host(tmp_path):
    plan = recompute_all(TEMPLATE.spec, NAMES, batch_rows=4, sequence_length=8)
    document = plan.model_dump(mode="json") | {"version": 3}
    document["rows"] = document.pop("batch_rows")
    for layer in document["layers"]:
        for part in ("lo", "gradient", "hi"):
            del layer[part]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    assert load_plan(tmp_path / "plan.json") == plan


def test_a_plan_of_the_version_before_names_the_rows_of_its_batch_rows(tmp_path):
    plan = recompute_all(TEMPLATE.spec, NAMES, batch_rows=4, sequence_length=8)
    document = plan.model_dump(mode="json")
    document["rows"] = document.pop("batch_rows")
    (tmp_path / "plan.json").write_text(json.dumps(document | {"version": 4}))
    assert load_plan(tmp_path / "plan.json") == plan
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(PlanError, match=r"batch_rows: Field required"):
        load_plan(tmp_path / "plan.json")


def test_the_fingerprint_is_of_decisions():
    plan = recompute_all(TEMPLATE.spec, NAMES, batch_rows=4, sequence_length=8)
    assert plan.model_copy(update={"hardware": "h200"}).fingerprint() == plan.fingerprint()
    assert plan.model_copy(update={"prefetch": 3}).fingerprint() != plan.fingerprint()
