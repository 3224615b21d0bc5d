"""Gated linear attention on the ThunderKittens kernels: what they support, and their launches."""
