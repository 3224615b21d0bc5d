"""What could not be had is forgotten after a while: the call after it finds that the cause is gone."""

from __future__ import annotations

import errno
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tfla_tk.backends.tk import device
from tfla_tk.build import BuildError, Instance, builder, sources
from tfla_tk.core.dispatch import CallMemo

GPU = torch.device("cuda", 0)


@pytest.fixture
def kernels_of(
    fake_compiler: Any, fake_extension: Any, toys: list[Instance], monkeypatch: pytest.MonkeyPatch
) -> Iterator[device.KernelsOf]:
    """Those of a call on a GPU; what fails is tried again after a fraction of a second."""
    monkeypatch.setattr(device, "RETRY_S", 0.3)
    monkeypatch.setattr(device, "device_fault", lambda index: ("", ""))
    device.forget_failures()
    yield lambda: (toys[0].launcher, tuple(toys))
    device.forget_failures()


def fill_disk(patch: pytest.MonkeyPatch) -> str:
    def fail(*args: object, **kwargs: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(tempfile, "mkdtemp", fail)
    return "No space left on device"


def put_file_in_place_of_cache(patch: pytest.MonkeyPatch) -> str:
    place = sources.kernels_root() / "a file"
    place.touch()
    patch.setenv("TFLA_TK_CACHE_DIR", str(place))
    return "cache directory"


def lose_thunderkittens(patch: pytest.MonkeyPatch) -> str:
    def fail(clone: bool = True) -> None:
        raise BuildError("ThunderKittens was not found", "fetch it")

    patch.setattr(builder, "find_thunderkittens", fail)
    return "ThunderKittens was not found"


@pytest.mark.parametrize("break_it", [fill_disk, put_file_in_place_of_cache, lose_thunderkittens])
def test_a_failure_is_forgotten(
    break_it: Callable[[pytest.MonkeyPatch], str],
    kernels_of: device.KernelsOf,
    fake_compiler: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And so are plans of calls that another backend has served meanwhile."""
    plans: CallMemo[str] = CallMemo()
    call = (torch.zeros(1),), ()
    with pytest.MonkeyPatch.context() as patch:
        reason = break_it(patch)
        support = device.load(kernels_of)
        assert not support.ok and reason in support.reason
        assert reason in caplog.text
    # the cause is gone, but nothing is tried again at once
    assert plans.of(*call, lambda *_, eager: "triton") == "triton"
    assert not device.load(kernels_of).ok and not device.supports(GPU, kernels_of).ok
    assert plans.of(*call, lambda *_, eager: "tk") == "triton"
    deadline = time.monotonic() + 10
    while not device.supports(GPU, kernels_of).ok:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert device.load(kernels_of).ok
    assert {"adds_1", "adds_2", "adds_3"} <= set(fake_compiler.compiled)
    assert plans.of(*call, lambda *_, eager: "tk") == "tk"


def test_a_cache_that_cannot_be_written_is_tried_again(
    kernels_of: device.KernelsOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the answer alone is remembered, before anything is loaded."""
    (tmp_path / "a file").touch()
    monkeypatch.setenv("TFLA_TK_CACHE_DIR", str(tmp_path / "a file"))
    assert "toy_1 is not compiled" in device.supports(GPU, kernels_of).reason
    (tmp_path / "a file").unlink()
    assert not device.supports(GPU, kernels_of).ok
    time.sleep(0.6)
    assert device.supports(GPU, kernels_of).ok and device.load(kernels_of).ok
