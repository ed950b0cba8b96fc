"""Bytes reach the drive and come back whichever way the system lets them take."""

from __future__ import annotations

import errno
import os
import pathlib

import numpy as np
import pytest

from lazyjax.hardware import drive

PAGE = 4096


def aligned(size: int) -> np.ndarray:
    array = drive.aligned_bytes(size)
    array[:] = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    return array


def comes_back(path: pathlib.Path, source: np.ndarray) -> bool:
    target = np.full(source.size, 77, np.uint8)
    drive.read_file(path, target)
    return path.stat().st_size == source.size and bool(np.array_equal(target, source))


def test_whole_pages_pass_the_page_cache_by_and_the_rest_does_not(tmp_path, monkeypatch) -> None:
    direct = []
    opened = os.open

    def noted(path, flags, *rest, **options):
        direct.append(bool(flags & os.O_DIRECT))
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", noted)
    source = aligned(3 * PAGE + 100)
    drive.write_file(tmp_path / "file", source)
    assert direct == [False, True]
    direct.clear()
    drive.write_file(tmp_path / "odd", source[1:])
    assert direct == [False]
    monkeypatch.undo()
    assert comes_back(tmp_path / "file", source)
    assert comes_back(tmp_path / "odd", source[1:])


@pytest.mark.parametrize("refused", ["open", "write"])
def test_where_direct_writes_are_refused_bytes_go_the_ordinary_way(tmp_path, monkeypatch, refused) -> None:
    opened, written, direct = os.open, os.pwrite, set()

    def no_direct(path, flags, *rest, **options):
        if flags & os.O_DIRECT and refused == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        file = opened(path, flags, *rest, **options)
        if flags & os.O_DIRECT:
            direct.add(file)
        return file

    def one_and_a_half_pages(file, data, offset):
        if file in direct and offset % PAGE:
            raise OSError(errno.EINVAL, "Invalid argument")
        return written(file, data[: PAGE if file in direct else PAGE + 100], offset) - (file in direct)

    monkeypatch.setattr(os, "open", no_direct)
    monkeypatch.setattr(os, "pwrite", one_and_a_half_pages)
    source = aligned(5 * PAGE + 100)
    drive.write_file(tmp_path / "file", source)
    assert bool(direct) == (refused == "write")
    monkeypatch.undo()
    assert comes_back(tmp_path / "file", source)


def test_a_full_drive_is_an_error(tmp_path, monkeypatch) -> None:
    def full(file, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        drive.write_file(tmp_path / "file", aligned(PAGE))
