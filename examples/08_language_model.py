"""A small transformer that predicts the next letter in lines of different length.

Padding is masked, and every micro-batch has a different number of valid letters. So the mean of
the micro-batches' means is not the mean of the batch. Keras' own accumulation applies the mean
of means, which gives different updates. bigbatch makes the update of the full batch.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits, load_iris, load_wine

import bigbatch

LENGTH, BATCH, MICROBATCH, EPOCHS = 48, 64, 8, 2

text = "\n".join(load().DESCR for load in (load_digits, load_iris, load_wine))
lines = [line.strip()[:LENGTH] for line in text.splitlines() if line.strip()]
lines = lines[: len(lines) // BATCH * BATCH]  # full batches: Keras' own drops short ones
letters = sorted(set("".join(lines)))
number = {letter: index for index, letter in enumerate(letters, start=1)}  # 0 is padding
data = np.zeros((len(lines), LENGTH + 1), "int32")
for row, line in zip(data, lines):
    row[: len(line)] = [number[letter] for letter in line]
x, y = data[:, :-1], data[:, 1:]


class Positions(keras.layers.Layer):
    """Add a learned vector to every position, and pass the mask on."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True

    def build(self, shape):
        self.vectors = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, inputs):
        return inputs + self.vectors


def make_model():
    tokens = keras.Input((LENGTH,), dtype="int32")
    hidden = keras.layers.Embedding(len(letters) + 1, 32, mask_zero=True)(tokens)
    hidden = Positions()(hidden)
    attention = keras.layers.MultiHeadAttention(2, 16)
    normal = keras.layers.LayerNormalization()
    hidden = normal(hidden + attention(hidden, hidden, use_causal_mask=True))
    hidden = hidden + keras.layers.Dense(32)(keras.layers.Dense(64, "relu")(hidden))
    return keras.Model(tokens, keras.layers.Dense(len(letters) + 1)(hidden))


def train(batch_size, prepare=lambda model: model, **options):
    keras.utils.set_random_seed(0)
    model = make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    model.compile(keras.optimizers.Adam(3e-3, **options), loss)
    prepare(model)
    model.fit(x, y, batch_size=batch_size, epochs=EPOCHS, shuffle=False, verbose=0)
    return model.get_weights()


def largest_difference(one, two):
    return max(np.abs(a - b).max() for a, b in zip(one, two))


full = train(BATCH)
steps = BATCH // MICROBATCH
ours = train(BATCH, lambda model: bigbatch.accumulate(model, microbatch_size=MICROBATCH))
keras_own = train(MICROBATCH, gradient_accumulation_steps=steps)
print(
    f"{len(lines)} lines, {len(letters)} letters, batches of {BATCH} in parts of {MICROBATCH}"
)
print("largest difference of a weight from the full batch:")
print(f"  bigbatch    {largest_difference(full, ours):.1e}")
print(f"  Keras' own  {largest_difference(full, keras_own):.1e}")
