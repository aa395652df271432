"""Gradient accumulation for training loops that people write themselves."""
