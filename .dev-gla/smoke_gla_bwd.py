"""Relative errors of GLA's gradients against the reference in fp64. Run under `timeout 300`."""
# ruff: noqa

import sys
import time

import torch
from torch.nn.functional import logsigmoid

from tfla_tk import chunk_gla, reference


def draw(
    batch,
    seq,
    heads,
    dims,
    dtype=torch.bfloat16,
    gates="usual",
    of_gates=torch.float32,
    states=True,
    packed=None,
):
    gen = torch.Generator("cuda").manual_seed(0)
    n = lambda *s: torch.randn(s, generator=gen, device="cuda")
    x = {k: n(batch, seq, heads, dims[0]).to(dtype) for k in "qk"}
    x["v"] = n(batch, seq, heads, dims[1]).to(dtype)
    g = logsigmoid(n(batch, seq, heads, dims[0]) + 2)
    u = torch.rand(g.shape, generator=gen, device="cuda")
    x["g"] = {
        "usual": lambda: g,
        "none": lambda: torch.zeros_like(g),
        "-1e3": lambda: torch.full_like(g, -1e3),
        "closed": lambda: torch.full_like(g, -torch.inf),
        "half closed": lambda: torch.where(u > 0.5, -torch.inf, 0.0),
        "mixed": lambda: g.where(u > 0.03, -50.0).where(u > 0.01, -1e3).where(u < 0.8, 0.0),
        "slow": lambda: 0.01 * g,
    }[gates]().to(of_gates)
    rows = batch if packed is None else len(packed)
    if states:
        x["initial_state"] = n(rows, heads, *dims)
    if packed is not None:
        x["cu_seqlens"] = torch.tensor([0, *packed]).cumsum(0).cuda()
    do, dht = n(batch, seq, heads, dims[1]).to(dtype), n(rows, heads, *dims) if states else None
    return x, do, dht


def check(title, *args, **kwargs):
    x, do, dht = draw(*args, **kwargs)
    leaves = {k: t.detach().requires_grad_() if t.is_floating_point() else t for k, t in x.items()}
    start = time.time()
    o, last = chunk_gla(**leaves, output_final_state=True, backend="tk")
    names = [k for k, t in leaves.items() if t.is_floating_point()]
    outs, grads = ([o, last], [do, dht]) if dht is not None else ([o], [do])
    found = dict(zip(names, torch.autograd.grad(outs, [leaves[k] for k in names], grads)))
    torch.cuda.synchronize()
    took = time.time() - start
    wide = {k: t.double() if t.is_floating_point() else t for k, t in x.items()}
    exp = reference.gla_backward(
        wide["q"],
        wide["k"],
        wide["v"],
        wide["g"],
        do.double(),
        None if dht is None else dht.double(),
        initial_state=wide.get("initial_state"),
        cu_seqlens=wide.get("cu_seqlens"),
    )
    names_of = {"q": "dq", "k": "dk", "v": "dv", "g": "dg", "initial_state": "dh0"}
    errors = {}
    for k in names:
        f, e = found[k].double(), getattr(exp, names_of[k])
        # gradients that have vanished: of their size alone
        errors[names_of[k]] = ((f - e).norm() / e.norm().clamp_min(1e-3 * exp.dv.norm())).item()
    bad = any(not (v < 1.2e-2) for v in errors.values())
    print(
        f"{'BAD ' if bad else 'ok  '}{title:34s}",
        *(f"{k} {v:.2e}" for k, v in errors.items()),
        f"({took:.1f} s)",
        flush=True,
    )
    return bad


print(torch.cuda.get_device_name(), flush=True)
bad = check("B1 T64 H1 64/64, no states", 1, 64, 1, (64, 64), states=False)
bad |= check("B1 T16 H1 64/64", 1, 16, 1, (64, 64))
bad |= check("B1 T300 H2 64/64", 1, 300, 2, (64, 64))
bad |= check("B1 T300 H2 128/128", 1, 300, 2, (128, 128))
bad |= check("B4 T300 H40 128/128 (2 walkers)", 4, 300, 40, (128, 128))
bad |= check("B2 T1100 H2 128/128 (anchors)", 2, 1100, 2, (128, 128))
bad |= check("B4 T1100 H20 128/64 (2 walkers)", 4, 1100, 20, (128, 64), gates="slow")
bad |= check("B2 T300 H2 128/256", 2, 300, 2, (128, 256))
bad |= check("B2 T333 H2 96/80 fp16", 2, 333, 2, (96, 80), dtype=torch.float16)
bad |= check("gates in bf16", 2, 333, 2, (128, 128), of_gates=torch.bfloat16)
bad |= check("gates in fp16, 2 walkers", 4, 333, 40, (112, 128), of_gates=torch.float16)
for gates in ("none", "mixed", "half closed", "closed", "-1e3"):
    bad |= check(f"gates: {gates}", 1, 700, 2, (128, 128), gates=gates)
bad |= check("packed", 1, 70 + 0 + 1 + 64 + 700 + 333, 2, (128, 128), packed=[70, 0, 1, 64, 700, 333])
bad |= check(
    "packed, 2 walkers, bf16 gates",
    1,
    1168,
    80,
    (96, 80),
    packed=[70, 0, 1, 64, 700, 333],
    of_gates=torch.bfloat16,
)
bad |= check("T2048", 1, 2048, 4, (128, 128))
bad |= check("T8192", 1, 8192, 4, (128, 128), states=False)

x, do, dht = draw(2, 700, 4, (128, 128), gates="mixed")
leaves = {k: t.detach().requires_grad_() for k, t in x.items()}
first = None
for _ in range(200):
    o, last = chunk_gla(**leaves, output_final_state=True, backend="tk")
    found = torch.autograd.grad([o, last], list(leaves.values()), [do, dht])
    first = first or found
    if not all(torch.equal(a, b) for a, b in zip(found, first)):
        print("BAD repeats differ")
        bad = True
        break
else:
    print("ok  200 repeats bitwise equal")
sys.exit(bad)
