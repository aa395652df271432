"""The demo: a batch that does not fit a small device, the line that makes it fit, the proof.

Three programs run side by side: two on a device with little memory, which is real (TensorFlow's
allocator for GPUs with a limit, on the CPU), and one without a limit to compare with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

import numpy as np

from bigbatch.core.memory import readable
from bigbatch.core.report import Report, Table
from bigbatch.errors import ContextError, explain

BATCH, EPOCHS, MICROBATCH = 512, 15, 64
LIMIT = 24
"""The memory of the small device, in MB."""


_INTRODUCTION = (
    f"A small network learns handwritten digits with updates of {BATCH} samples, on a device "
    f"whose memory is too small for so many at once ({LIMIT} MB, which is a real limit of "
    "TensorFlow's allocator). bigbatch runs each batch in parts that fit, and makes the one "
    "update that the whole batch would have made."
)


def run(directory: Path, show: Callable[[Any], None]) -> None:
    """Run the demo, show what comes out, and write `demo.png` and `demo.html`."""
    from bigbatch.diagnostics.page import page

    _check_dependencies()
    show(Report("bigbatch: the demo", [], [_INTRODUCTION]))
    with tempfile.TemporaryDirectory() as scratch:
        limit = {"TF_CPU_BFC_MEM_LIMIT_IN_MB": str(LIMIT)}
        programs = {"full": limit, "small": limit, "free": {}}
        running = [_start(name, scratch, more) for name, more in programs.items()]
        codes = [process.wait() for process in running]
        if any(codes):
            raise ContextError(
                explain(
                    received=f"programs that ended with {codes}",
                    expected="all parts of the demo to run",
                    fix="see what they have printed above",
                )
            )
        results = {name: json.loads(Path(scratch, name).read_text()) for name in programs}
        weights = {name: dict(np.load(Path(scratch, f"{name}.npz"))) for name in programs}
    reports = _reports(results, weights)
    for report in reports[1:]:  # the first was shown as it happened
        show(report)
    figure = _figure(results, weights)
    directory.mkdir(parents=True, exist_ok=True)
    figure.savefig(directory / "demo.png", dpi=120)
    (directory / "demo.html").write_text(
        page("bigbatch: the demo", _INTRODUCTION, reports, figure)
    )
    show(Report(f"Wrote {directory / 'demo.png'} and {directory / 'demo.html'}", []))


def _check_dependencies() -> None:
    try:
        import matplotlib  # noqa: F401
        import sklearn  # noqa: F401
    except ModuleNotFoundError as error:
        raise ContextError(
            explain(
                received=f"no module named {error.name!r}",
                expected="what the demo draws with, and its data",
                fix="pip install 'bigbatch[demo]'",
            )
        ) from error


def _start(name: str, scratch: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__, name, scratch],
        env={
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_CPU_ALLOCATOR_USE_BFC": "true",
            "KERAS_BACKEND": "tensorflow",
            **environment,
        },
    )


def _difference(some: dict[str, Any], prefix: str, others: dict[str, Any]) -> float:
    full = [value for name, value in others.items() if name.startswith("full ")]
    mine = [value for name, value in some.items() if name.startswith(prefix)]
    return max(float(np.max(np.abs(one - two))) for one, two in zip(mine, full))


def _differences(weights: dict[str, dict[str, Any]]) -> dict[str, float]:
    small, free = weights["small"], weights["free"]
    return {
        "bigbatch": _difference(small, "auto ", free),
        "Keras' own": _difference(free, "keras ", free),
        "loss / k by hand": _difference(free, "hand ", free),
    }


def _reports(results: dict[str, Any], weights: dict[str, Any]) -> list[Report]:
    small, free = results["small"], results["free"]
    tail = free["samples"] % BATCH
    return [
        Report(
            f"1. A batch of {BATCH} does not fit {LIMIT} MB; one line makes it fit",
            [
                Table(
                    ("", "result"),
                    [
                        ("model.fit(batch_size=512)", results["full"]["result"]),
                        (
                            'bigbatch.accumulate(model, microbatch_size="auto")',
                            f"trains, {small['microbatch_size']} at a time",
                        ),
                    ],
                )
            ],
        ),
        Report(
            "2. The weights are those of the full batch",
            [
                Table(
                    ("after training", "difference", "loss"),
                    [
                        ("full batch, no limit", "", f"{free['loss']['full']:.4f}"),
                        *(
                            (name, f"{value:.1e}", f"{loss:.4f}")
                            for (name, value), loss in zip(
                                _differences(weights).items(),
                                (small["loss"], free["loss"]["keras"], free["loss"]["hand"]),
                            )
                        ),
                    ],
                    marked=1,
                )
            ],
            [
                "The difference is the largest of any weight.",
                f"{free['samples']} samples make {free['samples'] // BATCH} batches of {BATCH} "
                f"and a last one of {tail}: what others get wrong.",
            ],
        ),
        Report(
            "3. What micro-batches take",
            [
                Table(
                    ("samples per micro-batch", "peak memory"),
                    [(str(size), readable(peak)) for size, peak in small["peaks"]],
                )
            ],
            [f"The device has {readable(LIMIT * 2**20)}."],
        ),
        Report("4. Which batch size is worth having", [], [small["advice"]]),
    ]


def _figure(results: dict[str, Any], weights: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    from bigbatch.core.noise import Estimate
    from bigbatch.diagnostics.figures import draw_noise

    small = results["small"]
    drawing = Figure(figsize=(7, 10), layout="constrained")
    first, second, third = drawing.subplots(3)
    differences = _differences(weights)
    colors = ["tab:green", "tab:gray", "tab:gray"]
    bars = first.barh(list(differences), list(differences.values()), color=colors)
    first.bar_label(bars, [f"{value:.0e}" for value in differences.values()], padding=4)
    first.set_xscale("log")
    first.set_xlim(1e-8, 10)
    first.invert_yaxis()
    first.set_title("How far weights are from those of the full batch")
    first.set_xlabel("largest difference of a weight after training")
    for label, points, style in (
        ("predicted", small["predicted"], "--"),
        ("measured", small["peaks"], "o"),
    ):
        sizes, peaks = zip(*points)
        second.plot(
            sizes, [peak / 2**20 for peak in peaks], style, color="tab:blue", label=label
        )
    second.axhline(LIMIT, color="tab:red", label="the device")
    second.axvline(
        small["microbatch_size"],
        color="tab:green",
        ls="--",
        label=f"chosen: {small['microbatch_size']}",
    )
    second.set_xscale("log", base=2)
    second.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    second.set_ylim(bottom=0)
    second.set_title("What micro-batches take")
    second.set_xlabel("samples per micro-batch")
    second.set_ylabel("MiB")
    second.grid(alpha=0.3)
    second.legend()
    draw_noise(third, [Estimate(tuple(a), n) for a, n in small["noise"]])
    return drawing


def _data() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = (digits.data[..., np.newaxis] / 16).astype("float32")  # pixel by pixel
    return x, digits.target.astype("int32")


def _model(**options: Any) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((64, 1)),
            *(layers.Dense(64, "relu") for _ in range(3)),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3, epsilon=1e-3, **options), loss)
    return model


def _set_up(is_limited: bool) -> None:
    """Use a GPU if there is one, with the same limit, and in full precision."""
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
    for gpu in tf.config.list_physical_devices("GPU")[:1]:
        tf.config.set_visible_devices(gpu, "GPU")
        if is_limited:
            limit = tf.config.LogicalDeviceConfiguration(memory_limit=LIMIT)
            tf.config.set_logical_device_configuration(gpu, [limit])
        else:
            tf.config.experimental.set_memory_growth(gpu, True)


def _full() -> tuple[dict[str, Any], dict[str, Any]]:
    """Try to train on the small device as one would."""
    import tensorflow as tf

    x, y = _data()
    result = "fits"
    try:
        _model().fit(x, y, batch_size=BATCH, verbose=0)
    except tf.errors.ResourceExhaustedError:
        result = "out of memory"
    print(f"model.fit(x, y, batch_size={BATCH}): {result}", flush=True)
    return {"result": result}, {}


def _small() -> tuple[dict[str, Any], dict[str, Any]]:
    """Train on the small device; return what was found, and the weights."""
    from bigbatch.diagnostics.noise_scale import NoiseScale
    from bigbatch.engine.accumulate import accumulate, microbatch_size
    from bigbatch.planner.measure import plan

    x, y = _data()
    print('\nbigbatch.accumulate(model, microbatch_size="auto"); model.fit(...)', flush=True)
    model, noise = accumulate(_model(), microbatch_size="auto"), NoiseScale()
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[noise, _Progress(EPOCHS)],
    )
    planned = plan(_model(), x, y, batch_size=BATCH, verbose=False)
    result = {
        "microbatch_size": microbatch_size(model),
        "loss": history.history["loss"][-1],
        "peaks": [(one.microbatch_size, one.peak) for one in planned.measured],
        "predicted": [(size, planned.peak(size)) for size in range(1, BATCH + 1)],
        "advice": noise.advice(),
        "noise": [(one.average, one.updates) for one in noise.history],
    }
    return result, _weights("auto", model)


def _free() -> tuple[dict[str, Any], dict[str, Any]]:
    """Train without a limit: with the full batch, and as others accumulate."""
    x, y = _data()
    options = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
    steps = BATCH // MICROBATCH
    full = _model()
    keras_own = _model(gradient_accumulation_steps=steps)
    losses = {
        "full": full.fit(x, y, batch_size=BATCH, **options).history["loss"][-1],
        "keras": keras_own.fit(x, y, batch_size=MICROBATCH, **options).history["loss"][-1],
    }
    by_hand, losses["hand"] = _by_hand(x, y, steps)
    weights = {
        **_weights("full", full),
        **_weights("keras", keras_own),
        **_weights("hand", by_hand),
    }
    return {"samples": len(x), "loss": losses}, weights


def _by_hand(x: Any, y: Any, steps: int) -> tuple[Any, float]:
    """Train with the loop everybody copies: loss / k, an update every k, and one at the end."""
    import tensorflow as tf

    model = _model()
    variables = model.trainable_variables
    sums = [tf.Variable(tf.zeros(variable.shape)) for variable in variables]

    @tf.function(reduce_retracing=True)
    def add(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
            part = loss / steps
        for total, gradient in zip(sums, tape.gradient(part, variables)):
            total.assign_add(gradient)
        return loss

    @tf.function
    def apply() -> None:
        model.optimizer.apply(list(sums), variables)
        for total in sums:
            total.assign(tf.zeros(total.shape))

    model.optimizer.build(variables)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(MICROBATCH)
    losses: list[float] = []
    for _ in range(EPOCHS):
        losses = []
        for index, batch in enumerate(data):
            losses.append(float(add(*batch)))
            if index % steps == steps - 1 or index == len(data) - 1:
                apply()
    return model, float(np.mean(losses))


def _weights(name: str, model: Any) -> dict[str, Any]:
    values = (variable.numpy() for variable in model.trainable_variables)
    return {f"{name} {index:03}": value for index, value in enumerate(values)}


def _Progress(epochs: int) -> Any:  # noqa: N802
    """Return a callback that shows how far training is."""
    import keras
    from rich.progress import MofNCompleteColumn, Progress, TextColumn

    bar = Progress(
        *Progress.get_default_columns()[:2], MofNCompleteColumn(), TextColumn("epochs")
    )
    task = bar.add_task("  training", total=epochs)
    return keras.callbacks.LambdaCallback(
        on_train_begin=lambda *_: bar.start(),
        on_epoch_end=lambda *_: bar.advance(task),
        on_train_end=lambda *_: bar.stop(),
    )


if __name__ == "__main__":
    part, scratch = sys.argv[1:]
    _set_up(is_limited=part != "free")
    found, values = {"full": _full, "small": _small, "free": _free}[part]()
    np.savez(Path(scratch, f"{part}.npz"), **values)
    Path(scratch, part).write_text(json.dumps(found))
