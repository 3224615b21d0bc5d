"""The delta rule on the ThunderKittens kernels: what they support, and their launches."""
