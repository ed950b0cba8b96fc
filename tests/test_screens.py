"""Every screen, as recorded in golden/screens (see tests/screens.py)."""

import pytest

from lazyjax.hardware.profile import HardwareProfile
from lazyjax.planning.commands.profile import doubts, profile_table
from tests.screens import KINDS, check

each_kind = pytest.mark.parametrize("kind", KINDS)


def measured_profile() -> HardwareProfile:
    when = "measured 2026-11-30: "
    how = {
        "matmul_flops_per_second": "bfloat16 products and both gradients, 59x3584x18944, 59x18944x3584; "
        "spread 3% over 5 runs",
        "device_bandwidth_bytes_per_second": "an element-wise pass; spread 41% over 5 runs",
        "h2d_bytes_per_second": "pinned array to device, alone; spread 9% over 5 runs",
        "d2h_bytes_per_second": "device to pinned host memory, alone; spread 12% over 5 runs",
        "duplex_factor": "both at once over each alone; spread 12% over 5 runs",
        "host_update_parameters_per_second.hybrid8bit": "updates of 8388608 parameters on all usable CPUs; "
        "spread 5% over 5 runs",
        "host_update_parameters_per_second.fp32_adamw": "updates of 8388608 parameters on all usable CPUs; "
        "spread 6% over 5 runs",
        "host_update_parameters_per_second.bf16_adamw": "updates of 8388608 parameters on all usable CPUs; "
        "spread 4% over 5 runs",
        "device_total_bytes": "half of the available host memory: the device is the host",
        "device_bytes": "0.95 of device_total_bytes",
        "host_bytes": "0.95 of the other half",
    }
    return HardwareProfile(
        name="machine",
        device="AMD EPYC 7B13, 2 CPUs",
        matmul_flops_per_second=1.12e11,
        device_total_bytes=12_000_000_000,
        device_bytes=11_400_000_000,
        device_bandwidth_bytes_per_second=2.1e10,
        h2d_bytes_per_second=8.4e9,
        d2h_bytes_per_second=8.1e9,
        duplex_factor=0.55,
        host_update_parameters_per_second={"hybrid8bit": 1.1e9, "fp32_adamw": 7e8, "bf16_adamw": 9e8},
        host_bytes=11_400_000_000,
        sources={figure: when + words for figure, words in how.items()},
    )


@each_kind
def test_profile(kind):
    profile = measured_profile()

    def show(console):
        console.print(profile_table(profile))
        console.print(doubts(profile, load=3.2, cpus=2))

    text = check("profile", kind, show)
    for name in ("update hybrid8bit", "update fp32_adamw", "update bf16_adamw", "41%", "load 3.2"):
        assert name in text


def test_a_quiet_machine_leaves_no_doubt():
    profile = measured_profile()
    calm = {figure: source.replace("41%", "4%") for figure, source in profile.sources.items()}
    profile = profile.model_copy(update={"sources": calm})
    assert doubts(profile, load=0.4, cpus=2) is None
    assert "load 9.0" in (doubts(profile, load=9.0, cpus=2) or "")
