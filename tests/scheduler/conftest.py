from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.scheduler.device import Bench


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """Makes benches; afterwards nothing runs and every page, ring and slot is home."""
    made: list[Bench] = []

    def make(*arguments: object, **options: object) -> Bench:
        made.append(Bench(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
