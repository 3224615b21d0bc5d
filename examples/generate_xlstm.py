"""Continue a prompt with a model that examples/train_xlstm.py saved, on tfla_tk's kernels.

    python examples/generate_xlstm.py model.pt --prompt "Kernels are " --tokens 200
    python examples/generate_xlstm.py    # with a model that it trains first, as train_xlstm.py does by itself

The prompt goes through the chunkwise kernel in one pass, whatever its length, every further byte through the
step. The state that comes back carries on: the second call of `generate` reads no byte twice.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tfla_tk.integrations.xlstm import replace, which

try:
    from xlstm.xlstm_large.model import xLSTMLarge, xLSTMLargeConfig
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[xlstm]', with Python 3.11 or newer") from None

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@torch.enable_grad()
def trained() -> xLSTMLarge:
    """A model that train_xlstm.py trains now, with its own defaults."""
    import train_xlstm  # the file beside this one

    with TemporaryDirectory() as directory:
        path = Path(directory) / "model.pt"
        train_xlstm.main(["--save", str(path)])
        return load(path)


def load(path: Path) -> xLSTMLarge:
    """The saved model for inference: bf16 on a GPU, fp32 elsewhere; states fp32."""
    saved = torch.load(path, map_location=DEVICE, weights_only=True)
    model = xLSTMLarge(xLSTMLargeConfig(**saved["config"] | {"mode": "inference"}))
    model.load_state_dict(saved["weights"])
    return model.to(DEVICE, torch.bfloat16 if ON_GPU else torch.float32).eval()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generate bytes with an xLSTM on tfla_tk's kernels.")
    parser.add_argument("model", type=Path, nargs="?", help="of train_xlstm.py --save; none: train one")
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--tokens", type=int, default=200, help="bytes to generate, in two calls")
    parser.add_argument("--original", action="store_true", help="keep mlstm_kernels' own kernels")
    args = parser.parse_args(argv)
    if args.model is not None and not args.model.is_file():
        parser.error(f"{args.model}: there is no such file; train_xlstm.py --save writes one")
    return args


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> str:
    """Generate and return prompt and continuation."""
    args = parse(argv)
    model = trained() if args.model is None else load(args.model)
    prompt = torch.tensor([list(args.prompt.encode())], device=DEVICE)
    if not args.original:
        replace(model)
        print("prefill on", which(model, 1, max(prompt.shape[1], 2)))
        print("decoding on", which(model, 1, 1))
    now = args.tokens // 2
    later = args.tokens - now
    first, state = model.generate(prompt, now)
    second, _ = model.generate(first[:, -1:], later, state=state)
    written = bytes(torch.cat([prompt, first, second], dim=1)[0].tolist())
    text = written.decode(errors="replace")
    print(text)
    return text


if __name__ == "__main__":
    main()
