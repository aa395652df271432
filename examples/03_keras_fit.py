"""One line in a Keras script: batches of 256 with 32 samples in memory at a time.

`fit`, callbacks, the optimizer and saving work unchanged; the loss and the weights equal the
full batch.
"""

import keras
from sklearn.datasets import load_digits

import bigbatch

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")


def train(prepare):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    prepare(model)
    history = model.fit(x, y, batch_size=256, epochs=5, shuffle=False, verbose=0)
    return model, history.history


full, full_history = train(lambda model: model)
small, small_history = train(
    lambda model: bigbatch.accumulate(model, microbatch_size=32)
)  # new

print(f"{'':12}{'full batch':>12}{'accumulated':>13}")
for name in ("loss", "accuracy"):
    print(f"{name:12}{full_history[name][-1]:>12.6f}{small_history[name][-1]:>13.6f}")
print(
    f"{'updates':12}{int(full.optimizer.iterations):>12}{int(small.optimizer.iterations):>13}"
)
pairs = zip(full.get_weights(), small.get_weights())
print(f"largest difference of any weight: {max(abs(a - b).max() for a, b in pairs):.1e}")
