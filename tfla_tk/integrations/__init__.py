"""Other packages' models on these kernels, one module per package; each is imported by name."""
