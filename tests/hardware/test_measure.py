"""Measuring gives a profile that reads back, with rates of this machine's order of magnitude."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import types
from collections.abc import Callable

import jax
import pytest
from rich.console import Console

from lazyjax.cli import main
from lazyjax.hardware import measure
from lazyjax.hardware.drive import drive_rates
from lazyjax.hardware.measure import (
    MatrixShape,
    MeasureOptions,
    link_rates,
    matmul_flops_per_second,
    measure_profile,
    timing,
)
from lazyjax.hardware.profile import dump_profile, load_profile
from lazyjax.optim.make import OPTIMIZERS
from lazyjax.planning.commands import profile as machine
from lazyjax.planning.commands.profile import profile_machine
from lazyjax.planning.costs.probes import block_shapes, update_probe
from tests import tiny

MIB = 2**20


def test_median_waits_and_ignores_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own: only runs take time."""
    now, waited = 0.0, []
    # The first round of three differs by much, so that a second one follows.
    durations = iter((9.0, 3.0, 1.0, 2.0, 2.0, 2.1, 2.0))

    def run() -> float:
        nonlocal now
        now += next(durations)
        return now

    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(measure.jax, "block_until_ready", waited.append)
    seconds, spread = timing(run, 3)
    assert seconds == 2.0
    assert spread == pytest.approx(0.05)
    assert waited == pytest.approx([9.0, 12.0, 13.0, 15.0, 17.0, 19.1, 21.1])


def test_matmul_rate_is_flops_over_time_and_not_dispatch_time() -> None:
    shape = MatrixShape(256, 512, 512)
    rate = matmul_flops_per_second([shape], "float32", repeats=3)
    assert 1e8 < rate < 1e13
    assert shape.flops == 2 * 256 * 512 * 512


def test_link_moves_real_bytes() -> None:
    rates = link_rates(32 * MIB, repeats=3)
    assert 1e7 < rates.h2d < 1e12
    assert 1e7 < rates.d2h < 1e12
    assert 0 < rates.duplex_factor <= 1
    # On a CPU a slab becomes the device's array: nothing is copied.
    assert rates.slab > 3 * rates.h2d


def test_drive_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    rates = drive_rates(tmp_path / "new", 32 * MIB)
    assert min(rates) > 1e6
    assert list((tmp_path / "new").iterdir()) == []


def test_unwritable_folder_is_an_error(tmp_path: pathlib.Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OSError, match="file"):
        drive_rates(blocked, MIB)


def test_measured_profile_reads_back(tmp_path: pathlib.Path) -> None:
    options = MeasureOptions(
        shapes=(MatrixShape(64, 128, 128),),
        compute_dtype="float32",
        transfer_bytes=4 * MIB,
        update_elements=MIB,
        nvme_bytes=16 * MIB,
        nvme_folder=tmp_path,
        repeats=2,
    )
    seen = []
    profile = measure_profile(
        "here", options, {"fp32_adamw": update_probe("fp32_adamw")},
        progress=lambda what, done, total: seen.append((what, done, total)),
    )  # fmt: skip
    assert [done for _, done, _ in seen] == list(range(len(seen)))
    assert set(profile.sources) == profile.figure_names()
    assert all(source.startswith("measured 2") for source in profile.sources.values())
    path = tmp_path / "here.yaml"
    path.write_text(dump_profile(profile))
    assert load_profile(path) == profile


def test_without_a_folder_there_is_no_nvme(tmp_path: pathlib.Path) -> None:
    template = tiny.template("qwen2", tied=False, blocks=1)
    output = tmp_path / "profiles" / "mine.yaml"
    with open(os.devnull, "w") as nowhere:
        profile = profile_machine(
            output, template, tokens=32, compute_dtype="float32", optimizers=("hybrid8bit",),
            console=Console(file=nowhere),
        )  # fmt: skip
    assert load_profile(output) == profile
    assert profile.nvme_bytes == 0
    assert set(profile.host_update_parameters_per_second) == {"hybrid8bit"}
    # The tests see four devices: what passes between them is timed, for plans that spread over them.
    assert profile.sources["interconnect_bytes_per_second"].startswith("measured 2")
    assert profile.spread(4, source="test").collective_seconds(10**9) > 0
    with pytest.raises(ValueError, match="optimizer 'sgd': there are"):
        profile_machine(output, template, optimizers=("sgd",))


def test_every_optimizer_is_measured_unless_told_otherwise(tmp_path, monkeypatch) -> None:
    asked = []

    def refuse(name, options, probes, *, progress):
        asked.extend(probes)
        raise ValueError("enough")

    monkeypatch.setattr(machine, "measure_profile", refuse)
    template = tiny.template("qwen2", tied=False, blocks=1)
    with pytest.raises(ValueError, match="enough"), open(os.devnull, "w") as nowhere:
        profile_machine(tmp_path / "mine.yaml", template, console=Console(file=nowhere))
    assert set(asked) == set(OPTIMIZERS)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_refused_before_measuring(tmp_path, monkeypatch, capsys) -> None:
    def measure(*arguments, **keywords):
        raise AssertionError("measured")

    monkeypatch.setattr(machine, "measure_profile", measure)
    blocked = tmp_path / "file"
    blocked.write_text("")
    good = tmp_path / "mine.yaml"
    for words in (["--out", blocked / "mine.yaml"], ["--out", tmp_path]):
        assert main(["profile", *map(str, words)]) == 2
        assert f"{words[1]}: the profile cannot be written there" in capsys.readouterr().err
    assert main(["profile", "--out", str(good), "--nvme-folder", str(blocked / "nvme")]) == 2
    message = f"NVMe folder {blocked / 'nvme'}: cannot be written"
    assert message in capsys.readouterr().err
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    assert main(["profile", "--out", str(good), "--nvme-folder", str(tmp_path)]) == 2
    assert re.search(r"measuring takes \d+ bytes, 0 are free", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == [blocked]


def test_shapes_are_the_blocks_matrices() -> None:
    template = tiny.template("qwen2", tied=False, blocks=2)
    shapes = {(shape.inner, shape.columns) for shape in block_shapes(template, 32)}
    assert {(32, 48), (48, 32), (32, 32)} <= shapes
    assert jax.default_backend() == "cpu"
    assert all(shape.rows == 32 for shape in block_shapes(template, 32))


class _Clock:
    """Time that passes only where something runs; a thread runs while its starter waits for it."""

    def __init__(self) -> None:
        self.now = 0.0
        clock = self

        class Thread:
            def __init__(self, target: Callable[..., object], args: tuple[object, ...]) -> None:
                self._run = lambda: target(*args)

            def start(self) -> None:
                self._started = clock.now

            def join(self) -> None:
                joined, clock.now = clock.now, self._started
                self._run()
                clock.now = max(clock.now, joined)

        self.Thread = Thread

    def perf_counter(self) -> float:
        return self.now


class _Resource:
    """Serves one caller at a time."""

    def __init__(self, clock: _Clock) -> None:
        self._clock, self._free_at = clock, 0.0

    def use(self, seconds: float) -> None:
        self._free_at = max(self._clock.now, self._free_at) + seconds
        self._clock.now = self._free_at


@pytest.mark.parametrize("shared", [True, False])
def test_what_shares_a_resource_costs_its_whole_time_and_what_does_not_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    clock = _Clock()
    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(measure, "threading", clock)
    device = _Resource(clock)
    host = device if shared else _Resource(clock)
    share = measure.lost_share(lambda: device.use(0.02), lambda: host.use(0.03), repeats=3)
    assert share == pytest.approx(1.0 if shared else 0.0)


def test_a_cpu_is_not_kept_busy_for_minutes_by_the_products_of_a_large_model(monkeypatch) -> None:
    asked: list[MatrixShape] = []

    def rate(shapes, *arguments, **keywords):
        asked.extend(shapes)
        return 1e11

    monkeypatch.setattr(measure, "matmul_flops_per_second", rate)
    monkeypatch.setattr(measure, "lost_share", lambda *arguments: 0.0)
    large, small = MatrixShape(2**20, 512, 512), MatrixShape(128, 64, 64)
    options = MeasureOptions(
        [large, small], "float32", transfer_bytes=2**16, update_elements=2**12, repeats=1
    )
    profile = measure_profile("here", options, {"hybrid8bit": update_probe("hybrid8bit")})
    assert asked == [large._replace(rows=19_073), small]
    assert "19073x512x512" in profile.sources["matmul_flops_per_second"]
