"""Parameters of tests are combined in pairs: three and more of them are not all tried with one another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pairs import in_pairs

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = {*in_pairs([item for item in items if HERE in item.path.parents])}
    left_out = [item for item in items if HERE in item.path.parents and item not in kept]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in {*left_out}]
