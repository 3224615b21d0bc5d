"""What the GPU tests of decoding share: the functions, names, shapes, tolerances, and how states compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tfla_tk

from .accuracy import relative_error

Tensors = dict[str, Tensor]

DEVICE = "cuda"
NAMES = ("q", "k", "v", "i", "f", "c", "n", "m")
TOKENS, STATE = NAMES[:5], NAMES[5:]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# of h and of a state in this dtype, relative Frobenius error
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
DIMS = [
    *((64, 64), (128, 256), (256, 512), (64, 512), (256, 64), (128, 128), (16, 16), (80, 48)),
    *((1, 1), (1, 512), (256, 1), (3, 5), (17, 31), (33, 36), (255, 511), (256, 504), (100, 300)),
]


def assert_close(found: Tensors, truth: Tensors) -> None:
    """h within its dtype; of the state c e^m and n e^m, which is all that counts; m within its rounding."""
    assert found.keys() == truth.keys()
    # h is nothing beyond the range of fp32
    errors = {"h": (relative_error(found["h"], truth["h"].float().double()), found["h"].dtype)}
    for name in ("c", "n"):
        own, true = (x[name].double() for x in (found, truth))
        if "m" in truth:
            largest = truth["m"].amax()
            own, true = (
                t * torch.exp(x["m"].double() - largest).reshape(*t.shape[:2], *(1,) * (t.dim() - 2))
                for t, x in ((own, found), (true, truth))
            )
        errors[name] = (relative_error(own, true), found[name].dtype)
    failed = {name: error for name, (error, dtype) in errors.items() if not error <= TOLERANCE[dtype]}
    assert not failed, f"relative errors {failed}"
    if "m" in found:
        rounding = torch.finfo(found["m"].dtype).eps
        torch.testing.assert_close(found["m"].double(), truth["m"], rtol=rounding, atol=1e-6)


def clone(x: Tensors) -> Tensors:
    return {name: t.clone() for name, t in x.items()}


@dataclass(frozen=True)
class Decoder:
    """Public functions with one choice of their gate and normaliser.

    Attributes:
        prefix: of the functions' names.
        tokens: of a call to mlstm_sequence; None: one, to mlstm_step.
    """

    prefix: str
    options: dict[str, Any]
    tokens: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES if self.prefix == "mlstm" else NAMES[:-1]

    @property
    def token_dim(self) -> int:
        """Of the heads, which a view of [B, S, NH, D], or of [B, NH, D], has elsewhere in memory."""
        return 0 if self.tokens is None else 1

    def function(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(tfla_tk, f"{self.prefix}_{name}")
        return found

    def __call__(self, x: Tensors, backend: str = "tk", **options: Any) -> Tensors:
        """h and the last state by name."""
        call = self.function("step" if self.tokens is None else "sequence")
        h, state = call(**{name: x[name] for name in self.names}, **self.options, **options, backend=backend)
        return {"h": h, **dict(zip(STATE, state, strict=False))}

    def truth(self, x: Tensors) -> Tensors:
        """The recurrence in fp64 on the same rounded inputs."""
        return self({name: t.double() for name, t in x.items()}, "reference")

    def by_steps(self, x: Tensors, **options: Any) -> Tensors:
        """What a call of several tokens computes, token by token."""
        state = [x[name] for name in self.names[5:]]
        outputs = []
        for t in range(x["q"].shape[2]):
            token = [x[name][:, :, t] for name in "qkv"] + [x[name][:, :, t : t + 1] for name in "if"]
            h, state = self.function("step")(*token, *state, **self.options, **options, backend="tk")
            outputs.append(h)
        return {"h": torch.stack(outputs, 2), **dict(zip(STATE, state, strict=False))}

    def draw(
        self,
        batch: int = 2,
        heads: int = 3,
        dims: tuple[int, int] = (128, 256),
        dtype: torch.dtype = torch.bfloat16,
        state: torch.dtype = torch.float32,
        seed: int = 0,
        device: str = DEVICE,
        seq: int | None = None,
    ) -> Tensors:
        """Tokens, so many as a call takes or `seq`, and the state before them."""
        generator = torch.Generator(device).manual_seed(seed)
        dim_qk, dim_v = dims
        seq = self.tokens if seq is None else seq
        rows = () if seq is None else (seq,)
        shapes = (
            *((*rows, dim_qk), (*rows, dim_qk), (*rows, dim_v), rows or (1,), rows or (1,)),
            *((dim_qk, dim_v), (dim_qk,), (1,)),
        )
        found = {
            name: torch.randn(batch, heads, *shape, generator=generator, device=device)
            for name, shape in zip(NAMES, shapes, strict=True)
        }
        found["f"] += 3
        kinds = {**dict.fromkeys("qkv", dtype), **dict.fromkeys(STATE, state)}
        return {name: t.to(kinds.get(name, torch.float32)) for name, t in found.items()}


GATES: dict[str, tuple[str, dict[str, Any]]] = {
    "exp": ("mlstm", {}),
    "sig": ("mlstm_siging", {"normalize": True}),
    "sig_unnormalised": ("mlstm_siging", {"normalize": False}),
}
