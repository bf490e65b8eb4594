from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.engine.talker import Talker


@pytest.fixture
def talker() -> Iterator[Callable[..., Talker]]:
    """Makes talkers; afterwards everything they held is home."""
    made: list[Talker] = []

    def make(**options: object) -> Talker:
        made.append(Talker(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        if one.engine.ready:
            one.engine.forget()
        one.engine.close()
        assert one.cache.report()["device_bytes"] == 0
