"""xLSTM models on the tk kernels: trained, prefilled and decoded beside their fp32 native path.

The baseline is the same model on the reference backend: over this model Triton's compiler has aborted, and
with it the whole run (docs/triton-baselines.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tfla_tk.integrations import xlstm

from .accuracy import relative_error

SEQ = 320
NATIVE = {
    "chunkwise_kernel": "chunkwise--native_autograd",
    "sequence_kernel": "native_sequence__native",
    "step_kernel": "native",
}
TRITON = {
    "chunkwise_kernel": "chunkwise--triton_xl_chunk",
    "sequence_kernel": "native_sequence__triton",
    "step_kernel": "triton",
}
# relative Frobenius error of logits and of all gradients together, of bf16 weights against fp32 ones; bf16
# rounding of the layers around the kernels dominates it, so what counts is that of the reference in bf16
FLOOR = 2e-2


@pytest.fixture(autouse=True)
def packages() -> Iterator[None]:
    """Skips without the packages; whatever a test registers or replaces is undone after it."""
    pytest.importorskip("mlstm_kernels.torch", reason="mlstm-kernels is not installed")
    pytest.importorskip("xlstm", reason="xlstm is not installed")
    yield
    xlstm.unregister()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(64, (2, SEQ), generator=torch.Generator().manual_seed(1)).cuda()


@pytest.fixture
def make_large() -> Callable[..., nn.Module]:
    """Builds an xLSTMLarge of two blocks with heads of 128/256 on the GPU."""
    model = importlib.import_module("xlstm.xlstm_large.model")

    def make(dtype: torch.dtype = torch.bfloat16, **fields: Any) -> nn.Module:
        torch.manual_seed(0)
        sizes = {"embedding_dim": 512, "num_heads": 2, "num_blocks": 2, "vocab_size": 64}
        config = model.xLSTMLargeConfig(**sizes | {"return_last_states": True} | TRITON | fields)
        return open_gates(model.xLSTMLarge(config)).to("cuda", dtype)

    return make


@pytest.fixture
def make_hf() -> Callable[..., nn.Module]:
    """Builds transformers' xLSTMForCausalLM of the same size on the GPU."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    def make(dtype: torch.dtype = torch.bfloat16, **fields: Any) -> nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 512, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 64}
        config = transformers.xLSTMConfig(**sizes | {"eos_token_id": None} | TRITON | fields)
        return open_gates(transformers.xLSTMForCausalLM(config)).to("cuda", dtype)

    return make


def open_gates(model: nn.Module) -> nn.Module:
    """Gates that open and forget, so that states and layers matter."""
    for name, parameter in model.named_parameters():
        if "gate" in name:
            forget_bias = "fgate" in name and name.endswith("bias")
            nn.init.normal_(parameter, 3.0 if forget_bias else 0.0, 0.02)
    return model


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Tensor:
    """All gradients in one vector."""
    model.train()
    model.zero_grad()
    loss(model).backward()
    return torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


def in_pieces(model: nn.Module, tokens: Tensor, size: int | list[int]) -> tuple[Tensor, Any]:
    """The logits of pieces, each of which goes on from the state of the one before, and the last state."""
    state, logits = None, []
    for piece in tokens.split(size, dim=1):
        out, state = model(piece, state)
        logits.append(out)
    return torch.cat(logits, dim=1), state


def test_which_takes_tk(make_large: Callable[..., nn.Module]) -> None:
    model = make_large()
    xlstm.replace(model)
    assert xlstm.which(model, 2, SEQ).backend == "tk"
    with torch.no_grad():
        assert xlstm.which(model, 2, 1).backend == "tk"
    full = make_large(torch.float32)
    choice = xlstm.which(full, 2, SEQ)
    assert choice.backend == "reference" and "float32" in choice.reasons["tk"].reason
    with torch.autocast("cuda", torch.bfloat16):
        assert xlstm.which(full, 2, SEQ).backend == "tk"


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_large_trains(make_large: Callable[..., nn.Module], tokens: Tensor, mode: str) -> None:
    def loss(model: nn.Module) -> Tensor:
        return token_loss(model(tokens)[0], tokens)

    truth = gradients(make_large(torch.float32, mode=mode, **NATIVE), loss)
    model = make_large(mode=mode)
    with xlstm.replaced(model, backend="reference"):
        theirs = gradients(model, loss)
    with xlstm.replaced(model, backend="tk"):
        ours = gradients(model, loss)
    assert relative_error(ours, truth) < 1.2 * relative_error(theirs, truth) + FLOOR


def test_large_trains_under_autocast(make_large: Callable[..., nn.Module], tokens: Tensor) -> None:
    """fp32 weights; q, k, v are cast by the configured autocast_kernel_dtype."""

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return token_loss(model(tokens)[0], tokens)

    model = make_large(torch.float32)
    truth = gradients(make_large(torch.float32, **NATIVE), lambda m: token_loss(m(tokens)[0], tokens))
    with xlstm.replaced(model, backend="reference"):
        theirs = gradients(model, loss)
    with xlstm.replaced(model):
        ours = gradients(model, loss)
    assert relative_error(ours, truth) < 1.2 * relative_error(theirs, truth) + FLOOR


def test_large_trains_through_segments(make_large: Callable[..., nn.Module], tokens: Tensor) -> None:
    """Full backpropagation through states that the model overwrites in place."""

    def loss(model: nn.Module) -> Tensor:
        return token_loss(in_pieces(model, tokens, [100, 3, SEQ - 103])[0], tokens)

    model = make_large(mode="inference")
    xlstm.replace(model, backend="tk")
    truth = gradients(make_large(torch.float32, **NATIVE), lambda m: token_loss(m(tokens)[0], tokens))
    at_once = gradients(model, lambda m: token_loss(m(tokens)[0], tokens))
    assert relative_error(gradients(model, loss), truth) < 1.5 * relative_error(at_once, truth) + FLOOR


def in_inference(
    make_large: Callable[..., nn.Module], tokens: Tensor, backend: str
) -> tuple[nn.Module, Tensor, Tensor, float]:
    """A model on a backend, its logits of one pass, those in fp32, and how far from these it may be."""
    truth, _ = make_large(torch.float32, mode="inference", **NATIVE)(tokens)
    model = make_large(mode="inference")
    with xlstm.replaced(model, backend="reference"):
        theirs, _ = model(tokens)
    xlstm.replace(model, backend=backend)
    ours, _ = model(tokens)
    return model, ours, truth, 1.2 * relative_error(theirs, truth) + FLOOR


@pytest.mark.parametrize("backend", ["auto", "tk"])
@torch.no_grad()
def test_large_prefills_and_decodes(
    make_large: Callable[..., nn.Module], tokens: Tensor, backend: str
) -> None:
    """Pieces of any length and single tokens equal one pass; as close to fp32 as the reference."""
    model, ours, truth, limit = in_inference(make_large, tokens, backend)
    pieces, _ = in_pieces(model, tokens, [77, 1, 1, 1, SEQ - 80])
    assert relative_error(ours, truth) < limit
    assert relative_error(pieces, truth) < limit
    generated, state = model.generate(tokens[:, :33], 8)
    again, _ = model.generate(generated[:, -1:], 8, state=state)
    assert generated.shape == again.shape == (2, 8)


@pytest.mark.parametrize("use_cache", [False, True])
def test_hf_trains(make_hf: Callable[..., nn.Module], tokens: Tensor, use_cache: bool) -> None:
    """With a cache too: bf16 states that transformers overwrites in place."""

    def loss(model: nn.Module, use_cache: bool = use_cache) -> Tensor:
        return model(tokens, labels=tokens, use_cache=use_cache).loss

    truth = gradients(make_hf(torch.float32, **NATIVE), lambda m: loss(m, use_cache=False))
    model = make_hf()
    with xlstm.replaced(model, backend="reference"):
        theirs = gradients(model, lambda m: loss(m, use_cache=False))
    with xlstm.replaced(model, backend="tk"):
        ours = gradients(model, loss)
    assert relative_error(ours, truth) < 1.2 * relative_error(theirs, truth) + FLOOR


@pytest.mark.parametrize("backend", ["auto", "tk"])
@torch.no_grad()
def test_hf_generates(make_hf: Callable[..., nn.Module], tokens: Tensor, backend: str) -> None:
    model = make_hf().eval()
    xlstm.replace(model, backend=backend)
    text = model.generate(tokens[:, :33], max_new_tokens=16, do_sample=False)
    assert text.shape == (2, 49) and torch.equal(text[:, :33], tokens[:, :33])
    truth = make_hf(torch.float32, **NATIVE).eval()(tokens, use_cache=False).logits
    whole = model(tokens, use_cache=False).logits
    pieces, cache = [], None
    for piece in tokens.split([77, 1, 1, 4, SEQ - 83], dim=1):
        out = model(piece, use_cache=True, cache_params=cache)
        cache = out.cache_params
        pieces.append(out.logits)
    assert relative_error(torch.cat(pieces, dim=1), truth) < 1.5 * relative_error(whole, truth) + FLOOR
