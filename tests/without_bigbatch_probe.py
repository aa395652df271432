"""Load the model in a folder and train it one epoch; bigbatch cannot be imported here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.modules["bigbatch"] = None  # type: ignore[assignment]

import numpy as np

from stack import load_model

folder = Path(sys.argv[1])
model = load_model(folder / "model.keras")
model.load_weights(folder / "model.weights.h5")
with np.load(folder / "data.npz") as data:
    model.fit(data["x"], data["y"], batch_size=21, shuffle=False, verbose=0)
print(json.dumps([weight.tolist() for weight in model.get_weights()]))
