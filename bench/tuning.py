"""Triton's autotuners: their configurations compiled side by side before any is timed."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tfla_tk.core.installed import find_package

# what a launch is given beside the kernel's arguments
_OF_LAUNCH = ("grid", "warmup")


@contextlib.contextmanager
def configs_compiled_by(threads: int) -> Iterator[None]:
    """Within the block an autotuner has so many threads compile the configurations that it is about to
    time. By itself it compiles each one right before it times it, which takes minutes for FLA's backward.
    What is timed stays the same. A configuration that does not compile is left to the autotuner, which
    drops it."""
    if threads == 1 or find_package("triton") is None:
        yield
        return
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs
    # a thread begins on device 0
    start: dict[str, Any] = {}
    if torch.cuda.is_available():
        start = {"initializer": torch.cuda.set_device, "initargs": (torch.cuda.current_device(),)}

    def prune_and_compile(tuner: Any, kwargs: dict[str, Any]) -> Any:
        options = {name: value for name, value in kwargs.items() if name not in _OF_LAUNCH}

        def compile_one(config: Any) -> None:
            # it is compiled again when it is timed, and raises there what the autotuner expects
            with contextlib.suppress(Exception):
                tuner.fn.warmup(*tuner.nargs.values(), grid=(1,), **options, **config.all_kwargs())

        configs = prune(tuner, kwargs)
        with ThreadPoolExecutor(threads, **start) as pool:
            list(pool.map(compile_one, configs))
        return configs

    Autotuner.prune_configs = prune_and_compile
    try:
        yield
    finally:
        Autotuner.prune_configs = prune
