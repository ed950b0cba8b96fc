"""Settings of every test run; they must stand before JAX or lazyjax is imported.

Four virtual CPU devices serve the sharding tests (everything else uses the first one), machine code
is compiled without LLVM's optimizations, annotations are checked at run time, and hypothesis draws the
same examples every time.
"""

import atexit
import gc
import os
import pathlib
import shutil
import signal
import tempfile
from collections.abc import Iterator

# Tests compile hundreds of kernels and run each a few times: LLVM's optimizations would take half of the
# whole time. Runs and benchmarks keep XLA's default.
for _flag, _value in (
    ("--xla_force_host_platform_device_count", "4"),
    ("--xla_backend_optimization_level", "0"),
):
    if _flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}={_value}".strip()
# Compiling is most of the suite's time. What one process has compiled the others get, those that tests start
# too, and itself again where it has dropped its kernels; the first to come here owns the folder.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.mkdtemp(prefix="lazyjax-tests-compiled-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

install_import_hook("lazyjax", "beartype.beartype")

jax.config.update("jax_platforms", "cpu")

hypothesis.settings.register_profile(
    "lazyjax",
    max_examples=25,
    deadline=None,
    # A health check of the clock: on a busy machine drawing examples takes as long as it takes.
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=True,
    database=None,
    print_blob=True,
)
hypothesis.settings.load_profile("lazyjax")


@pytest.fixture(scope="session", autouse=True)
def hangup_is_not_ignored() -> None:
    """Under `nohup` the signal of a dropped terminal is ignored, which a run respects; tests send it."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plans of the user's cache, or of another worker's test, decide nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


#: Every kernel that XLA:CPU compiles takes dozens of memory maps; Linux allows a process 65,530, and
#: past that the compiler aborts. A test process compiles far more kernels than a training run.
_MOST_MEMORY_MAPS = 15_000


@pytest.fixture(autouse=True)
def few_memory_maps() -> Iterator[None]:
    """Drops compiled kernels after a test when they have piled up."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MEMORY_MAPS:
        jax.clear_caches()
        gc.collect()
