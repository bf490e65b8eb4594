"""The parser, and how a command ends: 0 done, 1 failed, 2 misused, 130 interrupted, 141 nobody reads the output."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from zllm_jax import __version__
from zllm_jax.cli import cache, doctor, experiment, fence, generate, logs, models
from zllm_jax.errors import ConfigError, InvalidRequest, ZllmError

DONE, FAILED, MISUSED, INTERRUPTED, NOBODY_READS = 0, 1, 2, 130, 141

DESCRIPTION = """\
Run a language model with JAX; its conversations' state survives in memory and on disk.

first steps:
  zllm pull smollm2-135m                                      fetch a small model
  zllm generate --model smollm2-135m --prompt "The sea is"    let it write
  zllm experiment run experiments/ttft_restore.yaml --quick   what restoring state from disk gains
  zllm doctor                                                 what this machine offers

ZLLM_HOME names the folder of models, snapshots and compilations (default: zllm in your cache folder).
"""


def build_parser() -> argparse.ArgumentParser:
    """All commands. Each sets `run`, which takes the parsed arguments and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="zllm", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"zllm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (models, generate, fence, experiment, cache, doctor):
        module.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    args = build_parser().parse_args(argv)
    try:
        logs.configure(args)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except ZllmError as error:
        print(f"zllm: {' '.join(str(error).split())}", file=sys.stderr)
        return MISUSED if isinstance(error, ConfigError | InvalidRequest) else FAILED
    except KeyboardInterrupt:
        print("zllm: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
