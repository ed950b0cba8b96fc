import pytest

from lazyjax.config import load_config
from lazyjax.training.run_folder import RunFolderError, create_run_folder


def config(tmp_path, *overrides):
    return load_config(None, ["--model.architecture", "a", "--run.folder", str(tmp_path), *overrides])


def test_resolved_configuration_repeats_the_run(tmp_path):
    given = config(tmp_path, "--run.name", "first", "--training.steps", "3")
    folder = create_run_folder(given, "some model")
    assert folder.path == tmp_path / "first"
    assert load_config(folder.path / "config.yaml") == given


def test_default_name_holds_the_model_and_is_resolved(tmp_path):
    folder = create_run_folder(config(tmp_path), "org/some model")
    assert folder.path.name.endswith("-org-some-model")
    assert load_config(folder.path / "config.yaml").run.name == folder.path.name


def test_never_writes_into_another_run(tmp_path):
    given = config(tmp_path, "--run.name", "first")
    create_run_folder(given, "m")
    with pytest.raises(RunFolderError, match=r"first is not empty; choose another run\.name"):
        create_run_folder(given, "m")


def test_unwritable_parent_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="file"):
        create_run_folder(config(tmp_path / "file"), "m")
