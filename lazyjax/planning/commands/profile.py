"""`lazyjax profile`: measures this machine at a model's shapes and writes a hardware profile."""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lazyjax.hardware.devices import visible_devices
from lazyjax.hardware.measure import SPREAD, MeasureOptions, measure_profile, spread_of
from lazyjax.hardware.profile import HardwareProfile, ProfileError, dump_profile
from lazyjax.models.template import ModelTemplate
from lazyjax.optim.make import OPTIMIZERS, usable_cpus
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
    devices = visible_devices()
    small = devices[0].platform == "cpu"
    options = MeasureOptions(
        shapes=block_shapes(template, tokens),
        compute_dtype=compute_dtype,
        transfer_bytes=(64 if small else 512) * 2**20,
        update_elements=(8 if small else 64) * 2**20,
        nvme_bytes=(256 if small else 4096) * 2**20,
        nvme_folder=nvme_folder,
        devices=len(devices),
    )
    unknown = sorted(set(optimizers) - set(OPTIMIZERS))
    if unknown:
        raise ValueError(f"optimizer {unknown[0]!r}: there are {', '.join(sorted(OPTIMIZERS))}")
    _check_output(output)
    if nvme_folder is not None:
        _check_nvme_folder(nvme_folder, options.nvme_bytes)
    probes = {optimizer: update_probe(optimizer) for optimizer in optimizers}
    load = os.getloadavg()[0]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("measuring")

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        profile = measure_profile(name, options, probes, progress=progress)
    output.write_text(dump_profile(profile))
    console.print(profile_table(profile))
    warning = doubts(profile, load, usable_cpus())
    if warning is not None:
        console.print(warning, style="yellow", highlight=False)
    console.print(f"written to {output}; use it with --hardware {output}", highlight=False, soft_wrap=True)
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


#: Runs of one figure that differ by more than this were disturbed.
_UNSTEADY = 0.25
#: What a figure of a profile is called on the screen; rates of updates are named by their optimizer.
_WORDS = {
    "matmul_flops_per_second": "matrix products",
    "device_bandwidth_bytes_per_second": "device memory",
    "kernel_launch_seconds": "launch of a kernel",
    "h2d_bytes_per_second": "host to device",
    "slab_bytes_per_second": "parameters to device",
    "d2h_bytes_per_second": "device to host",
    "duplex_factor": "both ways at once",
    "host_bandwidth_bytes_per_second": "host memory",
    "host_update_parameters_per_second": "update",
    "update_contention": "compute lost to updates",
    "copy_contention": "compute lost to copies",
    "collective_contention": "compute lost to collectives",
    "nvme_read_bytes_per_second": "NVMe read",
    "nvme_write_bytes_per_second": "NVMe write",
    "nvme_shared_bytes_per_second": "NVMe both ways at once",
    "interconnect_bytes_per_second": "between devices",
    "network_bytes_per_second": "between hosts",
    "device_total_bytes": "device has",
    "device_bytes": "a plan may use",
    "host_bytes": "of the host",
    "nvme_bytes": "of NVMe",
    "devices": "devices",
    "hosts": "hosts",
    "link_devices": "devices on a link",
}
#: Figures without a unit.
_PLAIN = frozenset(
    {
        "devices", "hosts", "link_devices", "duplex_factor", "update_contention", "copy_contention",
        "collective_contention",
    }
)  # fmt: skip


def profile_table(profile: HardwareProfile) -> Table:
    """Every figure with its spread and its source; fits 80 columns without cutting a name."""
    table = Table(title=f"{profile.name}: {profile.device}", title_justify="left", box=box.SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("spread", justify="right", no_wrap=True)
    table.add_column("source")
    order = list(_WORDS)
    figures = sorted(
        profile.figure_names(), key=lambda figure: (order.index(figure.partition(".")[0]), figure)
    )
    for figure in figures:
        head, _, optimizer = figure.partition(".")
        value = getattr(profile, head)
        spread = spread_of(profile.sources[figure])
        table.add_row(
            f"{_WORDS[head]} {optimizer}".rstrip(),
            _readable(value[optimizer] if optimizer else value, head),
            "" if spread is None else f"{spread:.0%}",
            profile.sources[figure].partition(f"; {SPREAD}")[0],
        )
    return table


def doubts(profile: HardwareProfile, load: float, cpus: int) -> str | None:
    """Why the figures of a measured profile may be too low; None where nothing speaks for it.

    Args:
        load: how many processes wanted to run when measuring began (the average over a minute).
        cpus: that this process may use.
    """
    spreads = {figure: spread_of(source) for figure, source in profile.sources.items()}
    unsteady = [figure for figure, spread in spreads.items() if spread is not None and spread > _UNSTEADY]
    busy = f"load {load:.1f} on {cpus} CPU(s)" if load > 1 + 0.1 * cpus else ""
    if not busy and not unsteady:
        return None
    varies = f"{len(unsteady)} figure(s) vary by more than {_UNSTEADY:.0%}" if unsteady else ""
    why = "; ".join(words for words in (busy, varies) if words)
    return f"The machine seems busy ({why}): figures may be too low; measure again when it is quiet."


def _readable(value: float | int, figure: str) -> str:
    if figure in _PLAIN:
        return f"{value:.3g}"
    if figure == "kernel_launch_seconds":
        return f"{value * 1e6:.3g} us"
    if figure == "matmul_flops_per_second":
        return f"{value / 1e12:.3g} TFLOPS"
    if figure == "host_update_parameters_per_second":
        return f"{value / 1e9:.3g} G param/s"
    return f"{value / 1e9:.4g} GB" + ("/s" if figure.endswith("per_second") else "")
