"""The doctor tells what is there, and what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from zllm_jax.experiment.doctor import examine

KIB = 1 << 10


def test_a_sound_machine(zllm_home: Path) -> None:
    found = examine(disk_bytes=64 * KIB, copy_bytes=64 * KIB, matrix_sizes=(64,))
    assert found.ok
    assert found.environment["devices"]
    assert found.libraries["numpy"]
    assert {kernel.operation for kernel in found.kernels} == {"paged attention", "sampling"}
    assert all(found.environment["devices"][0].split(":")[0] in kernel.reason for kernel in found.kernels)
    assert {folder.use for folder in found.folders} == {"models", "snapshots"}
    rates = {name: rate for name, rate in found.rates.items() if name != "disk_cold_read_bytes_s"}
    assert all(rate is not None and rate > 0 for rate in rates.values())


def test_a_home_that_cannot_be_written_is_told_not_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZLLM_HOME", str(tmp_path / "file"))
    found = examine(disk_bytes=64 * KIB, copy_bytes=64 * KIB, matrix_sizes=(64,))
    assert not found.ok
    assert all(folder.problem for folder in found.folders)
    assert found.rates["disk_write_bytes_s"] is None
    assert found.rates["copy_bytes_s"]
