import ctypes
import os
import pathlib
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest

from lazyjax.optim import make
from lazyjax.optim.host8bit import Hybrid8bit
from lazyjax.optim.native import library
from tests.optim.slabs import LAYOUT, all_bytes, fill_gradient, make_slabs

compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
native = pytest.mark.skipif(library.library_file() is None, reason="the install had no C++ compiler")


@pytest.fixture
def fresh_load():
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


@pytest.mark.skipif(not compiler, reason="no C++ compiler")
def test_an_install_with_a_compiler_has_the_kernels() -> None:
    assert library.library_file() is not None, "install again: the kernels were not built"


def test_without_the_library_the_pure_path_runs_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, fresh_load: None
) -> None:
    monkeypatch.setattr(library, "library_file", lambda: None)
    monkeypatch.delenv(library.ENVIRONMENT_VARIABLE, raising=False)
    slabs = make_slabs()
    fill_gradient(slabs, np.random.default_rng(0))
    results = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for optimizer in (Hybrid8bit(), Hybrid8bit(path="pure")):
            slabs = make_slabs()
            fill_gradient(slabs, np.random.default_rng(0))
            state = optimizer.create_state(LAYOUT)
            for count in (1, 2):
                optimizer.update(slabs, state, learning_rate=1e-3, count=count, scale=1.0)
            results.append(all_bytes(slabs, state))
    assert len([w for w in caught if "native host update" in str(w.message)]) == 1
    assert results[0] == results[1]
    with pytest.raises(ValueError, match="available: auto, pure"):
        library.choose_path("avx2")


def test_a_damaged_library_is_not_used(
    monkeypatch: pytest.MonkeyPatch, fresh_load: None, tmp_path: pathlib.Path
) -> None:
    broken = tmp_path / "_hostupdate.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(library, "library_file", lambda: broken)
    with pytest.warns(RuntimeWarning, match="native host update is not used"):
        assert library.load_library() is None


@native
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch, fresh_load: None) -> None:
    monkeypatch.setattr(library, "INTERFACE_VERSION", -1)
    with pytest.warns(RuntimeWarning, match="interface version"):
        assert library.load_library() is None


@native
def test_the_environment_replaces_auto_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, "portable")
    assert library.choose_path("auto") == "portable"
    assert library.choose_path("pure") == "pure"
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, "sse9")
    with pytest.raises(ValueError, match="sse9"):
        library.choose_path("auto")


@native
def test_unavailable_cpus_are_an_error_before_anything_is_written() -> None:
    optimizer = Hybrid8bit(threads=2, cpus=(1020,))
    slabs, state = make_slabs(), optimizer.create_state(LAYOUT)
    before = all_bytes(slabs, state)
    with pytest.raises(OSError, match="1020"):
        optimizer.update(slabs, state, learning_rate=1e-3, count=1, scale=1.0)
    assert all_bytes(slabs, state) == before


@native
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_bound_threads_give_the_same_result() -> None:
    cpu = min(os.sched_getaffinity(0))
    results = []
    for optimizer in (Hybrid8bit(), Hybrid8bit(threads=3, cpus=(cpu,))):
        slabs, state = make_slabs(), optimizer.create_state(LAYOUT)
        fill_gradient(slabs, np.random.default_rng(0))
        optimizer.update(slabs, state, learning_rate=1e-3, count=1, scale=1.0)
        results.append(all_bytes(slabs, state))
    assert results[0] == results[1]


@native
def test_structures_have_the_sizes_of_the_header() -> None:
    assert library.CHUNK_DTYPE.itemsize == 32
    assert ctypes.sizeof(library._Slabs) == 80
    assert ctypes.sizeof(library._Scalars) == 36


@native
def test_the_callers_treatment_of_denormals_is_restored() -> None:
    """The kernels flush denormals; numpy after them must not."""
    optimizer = Hybrid8bit(threads=1)
    slabs, state = make_slabs(), optimizer.create_state(LAYOUT)
    optimizer.update(slabs, state, learning_rate=1e-3, count=1, scale=1.0)
    assert np.float32(1e-38) * np.float32(0.5) > 0


def test_threads_default_to_the_cpus_of_the_process() -> None:
    assert make.make_host_optimizer("hybrid8bit").threads == make.usable_cpus()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.skipif(not compiler, reason="no C++ compiler")
def test_the_kernels_hold_under_the_sanitizers(tmp_path: pathlib.Path) -> None:
    """Undefined behaviour in the C++ code stops the process with a message."""
    sources = sorted(map(str, pathlib.Path(library.__file__).parent.glob("*.cpp")))
    target = tmp_path / "_hostupdate.so"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno"]
    flags += ["-w", "-fsanitize=undefined", "-fno-sanitize-recover=all", "-static-libubsan"]
    built = subprocess.run(
        [str(compiler), *flags, *sources, "-o", str(target)], capture_output=True, text=True
    )
    if built.returncode:
        pytest.skip(f"no sanitizer here: {built.stderr[-200:]}")
    script = f"""
import pathlib, numpy as np
from lazyjax.optim.native import library
library.library_file = lambda: pathlib.Path({str(target)!r})
from lazyjax.optim.make import make_host_optimizer
from tests.optim.slabs import LAYOUT, fill_gradient, make_slabs
for name in ("hybrid8bit", "fp32_adamw", "bf16_adamw"):
    for path in library.load_library().paths:
        optimizer = make_host_optimizer(name, threads=2, path=path)
        slabs, state = make_slabs(), optimizer.create_state(LAYOUT)
        for count in (1, 2, 3):
            fill_gradient(slabs, np.random.default_rng(0), spread=3.0)
            optimizer.update(slabs, state, learning_rate=1e-3, count=count, scale=1.0)
print("held")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "held", done.stderr
