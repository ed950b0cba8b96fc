"""What the machine lacks is said before anything is read, measured or allocated."""

import jax
import pytest

from lazyjax.config import load_config
from lazyjax.hardware.profile import ProfileError
from lazyjax.optim.make import usable_cpus
from lazyjax.planning.plan.baselines import keep_all
from lazyjax.planning.plan.document import PlanError
from lazyjax.training import checks
from lazyjax.training.checks import MachineError, check_machine
from tests import tiny

TEMPLATE = tiny.template("qwen2", tied=False, blocks=3)


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """What is said of a configuration on a machine with so much memory; None where nothing is wrong."""

    def check(*words, device=10**9, host=10**9):
        sizes = {"device_total_bytes": device, "device_bytes": device, "host_bytes": host}
        found = {figure: (size, "made up") for figure, size in sizes.items()}
        monkeypatch.setattr(checks, "capacities", lambda device: found)
        fixed = {"--model": "m", "--run.folder": str(tmp_path), "--data.sequence-length": "64"}
        given = fixed | dict(zip(words[::2], words[1::2], strict=True))
        config = load_config(None, [word for pair in given.items() for word in pair])
        said = None
        try:
            check_machine(config, TEMPLATE, jax.devices()[0])
        except MachineError as error:
            said = str(error)
        return said

    return check


def test_what_fits_passes(refused):
    assert refused() is None
    assert refused("--plan.planner", "megatrain") is None


def test_a_batch_that_no_machine_holds_is_refused_from_its_size_alone(refused):
    said = refused("--data.sequence-length", "1e9")
    assert said is not None
    assert "data.sequence_length 1000000000" in said
    assert "one layer's input alone" in said
    assert "data.rows 1000000000" in (refused("--data.rows", "1e9") or "")


def test_a_step_that_no_plan_fits_is_refused_with_the_sum(refused):
    said = refused(device=50_000)
    assert said is not None
    assert "device memory" in said
    assert "short" in said
    said = refused(host=100_000)
    assert said is not None
    assert "weights and gradients" in said
    assert "optimizer state" in said
    assert "\n" not in said


def test_a_rule_that_does_not_fit_points_to_the_planner(refused):
    said = refused("--plan.planner", "keep_all", "--data.rows", "64", device=4_000_000)
    assert said is not None
    assert "the rule keep_all" in said
    assert "plan.planner milp" in said


def test_a_plan_or_profile_that_cannot_be_used_is_known_before_the_data_is_read(refused, tmp_path):
    with pytest.raises(PlanError, match=r"absent\.json: cannot be read"):
        refused("--plan.file", str(tmp_path / "absent.json"))
    with pytest.raises(ProfileError, match="profile 'h9000'"):
        refused("--plan.hardware", "h9000")
    plan = keep_all(TEMPLATE.spec, tiny.residual_names(TEMPLATE), batch_rows=64, sequence_length=64)
    plan.save(tmp_path / "plan.json")
    words = ("--plan.file", str(tmp_path / "plan.json"), "--data.rows", "64")
    assert refused(*words) is None
    assert f"the plan {tmp_path / 'plan.json'}" in (refused(*words, device=4_000_000) or "")


def test_threads_and_folders(refused, tmp_path):
    assert "optimizer.threads is 100000" in (refused("--optimizer.threads", "100000") or "")
    assert refused("--optimizer.threads", str(usable_cpus())) is None
    (tmp_path / "file").write_text("")
    for key in ("--data.cache-folder", "--plan.nvme-folder"):
        said = refused(key, str(tmp_path / "file" / "below"))
        assert said is not None
        assert key.removeprefix("--").replace("-", "_") in said
        assert "is a file, not a folder" in said
    assert refused("--data.cache-folder", str(tmp_path / "new" / "deep")) is None
    assert not (tmp_path / "new").exists()
