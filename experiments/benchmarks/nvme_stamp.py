"""What checking every read from NVMe costs: the stamp beside the transfers and beside a CRC.

    python -m experiments.benchmarks.nvme_stamp [FOLDER] [--mib 256]
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable

import numpy as np

from experiments.benchmarks.provenance import provenance
from lazyjax.storage.nvme import NvmeStore, stamp


def gigabytes_per_second(work: Callable[[], object], size: int, repeats: int = 5) -> float:
    """The median of a few runs."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return size / statistics.median(seconds) / 1e9


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=int, default=256)
    options = parser.parse_args()
    raw = np.random.default_rng(0).integers(0, 256, options.mib * 2**20, dtype=np.uint8)
    target = np.zeros_like(raw)
    store = NvmeStore(options.folder)
    rates = {
        "write, stamped (no fsync)": gigabytes_per_second(
            lambda: store.write("slab", raw).result(), raw.size
        ),
        "read, compared (page cache)": gigabytes_per_second(
            lambda: store.read("slab", target).result(), raw.size
        ),
        "stamp alone": gigabytes_per_second(lambda: stamp(raw), raw.size),
        "zlib.crc32 alone": gigabytes_per_second(lambda: zlib.crc32(raw), raw.size),
    }
    store.close()
    print(f"{options.mib} MiB\n\n{provenance('lazyjax/storage')}\n\n| what | GB/s |\n|---|---|")
    for name, rate in rates.items():
        print(f"| {name} | {rate:.2f} |")


if __name__ == "__main__":
    main()
