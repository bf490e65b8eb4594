"""Measured ceilings: plausible figures, and errors that name the folder."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest

from zllm_jax.errors import StoreUnavailable
from zllm_jax.roofline import copy_rate, disk_rates, drop_page_cache, median_seconds

MIB = 1 << 20


def test_copy_rate_is_of_the_order_of_memory() -> None:
    assert 1e8 < copy_rate(16 * MIB, repeats=2) < 1e13


def test_disk_rates_leave_nothing_behind(tmp_path: Path) -> None:
    rates = disk_rates(tmp_path / "new", MIB, repeats=2)
    assert rates.file_bytes == MIB
    assert 1e5 < rates.write_bytes_s < 1e12
    assert 1e6 < rates.read_bytes_s < 1e12
    assert (rates.cold_read_bytes_s is None) == (not hasattr(os, "posix_fadvise"))
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match=r"file.x: its disk rates cannot be measured"):
        disk_rates(tmp_path / "file" / "x", MIB)


def test_drop_page_cache_says_whether_it_did(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    assert drop_page_cache(tmp_path / "file") == hasattr(os, "posix_fadvise")
    assert drop_page_cache(tmp_path / "absent") is False


def test_median_seconds_leaves_out_the_first_run_and_what_comes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    spans = itertools.chain([100.0], itertools.cycle([1.0, 5.0, 2.0]))

    def spend(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    assert median_seconds(lambda: spend(next(spans)), 3, before=lambda: spend(50.0)) == 2.0
