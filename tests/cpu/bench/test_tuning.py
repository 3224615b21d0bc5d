from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tfla_tk.bench.tuning import configs_compiled_by

triton = pytest.importorskip("triton")
autotuner = pytest.importorskip("triton.runtime.autotuner")


class Kernel:
    """Stands for a Triton kernel.

    Attributes:
        compiled: arguments, options and launch grid of each configuration, and the thread.
    """

    fn = staticmethod(lambda: None)
    arg_names = ("x", "size")

    def __init__(self, refused: int) -> None:
        self.refused = refused
        self.together = threading.Barrier(3)
        self.compiled: list[tuple[Any, ...]] = []

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.together.wait(timeout=30)  # passes if three threads are here at once
        if options["BLOCK"] == self.refused:
            raise RuntimeError("out of shared memory")
        self.compiled.append((args, grid, options, threading.current_thread()))


def make(kernel: Kernel) -> Any:
    """An autotuner in the midst of a call of the kernel."""
    configs = [triton.Config({"BLOCK": n}, num_warps=2, num_stages=3) for n in (16, 32, 64)]
    found = autotuner.Autotuner(
        kernel, kernel.arg_names, configs, key=["size"], reset_to_zero=None, restore_value=None
    )
    found.nargs = {"x": torch.ones(1), "size": 7}
    return found


def test_configurations_are_compiled_side_by_side() -> None:
    tuner = make(kernel := Kernel(refused=64))
    of_call = {"grid": (5, 5), "warmup": False, "DTYPE": "fp32"}
    with configs_compiled_by(3):
        assert tuner.prune_configs(of_call) == tuner.configs  # those that do not compile are left to it
    blocks = {options.pop("BLOCK") for _, _, options, _ in kernel.compiled}
    assert blocks == {16, 32}
    for args, grid, options, thread in kernel.compiled:
        assert args == (tuner.nargs["x"], 7) and grid == (1,) and thread is not threading.main_thread()
        assert {name: options[name] for name in ("DTYPE", "num_warps", "num_stages")} == {
            "DTYPE": "fp32", "num_warps": 2, "num_stages": 3,
        }  # fmt: skip
        assert "warmup" not in options


@pytest.mark.parametrize("threads", [1, 3])
def test_autotuners_are_as_before_behind_the_block(threads: int) -> None:
    before = autotuner.Autotuner.prune_configs
    with pytest.raises(KeyError), configs_compiled_by(threads):
        assert (autotuner.Autotuner.prune_configs is before) == (threads == 1)
        raise KeyError
    assert autotuner.Autotuner.prune_configs is before
