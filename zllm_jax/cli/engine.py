"""The options of every command that opens an engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zllm_jax.experiment import Progress
    from zllm_jax.wiring import Engine


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="NAME",
        default="smollm2-135m",
        help="known name, directory or GGUF file (default: %(default)s)",
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML with keys of EngineConfig")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="one key of EngineConfig, e.g. max_seq_tokens=4096; may be repeated; goes over --config",
    )


def open_engine(args: argparse.Namespace, progress: Progress, **defaults: object) -> Engine:
    """The engine that `--model`, `--config` and `--set` describe. Raises `ConfigError` naming the key.

    defaults: of a command that knows better than EngineConfig what it needs.
    """
    from zllm_jax.config import EngineConfig
    from zllm_jax.experiment.config import from_mapping, merged, parse_override, read_mapping

    settings = merged(defaults, read_mapping(args.config) if args.config else {})
    for text in args.set:
        settings = merged(settings, parse_override(text))
    config = from_mapping(EngineConfig, settings, "")

    from zllm_jax.wiring import Engine

    return Engine.from_pretrained(args.model, config, progress=progress)
