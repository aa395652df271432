"""Micro-batches in stages, with sums over the whole batch between them."""
