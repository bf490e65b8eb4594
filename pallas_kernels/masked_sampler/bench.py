"""Time every case on this machine's device: python -m pallas_kernels.masked_sampler.bench [implementation]"""

from __future__ import annotations

import functools
import sys

from pallas_kernels._common.timing import bench
from pallas_kernels.masked_sampler import masked_sample
from pallas_kernels.masked_sampler.cases import CASES


def main() -> None:
    """Print a line a case: seconds, bytes, rate, and the share of the rate at which this device copies memory."""
    implementation = sys.argv[1] if len(sys.argv) > 1 else "auto"
    bench(functools.partial(masked_sample, implementation=implementation), [case for case in CASES if not case.small])


if __name__ == "__main__":
    main()
