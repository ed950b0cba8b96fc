"""A backend that is not there is one line."""

import jax
import pytest

from lazyjax import cli
from lazyjax.hardware import devices
from lazyjax.hardware.devices import DeviceError, visible_devices


def test_devices_are_what_jax_sees():
    assert visible_devices() == jax.devices()


@pytest.mark.parametrize(
    "error",
    [
        AssertionError(),
        RuntimeError("Unable to initialize backend 'cuda': no plugin (set JAX_PLATFORMS='' to choose)\nmore"),
    ],
)
def test_a_backend_that_is_not_there_is_one_line(error, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(devices.jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(DeviceError, match="JAX finds no device for JAX_PLATFORMS='cuda'") as raised:
        visible_devices()
    assert "\n" not in str(raised.value)
    words = ["train", "--model", "Qwen2.5-0.5B", "--random-weights"]
    assert cli.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
