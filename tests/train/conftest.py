"""One process that has imported everything, for all tests of this folder that launch several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Ranks, ranks


@pytest.fixture(scope="session")
def several() -> Iterator[Ranks]:
    with ranks() as found:
        yield found
