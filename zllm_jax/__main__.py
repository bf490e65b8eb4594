"""`python -m zllm_jax` is `zllm`."""

from __future__ import annotations

import sys

from zllm_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
