"""One worker: trains with sizes chosen automatically, while only the second is short of memory.

Prints as JSON what each case ends with, and what was said.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
if worker == 1:
    os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = "36"

import tensorflow as tf

# The strategy has to come before anything else that touches a device.
strategy = tf.distribute.MultiWorkerMirroredStrategy()

sys.path.insert(0, str(Path(__file__).parent.parent))

import bigbatch
from fit_cases import CASES
from out_of_memory_probe import longer_later, train

tf.get_logger().setLevel("ERROR")
AUTO = {"microbatch_size": "auto"}
results = {}
with warnings.catch_warnings(record=True) as caught, strategy.scope():
    warnings.simplefilter("always")
    # The third batch is too long for the second worker only.
    model, history = train(longer_later, AUTO)
    results["longer later"] = model, history
    for name in ("masked", "two outputs"):  # whose denominators have to be known first
        noise = bigbatch.NoiseScale()
        results[name] = CASES[name].train(
            lambda model: bigbatch.accumulate(model, **AUTO), batch_size=20, callbacks=[noise]
        )
        results[name].history.pop("noise_scale")
messages = [str(one.message) for one in caught if "out of memory" in str(one.message)]
printed = {
    name: {
        "weights": [weight.tolist() for weight in model.get_weights()],
        "history": history,
        "size": bigbatch.microbatch_size(model),
    }
    for name, (model, history) in results.items()
}
print(json.dumps({**printed, "messages": messages, "noise": list(noise.estimate.average)}))
