import sys, torch
sys.path.insert(0,"/work/main" if len(sys.argv)<2 or not sys.argv[1].startswith("/") else sys.argv[1])
import importlib.util, types, math
spec = importlib.util.spec_from_file_location("tfla_launcher_module", "/tmp/kda-emulator/tfla_launcher_module.so")
ext = importlib.util.module_from_spec(spec); spec.loader.exec_module(ext)
functions, constants = ext.open("/tmp/kda-emulator/kda.so")
kernel = types.SimpleNamespace(**functions)
from tfla_tk import build
from tfla_tk.backends.tk.kda import call, launch
from tfla_tk.calls.kda import KDACore
import tfla_tk.reference as ref
build.load = lambda *a: kernel
build.launches = ext.launches
launch.current_stream = lambda d: 0
call.multiprocessors = lambda d: 132
from check import gates
def err(a,b): a,b=a.double(),b.double(); d=(a-b).norm(); n=b.norm(); return (d/n).item() if n>0 else d.item()
def run(B=1,T=70,H=1,K=128,V=128,kind="usual",gdtype=torch.float32,dtype=torch.bfloat16,cu=None,A=False,dt=False,lb=None,l2=False,bs=False,ne=False,seed=0):
    G=torch.Generator().manual_seed(seed); R=lambda *s: torch.randn(s,generator=G)
    q,k,v=R(B,T,H,K),R(B,T,H,K),R(B,T,H,V)
    if not l2: q,k=(torch.nn.functional.normalize(x,dim=-1) for x in (q,k))
    q,k,v=(x.to(dtype) for x in (q,k,v))
    g=gates(kind,(B,T,H,K),G).to(gdtype); beta=(R(B,T,H) if bs else torch.rand((B,T,H),generator=G))
    a=torch.rand(H,generator=G)*2 if A else None; d=R(H*K)-2 if dt else None
    N=B if cu is None else len(cu)-1
    s0=0.3*R(N,H,K,V); cus=None if cu is None else torch.tensor(cu,dtype=torch.int32)
    core=KDACore(q,k,v,g,beta,a,d,s0,cus,K**-.5,l2,bs,ne,lb,False)
    o,last,kept=launch.forward(core,output_final_state=True,keep=True)
    do=R(B,T,H,V).to(dtype); dl=R(N,H,K,V)
    got=launch.backward(core,kept,do,dl,needs_gates=True)
    names=["q","k","v","g","beta","A_log","dt_bias","initial_state"]; xs=[q,k,v,g,beta,a,d,s0]
    ys=[None if x is None else x.double().requires_grad_() for x in xs]
    qq,kk,vv,gg,bb,aa,dd,ss=ys
    if l2: qq,kk=(t*(t.square().sum(-1,keepdim=True)+1e-6).rsqrt() for t in (qq,kk))
    if a is not None or lb is not None:
        y=gg+(0 if dd is None else dd.view(H,K)); r=1. if aa is None else aa.exp()[:,None]
        gg=lb*torch.sigmoid(r*y) if lb is not None else -r*torch.nn.functional.softplus(y)
    if bs: bb=bb.sigmoid()*(2 if ne else 1)
    outs,lasts=[],[]
    seqs=[(b,slice(None)) for b in range(B)] if cu is None else [(0,slice(x,y)) for x,y in zip(cu,cu[1:])]
    for n,(b,sl) in enumerate(seqs):
        S=ss[n]; oo=[]
        for t in range(*sl.indices(T)):
            S=S*gg[b,t].exp()[...,None]; u=bb[b,t,:,None]*(vv[b,t]-torch.einsum("hk,hkv->hv",kk[b,t],S)); S=S+kk[b,t,:,:,None]*u[:,None]
            oo.append(K**-.5*torch.einsum("hk,hkv->hv",qq[b,t],S))
        outs.append(torch.stack(oo) if oo else vv[b,:0]); lasts.append(S)
    Y=torch.stack(outs) if cu is None else torch.cat(outs)[None]
    loss=(Y*do.double()).sum()+(torch.stack(lasts)*dl.double()).sum()
    want=torch.autograd.grad(loss,[y for y in ys if y is not None])
    w=iter(want); res={n:err(x,next(w)) for n,x,y in zip(names,got,ys) if y is not None}
    print(dict(T=T,K=K,V=V,kind=kind,cu=cu,A=A,dt=dt,lb=lb,l2=l2), "o %.1e"%err(o,Y.detach())," ".join("d%s %.1e"%i for i in res.items()),flush=True)
bf,hf=torch.bfloat16,torch.float16
cases=[dict(T=20,K=64,V=64),dict(T=70),dict(T=130,kind="strong"),dict(T=70,kind="mixed"),dict(T=70,kind="by channel"),dict(T=70,kind="-50"),dict(T=100,cu=[0,37,37,100],K=96,V=80,H=2),dict(T=70,kind="raw",gdtype=bf,A=True,dt=True,l2=True,bs=True),dict(T=70,kind="raw",A=True,lb=-5.,dt=True,bs=True,ne=True,K=64),dict(T=70,dtype=hf,kind="raw",A=True,l2=True),dict(T=128,kind="0")]
sel=[int(x) for x in sys.argv[1:] if x.isdigit()] or range(len(cases))
for i in sel: run(**cases[i])
