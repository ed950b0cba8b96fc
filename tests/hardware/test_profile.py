"""Profiles: every preset loads and is sourced; a bad file is refused with the key's name."""

from __future__ import annotations

import pathlib

import pytest

from lazyjax.hardware.profile import (
    HardwareProfile,
    ProfileError,
    dump_profile,
    load_profile,
    parse_profile,
    preset_names,
)
from lazyjax.optim.base import touched_bytes
from lazyjax.optim.make import OPTIMIZERS, make_host_optimizer
from lazyjax.planning.commands import profile as machine

EXPECTED = {"h800-paper", "h100-sxm", "h200", "gh200", "a100-80g", "rtx3090", "rtx4090", "rtx5090", "a6000"}


def test_presets_are_all_there() -> None:
    assert set(preset_names()) == EXPECTED


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_preset_states_a_source_for_every_figure(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert set(profile.sources) == profile.figure_names()
    kinds = ("paper", "datasheet", "assumption", "fit")
    assert all(source.startswith(kinds) for source in profile.sources.values())
    # Rates of updates follow from what optimizers touch, so that every preset knows every one.
    assert not profile.host_update_parameters_per_second
    for optimizer in OPTIMIZERS:
        touched = touched_bytes(make_host_optimizer(optimizer, threads=1, path="pure"), "bfloat16")
        assert 1e9 < profile.update_parameters_per_second(optimizer, touched) < 1e11


def test_paper_rates() -> None:
    profile = load_profile("h800-paper")
    assert (profile.h2d_bytes_per_second, profile.d2h_bytes_per_second) == (12e9, 12e9)
    assert (profile.nvme_read_bytes_per_second, profile.nvme_write_bytes_per_second) == (2.83e9, 3.35e9)
    # 72 x 1024 x 5120 bf16: 30 of the paper's boundaries fit 21.55 GiB, 28 would fit 21.55 GB.
    boundary_bytes = 72 * 1024 * 5120 * 2
    assert int(21.55 * 2**30 // boundary_bytes) == 30
    assert profile.device_bytes == 70 * 2**30
    assert profile.host_bytes == 2 * 2**40


@pytest.mark.parametrize("name", ["h800-paper", "a6000"])
def test_dump_reads_back(name: str, tmp_path: pathlib.Path) -> None:
    profile = load_profile(name)
    path = tmp_path / "mine.yaml"
    path.write_text(dump_profile(profile))
    assert load_profile(path) == profile


def test_exponents_without_sign_are_numbers() -> None:
    text = dump_profile(load_profile("h100-sxm")).replace("value: 2847500000000.0", "value: 2847.5e9")
    text = text.replace(f"value: {80 * 2**30}", "value: 80e9").replace("value: 81604378624", "value: 70e9")
    profile = parse_profile(text, where="test")
    assert profile.device_total_bytes == 80_000_000_000
    assert profile.device_bandwidth_bytes_per_second == 2847.5e9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("h2d_bytes_per_second:", "h2d_rate:"), r"h2d_bytes_per_second: Field required"),
        (("duplex_factor:", "speling: 3\nduplex_factor:"), r"speling: unknown key; known keys: name, device"),
        (("value: 12.0e+9", "value: -1"), r"h2d_bytes_per_second: .*greater than 0"),
        (("value: 1.0\n", "value: 1.5\n"), r"duplex_factor: .*less than or equal to 1"),
        (("value: 12.0e+9", "value: fast"), r"h2d_bytes_per_second: .*valid number"),
        (
            ('  source: "paper, setup: 2 TiB DRAM"\n', ""),
            r"host_bytes: no source; write it as \{value: ..., source: ...\}",
        ),
        (("value: 75161927680", "value: 99e9"), r"device_bytes: more than device_total_bytes"),
        (("name: h800-paper", "- name"), r"not YAML"),
    ],
)
def test_bad_profile_names_the_key(change: tuple[str, str], message: str) -> None:
    import importlib.resources

    preset = importlib.resources.files("lazyjax.hardware") / "presets" / "h800-paper.yaml"
    text = preset.read_text()
    assert change[0] in text
    with pytest.raises(ProfileError, match=message):
        parse_profile(text.replace(change[0], change[1], 1), where="profile test")


def test_unknown_name_lists_presets() -> None:
    with pytest.raises(ProfileError, match=r"neither a file nor a preset \(presets: a100-80g, a6000"):
        load_profile("tpu")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("h800", "h800-paper"), ("rtx4909", "rtx4090"), ("H200", "h200"), ("h100", "h100-sxm")],
)
def test_a_near_miss_is_told_what_was_probably_meant(given: str, meant: str) -> None:
    with pytest.raises(ProfileError, match=rf"profile '{given}': .*; did you mean {meant}\?"):
        load_profile(given)


@pytest.mark.parametrize("content", [b"\x93NUMPY\x01\x00\xff\xfe", b"name: \x00\x01"])
def test_a_binary_file_is_named(content: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "weights.yaml"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"weights\.yaml: not (a text file|YAML)"):
        load_profile(path)


@pytest.mark.parametrize("key", ["duplex_factor", "host_bytes"])
def test_a_repeated_key_is_refused_by_name(key: str) -> None:
    text = dump_profile(load_profile("h800-paper"))
    (line,) = [line for line in text.splitlines() if line.strip() == f"{key}:"]
    indent = line.removesuffix(f"{key}:")
    twice = text.replace(line, f"{indent}{key}: {{value: 1.0, source: x}}\n{line}", 1)
    with pytest.raises(ProfileError, match=rf"profile test: .*key '{key}' stands twice.*line"):
        parse_profile(twice, where="profile test")


def test_nvme_capacity_needs_rates() -> None:
    text = dump_profile(load_profile("h800-paper"))
    head, _ = text.split("nvme_read_bytes_per_second:")
    with pytest.raises(ProfileError, match="nvme_bytes: needs nvme_read_bytes_per_second"):
        parse_profile(head, where="profile test")


def test_every_figure_has_a_name_on_the_screen() -> None:
    fields = set(HardwareProfile.model_fields) - {"name", "device", "platform", "sources"}
    assert fields == set(machine._WORDS)
