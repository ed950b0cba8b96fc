"""`lazyjax profile`: measures this machine at a model's shapes and writes a hardware profile."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lazyjax.hardware.measure import MeasureOptions, measure_profile
from lazyjax.hardware.profile import HardwareProfile, ProfileError, dump_profile
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.make import OPTIMIZERS
from lazyjax.planning.costs.probes import block_shapes, update_probe


def profile_machine(
    output: pathlib.Path,
    template: ModelTemplate,
    *,
    name: str = "measured",
    tokens: int = 4096,
    compute_dtype: str = "bfloat16",
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
    nvme_folder: pathlib.Path | None = None,
    console: Console | None = None,
) -> HardwareProfile:
    """Measures, writes `output` (YAML that `load_profile` takes) and prints what was found.

    Args:
        template: matrix products are timed at the shapes of its blocks.
        tokens: rows of those products; fewer where one product would take long.
        optimizers: whose host updates are timed; by default all that there are.
        nvme_folder: None leaves NVMe out.

    Raises:
        ValueError: before anything is measured: an unknown optimizer; (ProfileError) `output` or the
            NVMe folder cannot be written.
    """
    console = console or Console()
    small = jax.default_backend() == "cpu"
    options = MeasureOptions(
        shapes=block_shapes(template, tokens),
        compute_dtype=compute_dtype,
        transfer_bytes=(64 if small else 512) * 2**20,
        update_elements=(8 if small else 64) * 2**20,
        nvme_bytes=(256 if small else 4096) * 2**20,
        nvme_folder=nvme_folder,
    )
    unknown = sorted(set(optimizers) - set(OPTIMIZERS))
    if unknown:
        raise ValueError(f"optimizer {unknown[0]!r}: there are {', '.join(sorted(OPTIMIZERS))}")
    _check_output(output)
    if nvme_folder is not None:
        _check_nvme_folder(nvme_folder, options.nvme_bytes)
    probes = {optimizer: update_probe(optimizer) for optimizer in optimizers}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("measuring")

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        profile = measure_profile(name, options, probes, progress=progress)
    output.write_text(dump_profile(profile))
    console.print(profile_table(profile))
    console.print(f"written to {output}; use it with --hardware {output}")
    return profile


def _check_output(output: pathlib.Path) -> None:
    """Makes the file's folder and opens the file, without changing it, as it will be written."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        there = output.exists()
        with output.open("a"):
            pass
        if not there:
            output.unlink()
    except OSError as error:
        raise ProfileError(f"{output}: the profile cannot be written there ({error.strerror})") from error


def _check_nvme_folder(folder: pathlib.Path, size: int) -> None:
    """Makes the folder and a file in it that is gone again; `size` bytes are going to be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ProfileError(f"NVMe folder {folder}: cannot be written ({error.strerror})") from error
    if free < size:
        raise ProfileError(f"NVMe folder {folder}: measuring takes {size} bytes, {free} are free")


def profile_table(profile: HardwareProfile) -> Table:
    """Every figure with its source."""
    table = Table(title=f"{profile.name}: {profile.device}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("source")
    for figure in sorted(profile.figure_names()):
        head, _, kind = figure.partition(".")
        value = getattr(profile, head)
        table.add_row(figure, _readable(value[kind] if kind else value, head), profile.sources[figure])
    return table


def _readable(value: float | int, figure: str) -> str:
    if figure in ("devices", "duplex_factor"):
        return f"{value:.3g}"
    if figure == "matmul_flops_per_second":
        return f"{value / 1e12:.3g} TFLOPS"
    if figure == "host_update_parameters_per_second":
        return f"{value / 1e9:.3g} G parameters/s"
    return f"{value / 1e9:.4g} GB" + ("/s" if figure.endswith("per_second") else "")
