"""One process that has imported everything, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forks import Forks, forks


@pytest.fixture(scope="session")
def forked() -> Iterator[Forks]:
    with forks() as some:
        yield some
