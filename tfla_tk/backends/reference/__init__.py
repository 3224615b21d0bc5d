"""The reference as a backend, one module for each family."""
