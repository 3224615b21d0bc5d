"""GLA beyond what every operator has: transforms of what is recomputed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tfla_tk import reference

from .conftest import linear_drawer


def dual(run: Callable[[Tensor], Tensor], x: Tensor, tangent: Tensor) -> Any:
    """The result and its tangent, by dual numbers."""
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(run(forward_ad.make_dual(x, tangent))))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "vmap": lambda run, x: torch.func.vmap(run)(torch.stack((x, 2 * x))),
    "grad": lambda run, x: torch.func.grad(lambda y: run(y).sum())(x),
    "vmap of grad": lambda run, x: torch.func.vmap(torch.func.grad(lambda y: run(y).sum()))(x[None]),
    "compiled grad": lambda run, x: torch.compile(
        lambda y: torch.func.grad(lambda z: run(z).sum())(y), backend="aot_eager", fullgraph=True
    )(x),
    "jvp": lambda run, x: torch.func.jvp(run, (x,), (x + 1,)),
    "dual numbers": lambda run, x: dual(run, x, x + 1),
    "functionalize": lambda run, x: torch.func.functionalize(run)(x),
}


@pytest.mark.parametrize("recorded", [False, True], ids=["", "recorded"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform: str, recorded: bool) -> None:
    """Those of the chunkwise form, which recomputes, as of the recurrent one, which is not compiled;
    autograd around them, too."""
    (q, *tokens), (state,) = linear_drawer("G")(20)
    x = dict(zip("kvg", tokens, strict=True)) | {"initial_state": state}
    q.requires_grad_(recorded)
    found = []
    for form, applied in (
        (partial(reference.gla_chunkwise, chunk_size=8), TRANSFORMS[transform]),
        (reference.gla_recurrent, TRANSFORMS[transform.removeprefix("compiled ")]),
    ):
        results = applied(lambda q, form=form: form(q, **x)[0], q)
        results = list(results) if isinstance(results, tuple) else [results]
        results += torch.autograd.grad(results[0].square().sum(), q) if results[0].requires_grad else ()
        found.append(results)
    assert len(found[0]) == len(found[1])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)
