"""The TensorFlow mechanism: buffers, the accumulator, and gradients by micro-batches."""
