"""Attention of one new token a sequence over keys and values that lie in pages."""

from pallas_kernels.paged_attention.api import paged_attention

__all__ = ["paged_attention"]
