"""`fit` on two machines with `MultiWorkerMirroredStrategy`: one reduction per update.

Run the same script on each machine; TF_CONFIG says which worker it is:

    TF_CONFIG='{"cluster": {"worker": ["HOST1:2222", "HOST2:2222"]},
                "task": {"type": "worker", "index": 0}}' python 09_two_workers.py
    TF_CONFIG='{"cluster": {"worker": ["HOST1:2222", "HOST2:2222"]},
                "task": {"type": "worker", "index": 1}}' python 09_two_workers.py

Without TF_CONFIG the script starts both workers on this machine.
"""

import json
import os
import socket
import subprocess
import sys

if "TF_CONFIG" not in os.environ:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    workers = []
    for index in range(2):
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": addresses}, "task": task})
        environment = {**os.environ, "TF_CONFIG": config, "TF_CPP_MIN_LOG_LEVEL": "3"}
        workers.append(subprocess.Popen([sys.executable, __file__], env=environment))
    sys.exit(max(abs(worker.wait()) for worker in workers))

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import bigbatch

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before any other call of TensorFlow
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
# batch_size counts all workers: each gets its part, and cuts it into micro-batches.
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(256)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA

with strategy.scope():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])

bigbatch.accumulate(model, microbatch_size=32)  # the one line
history = model.fit(dataset.with_options(options), epochs=5, verbose=0).history

me = strategy.cluster_resolver.task_id
print(f"worker {me}: loss {history['loss'][-1]:.4f}, accuracy {history['accuracy'][-1]:.3f}")
