"""Small tensors that never change, made once for each device."""

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)


def kept_on_device(
    kept: dict[Key, Tensor], key: Key, device: torch.device, make: Callable[[torch.device], Tensor]
) -> Tensor:
    """What `kept` has under a key, which tells the device, else what `make(device)` returns, kept for the
    next time."""
    found = kept.get(key)
    if found is not None:
        return found
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # the graph's memory is not for keeping
        return make(device)
    with torch.inference_mode(False), torch.no_grad():
        # from the CPU: it is there for every stream when the copy returns
        kept[key] = make(torch.device("cpu")).to(device)
    return kept[key]
