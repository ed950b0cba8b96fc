"""Hardware profiles: what a machine can do, each figure with where it comes from.

A profile is a YAML file in which every figure stands beside its source (a datasheet, a paper, a
measurement, or a stated assumption). Presets ship in `presets/`; `lazyjax profile` measures the
machine at hand and writes the same format. In code the figures are plain numbers.

This module knows nothing about models, plans or JAX.
"""

from __future__ import annotations

import difflib
import importlib.resources
import os
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any

import pydantic
import yaml

from lazyjax.config import UniqueKeyLoader

PositiveRate = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, pydantic.Field(ge=1)]
Share = Annotated[float, pydantic.Field(ge=0, le=1, allow_inf_nan=False)]
#: Fields that describe the machine in words and therefore need no source.
_WORDS = frozenset({"name", "device", "platform", "sources"})
_UPDATE_KEY = "host_update_parameters_per_second"


class ProfileError(ValueError):
    """A profile that cannot be found or read; the message names the file and the key."""


def _whole(value: Any) -> Any:
    """Byte counts written as 80e9 (which YAML 1.1 reads as text) or 80.0e+9."""
    if isinstance(value, str):
        value = float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


ByteCount = Annotated[int, pydantic.BeforeValidator(_whole), pydantic.Field(ge=0)]


class HardwareProfile(pydantic.BaseModel):
    """Rates and capacities of one device and its host.

    Attributes:
        name, device: labels.
        platform: of the device, as JAX names it: programs for a CPU are written otherwise.
        matmul_flops_per_second: executed rate of bf16 products at a large model's shapes, not the peak.
        device_total_bytes, device_bytes: device memory that is there, and what a plan may use
            (the rest is left to the runtime, workspaces and fragmentation).
        device_bandwidth_bytes_per_second: device memory, reads plus writes.
        kernel_launch_seconds: added to every kernel.
        h2d_bytes_per_second, d2h_bytes_per_second: each direction alone.
        slab_bytes_per_second: of parameters, where their slabs take another way; None: that of h2d.
        duplex_factor: share of those rates each direction keeps while both are busy (1: full
            duplex; 0.5: the directions share one channel).
        host_bandwidth_bytes_per_second: host memory, reads plus writes of a pass that does both, all
            threads together. What an optimizer touches over this rate is the time of its update.
        host_update_parameters_per_second: parameters updated per second by all host threads, for
            optimizers whose updates were measured.
        update_contention, copy_contention, collective_contention: seconds of compute lost per second of
            host updates, of copies, or of collectives, beside it: 0 where the device has cores, memory or
            engines of its own for them.
        host_bytes, nvme_bytes: capacities of one host that a plan may use; `nvme_bytes` 0 means no NVMe.
        nvme_read_bytes_per_second, nvme_write_bytes_per_second: of one host, each direction alone,
            sustained, past the page cache.
        nvme_shared_bytes_per_second: of both together while both are busy; None: each keeps its own rate.
        devices, hosts: devices that share the work of one step, and the hosts that they are in, each with
            as many. Whatever is said of the host is said of one of them, and its devices share it.
        link_devices: devices of a host that share one link's rates, because they are behind one switch.
        interconnect_bytes_per_second: between the devices of a host, per device and direction.
        network_bytes_per_second: between hosts, per host and direction, all its adapters together.
        sources: where each figure comes from, by field name.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    name: str
    device: str
    platform: str = "gpu"
    matmul_flops_per_second: PositiveRate
    device_total_bytes: ByteCount
    device_bytes: ByteCount
    device_bandwidth_bytes_per_second: PositiveRate
    kernel_launch_seconds: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)] = 0.0
    h2d_bytes_per_second: PositiveRate
    d2h_bytes_per_second: PositiveRate
    slab_bytes_per_second: PositiveRate | None = None
    duplex_factor: Annotated[float, pydantic.Field(gt=0, le=1)]
    host_bandwidth_bytes_per_second: PositiveRate
    host_update_parameters_per_second: Mapping[str, PositiveRate] = pydantic.Field(default_factory=dict)
    update_contention: Share = 0.0
    copy_contention: Share = 0.0
    collective_contention: Share = 0.0
    host_bytes: ByteCount
    nvme_bytes: ByteCount = 0
    nvme_read_bytes_per_second: PositiveRate | None = None
    nvme_write_bytes_per_second: PositiveRate | None = None
    nvme_shared_bytes_per_second: PositiveRate | None = None
    devices: Count = 1
    hosts: Count = 1
    link_devices: Count = 1
    interconnect_bytes_per_second: PositiveRate | None = None
    network_bytes_per_second: PositiveRate | None = None
    sources: Mapping[str, str]

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> HardwareProfile:
        for check in (_check_sources, _check_capacities, _check_devices):
            check(self)
        return self

    @property
    def devices_per_host(self) -> int:
        """Devices that share a host's memory, drives and updates."""
        return self.devices // self.hosts

    def spread(self, devices: int, hosts: int = 1, *, source: str) -> HardwareProfile:
        """The same machine with another number of devices, all hosts together.

        Raises:
            ProfileError: hosts do not divide the devices, or the profile lacks a rate between them.
        """
        update: dict[str, int] = {"devices": devices, "hosts": hosts}
        changed = {name: value for name, value in update.items() if getattr(self, name) != value}
        if not changed:
            return self
        sources = {**self.sources, **dict.fromkeys(changed, source)}
        given = {name: getattr(self, name) for name in self.model_fields_set}
        try:
            return HardwareProfile.model_validate({**given, **changed, "sources": sources})
        except pydantic.ValidationError as error:
            raise ProfileError(f"profile {self.name}: {_first_error(error)}") from error

    def h2d_rate(self) -> float:
        """Bytes per second from its host to a device while both directions and its neighbours are busy."""
        return self._link_rate(self.h2d_bytes_per_second)

    def slab_rate(self, *, alone: bool = False) -> float:
        """The same of parameters, or their rate while nothing else is busy (`alone`)."""
        rate = self.slab_bytes_per_second or self.h2d_bytes_per_second
        return rate if alone else self._link_rate(rate)

    def d2h_rate(self) -> float:
        """Bytes per second from a device to its host, as `h2d_rate`."""
        return self._link_rate(self.d2h_bytes_per_second)

    def _link_rate(self, alone_bytes_per_second: float) -> float:
        """Devices behind one switch share its link; no more passes than the host's memory takes both ways."""
        rate = alone_bytes_per_second * self.duplex_factor
        if self.devices_per_host == 1:
            return rate
        shared = rate / min(self.link_devices, self.devices_per_host)
        return min(shared, self.host_bandwidth_bytes_per_second / (2 * self.devices_per_host))

    def collective_seconds(self, whole_bytes: int) -> float:
        """Seconds of an all-gather to, or a reduce-scatter from, `whole_bytes` on every device.

        A ring over n devices passes (n - 1) / n of them over every device's interconnect. Between hosts, each
        receives what it does not have, (h - 1) / h of them, over its network; the rings of its devices run
        side by side, so that the slower way is what counts.
        """
        seconds = 0.0
        if self.devices_per_host > 1:
            assert self.interconnect_bytes_per_second is not None
            seconds = whole_bytes * (self.devices - 1) / self.devices / self.interconnect_bytes_per_second
        if self.hosts > 1:
            assert self.network_bytes_per_second is not None
            crossing = whole_bytes * (self.hosts - 1) / self.hosts
            seconds = max(seconds, crossing / self.network_bytes_per_second)
        return seconds

    def update_parameters_per_second(self, optimizer: str, touched_bytes: float) -> float:
        """Parameters that a host update gets through per second: as measured, or by memory's rate.

        Args:
            touched_bytes: read and written per parameter (`lazyjax.optim.base.touched_bytes`).
        """
        measured = self.host_update_parameters_per_second
        if optimizer in measured:
            return measured[optimizer]
        return self.host_bandwidth_bytes_per_second / touched_bytes

    def figure_names(self) -> frozenset[str]:
        """Names of the figures this profile states; updates as `host_update_...second.KIND`."""
        given = {
            name for name in self.model_fields_set - _WORDS - {_UPDATE_KEY} if getattr(self, name) is not None
        }
        return frozenset(given | {f"{_UPDATE_KEY}.{kind}" for kind in self.host_update_parameters_per_second})


def _check_sources(profile: HardwareProfile) -> None:
    missing = sorted(profile.figure_names() - set(profile.sources))
    if missing:
        raise ValueError(f"{missing[0]}: no source; write it as {{value: ..., source: ...}}")
    surplus = sorted(set(profile.sources) - profile.figure_names())
    if surplus:
        raise ValueError(f"{surplus[0]}: a source, but no figure")


def _check_capacities(profile: HardwareProfile) -> None:
    if profile.device_bytes > profile.device_total_bytes:
        raise ValueError("device_bytes: more than device_total_bytes")
    both = profile.nvme_read_bytes_per_second and profile.nvme_write_bytes_per_second
    if profile.nvme_bytes and not both:
        raise ValueError("nvme_bytes: needs nvme_read_bytes_per_second and nvme_write_bytes_per_second")


def _check_devices(profile: HardwareProfile) -> None:
    if profile.devices % profile.hosts:
        raise ValueError(
            f"hosts: {profile.hosts} does not divide {profile.devices}, the number of all devices"
        )
    if profile.devices_per_host > 1 and profile.interconnect_bytes_per_second is None:
        raise ValueError("interconnect_bytes_per_second: needed for more than one device of a host")
    if profile.hosts > 1 and profile.network_bytes_per_second is None:
        raise ValueError("network_bytes_per_second: needed for more than one host")


def preset_names() -> tuple[str, ...]:
    """Names of the profiles that ship with the package."""
    folder = importlib.resources.files("lazyjax.hardware") / "presets"
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".yaml")))


def load_profile(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """Reads a preset by name, or a profile file by path.

    Raises:
        ProfileError: no such preset or file, not YAML, an unknown, missing or repeated key, a figure
            without a source, or a value out of range.
    """
    text = os.fspath(name_or_path)
    if text in preset_names():
        resource = importlib.resources.files("lazyjax.hardware") / "presets" / f"{text}.yaml"
        return parse_profile(resource.read_text(), where=f"profile {text}")
    path = pathlib.Path(text)
    if not path.is_file():
        meant = _meant_preset(text)
        hint = f"; did you mean {meant}?" if meant else ""
        raise ProfileError(
            f"profile {text!r}: neither a file nor a preset{hint} (presets: {', '.join(preset_names())})"
        )
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"profile {text}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ProfileError(f"profile {text}: not a text file") from error
    return parse_profile(content, where=f"profile {text}")


def _meant_preset(text: str) -> str | None:
    """The preset that `text` begins or continues, or else the one spelled most like it."""
    lower, names = text.lower(), preset_names()
    begun = [name for name in names if lower and (name.startswith(lower) or lower.startswith(name))]
    close = difflib.get_close_matches(lower, names, n=1)
    return next(iter([*begun, *close]), None)


def parse_profile(text: str, *, where: str) -> HardwareProfile:
    """A profile from YAML text; `where` opens every error message.

    Raises:
        ProfileError: see `load_profile`.
    """
    try:
        document = yaml.load(text, Loader=UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ProfileError(f"{where}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(document, dict):
        raise ProfileError(f"{where}: expected keys and values at the top")
    try:
        return HardwareProfile.model_validate(_split_sources(document))
    except pydantic.ValidationError as error:
        raise ProfileError(f"{where}: {_first_error(error)}") from error


def dump_profile(profile: HardwareProfile) -> str:
    """The YAML text that `load_profile` reads back to an equal profile."""
    document: dict[str, Any] = {field: getattr(profile, field) for field in ("name", "device", "platform")}
    figures = profile.figure_names()
    for field in HardwareProfile.model_fields:
        value = getattr(profile, field)
        if field == _UPDATE_KEY and value:
            document[field] = {
                kind: {"value": rate, "source": profile.sources[f"{field}.{kind}"]}
                for kind, rate in value.items()
            }
        elif field in figures:
            document[field] = {"value": value, "source": profile.sources[field]}
    return yaml.safe_dump(document, sort_keys=False, width=110, allow_unicode=True)


def _split_sources(document: Mapping[str, Any]) -> dict[str, Any]:
    """Turns `key: {value, source}` into the figure and an entry of `sources`."""
    plain: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def take(key: str, entry: Any) -> Any:
        if not isinstance(entry, dict) or "value" not in entry:
            return entry
        extra = sorted(set(entry) - {"value", "source"})
        if extra:
            return entry  # pydantic rejects the mapping and names the key
        if "source" in entry:
            sources[key] = str(entry["source"])
        return entry["value"]

    for key, entry in document.items():
        if key == _UPDATE_KEY and isinstance(entry, dict):
            plain[key] = {kind: take(f"{key}.{kind}", item) for kind, item in entry.items()}
        else:
            plain[str(key)] = take(str(key), entry)
    plain["sources"] = sources
    return plain


def _first_error(error: pydantic.ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = [name for name in HardwareProfile.model_fields if name != "sources"]
        return f"{key}: unknown key; known keys: {', '.join(known)}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" if key else message
