"""Markers and fixtures that every test shares."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tfla_tk import env
from tfla_tk.build import BuildError, find_thunderkittens, find_toolchain

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of tests/gpu, and skip what needs a Hopper GPU where there is none."""
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_hopper():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a Hopper (sm_90) GPU"))


def has_hopper() -> bool:
    """Whether torch sees a GPU of compute capability 9.0."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture
def isolated_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """None of tfla_tk's environment variables, and an empty cache directory (returned; not yet made)."""
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    cache = tmp_path / "the cache"
    monkeypatch.setenv(env.CACHE_DIR.name, str(cache))
    return cache


@pytest.fixture(scope="session")
def kernel_compiler() -> None:
    """Skip where kernels cannot be compiled: no nvcc or no ThunderKittens (none is fetched)."""
    try:
        find_toolchain()
        find_thunderkittens(clone=False)
    except BuildError as error:
        pytest.skip(error.reason.splitlines()[0])
