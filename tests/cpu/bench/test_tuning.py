from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tfla_tk.bench.tuning import configs_compiled_by

triton = pytest.importorskip("triton")
autotuner = pytest.importorskip("triton.runtime.autotuner")


class Kernel:
    """Stands for a Triton kernel: the configurations that were compiled, and by which threads."""

    fn = staticmethod(lambda: None)
    arg_names = ("x", "size")

    def __init__(self) -> None:
        self.together = threading.Barrier(3)
        self.compiled: list[dict[str, Any]] = []

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.together.wait(timeout=30)  # passes if three threads are here at once
        assert args[1] == 7 and grid == (1,) and threading.current_thread() is not threading.main_thread()
        if options["BLOCK"] == 64:
            raise RuntimeError("out of shared memory")
        self.compiled.append(options)


def test_configurations_are_compiled_side_by_side() -> None:
    configs = [triton.Config({"BLOCK": n}, num_warps=2, num_stages=3) for n in (16, 32, 64)]
    kernel = Kernel()
    tuner = autotuner.Autotuner(kernel, kernel.arg_names, configs, ["size"], None, None)
    tuner.nargs = {"x": torch.ones(1), "size": 7}
    with configs_compiled_by(3):
        # those that do not compile are left to it
        assert tuner.prune_configs({"grid": (5, 5), "warmup": False, "DTYPE": "fp32"}) == tuner.configs
    assert {options["BLOCK"] for options in kernel.compiled} == {16, 32}
    for options in kernel.compiled:
        assert (options["DTYPE"], options["num_warps"], options["num_stages"]) == ("fp32", 2, 3)
        assert "warmup" not in options
    before = autotuner.Autotuner.prune_configs
    for threads in (1, 3):
        with pytest.raises(KeyError), configs_compiled_by(threads):
            assert (autotuner.Autotuner.prune_configs is before) == (threads == 1)
            raise KeyError
        assert autotuner.Autotuner.prune_configs is before
