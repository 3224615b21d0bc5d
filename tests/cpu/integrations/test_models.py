"""xLSTMLarge and transformers' xLSTMForCausalLM on these kernels against their own native ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tfla_tk import UnsupportedError
from tfla_tk.integrations import xlstm
from tfla_tk.integrations.xlstm import modules as explain

from .conftest import assert_same_gradients, gradients, relative_error

Make = Callable[..., nn.Module]
Switched = Callable[..., nn.Module]


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


# xLSTMLarge


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("weight_mode", ["single", "fused"])
def test_large_trains(
    make_large: Make, switched: Switched, tokens: Tensor, mode: str, weight_mode: str
) -> None:
    fields = {"mode": mode, "weight_mode": weight_mode}

    def loss(model: nn.Module) -> Tensor:
        return token_loss(model(tokens)[0], tokens)

    truth = gradients(make_large(**fields), loss)
    assert_same_gradients(gradients(switched(make_large, **fields), loss), truth)


@pytest.mark.parametrize("pieces", [[29, 35], [40, 1, 23]])
def test_large_trains_through_segments(
    make_large: Make, switched: Switched, tokens: Tensor, pieces: list[int]
) -> None:
    """Full backpropagation through the states, which the model overwrites in place; native kernels raise."""

    def whole(model: nn.Module) -> Tensor:
        return token_loss(model(tokens)[0], tokens)

    def in_pieces(model: nn.Module) -> Tensor:
        state, logits = None, []
        for piece in tokens.split(pieces, dim=1):
            out, state = model(piece, state)
            logits.append(out)
        return token_loss(torch.cat(logits, dim=1), tokens)

    native = make_large(mode="inference")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(make_large(mode="inference"), in_pieces)
    model = switched(make_large, mode="inference")
    assert_same_gradients(gradients(model, in_pieces), gradients(native, whole))


@torch.no_grad()
def test_large_generates(make_large: Make, switched: Switched, tokens: Tensor) -> None:
    """As natively, in one go and continued from the state, from prompts of any length."""
    native, model = make_large(mode="inference"), switched(make_large, mode="inference")
    for prompt in (tokens[:, :1], tokens[:, :37]):
        expected, _ = native.generate(prompt, 12)
        found, state = model.generate(prompt, 5)
        rest, _ = model.generate(found[:, -1:], 7, state=state)
        assert torch.equal(torch.cat([found, rest], dim=1), expected)
    logits, state = native(tokens)
    found, last = model(tokens)
    assert relative_error(found, logits) < 1e-5
    for layer, (c, n, m) in state.items():
        assert relative_error(last[layer], (c, n, m)) < 1e-4


@torch.no_grad()
def test_side_by_side(make_large: Make, tokens: Tensor) -> None:
    """One model on both sides: the weights are the same objects, the configuration is not touched."""
    model = make_large(mode="inference")
    config, weights = vars(model.config).copy(), dict(model.named_parameters())
    native, _ = model(tokens)
    with xlstm.replaced(model, backend="reference"):
        ours, _ = model(tokens)
        with xlstm.restored(model):
            again, _ = model(tokens)
    assert (
        torch.equal(again, native) and relative_error(ours, native) < 1e-5 and not torch.equal(ours, native)
    )
    assert vars(model.config) == config
    assert all(weights[name] is p for name, p in model.named_parameters())


def test_which(make_large: Make) -> None:
    model = make_large()
    choice = xlstm.which(model)
    assert choice.backend == "reference" and "GPU" in choice.reasons["tk"].reason
    assert xlstm.which(model, seq=1).backend == "reference"
    xlstm.replace(model, backend="reference:parallel")
    assert xlstm.which(model).backend == "reference:parallel"
    assert xlstm.which(model, seq=1).backend == "reference"
    with pytest.raises(ValueError, match="expected an mLSTM layer around the module"):
        xlstm.which(model.backbone.blocks[0].mlstm_layer.mlstm_backend)


def test_which_describes_the_call(make_large: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator and the arguments that the layer would pass."""
    monkeypatch.setattr(explain.dispatch, "which", lambda op, *args, **options: (op, args, options))
    model = make_large(qk_dim_factor=0.25, autocast_kernel_dtype="float16", chunk_size=32)
    op, args, options = xlstm.which(model, 3, 40)
    assert op == "mlstm_chunkwise" and "backend" not in options
    assert [tuple(x.shape) for x in args] == [(3, 2, 40, 8)] * 2 + [(3, 2, 40, 32)] + [(3, 2, 40)] * 2
    assert all(x.requires_grad and x.dtype == torch.float32 for x in args)
    assert options["return_last_states"] and options["autocast_kernel_dtype"] == torch.float16
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        op, args, options = xlstm.which(model, 3, 1)
    assert op == "mlstm_step" and not args[0].requires_grad
    assert [x.dtype for x in args] == [torch.bfloat16] * 5 + [torch.float32] * 3
    assert [tuple(x.shape) for x in args[5:]] == [(3, 2, 8, 32), (3, 2, 8), (3, 2, 1)]


@pytest.mark.parametrize(
    "fields, dtype, backend, reason",
    [
        ({}, torch.bfloat16, "tk", "yes"),
        ({}, torch.float32, "reference", "no: q, k, v are torch.float32 (use torch.bfloat16 or"),
        ({"qk_dim_factor": 16.0}, torch.bfloat16, "reference", "no: head dims are 512/32 (use multiples"),
    ],
)
@torch.no_grad()
def test_which_says_why_a_model_is_not_served(
    make_large: Make,
    tokens: Tensor,
    on_a_gpu: Callable[[str], None],
    fields: dict[str, Any],
    dtype: torch.dtype,
    backend: str,
    reason: str,
) -> None:
    """As on a Hopper GPU, as far as tk is concerned; the model runs on what serves it."""
    on_a_gpu("supports_mlstm")
    model = make_large(**fields).to(dtype)
    xlstm.replace(model)
    choice = xlstm.which(model)
    assert choice.backend == backend and str(choice.reasons["tk"]).startswith(reason)
    if backend == "reference":
        native = make_large(**fields)(tokens)[0]
        assert (model(tokens)[0] - native).abs().max() < 1e-4 or dtype == torch.bfloat16
        xlstm.replace(model, backend="tk")
        with pytest.raises(UnsupportedError, match="on backend 'tk'"):
            model(tokens)


# transformers


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_hf_trains(make_hf: Make, switched: Switched, tokens: Tensor, mode: str, use_cache: bool) -> None:
    """With a cache too, which transformers overwrites in place; native kernels raise then."""

    def loss(model: nn.Module, use_cache: bool = use_cache) -> Tensor:
        return model(tokens, labels=tokens, use_cache=use_cache).loss

    native = make_hf(mode=mode)
    if use_cache:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(native, loss)
    truth = gradients(native, lambda model: loss(model, use_cache=False))
    assert_same_gradients(gradients(switched(make_hf, mode=mode), loss), truth)


def in_segments(model: nn.Module, tokens: Tensor, cut: int) -> Tensor:
    """The loss over two segments, the second from the cache of the first."""
    first = model(tokens[:, :cut], use_cache=True)
    second = model(tokens[:, cut:], use_cache=True, cache_params=first.cache_params)
    return token_loss(torch.cat([first.logits, second.logits], dim=1), tokens)


@pytest.mark.parametrize("cut", [1, 29, 63])
def test_hf_trains_through_the_cache(make_hf: Make, switched: Switched, tokens: Tensor, cut: int) -> None:
    native = make_hf()
    truth = gradients(native, lambda model: token_loss(model(tokens, use_cache=False).logits, tokens))
    found = gradients(switched(make_hf), lambda model: in_segments(model, tokens, cut))
    assert_same_gradients(found, truth)


def test_hf_trains_in_bf16(make_hf: Make, switched: Switched, tokens: Tensor) -> None:
    """bf16 weights and a bf16 cache between segments: as close to the fp32 native path as one bf16 pass."""

    def whole(model: nn.Module) -> Tensor:
        return token_loss(model(tokens, use_cache=False).logits, tokens)

    truth = gradients(make_hf(), whole)
    model = switched(make_hf).bfloat16()
    at_once = gradients(model, whole)
    found = gradients(model, lambda model: in_segments(model, tokens, 29))
    cache = model(tokens[:, :3], use_cache=True).cache_params
    assert {x.dtype for layer in cache.rnn_state.values() for x in layer} == {torch.bfloat16}
    # the gates' biases have one number per head: too few for a bound on their rounding
    weights = {name: g for name, g in truth.items() if name.endswith("weight")}
    errors = {
        name: (relative_error(found[name], g), relative_error(at_once[name], g))
        for name, g in weights.items()
    }
    assert not {name: pair for name, pair in errors.items() if not pair[0] <= 1.5 * pair[1] + 0.02}


@torch.no_grad()
def test_hf_generates(make_hf: Make, switched: Switched, tokens: Tensor) -> None:
    native, model = make_hf().eval(), switched(make_hf).eval()
    for length in (1, 37):
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        expected = native.generate(tokens[:, :length], **options)
        assert expected.shape == (2, length + 8)
        assert torch.equal(model.generate(tokens[:, :length], **options), expected)
    logits = native(tokens, use_cache=False).logits
    pieces, cache = [], None
    for piece in tokens.split([20, 1, 1, 42], dim=1):
        out = model(piece, use_cache=True, cache_params=cache)
        cache = out.cache_params
        pieces.append(out.logits)
    assert relative_error(torch.cat(pieces, dim=1), logits) < 1e-5


@torch.no_grad()
def test_hf_long_prompts_go_through_in_pieces(make_hf: Make, switched: Switched, tokens: Tensor) -> None:
    """max_inference_chunksize below the prompt: transformers hands the cache on by itself."""
    expected = make_hf().eval()(tokens, use_cache=True).logits
    model = switched(make_hf, max_inference_chunksize=24).eval()
    torch.testing.assert_close(model(tokens, use_cache=True).logits, expected, atol=1e-4, rtol=1e-4)


def test_hf_with_gradient_checkpointing(make_hf: Make, switched: Switched, tokens: Tensor) -> None:
    def loss(model: nn.Module) -> Tensor:
        return model(tokens, labels=tokens, use_cache=False).loss

    truth = gradients(make_hf(mode="train"), loss)
    model = switched(make_hf, mode="train")
    model.gradient_checkpointing_enable()
    assert_same_gradients(gradients(model, loss), truth)


def test_hf_configurations_check_names(make_hf: Make) -> None:
    with pytest.raises(Exception, match="chunkwise--tfla_tk"):
        make_hf(chunkwise_kernel="chunkwise--tfla_tk")
    xlstm.register()
    config = make_hf(chunkwise_kernel="chunkwise--tfla_tk", step_kernel="tfla_tk").config
    config.chunkwise_kernel = "chunkwise--native_autograd_original"
    with pytest.raises(Exception, match="chunkwise--triton_xl_chunk"):
        config.chunkwise_kernel = "chunkwise--unheard_of"
    xlstm.unregister()
    with pytest.raises(Exception, match="expected one of"):
        config.step_kernel = "tfla_tk"


QUANTISED = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("make", ["make_large", "make_hf"])
def test_which_of_quantised_projections(
    make: str, dtype: torch.dtype, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operands have the dtype of the weights that are not quantised, never that of a scale."""
    model = request.getfixturevalue(make)().to(torch.bfloat16)
    for module in model.modules():
        for name in ("q", "k", "v", "out_proj"):
            linear = getattr(module, name, None)
            if isinstance(linear, nn.Linear):
                linear.weight = nn.Parameter(linear.weight.to(dtype), requires_grad=False)
                linear.register_parameter("weight_scale", nn.Parameter(torch.ones(1)))
    for seq in (1, 40):
        assert xlstm.which(model, seq=seq).backend == "reference"
    monkeypatch.setattr(explain.dispatch, "which", lambda op, *args, **options: args)
    for seq in (1, 40):
        operands = xlstm.which(model, seq=seq)
        assert {x.dtype for x in operands} == {torch.bfloat16} and operands[0].requires_grad


def test_which_where_the_weight_is_a_method(make_large: Make) -> None:
    """As in torch.ao's dynamically quantised Linear, which has no parameters at all."""
    model = make_large()
    layer = model.backbone.blocks[0].mlstm_layer
    shapes = {name: x.shape for name, x in layer.named_parameters()}
    assert "out_proj.weight" in shapes
    for name in ("q", "k", "v", "ogate_preact", "igate_preact", "fgate_preact", "out_proj"):
        replacement = nn.Module()
        replacement.weight = lambda: None
        setattr(layer, name, replacement)
    for seq in (1, 40):
        assert xlstm.which(model, seq=seq).backend == "reference"


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "make, mode", [("make_large", "train"), ("make_large", "inference"), ("make_hf", "")]
)
def test_models_on_meta(make: str, mode: str, autocast: bool, request: pytest.FixtureRequest) -> None:
    """Built without memory, to plan with: switched or not, `which` answers and a pass gives shapes."""
    fields = {"mode": mode} if mode else {}
    with torch.device("meta"):
        model = request.getfixturevalue(make)(**fields)
        tokens = torch.zeros(2, 64, dtype=torch.long)
    assert next(model.parameters()).device.type == "meta"
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for seq in (1, 3, 64):
            assert xlstm.which(model, seq=seq).backend == "reference"
        xlstm.replace(model)
        for seq in (1, 3, 64):
            choice = xlstm.which(model, seq=seq)
            assert choice.backend == "reference" and "on meta" in choice.reasons["tk"].reason
        logits = model(tokens)[0]
    assert logits.shape == (2, 64, 50) and logits.device.type == "meta"
    logits.sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads and all(grad.device.type == "meta" for grad in grads)
    if mode == "inference":
        with torch.no_grad():
            logits, state = model(tokens[:, :1])
            assert model(tokens[:, :3], state)[0].shape == (2, 3, 50)
