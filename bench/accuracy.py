"""Errors against the fp64 reference on the same rounded inputs, in slices that bound memory and time.

The Triton mLSTM kernels leave out the gradient through the normaliser: under a random output gradient their
dq, dk and di are far off. They are checked with an output gradient orthogonal to h (each row dh_t.h_t = 0),
under which that part is zero, as it is in a model with a scale-invariant norm behind h. Everything else is
checked with a random one, but that it is zero in rows where the gradient jumps (`Operator.at_kink`): one of
them can be all of the error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .inputs import cotangent_like
from .operators import Operator
from .shapes import CHUNK, Shape

RANDOM, ORTHOGONAL = "random", "orthogonal"


def _tolerances(h: float, operands: float, gates: float) -> dict[str, float]:
    """By result; the initial states' gradients are sums of products of the operands, as theirs are."""
    products = dict.fromkeys(("dq", "dk", "dv", "dc_initial", "dn_initial"), operands)
    return {"h": h, **products, "di": gates, "df": gates}


# relative Frobenius error, per dtype
TOLERANCES: dict[str, dict[str, float]] = {
    "bf16": _tolerances(5e-3, 8e-3, 1e-2),
    "fp16": _tolerances(1.25e-3, 2e-3, 2.5e-3),
    "fp32": _tolerances(1e-4, 1e-4, 1e-3),
}
# the baselines keep n and m in bf16 and sum df from rounded dq and dk: df is reported, not checked;
# their fp32 products are tf32
BASELINE_TOLERANCES: dict[str, dict[str, float]] = {
    "bf16": {"h": 1.5e-2, "dq": 3e-2, "dk": 3e-2, "dv": 3e-2, "di": 1e-1},
    "fp16": {"h": 4e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3, "di": 2.5e-2},
    "fp32": {"h": 4e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3, "di": 2.5e-2},
}

# work and memory that one truth may take
FLOP_LIMIT = {"cuda": 4e12, "cpu": 2e10}
SLICE_BYTES = {"cuda": 16 * 2**30, "cpu": 2**28}


def pick_pairs(operator: Operator, shape: Shape, which: str, device: torch.device) -> list[int]:
    """The (batch, head) pairs to check, evenly spread: all of them unless that takes more than FLOP_LIMIT."""
    total = shape.B * shape.H
    flops = operator.cost(shape, which, 2).flops
    count = max(1, min(total, int(total * FLOP_LIMIT[device.type] / flops)))
    return [pair * total // count for pair in range(count)]


def slice_size(shape: Shape, which: str, device: torch.device) -> int:
    """How many pairs the reference may take at a time, by the fp64 tensors that it keeps.

    The forward keeps the inputs, h in pieces and as a whole, and one chunk's states; autograd all chunks'.
    """
    per_token, chunks = 2 * (shape.K + 1) + 3 * shape.V, 1
    if which == "fwdbwd":
        per_token, chunks = 6 * (shape.K + shape.V) + 6 * CHUNK, shape.T // CHUNK + 1
    kept = 8 * (shape.T * per_token + chunks * 4 * shape.K * shape.V)
    return max(1, SLICE_BYTES[device.type] // kept)


@dataclass(frozen=True)
class Truth:
    """fp64 results on the pairs that were picked.

    Attributes:
        values: per output gradient kind (RANDOM, ORTHOGONAL): h and the gradients, each [pairs, S(, D)].
        cotangents: per kind, the output gradient [B, NH, S, V] in the inputs' dtype; empty for "fwd".
        batch, head: indices of the pairs. partial: not every pair was picked.
    """

    values: dict[str, dict[str, Tensor]]
    cotangents: dict[str, Tensor]
    batch: Tensor
    head: Tensor
    partial: bool

    def errors(self, kind: str, found: Mapping[str, Tensor]) -> dict[str, float]:
        """Relative Frobenius error of each result [B, NH, S(, D)]; NaN where one is not finite."""
        return {name: self._error(self.values[kind][name], tensor) for name, tensor in found.items()}

    def _error(self, truth: Tensor, found: Tensor) -> float:
        difference = torch.zeros((), dtype=torch.float64, device=truth.device)
        norm = torch.zeros_like(difference)
        # one pair at a time: a few fp64 matrices of [S, D] in memory
        for row, (b, h) in enumerate(zip(self.batch.tolist(), self.head.tolist(), strict=True)):
            difference += (found[b, h].double() - truth[row]).square().sum()
            norm += truth[row].square().sum()
        ratio = (difference / norm).sqrt().item()
        return ratio if ratio == ratio and ratio != float("inf") else float("nan")


def compute_truth(
    operator: Operator,
    inputs: Mapping[str, Tensor],
    shape: Shape,
    which: str,
    *,
    kinds: Sequence[str] = (RANDOM,),
    seed: int = 0,
) -> Truth:
    """Run the reference in fp64 on the rounded inputs.

    Args:
        inputs: as the backends get them, [B, NH, S(, D)].
        which: "fwd", or "fwdbwd" for the gradients of all inputs as well.
        kinds: the output gradients to compute gradients for.
        seed: of the output gradients.
    """
    v = inputs["v"]
    pairs = pick_pairs(operator, shape, which, v.device)
    batch, head = (
        torch.tensor(x, device=v.device) for x in zip(*(divmod(p, shape.H) for p in pairs), strict=True)
    )
    backward = which == "fwdbwd"
    cotangents: dict[str, Tensor] = {}
    if backward:
        base = cotangent_like(v, seed)
        cotangents = {kind: base if kind == RANDOM else base.clone() for kind in kinds}
    parts: dict[str, dict[str, list[Tensor]]] = {kind: {} for kind in kinds}
    size = slice_size(shape, which, v.device)
    for start in range(0, len(pairs), size):
        b, h = batch[start : start + size], head[start : start + size]
        leaves = [tensor[b, h].double().unsqueeze(0).requires_grad_(backward) for tensor in inputs.values()]
        with torch.set_grad_enabled(backward):
            output = operator.truth(*leaves, chunk_size=CHUNK, **operator.options)
        for kind in kinds:
            results = {"h": output.detach()}
            if backward:
                if kind == ORTHOGONAL:
                    _orthogonalise(cotangents[kind], results["h"], b, h)
                elif operator.at_kink is not None:
                    jumps = operator.at_kink(*(leaf.detach() for leaf in leaves))[0]
                    cotangents[kind][b, h] = cotangents[kind][b, h].masked_fill(jumps[..., None], 0)
                given = cotangents[kind][b, h].double().unsqueeze(0)
                grads = torch.autograd.grad(output, leaves, given, retain_graph=kind != kinds[-1])
                results |= {f"d{name}": grad for name, grad in zip(inputs, grads, strict=True)}
            for name, tensor in results.items():
                parts[kind].setdefault(name, []).append(tensor[0])
    values = {
        kind: {name: torch.cat(found) for name, found in named.items()} for kind, named in parts.items()
    }
    return Truth(values, cotangents, batch, head, partial=len(pairs) < shape.B * shape.H)


def _orthogonalise(cotangent: Tensor, output: Tensor, b: Tensor, h: Tensor) -> None:
    """Take from each row of the pairs' output gradient its part along the output row."""
    given = cotangent[b, h].double()
    along = (given * output[0]).sum(-1, keepdim=True) / output[0].square().sum(-1, keepdim=True)
    cotangent[b, h] = (given - along * output[0]).to(cotangent.dtype)


def failures(errors: Mapping[str, float], tolerances: Mapping[str, float]) -> list[str]:
    """What exceeds its tolerance, each as "h 2.1e-02 > 5.0e-03"; NaN exceeds every tolerance."""
    found = []
    for name, error in errors.items():
        limit = tolerances.get(name)
        if error != error:
            found.append(f"{name} is not finite")
        elif limit is not None and not error <= limit:
            found.append(f"{name} {error:.1e} > {limit:.1e}")
    return found


def poison(nbytes: int, device: torch.device) -> None:
    """Leave NaN in the allocator's free memory: an element that a kernel does not write shows as NaN."""
    if device.type == "cuda":
        torch.full((max(nbytes, 4) // 4,), float("nan"), device=device)
