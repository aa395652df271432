"""Keras 3 on torch."""
