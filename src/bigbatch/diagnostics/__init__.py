"""Proof and insight: what accumulation does to a model, and which batch is worth having."""
