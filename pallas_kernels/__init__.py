"""Kernels for accelerators, each beside the slow and obvious reference that defines it.

This room imports jax and nothing else of the project. It knows arrays, tiles and memories; it must not know models,
requests or how state is shared. Only the runtime calls it, one kernel at a time:
`from pallas_kernels.paged_attention import paged_attention`.
"""
