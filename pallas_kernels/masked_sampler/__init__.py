"""Draw one token a row under a packed bit mask, in one pass over the vocabulary."""

from pallas_kernels.masked_sampler.api import masked_sample

__all__ = ["masked_sample"]
