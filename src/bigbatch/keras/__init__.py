"""Accumulation in `model.fit`: the model's own `train_step`, run micro-batch by micro-batch."""
