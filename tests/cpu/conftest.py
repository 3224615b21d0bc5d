"""Parameters of tests are combined in pairs: three and more of them are not all tried with one another.

But for those marked `product`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pairs import in_pairs

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "product: all combinations of the parameters count, not pairs of them")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    own = [item for item in items if HERE in item.path.parents and not item.get_closest_marker("product")]
    kept = {*in_pairs(own)}
    left_out = [item for item in own if item not in kept]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in {*left_out}]
