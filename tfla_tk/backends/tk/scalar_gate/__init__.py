"""The kernels with one decay per token and head: what they support, and their launches from tensors."""
