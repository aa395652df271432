"""One worker: trains with an accumulator, saves and restores in the middle of a window.

Prints as JSON the weights it ends with. `python accumulator.py die` ends the second worker
in the middle of training.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import tensorflow as tf

# The strategy has to come before anything else that touches a device.
strategy = tf.distribute.MultiWorkerMirroredStrategy()

sys.path.insert(0, str(Path(__file__).parent.parent))

import bigbatch

from problems import embedding_problem, optimizers

SHARES = [(1, 9), (11, 3)]  # samples of each worker in each micro-batch
UPDATES = 3

worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
tf.get_logger().setLevel("ERROR")
problem = embedding_problem()
with strategy.scope():
    model, optimizer = problem.build(optimizers()["adam"])
    variables = model.trainable_variables
    accumulator = bigbatch.GradientAccumulator(optimizer, variables, accumulation_steps=2)


def replica_fn(x, y):
    with tf.GradientTape() as tape:
        loss = problem.mean_loss(model, x, y)
    accumulator.accumulate(tape.gradient(loss, variables), weight=tf.shape(x)[0])


@tf.function(reduce_retracing=True)
def micro_batch(x, y):
    strategy.run(replica_fn, args=(x, y))


checkpoint = tf.train.Checkpoint(accumulator=accumulator)
with tempfile.TemporaryDirectory() as folder:
    for _ in range(UPDATES):
        start = 0
        for share in SHARES:
            mine = slice(start + sum(share[:worker]), start + sum(share[: worker + 1]))
            micro_batch(tf.constant(problem.x[mine]), tf.constant(problem.y[mine]))
            start += sum(share)
            if sys.argv[1:] == ["die"] and worker == 1:
                os._exit(3)
            path = checkpoint.save(f"{folder}/checkpoint")
            accumulator.reset()
            checkpoint.restore(path)
            accumulator.apply_when_full()
print(json.dumps([weights.tolist() for weights in model.get_weights()]))
