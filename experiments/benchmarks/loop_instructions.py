"""Instructions per element of the 8-bit kernels' loops, counted in the compiled library.

Reads objdump's listing. A loop is what lies between a backward jump and its target; the two inner
loops of an 8-bit kernel are those with a square root (decode, step, masters) and with a conversion to
integers (encode). The loops have no branches inside, so their length is what runs.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
from typing import NamedTuple

#: By path: the vector type's name in the kernel's symbol, its registers, and its lanes.
KERNELS = {"avx512": ("Avx512", "zmm", 16), "avx2": ("Avx2", "ymm", 8)}


class Loop(NamedTuple):
    """Instructions of one pass through a loop body, all of them and those on vectors."""

    instructions: int
    vector_instructions: int
    square_roots: int
    conversions: int


def kernel_loops(library: pathlib.Path, path: str) -> list[Loop]:
    """The innermost loops of the 8-bit kernel with bf16 gradients; empty without objdump."""
    if shutil.which("objdump") is None:
        return []
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
    ).stdout
    lanes_name, register, _ = KERNELS[path]
    body = re.search(rf"<\S*{lanes_name}\S*eight_bitILb0\S*>:\n((?:.+\n)+)", listing)
    if body is None:
        return []
    lines = [line.split("\t") for line in body.group(1).splitlines() if "\t" in line]
    addresses = {parts[0].strip(" :"): index for index, parts in enumerate(lines)}
    text = [parts[-1] for parts in lines]
    spans = []
    for index, instruction in enumerate(text):
        jump = re.match(r"j\w+\s+([0-9a-f]+) ", instruction)
        if jump and jump.group(1) in addresses and addresses[jump.group(1)] <= index:
            spans.append((addresses[jump.group(1)], index))
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [_count(text[first : last + 1], register) for first, last in inner]


def _count(text: list[str], register: str) -> Loop:
    return Loop(
        len(text),
        sum(f"%{register}" in line for line in text),
        sum(line.startswith("vsqrtps") for line in text),
        sum(line.startswith("vcvttps2dq") for line in text),
    )


def instructions_per_element(library: pathlib.Path, path: str) -> tuple[float, float] | None:
    """All and vector instructions per element of both loops; None where they cannot be told."""
    lanes = KERNELS[path][2]
    loops = kernel_loops(library, path)
    updates = [loop for loop in loops if loop.square_roots]
    encodes = [loop for loop in loops if loop.conversions]
    if len(updates) != 1 or len(encodes) != 1:
        return None
    elements = (updates[0].square_roots * lanes, encodes[0].conversions / 2 * lanes)  # m and v
    both = list(zip((updates[0], encodes[0]), elements, strict=True))
    return (
        sum(loop.instructions / count for loop, count in both),
        sum(loop.vector_instructions / count for loop, count in both),
    )
