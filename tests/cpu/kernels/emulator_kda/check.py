import importlib.util, sys, types, itertools, math
import torch
from torch.nn.functional import softplus, normalize
spec = importlib.util.spec_from_file_location("tfla_launcher_module", "/tmp/kda-emulator/tfla_launcher_module.so")
ext = importlib.util.module_from_spec(spec); spec.loader.exec_module(ext)
functions, constants = ext.open("/tmp/kda-emulator/kda.so")
kernel = types.SimpleNamespace(**functions)
from tfla_tk import build
from tfla_tk.backends.tk.kda import call, launch
build.load = lambda *a: kernel
build.launches = ext.launches
launch.current_stream = lambda d: 0
call.multiprocessors = lambda d: 132

def recurrence(q, k, v, g, beta, scale, S):  # one sequence [T, H, D]
    o = []
    for t in range(q.shape[0]):
        S = S * g[t].exp()[..., None]
        u = beta[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], S))
        S = S + k[t, :, :, None] * u[:, None]
        o.append(scale * torch.einsum("hk,hkv->hv", q[t], S))
    return (torch.stack(o) if o else v[:0]), S

def truth(x, **o):
    q, k, v, g, beta = (x[n].double() for n in ("q", "k", "v", "g", "beta"))
    H, HV = q.shape[2], v.shape[2]
    if o.get("qk_l2norm"): q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    q, k = (t.repeat_interleave(HV // H, 2) for t in (q, k))
    A, dt, lb = x.get("A_log"), x.get("dt_bias"), o.get("lower_bound")
    if A is not None or lb is not None:
        g = g + (0 if dt is None else dt.double().view(HV, -1))
        a = 1.0 if A is None else A.double().exp()[:, None]
        g = lb * torch.sigmoid(a * g) if lb is not None else -a * softplus(g)
    if o.get("beta_sigmoid"): beta = beta.sigmoid() * (2 if o.get("neg_eigval") else 1)
    cu = x.get("cu_seqlens"); S0 = x.get("initial_state")
    vf = o.get("state_v_first")
    if S0 is not None and vf: S0 = S0.mT
    outs, last = [], []
    seqs = [(b, slice(None)) for b in range(q.shape[0])] if cu is None else [(0, slice(int(a), int(b))) for a, b in zip(cu, cu[1:])]
    for n, (b, s) in enumerate(seqs):
        S = torch.zeros(HV, q.shape[3], v.shape[3], dtype=torch.float64) if S0 is None else S0[n].double()
        y, S = recurrence(q[b, s], k[b, s], v[b, s], g[b, s], beta[b, s], o["scale"], S)
        outs.append(y); last.append(S)
    y = torch.stack(outs) if cu is None else torch.cat(outs)[None]
    last = torch.stack(last)
    return y, last.mT if vf else last

def err(a, b):
    a, b = a.double(), b.double()
    d = (a - b).norm(); n = b.norm()
    return (d / n).item() if n > 0 else d.item()

def gates(kind, shape, G):
    r = lambda: torch.rand(shape, generator=G)
    return {
        "0": lambda: torch.zeros(shape), "-1e-4": lambda: torch.full(shape, -1e-4), "-50": lambda: torch.full(shape, -50.0),
        "-1e3": lambda: torch.full(shape, -1e3), "-1e5": lambda: torch.full(shape, -1e5), "-inf": lambda: torch.full(shape, -math.inf),
        "usual": lambda: torch.nn.functional.logsigmoid(torch.randn(shape, generator=G) + 3),
        "strong": lambda: -5 * torch.sigmoid(2 * torch.randn(shape, generator=G)),
        "raw": lambda: torch.randn(shape, generator=G),
        "mixed": lambda: torch.where(r() < .1, -1e3, torch.where(r() < .3, 0.0, torch.where(r() < .3, -50.0, -0.05 * r()))),
        "by channel": lambda: torch.tensor([0., -1e-4, -50., -1e3]).repeat(*shape[:-1], shape[-1] // 4),
    }[kind]()

def run(B=1, T=70, H=1, HV=None, K=128, V=128, kind="usual", gdtype=torch.float32, dtype=torch.bfloat16, cu=None, states=True, walkers=None, odd=False, A=None, dt=None, bdtype=torch.float32, seed=0, **o):
    G = torch.Generator().manual_seed(seed); HV = HV or H
    R = lambda *s: torch.randn(s, generator=G)
    x = dict(q=R(B, T, H, K), k=R(B, T, H, K), v=R(B, T, HV, V))
    if not o.get("qk_l2norm"): x["q"], x["k"] = normalize(x["q"], dim=-1), normalize(x["k"], dim=-1)
    x = {n: t.to(dtype) for n, t in x.items()}
    x["g"] = gates(kind, (B, T, HV, K), G).to(gdtype)
    x["beta"] = (R(B, T, HV) if o.get("beta_sigmoid") else torch.rand((B, T, HV), generator=G)).to(bdtype)
    if A: x["A_log"] = torch.rand(HV, generator=G) * 2
    if dt: x["dt_bias"] = R(HV * K) - 2
    if cu is not None: x["cu_seqlens"] = torch.tensor(cu, dtype=torch.int64 if odd else torch.int32)
    N = B if cu is None else len(cu) - 1
    if states: x["initial_state"] = 0.3 * R(N, HV, *((V, K) if o.get("state_v_first") else (K, V)))
    o.setdefault("scale", K ** -0.5)
    if walkers: call.Shape.walkers = walkers
    launch._forwards = type(launch._forwards)()
    y, last = launch.forward(**x, **o, output_final_state=True)
    t, tl = truth(x, **o)
    e = err(y, t), err(last, tl)
    ok = e[0] < 5e-3 and e[1] < 5e-3
    print("ok " if ok else "BAD", f"{e[0]:.2e} {e[1]:.2e}", dict(B=B, T=T, H=H, HV=HV, K=K, V=V, kind=kind, g=str(gdtype)[6:], cu=cu, walkers=walkers, A=A, dt=dt, **o), flush=True)
    return ok
if __name__ == "__main__":
    bf, hf, fp = torch.bfloat16, torch.float16, torch.float32
    cases = [
        dict(T=16, states=False, walkers=1, V=64), dict(T=64), dict(T=70, walkers=2), dict(T=200, walkers=1), dict(T=200, walkers=2, state_v_first=True),
        *(dict(T=100, kind=k, walkers=2) for k in ("0", "-1e-4", "-50", "-1e3", "-1e5", "mixed", "by channel", "strong")),
        dict(T=130, K=64, V=64, walkers=1), dict(T=130, K=64, V=128, walkers=2), dict(T=130, K=96, V=80, H=2, HV=4, walkers=2), dict(T=130, K=48, V=192, walkers=2),
        dict(T=200, cu=[0, 0, 37, 101, 165, 200], walkers=2), dict(T=200, cu=[0, 1, 130, 200], walkers=1, odd=True, state_v_first=True),
        dict(T=100, kind="raw", gdtype=bf, A=True, dt=True, qk_l2norm=True, beta_sigmoid=True, bdtype=bf, walkers=2),
        dict(T=100, kind="raw", gdtype=bf, A=True, dt=True, lower_bound=-5.0, qk_l2norm=True, beta_sigmoid=True, neg_eigval=True, bdtype=bf, walkers=2),
        dict(T=100, kind="raw", gdtype=hf, dtype=hf, lower_bound=-5.0, qk_l2norm=True, walkers=2, K=64), dict(T=100, kind="raw", gdtype=fp, A=True, walkers=2),
        dict(T=100, cu=[0, 37, 100], kind="raw", gdtype=bf, A=True, dt=True, qk_l2norm=True, beta_sigmoid=True, bdtype=bf, walkers=2, H=2, HV=6, K=80, V=96),
        dict(B=2, T=513, H=2, walkers=2, V=64, K=64), dict(T=65, kind="-inf", walkers=2),
    ]
    sel = sys.argv[1:]
    bad = [c for i, c in enumerate(cases) if (not sel or str(i) in sel) and not run(**c)]
    print("bad:", bad)
