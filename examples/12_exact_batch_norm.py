"""Batch normalisation with the statistics of 256 samples, eight in memory at a time.

With other ways to accumulate, BatchNormalization normalises with a micro-batch. Here it uses
the whole batch, and the weights equal the full batch.
"""

import keras
from sklearn.datasets import load_digits

import bigbatch

x, y = load_digits(return_X_y=True)
x = (x[:768] / 16).reshape(-1, 8, 8, 1)
y = y[:768]
keras.config.set_floatx("float64")  # so that rounding does not hide differences


def train(**setting):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8, 8, 1))])
    for filters in (8, 16):
        model.add(keras.layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(keras.layers.BatchNormalization())
        model.add(keras.layers.ReLU())
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(10))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    if setting:
        bigbatch.accumulate(model, **setting)
    history = model.fit(x, y, batch_size=256, epochs=2, shuffle=False, verbose=0)
    return model, history.history


full, full_history = train()
print(f"{'':14}{'loss':>10}{'accuracy':>10}  largest difference of any weight")
print(
    f"{'full batch':14}{full_history['loss'][-1]:>10.6f}{full_history['accuracy'][-1]:>10.4f}"
)
for batch_norm in ("pooled", "exact"):
    model, history = train(microbatch_size=8, batch_norm=batch_norm)
    pairs = zip(full.get_weights(), model.get_weights())
    difference = max(abs(one - two).max() for one, two in pairs)
    print(
        f"{batch_norm:14}{history['loss'][-1]:>10.6f}{history['accuracy'][-1]:>10.4f}"
        f"  {difference:.0e}"
    )
