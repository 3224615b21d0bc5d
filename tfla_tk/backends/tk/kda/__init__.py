"""KDA (the delta rule with a decay per key channel) on the ThunderKittens kernels."""
