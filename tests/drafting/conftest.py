"""The whole contract of every method is for the slow tests; the default run holds that of one drafter of each kind."""

from __future__ import annotations

import pytest

LONG = ("test_contract", "test_law")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the contracts and laws of this directory; `tests/contract` has the ones that always run."""
    for item in items:
        if item.path.parent.name == "drafting" and item.name.startswith(LONG):
            item.add_marker(pytest.mark.slow)
