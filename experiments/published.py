"""Figures of the LazyTrain paper (arXiv 2608.11919) that our simulations stand beside.

Quoted as printed. TFLOPS are 6 x parameters x rows x 1024 tokens / step time.
"""

from __future__ import annotations

from typing import NamedTuple

SEQUENCE_LENGTH = 1024


class Figures(NamedTuple):
    """One system on one model and GPU (table 3); None where the paper has no figure."""

    rows: int
    tflops: float
    device_gb: float
    host_gb: float | None
    tokens_per_second: float | None


class Row(NamedTuple):
    """A row of table 3: `zero3` is None where it ran out of memory."""

    gpu: str
    profile: str
    model: str
    zero3: Figures | None
    megatrain: Figures
    lazytrain: Figures


TABLE_3 = (
    Row("H800", "h800-paper", "Qwen2.5-3B", Figures(32, 68.65, 74.12, 61.8, 3814),
        Figures(192, 142.80, 35.72, 49.31, 7933), Figures(192, 176.42, 67.95, 52.68, 9801)),
    Row("H800", "h800-paper", "Qwen2.5-7B", Figures(16, 79.88, 76.43, 124.6, 1902),
        Figures(144, 161.35, 43.26, 95.74, 3842), Figures(144, 199.84, 68.21, 99.58, 4758)),
    Row("H800", "h800-paper", "Qwen2.5-14B", Figures(8, 93.43, 77.21, 257.9, 1112),
        Figures(96, 171.92, 52.83, 179.64, 2047), Figures(96, 212.34, 68.57, 185.12, 2528)),
    Row("H800", "h800-paper", "Qwen3.6-27B", Figures(2, 86.55, 78.34, 518.6, 534),
        Figures(72, 176.90, 60.40, 339.99, 1075.8), Figures(72, 219.95, 68.84, 361.58, 1361)),
    Row("RTX 3090", "rtx3090", "Qwen2.5-3B", Figures(1, 23.91, 20.32, None, None),
        Figures(7, 33.18, 22.83, 25.0, 1792), Figures(8, 40.76, 23.16, 27.8, 2210)),
    Row("RTX 3090", "rtx3090", "Qwen2.5-7B", Figures(1, 27.49, 20.83, None, None),
        Figures(5, 35.09, 22.63, 56.7, 768), Figures(6, 43.42, 23.06, 61.5, 951)),
    Row("RTX 3090", "rtx3090", "Qwen2.5-14B", None,
        Figures(3, 30.19, 21.10, 103.7, 341), Figures(4, 37.36, 22.92, 111.8, 422)),
    Row("RTX 3090", "rtx3090", "Qwen3.6-27B", None,
        Figures(1, 22.74, 22.48, 197.3, 140), Figures(2, 28.11, 23.08, 214.6, 174)),
)  # fmt: skip

#: Dense bf16 peaks in TFLOPS (datasheets): no executed rate lies above them.
PEAK_TFLOPS = {"H800": 989.4, "RTX 3090": 71.0}

#: Table 5, ablation of LazyTrain on the 27B H800 row: TFLOPS, device GB, host GB, tokens per second.
TABLE_5 = {
    "MegaTrain": (176.90, 60.40, 339.99, 1075.8),
    "LazyTrain": (219.95, 68.84, 361.58, 1361.0),
    "LazyTrain without MILP": (193.17, 68.84, 362.01, 1195.0),
    "LazyTrain without Hybrid-8bit": (219.29, 68.84, 360.23, 1357.0),
}

#: Table 4: exact match on the held-out rows of MetaMathQA, per cent.
TABLE_4 = {
    "Qwen2.5-7B": {"ZeRO-3": 88.93, "ZeRO-Infinity": 88.97, "MegaTrain": 88.99, "LazyTrain": 88.95},
    "Qwen2.5-14B": {"ZeRO-3": 92.41, "ZeRO-Infinity": 92.36, "MegaTrain": 92.52, "LazyTrain": 92.47},
    "Qwen3.6-27B": {"ZeRO-3": 95.27, "ZeRO-Infinity": 95.31, "MegaTrain": 95.33, "LazyTrain": 95.42},
}

#: Table 1: capacities of the published plan, GiB, and counts of its 65 boundaries per home.
TABLE_1_CAPACITY_GIB = {"device": 70.0, "activations": 21.55, "host": 15.0, "nvme": 32.0}
TABLE_1_COUNTS = {"device": 30, "host": 21, "nvme": 1, "recompute": 13}

#: Table 6, GPT-OSS-120B, solver only: host base GiB by share of 8-bit state, and the exposed traffic.
TABLE_6 = {
    "host GiB, 2 % 8-bit": 1321.38,
    "host GiB, all 8-bit": 683.41,
    "static device GiB": 41.98,
    "exposed traffic s": 31.2595,
}
TABLE_6_ROWS = 32
