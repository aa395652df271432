"""One worker: trains cases with `fit`, in split and window mode, and evaluates.

Prints as JSON what each case ends with. `python fit.py die` ends the second worker in the
middle of an epoch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tensorflow as tf

# The strategy has to come before anything else that touches a device.
strategy = tf.distribute.MultiWorkerMirroredStrategy()

sys.path.insert(0, str(Path(__file__).parent.parent))

import bigbatch
from coupled_cases import COUPLED_CASES
from exact_cases import WORKERS
from fit_cases import CASES

from stack import keras

tf.get_logger().setLevel("ERROR")
worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
die = sys.argv[1:] == ["die"]
SETTINGS = {"split": ({"microbatch_size": 4}, 20), "window": ({"accumulation_steps": 2}, 10)}


class Die(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and worker == 1:
            os._exit(3)


CASES_HERE = {name: CASES[name] for name in ("two outputs", "own train_step")}
# Its loss compares samples, which all workers find by trying.
CASES_HERE["metrics"] = COUPLED_CASES["metrics"]
CASES_HERE["exact"] = WORKERS
results = {}
for name, case in CASES_HERE.items():
    for mode, (setting, batch_size) in SETTINGS.items():
        if name == "exact":
            setting = {**setting, "batch_norm": "exact"}
        with strategy.scope():
            model, history = case.train(
                lambda model, setting=setting: bigbatch.accumulate(model, **setting),
                batch_size=batch_size,
                callbacks=[Die()] if die else [],
            )
            logs = model.evaluate(case.x, case.y, verbose=0, return_dict=True)
        weights = [weight.tolist() for weight in model.get_weights()]
        results[f"{name}, {mode}"] = {"weights": weights, "history": history, "logs": logs}
print(json.dumps(results))
