"""What one process of `python -m tfla_tk.bench model` is given, the model in it, and the kernels it calls."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tfla_tk.integrations import xlstm
from tfla_tk.integrations.xlstm import modules

from .results import FP32_NATIVE
from .runner import verdict_on
from .text import make_text

AGREEMENT = "agreement"
TRUTH, NOISE = FP32_NATIVE, "reference"  # of the agreement; the noise is that of the reference in bf16
OUT_OF_MEMORY = "out of memory"
LOSS_TOKENS = 1024  # of a sequence whose logits are in memory at a time, while training
INPUT_BIAS, FORGET_BIASES = -3.0, (3.0, 6.0)
TEXT_BYTES = 2**20
WARM_UP_RATE = 10  # steps
# chunkwise kernel, chunk size and step kernel; the step does not depend on the chunks
NATIVE = ("chunkwise--native_autograd", 64, "native")
BASELINES = {
    "native": NATIVE,
    "triton:xl_chunk_128": ("chunkwise--triton_xl_chunk", 128, "triton"),
    "triton:limit_chunk_64": ("chunkwise--triton_limit_chunk", 64, "triton"),
    "triton:step": ("chunkwise--triton_limit_chunk", 64, "triton"),
}
# Triton 3.6 aborts the process when it compiles the forward kernel of these over 16-bit gates
FP32_GATES = frozenset({"triton:xl_chunk_128"})
# the mLSTM kernels of this package and of mlstm_kernels; the latter compiles gate arithmetic by inductor
KERNELS = ("mlstm", "recurrent_step_fw_kernel")
INDUCTOR = "triton_"


@dataclass(frozen=True)
class Training:
    """The trainings whose losses are compared: layers, batch, tokens of a sequence, steps, learning rate."""

    layers: int
    batch: int
    length: int
    steps: int
    rate: float


@dataclass(frozen=True)
class Task:
    """What a process does.

    Attributes:
        phase: "train", "prefill", "decode" or AGREEMENT.
        variants: a backend of tfla_tk ("tk"), or a key of BASELINES: mlstm_kernels as its users run it.
        layers, width, heads, vocabulary: of the model; q and k have half the head's width.
        batches: one measurement for each. length: tokens of a sequence; for AGREEMENT, of the prompt.
        repeats: timed runs. tokens: decoded one by one for AGREEMENT. training: for AGREEMENT alone.
    """

    phase: str
    device: str
    variants: tuple[str, ...]
    layers: int
    width: int
    heads: int
    vocabulary: int
    batches: tuple[int, ...]
    length: int
    repeats: int
    seed: int = 0
    tokens: int = 16
    training: Training | None = None

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Task:
        found = json.loads(path.read_text(encoding="utf-8"))
        for name in ("variants", "batches"):
            found[name] = tuple(found[name])
        if found["training"] is not None:
            found["training"] = Training(**found["training"])
        return cls(**found)

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def head_dims(self) -> tuple[int, int]:
        """Of q and k, and of v."""
        return self.width // (2 * self.heads), self.width // self.heads


Note = Callable[..., None]
# layers, and what each of them calls
Bound = Sequence[tuple[nn.Module, tuple[Any, ...]]]


# The model


def build(task: Task, mode: str, dtype: torch.dtype, layers: int | None = None) -> Any:
    """An xLSTMLarge with weights from the seed, on the task's device; its gates open and remember.

    Gates start between short and long memory, and from an input bias at which losses of the first steps
    repeat within rounding.
    """
    large = importlib.import_module("xlstm.xlstm_large.model")
    kernel, chunk_size, step = NATIVE
    config = large.xLSTMLargeConfig(
        embedding_dim=task.width,
        num_heads=task.heads,
        num_blocks=layers or task.layers,
        vocab_size=task.vocabulary,
        mode=mode,
        return_last_states=True,  # without it xLSTMLarge cannot unpack what its layers return
        chunkwise_kernel=kernel,
        sequence_kernel="native_sequence__native",
        step_kernel=step,
        chunk_size=chunk_size,
    )
    torch.manual_seed(task.seed)
    with torch.device(task.device):
        model = large.xLSTMLarge(config)
    for block in model.backbone.blocks:
        layer = block.mlstm_layer
        for gate in (layer.igate_preact, layer.fgate_preact):
            nn.init.normal_(gate.weight, 0.0, 0.02)
        nn.init.constant_(layer.igate_preact.bias, INPUT_BIAS)
        layer.fgate_preact.bias.data.copy_(torch.linspace(*FORGET_BIASES, task.heads))
    return model.to(dtype)


# activation checkpointing; there is no dropout
recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def bindings(model: nn.Module, variant: str) -> Bound:
    """What the model's mLSTM layers call on a variant; `bind` puts it in.

    Raises:
        ValueError: an unknown variant.
    """
    layers = list(modules.backends_of(model).values())
    if variant not in BASELINES:
        xlstm.replace(model, backend=variant)
        return [(layer, modules.functions(layer)) for layer in layers]
    for layer in layers:
        config: Any = layer.config
        config.chunkwise_kernel, config.chunk_size, config.step_kernel = BASELINES[variant]
    xlstm.restore(model)
    found = [(layer, modules.functions(layer)) for layer in layers]
    if variant in FP32_GATES:
        found = [(layer, (*given[:3], *map(_with_fp32_gates, given[3:]))) for layer, given in found]
    return found


def bind(found: Bound) -> None:
    """Have the layers call what `bindings` found."""
    for layer, functions in found:
        modules.set_functions(layer, functions)


def _with_fp32_gates(function: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's pass over gates cast to fp32, without autocast, which would cast them back."""

    def call(*, q: Tensor, i: Tensor, f: Tensor, **rest: Any) -> Any:
        with torch.autocast(q.device.type, enabled=False):
            return function(q=q, i=i.float(), f=f.float(), **rest)

    return call


# Tokens, memory, errors


def kept_dtype(task: Task) -> torch.dtype:
    """Of the weights for inference; states are fp32."""
    return torch.bfloat16 if task.on_gpu else torch.float32


def random_tokens(task: Task, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(task.seed + 1)
    return torch.randint(task.vocabulary, (batch, length), generator=generator).to(task.device)


def text_tokens(task: Task, batch: int, length: int, seed: int) -> Tensor:
    """Windows of the text that `train` trains on, a token per byte."""
    text = torch.frombuffer(bytearray(_text(task.seed)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
    return text[starts + torch.arange(length)].long().to(task.device)


_texts: dict[int, bytes] = {}


def _text(seed: int) -> bytes:
    if seed not in _texts:
        _texts[seed] = make_text(TEXT_BYTES, seed)
    return _texts[seed]


def verdict(error: Exception) -> dict[str, str]:
    """Status and reason of a variant that raised; an error that all others would meet is raised again."""
    if isinstance(error, getattr(torch, "AcceleratorError", ())):
        raise error
    if isinstance(error, torch.OutOfMemoryError):
        return {"status": OUT_OF_MEMORY, "reason": str(error).splitlines()[0]}
    status, reason = verdict_on(error)
    return {"status": status, "reason": reason}


def release_memory(task: Task) -> None:
    gc.collect()
    if task.on_gpu:
        torch.cuda.empty_cache()
