"""Whether models on several kernels agree: logits and first losses, against the fp32 native path."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .model_task import (
    BASELINES,
    NOISE,
    TRUTH,
    WARM_UP_RATE,
    Note,
    Task,
    Training,
    bind,
    bindings,
    build,
    kept_dtype,
    release_memory,
    text_tokens,
    verdict,
)


def agreement(task: Task, note: Note) -> None:
    """Logits and first losses of every variant against mlstm_kernels' fp32 native path, and in pairs.

    Noted as `errors`, by kind: "prefill" and "decode" are relative Frobenius errors of logits, "train" is the
    largest difference of losses in nats; with `against`, TRUTH or the variant that it is a pair with. The
    variant NOISE is the reference in the same dtypes: what rounding around the mLSTM comes to.
    """
    names = (NOISE, *(name for name in task.variants if name != NOISE))
    for kinds, collect in ((("prefill", "decode"), _logits), (("train",), _losses)):
        found: dict[str, tuple[Tensor, ...]] = {}
        for name, results in collect(task, names):
            try:
                note(variant=name, running=True)
                found[name] = results()
            except Exception as error:
                note(variant=name, **verdict(error))
                release_memory(task)
        difference = largest_difference if kinds == ("train",) else relative_error
        for name, other in _pairs_of(found):
            errors = {
                kind: difference(a, b) for kind, a, b in zip(kinds, found[name], found[other], strict=True)
            }
            note(variant=name, against=other, errors=errors)
        del found
        release_memory(task)


def _pairs_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    """(variant, TRUTH) of each, then (variant, the first one of the package)."""
    names = [name for name in found if name != TRUTH]
    own = next((name for name in names if name not in BASELINES and name != NOISE), None)
    pairs = [(name, TRUTH) for name in names] if TRUTH in found else []
    return pairs + [(own, name) for name in names if own is not None and name in BASELINES]


# names, and functions that compute their results
Collected = Iterator[tuple[str, Callable[[], tuple[Tensor, ...]]]]


def _logits(task: Task, names: Sequence[str]) -> Collected:
    """fp32 logits of a prompt and of tokens that follow it one by one; the weights are rounded for all."""
    truth = build(task, "inference", torch.float32).eval()
    with torch.no_grad():
        for parameter in truth.parameters():
            parameter.copy_(parameter.to(kept_dtype(task)))
    model = build(task, "inference", kept_dtype(task)).eval()
    prompt = text_tokens(task, 1, task.length + task.tokens, task.seed)

    @torch.no_grad()
    def logits(model: Any, name: str) -> tuple[Tensor, ...]:
        bind(bindings(model, name))
        first, state = model(prompt[:, : task.length])
        decoded = []
        for token in prompt[:, task.length :].split(1, dim=1):
            out, state = model(token, state)
            decoded.append(out.float())
        return first.float(), torch.cat(decoded, dim=1)

    yield TRUTH, partial(logits, truth, "native")
    for name in names:
        yield name, partial(logits, model, name)


def _losses(task: Task, names: Sequence[str]) -> Collected:
    """Losses of the first training steps from the same weights, over the same batches."""
    plan = task.training
    if plan is None:
        return
    byte_model = dataclasses.replace(task, vocabulary=256)
    model = build(byte_model, "train", torch.float32, plan.layers)
    start = {name: x.clone() for name, x in model.state_dict().items()}

    def losses(name: str, autocast: bool) -> tuple[Tensor, ...]:
        model.load_state_dict(start)
        bind(bindings(model, name))
        return (_train_from(model, plan, task, autocast),)

    yield TRUTH, partial(losses, "native", False)
    for name in names:
        yield name, partial(losses, name, task.on_gpu)


def _train_from(model: Any, plan: Training, task: Task, autocast: bool) -> Tensor:
    """The loss of every step [steps]."""
    optimizer = torch.optim.AdamW(model.parameters(), plan.rate, betas=(0.9, 0.95), fused=True)
    found = []
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * min(1.0, (step + 1) / WARM_UP_RATE)
        tokens = text_tokens(task, plan.batch, plan.length + 1, task.seed + step)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            logits, _ = model(tokens[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found)


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Relative Frobenius error; NaN where one is not finite."""
    return _finite_or_nan((found.double() - truth.double()).norm() / truth.double().norm())


def largest_difference(found: Tensor, truth: Tensor) -> float:
    """NaN where one is not finite."""
    return _finite_or_nan((found.double() - truth.double()).abs().max())


def _finite_or_nan(x: Tensor) -> float:
    # a table and a results row take either as "no figure"
    return x.item() if x.isfinite() else math.nan
