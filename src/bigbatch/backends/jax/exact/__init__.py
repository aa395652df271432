"""Micro-batches in stages, with sums over all of them between the stages, on JAX."""
