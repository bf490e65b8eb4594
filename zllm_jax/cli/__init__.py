"""The `zllm` command: parse, call, print. No logic of its own, and nothing heavy imported before a command needs it."""

from __future__ import annotations

from zllm_jax.cli.app import main

__all__ = ["main"]
