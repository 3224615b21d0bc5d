"""mLSTM for the GPU tests: operators, inputs, their fp64 truth and the errors against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tfla_tk
from tfla_tk.backends.tk.scalar_gate import forward as tk_forward
from tfla_tk.bench.operators import KINK

from .accuracy import DEVICE, GRADIENT_TOLERANCE, TOLERANCE, relative_error

Tensors = dict[str, Tensor]

# of n and m, which are fp32 sums that never pass through the operands' dtype
NORM_TOLERANCE = 1e-5
# Size of a row of h relative to v beyond which the row's dh is drawn smaller: without that one row has half
# of dq's squared norm in a tenth of all draws, and its rounding does not average out.
LARGE_H = 4
# Size of a gradient, relative to dh, below which it counts as vanished and only its size is checked: the
# gradient of the only token that a row sees is a difference of equal terms.
VANISHED = {"q": 0.1, "k": 0.1, "v": 0.1, "i": 0.5, "f": 0.5, "c_initial": 0.1, "n_initial": 0.1}


@dataclass(frozen=True)
class Operator:
    """A public function with one choice of its gate and normaliser."""

    function: str
    states: tuple[str, ...]
    options: dict[str, Any]

    def __call__(self, inputs: Tensors, backend: str = "tk", **options: Any) -> Any:
        """The public function's own result; ``inputs`` are its tensors by argument name."""
        return getattr(tfla_tk, self.function)(**inputs, **self.options, **options, backend=backend)

    def run(self, inputs: Tensors, backend: str = "tk") -> Tensors:
        """h and the last state by name."""
        h, last = self(inputs, backend, return_last_states=True)
        return {"h": h, **dict(zip(("c", "n", "m"), last, strict=False))}

    def run_sequential(self, inputs: Tensors) -> Tensors:
        """`run` by the kernel that the ablation of bench/ takes."""
        names = "q", "k", "v", "i", "f", "c_initial", "n_initial", "m_initial", "cu_seqlens"
        sigmoid_gate, normalize = self.function != "mlstm_chunkwise", self.options.get("normalize", True)
        options = tk_forward.Options(sigmoid_gate, normalize, 1e-6, True, False, sequential=True)
        h, c, n, m, *_ = tk_forward.run(tuple(inputs.get(name) for name in names), options)
        return {name: x for name, x in zip("hcnm", (h, c, n, m), strict=True) if x is not None}

    def truth(self, inputs: Tensors) -> Tensors:
        """The chunkwise reference in fp64 on the same rounded inputs."""
        exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        return self.run(exact, "reference")

    def draw_cotangents(self, x: Tensors, last: bool, seed: int = 7) -> Tensors:
        """Of h, and on request of the last c and n."""
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE)

        found = {"h": torch.empty_like(x["v"]).copy_(normal(*x["v"].shape))}
        found["h"] *= self.row_weights(x)[..., None].to(found["h"])
        if last:
            batch, heads, _, dim_qk = x["q"].shape
            count = batch if "cu_seqlens" not in x else x["cu_seqlens"].numel() - 1
            found["c"] = normal(count, heads, dim_qk, x["v"].shape[-1])
            if len(self.states) > 1:
                found["n"] = normal(count, heads, dim_qk)
        return found

    def row_weights(self, x: Tensors) -> Tensor:
        """What the rows of dh are drawn with, [B, NH, S], so that rounding in one row is not the whole error.

        0 where q.n is hardly more or less than its floor: the gradient through the normaliser jumps there,
        and rounding decides on which side it is taken. Less than 1 where h is much larger than v: q.n is a
        small difference there, and what the row adds to a gradient grows with the square of h.
        """
        normalize = self.options.get("normalize", True)
        if not normalize or x["i"].numel() == 0:
            return torch.ones_like(x["i"])
        gates = (x[name].float() for name in ("i", "f"))
        given = (x.get(name) for name in ("c_initial", "n_initial", "m_initial", "cu_seqlens"))
        options = (self.function != "mlstm_chunkwise", normalize, 1e-6, False, True)
        with torch.no_grad():
            h, *_, d, m, _ = torch.ops.tfla_tk.mlstm_fwd(x["q"], x["k"], x["v"], *gates, *given, *options)
        floor = torch.ones_like(d) if m.numel() == 0 else torch.exp(-m.double())
        kink = (d.double().abs() / floor - 1).abs() < KINK
        assert kink.sum() <= 10 + 0.01 * kink.numel()
        relative = h.float().square().mean(-1) / x["v"].float().square().mean()
        weights = (LARGE_H**2 / relative).clamp(max=1).nan_to_num(nan=1)
        return weights.masked_fill(kink, 0)

    def gradients(
        self, x: Tensors, cotangents: Tensors, backend: str = "tk", names: tuple[str, ...] = ()
    ) -> Tensors:
        """The gradients of x's tensors by name, of `names` alone where there are any."""
        fixed = ("m_initial", "cu_seqlens")
        wanted = names or tuple(name for name in x if name not in fixed)
        leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in x.items()}
        outputs = self.run(leaves, backend) if "c" in cotangents else {"h": self(leaves, backend)}
        found = torch.autograd.grad(
            [outputs[name] for name in cotangents],
            [leaves[name] for name in wanted],
            list(cotangents.values()),
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(wanted, found, strict=True))

    def true_gradients(self, x: Tensors, cotangents: Tensors, form: str = "reference") -> Tensors:
        """Autograd of the reference in fp64 on the same rounded inputs."""
        exact, given = (
            {name: t.double() if t.is_floating_point() else t for name, t in group.items()}
            for group in (x, cotangents)
        )
        return self.gradients(exact, given, form)


OPERATORS = {
    "exp": Operator("mlstm_chunkwise", ("c_initial", "n_initial", "m_initial"), {}),
    "sig": Operator("mlstm_siging_chunkwise", ("c_initial", "n_initial"), {"normalize": True}),
    "sig_unnormalised": Operator("mlstm_siging_chunkwise", ("c_initial",), {"normalize": False}),
}


def make_inputs(
    batch: int = 2,
    heads: int = 3,
    seq: int = 300,
    dims: tuple[int, int] = (128, 256),
    dtype: torch.dtype = torch.bfloat16,
    states: tuple[str, ...] = (),
    seed: int = 0,
    device: str = DEVICE,
) -> Tensors:
    """Draws q, k, v, i, f and the initial state's tensors that are named."""
    generator = torch.Generator(device).manual_seed(seed)
    dim_qk, dim_v = dims
    rows = (batch, heads, seq)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    found = {name: normal(*rows, dim_qk, dtype=dtype) for name in ("q", "k")}
    found["v"] = normal(*rows, dim_v, dtype=dtype)
    found["i"] = normal(*rows)
    found["f"] = normal(*rows) + 3
    shapes: dict[str, tuple[int, ...]] = {
        "c_initial": (dim_qk, dim_v),
        "n_initial": (dim_qk,),
        "m_initial": (1,),
    }
    return found | {name: normal(batch, heads, *shapes[name]) for name in states}


def with_positive_sums(x: Tensors) -> Tensors:
    """x with q.n away from zero, where h is a quotient of cancelled sums and
    every kernel loses digits."""
    return x | {name: x[name].abs() for name in ("q", "k", "n_initial") if name in x}


def pack(x: Tensors, lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensors:
    """x with the offsets of its packed sequences."""
    return x | {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, dtype)}


def draw_packed(
    operator: Operator, lengths: list[int], dims: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> Tensors:
    """Packed sequences with an initial state each."""
    drawn = make_inputs(len(lengths), 3, 1, dims, states=operator.states, seed=1)
    x = make_inputs(1, 3, sum(lengths), dims, dtype) | {name: drawn[name] for name in operator.states}
    return pack(x, lengths)


def assert_accurate(found: Tensors, truth: Tensors, norm_tolerance: float = NORM_TOLERANCE) -> None:
    """Holds every result against the truth: dtypes, shapes, errors (n and m within ``norm_tolerance``)."""
    assert found.keys() == truth.keys()
    dtype = found["h"].dtype
    assert {x.dtype for name, x in found.items() if name != "h"} <= {torch.float32}
    errors = {name: relative_error(x, truth[name]) for name, x in found.items()}
    limits = {name: TOLERANCE[dtype] if name in "hc" else norm_tolerance for name in found}
    # not(<=): NaN fails
    failed = {name: error for name, error in errors.items() if not error <= limits[name]}
    assert not failed, f"relative errors {failed} exceed {limits}"


def without_overflow(name: str, grad: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Both with zeros where the dtype can hardly store the truth: what counts there is size and sign."""
    near_largest = 0.9 * torch.finfo(grad.dtype).max
    beyond = (exact.to(grad.dtype).isinf() | grad.isinf()) & (exact.abs() > near_largest)
    assert (grad.double() * exact.sign())[beyond].gt(near_largest).all(), name
    return grad.masked_fill(beyond, 0.0), exact.masked_fill(beyond, 0.0)


def assert_gradients(found: Tensors, expected: Tensors, dtype: torch.dtype, dh: Tensor | None = None) -> None:
    """Holds gradients against the truth; where they may vanish, relative to dh."""
    assert found.keys() == expected.keys()
    failed = {}
    for name in found:
        grad, exact = without_overflow(name, found[name], expected[name].double())
        limit = GRADIENT_TOLERANCE[dtype][name in ("i", "f")]
        error = relative_error(grad, exact)
        size = 0.0 if dh is None else VANISHED[name] * dh.double().norm().item()
        if exact.norm().item() < size:
            error = (grad.double() - exact).norm().item() / size
        # not(<=): NaN fails
        if not error <= limit:
            failed[name] = error
    assert not failed, f"relative errors {failed} exceed {GRADIENT_TOLERANCE[dtype]}"


def compare(operator: Operator, x: Tensors, *, last: bool = True, vanishing: bool = False) -> Tensors:
    """Gradients by the kernels, held against the truth."""
    cotangents = operator.draw_cotangents(x, last)
    found = operator.gradients(x, cotangents)
    for name, grad in found.items():
        assert (grad.shape, grad.dtype) == (x[name].shape, x[name].dtype), name
    dh = cotangents["h"] if vanishing else None
    assert_gradients(found, operator.true_gradients(x, cotangents), x["q"].dtype, dh)
    return found


def check(
    operator: Operator,
    x: Tensors,
    *,
    trains: bool = True,
    norm_tolerance: float = NORM_TOLERANCE,
    **options: bool,
) -> None:
    """Results and, unless it `trains` nothing, gradients by the kernels, held against the truth."""
    assert_accurate(operator.run(x), operator.truth(x), norm_tolerance)
    if trains:
        compare(operator, x, **options)
