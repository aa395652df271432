"""Run in a process of its own: goes on with a window that another process saved.

Prints as JSON the weights after one update. `resume_probe.py PATH graph` makes the update
inside `tf.function`, in a process that has never seen a gradient.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parent))

import bigbatch

from problems import embedding_problem, optimizers

problem = embedding_problem()
model, optimizer = problem.build(optimizers()["adam"])
accumulator = bigbatch.GradientAccumulator(optimizer, model.trainable_variables)
checkpoint = tf.train.Checkpoint(accumulator=accumulator)
checkpoint.restore(sys.argv[1]).assert_consumed()
flush = tf.function(accumulator.flush) if sys.argv[2] == "graph" else accumulator.flush
assert bool(flush())
print(json.dumps([weights.tolist() for weights in model.get_weights()]))
