"""Train a byte-level xLSTM language model on a text file, its mLSTM layers on tfla_tk's kernels.

    pip install '.[xlstm]'
    python examples/train_xlstm.py                                     # on this repository's README.md
    python examples/train_xlstm.py README.md --steps 200 --save model.pt
    python examples/train_xlstm.py README.md --steps 200 --original    # on mlstm_kernels' own kernels
    python examples/generate_xlstm.py model.pt --prompt "Kernels are "

On a GPU the model is configured for mlstm_kernels' Triton kernels, as xlstm's models are, elsewhere for its
native PyTorch kernels; the one line that switches is `replace(model)`. Without a GPU the default sizes are
smaller; with OMP_NUM_THREADS=1 a run takes seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tfla_tk.integrations.xlstm import replace, which

try:
    from xlstm.xlstm_large.model import xLSTMLarge, xLSTMLargeConfig
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[xlstm]', with Python 3.11 or newer") from None

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TEXT = Path(__file__).parents[1] / "README.md"
SIZES = {"steps": 200, "batch": 8, "seq": 256, "width": 256, "heads": 2, "blocks": 4}
if not ON_GPU:
    SIZES |= {"steps": 100, "batch": 4, "seq": 128, "width": 128, "blocks": 2}
TRITON = {
    "chunkwise_kernel": "chunkwise--triton_xl_chunk",
    "sequence_kernel": "native_sequence__triton",
    "step_kernel": "triton",
}
NATIVE = {
    "chunkwise_kernel": "chunkwise--native_autograd",
    "sequence_kernel": "native_sequence__native",
    "step_kernel": "native",
}


def build(args: argparse.Namespace) -> xLSTMLarge:
    """The model on its configured kernels, with the gates' biases of the xLSTM 7B paper."""
    config = xLSTMLargeConfig(
        embedding_dim=args.width,
        num_heads=args.heads,
        num_blocks=args.blocks,
        vocab_size=256,
        mode="train",
        return_last_states=True,  # without it xLSTMLarge cannot unpack what its layers return
        **(TRITON if ON_GPU else NATIVE),
    )
    model = xLSTMLarge(config).to(DEVICE)
    for block in model.backbone.blocks:
        layer = block.mlstm_layer
        torch.nn.init.constant_(layer.igate_preact.bias, -10.0)
        layer.fgate_preact.bias.data.copy_(torch.linspace(3.0, 6.0, args.heads))
    return model


def batches(text: Path, args: argparse.Namespace) -> Iterator[Tensor]:
    """Random windows of the file's bytes [batch, seq + 1], on the device."""
    data = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(args.seed)
    offsets = torch.arange(args.seq + 1)
    while True:
        starts = torch.randint(len(data) - args.seq, (args.batch, 1), generator=generator)
        yield data[starts + offsets].to(DEVICE)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level xLSTM on tfla_tk's kernels.")
    parser.add_argument("text", type=Path, nargs="?", default=TEXT, help="the file to train on: README.md")
    parser.add_argument("--original", action="store_true", help="keep mlstm_kernels' own kernels")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="where to write configuration and weights")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train and return the loss of every step, in nats per byte."""
    args = parse(argv)
    torch.manual_seed(args.seed)
    model = build(args)
    if not args.original:
        replace(model)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=ON_GPU):
            print("mLSTM layers on", which(model, args.batch, args.seq))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses = []
    for step, tokens in zip(range(args.steps), batches(args.text, args), strict=False):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=ON_GPU):
            logits, _ = model(tokens[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step:5d}  loss {losses[-1]:.3f}")
    if args.save:
        torch.save({"config": asdict(model.config), "weights": model.state_dict()}, args.save)
    return losses


if __name__ == "__main__":
    main()
