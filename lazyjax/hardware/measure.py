"""Micro-benchmarks that turn the machine at hand into a hardware profile.

Every figure is the median of repeated runs and carries what was timed, and how much the runs differed, as
its source. Transfers go
the ways that training uses: parameters from a host slab to the device, results from the device
to pinned host memory. Host updates are timed through functions that the caller passes in,
because optimizers lie above this package.

This module knows no model; matrix shapes are given to it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import functools
import os
import pathlib
import re
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from lazyjax.hardware.drive import aligned_bytes, drive_rates
from lazyjax.hardware.memory import host_memory_bytes
from lazyjax.hardware.process import usable_cpus
from lazyjax.hardware.profile import HardwareProfile

#: Called with the number of elements of a slab; returns a function that updates it once.
UpdateProbe = Callable[[int], Callable[[], None]]

_USABLE_SHARE = 0.95
#: In a figure's source, before the share by which its runs differed.
SPREAD = "spread"


class MatrixShape(NamedTuple):
    """A product of [rows, inner] and [inner, columns]."""

    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """2 per multiply-add."""
        return 2 * self.rows * self.inner * self.columns


@dataclasses.dataclass(frozen=True)
class MeasureOptions:
    """How much is measured.

    Attributes:
        shapes: products whose rate is wanted, as they appear in a layer's forward pass.
        compute_dtype: of those products.
        transfer_bytes: of one transfer.
        update_elements: of the slab whose update is timed.
        nvme_bytes: written and read back.
        nvme_folder: on the drive that plans may use; None leaves NVMe out of the profile.
        devices: of this host that are to share the work; more than one are timed together.
        repeats: runs of which the median counts.
    """

    shapes: Sequence[MatrixShape]
    compute_dtype: str
    transfer_bytes: int = 256 * 2**20
    update_elements: int = 32 * 2**20
    nvme_bytes: int = 1024 * 2**20
    nvme_folder: pathlib.Path | None = None
    devices: int = 1
    repeats: int = 5


def measure_profile(
    name: str,
    options: MeasureOptions,
    updates: Mapping[str, UpdateProbe],
    *,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> HardwareProfile:
    """Measures this machine.

    Args:
        updates: optimizer name -> probe.
        progress: gets what is being measured, how many steps are done, and their number.

    Raises:
        OSError: the NVMe folder cannot be written.
    """
    measurements = _Measurements(options, updates)
    steps = measurements.steps()
    for done, (what, step) in enumerate(steps):
        progress(what, done, len(steps))
        step()
    progress("done", len(steps), len(steps))
    return HardwareProfile(
        name=name,
        device=device_label(measurements.device),
        platform=measurements.device.platform,
        **measurements.figures,
        sources=measurements.sources,
    )


class _Measurements:
    """What is measured of a machine, figure by figure.

    Attributes:
        figures, sources: of the profile, as far as measured.
    """

    def __init__(self, options: MeasureOptions, updates: Mapping[str, UpdateProbe]) -> None:
        self.options, self.updates, self.device = options, updates, jax.devices()[0]
        self.shapes: Sequence[MatrixShape] = options.shapes
        if self.device.platform == "cpu":
            self.shapes = [_bounded(shape) for shape in options.shapes]
        self.when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        self.figures: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def steps(self) -> list[tuple[str, Callable[[], None]]]:
        """What is measured, in order, by name."""
        steps: list[tuple[str, Callable[[], None]]] = [
            ("matrix products", self.matrices),
            ("device memory", self.bandwidth),
            ("host link", self.link),
            ("host memory and updates", self.host),
            ("compute beside copies and updates", self.contention),
            ("NVMe", self.drive),
            ("capacities", self.memory),
        ]
        if self.options.devices > 1:
            steps.append(("between devices", self.between_devices))
        return steps

    def _note(self, figure: str, value: Any, how: str, spreads: Sequence[float] = ()) -> None:
        self.figures[figure] = value
        self.sources[figure] = self._source(how, spreads)

    def _source(self, how: str, spreads: Sequence[float]) -> str:
        runs = f"; {SPREAD} {max(spreads):.0%} over {self.options.repeats} runs" if spreads else ""
        return f"measured {self.when}: {how}{runs}"

    def matrices(self) -> None:
        """Matrix products of the model's shapes."""
        spreads = list[float]()
        rate = matmul_flops_per_second(
            self.shapes, self.options.compute_dtype, self.options.repeats, observe=spreads.append
        )
        some = ", ".join("x".join(map(str, shape)) for shape in self.shapes[:4])
        how = f"{self.options.compute_dtype} products and both gradients, {some}"
        self._note("matmul_flops_per_second", rate, how, spreads)

    def bandwidth(self) -> None:
        """Memory of the device."""
        spreads = list[float]()
        rate = device_bandwidth_bytes_per_second(
            self.options.transfer_bytes, self.options.repeats, observe=spreads.append
        )
        self._note(
            "device_bandwidth_bytes_per_second", rate, "an element-wise pass, reads plus writes", spreads
        )

    def link(self) -> None:
        """The host link, each way and both."""
        spreads = list[float]()
        alone = link_rates(self.options.transfer_bytes, self.options.repeats, observe=spreads.append)
        self._note("h2d_bytes_per_second", alone.h2d, "pinned array to device, alone", spreads[:1])
        self._note("d2h_bytes_per_second", alone.d2h, "device to pinned host memory, alone", spreads[1:2])
        self._note("duplex_factor", alone.duplex_factor, "both at once over each alone", spreads[:3])
        how = "host slab to device, alone"
        if self.device.platform == "cpu":
            how = "a slab becomes the device's array, nothing is copied"
        self._note("slab_bytes_per_second", alone.slab, how, spreads[3:])

    def host(self) -> None:
        """Memory of the host, and updates."""
        spreads = list[float]()
        rate = host_bandwidth_bytes_per_second(
            self.options.transfer_bytes, self.options.repeats, observe=spreads.append
        )
        how = "arrays updated in place by all usable CPUs, reads plus writes"
        self._note("host_bandwidth_bytes_per_second", rate, how, spreads)
        rates = {}
        for optimizer, probe in self.updates.items():
            update = probe(self.options.update_elements)
            seconds, spread = timing(update, self.options.repeats)
            rates[optimizer] = self.options.update_elements / seconds
            self.sources[f"host_update_parameters_per_second.{optimizer}"] = self._source(
                f"updates of {self.options.update_elements} parameters on all usable CPUs", [spread]
            )
        self.figures["host_update_parameters_per_second"] = rates

    def drive(self) -> None:
        """NVMe, where there is a folder."""
        if self.options.nvme_folder is None:
            return
        rates = drive_rates(self.options.nvme_folder, self.options.nvme_bytes)
        moved = self.options.nvme_bytes
        how = f"{moved} bytes in files of 64 MiB, not cached"
        self._note("nvme_read_bytes_per_second", rates.read, how)
        self._note("nvme_write_bytes_per_second", rates.write, how)
        self._note("nvme_shared_bytes_per_second", rates.shared, f"{how}, read while as many are written")
        free = int(0.9 * shutil.disk_usage(self.options.nvme_folder).free)
        self._note("nvme_bytes", free, "0.9 of the free space of the folder's file system")

    def between_devices(self) -> None:
        """Collectives of this host's devices."""
        devices, spreads = jax.local_devices()[: self.options.devices], list[float]()
        rate = interconnect_bytes_per_second(
            devices, self.options.transfer_bytes, self.options.repeats, observe=spreads.append
        )
        how = f"an all-gather of {self.options.transfer_bytes} bytes over {len(devices)} devices"
        self._note("interconnect_bytes_per_second", rate, how, spreads)
        self.figures["collective_contention"] = 1.0
        self.sources["collective_contention"] = (
            "assumption: JAX runs the programs of a device one after another"
        )

    def memory(self) -> None:
        """Capacities."""
        for figure, (value, how) in capacities(self.device).items():
            self._note(figure, value, how)

    def contention(self) -> None:
        """What compute loses to copies and updates beside it."""
        compute = products(self.shapes[:1], self.options.compute_dtype)
        # An optimizer's update is the same few passes over memory whichever it is: one stands for all.
        for optimizer, probe in list(self.updates.items())[:1]:
            update = probe(min(self.options.update_elements, _CONTENDING_ELEMENTS))
            share = lost_share(compute, update, self.options.repeats)
            self._note(
                "update_contention", share, f"lost by products, per second of {optimizer} updates beside"
            )
        share = lost_share(compute, pinned_copy(_CONTENDING_BYTES), self.options.repeats)
        self._note("copy_contention", share, "lost by products, per second of copies to pinned memory beside")


def device_label(device: jax.Device) -> str:
    """What the device calls itself; for a CPU backend the processor's name."""
    if device.platform != "cpu":
        return str(device.device_kind)
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'}, {len(names) or os.cpu_count()} CPUs"


#: A round of runs that differ by no more is steady; otherwise further rounds follow, up to so many.
_STEADY_SPREAD, _MOST_ROUNDS = 0.1, 4
#: Gets the spread of everything that is timed for one figure.
Observer = Callable[[float], None]


def _unobserved(spread: float) -> None:
    """Nobody asks."""


class Timing(NamedTuple):
    """Median wall seconds, and (longest - shortest) / median of what was timed."""

    seconds: float
    spread: float


def timing(run: Callable[[], Any], repeats: int) -> Timing:
    """Times `run`, after one run that does not count.

    Where the runs differ by much, up to `_MOST_ROUNDS` times as many: the median of all, and the
    spread of the round that differed least.
    """
    jax.block_until_ready(run())
    seconds, spreads = list[float](), list[float]()
    for _ in range(_MOST_ROUNDS):
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds)
        last = seconds[-repeats:]
        spreads.append((max(last) - min(last)) / median if median else 0.0)
        if min(spreads) <= _STEADY_SPREAD:
            break
    return Timing(statistics.median(seconds), min(spreads))


def spread_of(source: str) -> float | None:
    """The spread that a figure's source states; None for a figure that was not timed."""
    found = re.search(rf"; {SPREAD} (\d+)%", source)
    return int(found.group(1)) / 100 if found else None


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """The seconds of `timing`."""
    return timing(run, repeats).seconds


def matmul_flops_per_second(
    shapes: Sequence[MatrixShape], dtype: str, repeats: int = 5, *, observe: Observer = _unobserved
) -> float:
    """FLOPs over seconds of the products x W, dy W^T and x^T dy of all `shapes`, of normal values."""

    @jax.jit
    def forward(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    @jax.jit
    def input_gradient(dy: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("mn,kn->mk", dy, w)

    @jax.jit
    def weight_gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
        return jnp.einsum("mk,mn->kn", x, dy)

    # Equal inputs draw less power, and on a GPU run up to 1.4 times as fast as those of training.
    keys = jax.random.split(jax.random.key(0), 3)
    flops, seconds = 0, 0.0
    for shape in shapes:
        x = jax.random.normal(keys[0], (shape.rows, shape.inner), dtype)
        w = jax.random.normal(keys[1], (shape.inner, shape.columns), dtype)
        dy = jax.random.normal(keys[2], (shape.rows, shape.columns), dtype)
        for product, left, right in ((forward, x, w), (input_gradient, dy, w), (weight_gradient, x, dy)):
            median, spread = timing(functools.partial(product, left, right), repeats)
            observe(spread)
            seconds += median
            flops += shape.flops
    return flops / seconds


def device_bandwidth_bytes_per_second(
    array_bytes: int, repeats: int = 5, *, observe: Observer = _unobserved
) -> float:
    """Bytes read and written by y = x + 1."""
    x = jnp.zeros(array_bytes // 4, jnp.float32)
    seconds, spread = timing(lambda: _increment(x), repeats)
    observe(spread)
    return 2 * x.nbytes / seconds


@jax.jit
def _increment(x: jax.Array) -> jax.Array:
    return x + 1


def interconnect_bytes_per_second(
    devices: Sequence[jax.Device], whole_bytes: int, repeats: int = 5, *, observe: Observer = _unobserved
) -> float:
    """Bytes per second that each device receives in an all-gather to `whole_bytes` on every one."""
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=list(devices))
    elements = whole_bytes // 4 // len(devices) * len(devices)
    parts = jax.device_put(np.zeros(elements, np.float32), NamedSharding(mesh, PartitionSpec("data")))

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def gather(parts: jax.Array) -> jax.Array:
        return parts

    seconds, spread = timing(lambda: gather(parts), repeats)
    observe(spread)
    return parts.nbytes * (len(devices) - 1) / len(devices) / seconds


def host_bandwidth_bytes_per_second(
    array_bytes: int, repeats: int = 5, *, observe: Observer = _unobserved
) -> float:
    """Bytes read and written per second by in-place updates of an array, each CPU on its own part."""
    cpus = len(usable_cpus())
    parts = [aligned_bytes(array_bytes // cpus // 8 * 8).view(np.float64) for _ in range(cpus)]
    for part in parts:
        part[:] = 1.0
    with concurrent.futures.ThreadPoolExecutor(cpus) as pool:

        def update() -> None:
            # numpy releases the interpreter while it adds.
            list(pool.map(lambda part: np.add(part, 1.0, out=part), parts))

        seconds, spread = timing(update, repeats)
    observe(spread)
    return 2 * sum(part.nbytes for part in parts) / seconds


class LinkRates(NamedTuple):
    """Bytes per second of each direction alone, the share kept while both are busy, and parameters' rate.

    Attributes:
        h2d, d2h: of activations, between pinned host memory and the device.
        duplex_factor: of those.
        slab: of parameters, from a slab to the device.
    """

    h2d: float
    d2h: float
    duplex_factor: float
    slab: float


def link_rates(transfer_bytes: int, repeats: int = 5, *, observe: Observer = _unobserved) -> LinkRates:
    """Rates of the host link, of transfers of `transfer_bytes`."""
    device = jax.devices()[0]
    there = SingleDeviceSharding(device)
    here = SingleDeviceSharding(device, memory_kind="pinned_host")
    slab = aligned_bytes(transfer_bytes)
    slab[:] = 1
    result = _increment(jax.device_put(slab, there))
    source = jax.device_put(result, here)

    def up() -> jax.Array:
        return jax.device_put(source, there, may_alias=False)

    def down() -> jax.Array:
        return jax.device_put(result, here)

    def slab_up() -> jax.Array:
        # As parameters go: a CPU backend makes an aligned slab itself the device's array.
        return jax.device_put(slab, there, may_alias=False)

    timings = [timing(run, repeats) for run in (up, down, lambda: (up(), down()), slab_up)]
    for _, spread in timings:
        observe(spread)
    h2d, d2h = (transfer_bytes / timed.seconds for timed in timings[:2])
    both = 2 * transfer_bytes / timings[2].seconds
    return LinkRates(h2d, d2h, min(1.0, both / (h2d + d2h)), transfer_bytes / timings[3].seconds)


#: A CPU reaches its rate in products of this size; those of a large model would take it minutes.
_CPU_PRODUCT_FLOPS, _CPU_LEAST_ROWS = 1e10, 64


def _bounded(shape: MatrixShape) -> MatrixShape:
    """The same product of fewer rows, where it would take a CPU long."""
    rows = int(_CPU_PRODUCT_FLOPS / (2 * shape.inner * shape.columns))
    return shape._replace(rows=min(shape.rows, max(_CPU_LEAST_ROWS, rows)))


#: Size of the updates and copies that run beside compute: about a layer of a small model.
_CONTENDING_ELEMENTS, _CONTENDING_BYTES = 2**21, 2**22
#: Compute against which something runs lasts about this long.
_CONTENTION_SECONDS = 0.2


def products(shapes: Sequence[MatrixShape], dtype: str) -> Callable[[], object]:
    """Runs the products of all `shapes` once, of normal values, and waits for them."""
    keys = jax.random.split(jax.random.key(0), 2)
    operands = [
        (
            jax.random.normal(keys[0], (shape.rows, shape.inner), dtype),
            jax.random.normal(keys[1], (shape.inner, shape.columns), dtype),
        )
        for shape in shapes
    ]
    multiply = jax.jit(lambda pairs: [x @ w for x, w in pairs])
    return lambda: jax.block_until_ready(multiply(operands))


def pinned_copy(size: int) -> Callable[[], object]:
    """Copies `size` bytes from the device to pinned host memory once, and waits for that."""
    device = jax.devices()[0]
    source = jax.device_put(np.zeros(size, np.uint8), SingleDeviceSharding(device))
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    return lambda: jax.block_until_ready(jax.device_put(source, pinned))


def lost_share(compute: Callable[[], object], beside: Callable[[], object], repeats: int) -> float:
    """Seconds that `compute` loses per second of `beside` on another thread: the median, from 0 to 1."""

    def seconds_of(run: Callable[[], object], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            run()
        return time.perf_counter() - start

    seconds_of(compute, 1), seconds_of(beside, 1)
    calls = max(1, round(_CONTENTION_SECONDS / seconds_of(compute, 1)))
    # Less than the compute, so that all of it has compute beside it.
    beside_calls = max(1, round(0.6 * _CONTENTION_SECONDS / seconds_of(beside, 1)))
    shares = []
    for _ in range(repeats):
        alone, other = seconds_of(compute, calls), seconds_of(beside, beside_calls)
        thread = threading.Thread(target=seconds_of, args=(beside, beside_calls))
        start = time.perf_counter()
        thread.start()
        seconds_of(compute, calls)
        thread.join()
        shares.append((time.perf_counter() - start - alone) / other)
    return min(1.0, max(0.0, statistics.median(shares)))


def usable_device_bytes(device: jax.Device) -> int:
    """Device memory that is free for a plan; on a CPU, where the host is the device, a share of it."""
    usable = capacities(device)["device_bytes"][0]
    return usable if device.platform == "cpu" else usable - int(device.memory_stats()["bytes_in_use"])


def capacities(device: jax.Device) -> dict[str, tuple[int, str]]:
    """Memory of the device and the host: figure of a profile -> bytes, and how they were found."""
    host = host_memory_bytes()
    if device.platform == "cpu":
        half = host // 2
        return {
            "device_total_bytes": (half, "half of the available host memory: the device is the host"),
            "device_bytes": (int(_USABLE_SHARE * half), f"{_USABLE_SHARE} of device_total_bytes"),
            "host_bytes": (int(_USABLE_SHARE * (host - half)), f"{_USABLE_SHARE} of the other half"),
        }
    stats = device.memory_stats()
    limit = int(stats["bytes_limit"])
    return {
        "device_total_bytes": (limit, "limit of the device's allocator"),
        "device_bytes": (int(_USABLE_SHARE * limit), f"{_USABLE_SHARE} of device_total_bytes"),
        "host_bytes": (int(_USABLE_SHARE * host), f"{_USABLE_SHARE} of the available host memory"),
    }
