"""What the README says exists and runs."""

import pathlib
import re

import jax
import pytest

from lazyjax import cli
from lazyjax.data.sources import problems_folder
from lazyjax.huggingface.export import export
from lazyjax.models.architecture import Qwen3Architecture, Rope
from lazyjax.models.registry import build_template, init_parameters
from lazyjax.storage.host import allocate_host_store

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [README, (ROOT / "docs/commands.md").read_text()]


def test_every_file_that_is_named_exists():
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`((?:lazyjax|experiments|tests|docs|analysis)/[\w./-]*)`", page)
    }
    named |= {f"docs/{pathlib.Path(link).name}" for link in re.findall(r"\]\(([\w/.-]+\.md)\)", README)}
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    modules = {name for page in PAGES for name in re.findall(r"python -m\s+([a-z_.0-9]+)", page)}
    paths = {name: ROOT / name.replace(".", "/") for name in modules if not name.startswith("pytest")}
    assert [n for n, path in paths.items() if not (path.with_suffix(".py").exists() or path.is_dir())] == []


def test_every_command_is_in_the_readme():
    for name in cli.COMMANDS:
        assert f"lazyjax {name}" in README, name


def test_the_table_is_the_computed_one():
    computed = (ROOT / "experiments/results/what_fits.md").read_text()
    rows = [line for line in computed.splitlines() if line.startswith("|")]
    assert len(rows) > 5
    assert "\n".join(rows) in README
    assert "simulated" in README


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    """With a tiny model in the place of the one it names, and one step."""
    config = Qwen3Architecture(
        name="tiny", vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, rms_norm_eps=1e-6,
        tie_word_embeddings=True, rope=Rope(theta=1e4),
    )  # fmt: skip
    template = build_template(config)
    store = allocate_host_store(template.spec)
    for index, slabs in enumerate(store.layers):
        for name, value in init_parameters(template, index, jax.random.key(0)).items():
            slabs.set_master(name, value)
    export(tmp_path / "Qwen2.5-0.5B", template, store, tokenizer_folder=problems_folder())
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert 5 <= len([line for line in example.splitlines() if line.strip()]) <= 10
    small = ["--data.sequence-length", "64", "--data.rows", "2", "--plan.planner", "recompute_all"]
    small += ["--training.evaluate-rows", "2", "--data.take", "40"]
    words = "".join(f', "{word}"' for word in small)
    assert '"--training.steps", "20"' in example
    example = example.replace('"--training.steps", "20"', f'"--training.steps", "1"{words}')
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    last = capsys.readouterr().out.strip().splitlines()[-3:]
    assert " -> " in last[0]
    assert last[1] == "qwen3"


@pytest.mark.parametrize("page", ["README.md"])
def test_the_readme_is_one_page(page):
    assert len((ROOT / page).read_text().splitlines()) <= 150
