"""`zllm doctor`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from zllm_jax.cli.output import add_json, print_json, print_table, size

RATES: dict[str, tuple[str, float, str]] = {
    "copy_bytes_s": ("memory copy", 1e9, "GB/s"),
    "read_bytes_s": ("memory read by one reduction", 1e9, "GB/s"),
    "matrix_float32_flop_s": ("matrix product, float32", 1e9, "GFLOP/s"),
    "matrix_bfloat16_flop_s": ("matrix product, bfloat16", 1e9, "GFLOP/s"),
    "disk_write_bytes_s": ("disk write, fsynced", 1e9, "GB/s"),
    "disk_read_bytes_s": ("disk read, page cache warm", 1e9, "GB/s"),
    "disk_cold_read_bytes_s": ("disk read, page cache dropped", 1e9, "GB/s"),
}


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="what this machine offers, and what is wrong with it",
        description="Versions, devices, the kernels that would be chosen and why, measured rates, writable folders. "
        "Exit code 1 when a folder cannot be written.",
    )
    add_json(parser, "the diagnosis")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from zllm_jax.experiment.doctor import examine

    found = examine()
    if args.json:
        print_json(dataclasses.asdict(found))
        return 0 if found.ok else 1
    versions = {**found.environment, **found.libraries}
    print_table(("environment", ""), [(name, _words(value)) for name, value in versions.items()])
    kernels = [(k.operation, k.implementation, k.reason) for k in found.kernels]
    print_table(("operation", "computed by", "because"), kernels)
    rates = [(words, _rate(found.rates[key], scale, unit)) for key, (words, scale, unit) in RATES.items()]
    print_table(("rate, measured now", ""), rates)
    print_table(
        ("folder", "path", "free", "state"),
        [(f.use, f.path, size(f.free_bytes), f.problem or "writable") for f in found.folders],
    )
    return 0 if found.ok else 1


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "not installed" if value is None else str(value)


def _rate(value: float | None, scale: float, unit: str) -> str:
    return "not measurable here" if value is None else f"{value / scale:.1f} {unit}"
