"""Programs built from other libraries, trained with and without gradient accumulation.

Each program trains tiny models of a library that nobody here wrote, from a fixed seed:

- plain: each update sees its full batch;
- split: `accumulate(model, microbatch_size=5)` cuts each batch of 12, with a remainder of 2;
- window: `fit` gets batches of 4, and `accumulate(model, accumulation_steps=3)` groups them.

The weights after training are compared with those of the plain run. `make upstream
SUITES=programs` runs them; `permitted.py` lists what may differ.
"""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["KERAS_BACKEND"] = "tensorflow"

import argparse
import contextlib
import dataclasses
import functools
import importlib
import io
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import keras
import numpy as np

import bigbatch

SEED = 7
SAMPLES = 30  # two batches of 12 and one of 6
EPOCHS = 2
TOKENS, VOCABULARY, CLASSES = 7, 24, 3
MODES = ("split", "window")


@dataclass(frozen=True)
class Training:
    """How a program trains: the batch size it gives to `fit`, and how it accumulates."""

    batch_size: int
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of `bigbatch.accumulate`; none for plain training."""

    def prepare(self, model: Any, **options: Any) -> Any:
        """Return a compiled model, accumulating if this training does."""
        return bigbatch.accumulate(model, **self.options, **options) if self.options else model


TRAININGS = {
    "plain": Training(12),
    "split": Training(12, {"microbatch_size": 5}),
    "window": Training(4, {"accumulation_steps": 3}),
}


@dataclass(frozen=True)
class Weights:
    """All weights a program trains, before and after training."""

    before: list[np.ndarray]
    after: list[np.ndarray]


@dataclass(frozen=True)
class Program:
    """A compiled model and its data, for programs that are one call of `fit`."""

    model: Any
    x: Any
    y: Any
    fit_options: dict[str, Any] = field(default_factory=dict)
    accumulate_options: dict[str, Any] = field(default_factory=dict)

    def train(self, training: Training) -> Weights:
        """Fit the model; return its weights before and after."""
        before = self.model.get_weights()
        training.prepare(self.model, **self.accumulate_options)
        options = {"epochs": EPOCHS, "shuffle": False, "verbose": 2, **self.fit_options}
        self.model.fit(self.x, self.y, batch_size=training.batch_size, **options)
        return Weights(before, self.model.get_weights())


@dataclass(frozen=True)
class Outcome:
    """How far the weights of an accumulated run are from those of the plain run."""

    name: str
    mode: str
    difference: float | None
    """Max |Δweight| / the largest change of any weight in training; NaN if any weight is."""
    error: str | None
    """The first line of the exception, if a run raised one."""
    warnings: list[str]
    """Python warnings that bigbatch gave."""
    announced: list[str]
    """What bigbatch said of layers that differ, and of what it did not check."""


def _data() -> np.random.Generator:
    return np.random.default_rng(SEED)


def _labels() -> np.ndarray:
    return _data().integers(0, CLASSES, SAMPLES)


def _padding() -> np.ndarray:
    """Return a mask of tokens: sentences have 2 to `TOKENS` tokens."""
    lengths = _data().integers(2, TOKENS + 1, SAMPLES)
    return np.arange(TOKENS)[None] < lengths[:, None]


def _images() -> np.ndarray:
    return _data().normal(size=(SAMPLES, 16, 16, 3)).astype("float32")


def _token_ids(seed: int = SEED) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, VOCABULARY, (SAMPLES, TOKENS))


def _cross_entropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _momentum(learning_rate: float = 0.05) -> Any:
    return keras.optimizers.SGD(learning_rate, momentum=0.9)


def bert(dropout: float = 0.0) -> Program:
    models: Any = importlib.import_module("keras_hub").models
    backbone = models.BertBackbone(
        VOCABULARY, 2, 2, 8, 16, dropout=dropout, max_sequence_length=TOKENS
    )
    model = models.BertTextClassifier(backbone, CLASSES, dropout=dropout)
    model.compile(_momentum(), _cross_entropy(), metrics=["accuracy"])
    x = {
        "token_ids": _token_ids(),
        "segment_ids": np.zeros((SAMPLES, TOKENS), "int32"),
        "padding_mask": _padding(),
    }
    return Program(model, x, _labels())


def bert_from_strings() -> Program:
    """Sentences go through the library's own preprocessor, inside `fit`."""
    models: Any = importlib.import_module("keras_hub").models
    words = [f"word{i}" for i in range(VOCABULARY)]
    tokenizer = models.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])
    preprocessor = models.BertTextClassifierPreprocessor(tokenizer, sequence_length=TOKENS)
    size = tokenizer.vocabulary_size()
    backbone = models.BertBackbone(size, 1, 2, 8, 16, dropout=0, max_sequence_length=TOKENS)
    model = models.BertTextClassifier(backbone, CLASSES, preprocessor, dropout=0)
    model.compile(_momentum(), _cross_entropy())
    pairs = zip(_token_ids(), _padding())
    x = np.array([" ".join(words[i] for i in ids[mask]) for ids, mask in pairs])
    return Program(model, x, _labels())


def _causal_lm(model: Any, epsilon: float = 1e-7) -> Program:
    """Return a program that trains as the library's preprocessors have it: padding weighs 0."""
    optimizer = keras.optimizers.Adam(1e-2, epsilon=epsilon)
    model.compile(optimizer, _cross_entropy(), weighted_metrics=["accuracy"])
    x = {"token_ids": _token_ids(), "padding_mask": _padding()}
    weights = np.roll(_padding(), -1, axis=1).astype("float32")
    weights[:, -1] = 0
    labels = np.roll(_token_ids(), -1, axis=1)
    return Program(model, x, labels, {"sample_weight": weights})


def gpt2() -> Program:
    models: Any = importlib.import_module("keras_hub").models
    backbone = models.GPT2Backbone(
        VOCABULARY, 2, 2, 8, 16, dropout=0, max_sequence_length=TOKENS
    )
    # The gradient of a key's bias is zero except for rounding: with an epsilon of 1e-7 Adam
    # turns that into updates, and reordering the samples of a batch already moves weights.
    return _causal_lm(models.GPT2CausalLM(backbone), epsilon=1e-5)


def gemma_lora(quantized: bool = False) -> Program:
    models: Any = importlib.import_module("keras_hub").models
    model = models.GemmaCausalLM(models.GemmaBackbone(VOCABULARY, 2, 2, 1, 8, 16, 4))
    if quantized:
        model.quantize("int8")
    model.backbone.enable_lora(2)
    return _causal_lm(model)


def llama_lora() -> Program:
    models: Any = importlib.import_module("keras_hub").models
    model = models.LlamaCausalLM(models.LlamaBackbone(VOCABULARY, 2, 2, 8, 16, 1))
    model.backbone.enable_lora(2)
    return _causal_lm(model)


def t5() -> Program:
    """The rows of its position bias's sparse gradient are as many for any batch size."""
    models: Any = importlib.import_module("keras_hub").models
    model = models.T5Seq2SeqLM(models.T5Backbone(VOCABULARY, 2, 2, 8, 16, dropout=0))
    program = _causal_lm(model)
    x = {
        "encoder_token_ids": _token_ids(SEED + 1),
        "encoder_padding_mask": np.flip(_padding(), axis=0),
        "decoder_token_ids": program.x["token_ids"],
        "decoder_padding_mask": program.x["padding_mask"],
    }
    return dataclasses.replace(program, x=x)


def vit() -> Program:
    models: Any = importlib.import_module("keras_hub").models
    backbone = models.ViTBackbone((16, 16, 3), (8, 8), 2, 2, 8, 16)
    model = models.ViTImageClassifier(backbone, CLASSES)
    model.compile(_momentum(), _cross_entropy(), metrics=["accuracy"])
    return Program(model, _images(), _labels())


def resnet(frozen: bool = False) -> Program:
    models: Any = importlib.import_module("keras_hub").models
    backbone = models.ResNetBackbone(
        [64], [3], [64, 64], [1, 1], [1, 2], "basic_block", image_shape=(16, 16, 3)
    )
    backbone.trainable = not frozen
    model = models.ResNetImageClassifier(backbone, CLASSES, activation=None)
    model.compile(_momentum(), _cross_entropy(), metrics=["accuracy"])
    return Program(model, _images(), _labels())


def clip(coupled: bool = False) -> Program:
    """CLIP's backbone with its contrastive loss, which compares the samples of a batch.

    The backbone's own logits compare samples inside the model. With `coupled=True` the model
    returns embeddings, and the backbone's head is a part of the loss.
    """
    models: Any = importlib.import_module("keras_hub").models
    vision: Any = importlib.import_module("keras_hub.src.models.clip.clip_vision_encoder")
    text: Any = importlib.import_module("keras_hub.src.models.clip.clip_text_encoder")
    backbone = models.CLIPBackbone(
        vision.CLIPVisionEncoder(8, 8, 1, 2, 16, image_shape=(16, 16, 3)),
        text.CLIPTextEncoder(VOCABULARY, 8, 8, 1, 2, 16, max_sequence_length=TOKENS),
        projection_dim=6,
    )

    class Contrastive(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = backbone

        def call(self, inputs: Any) -> Any:
            if not coupled:
                return self.backbone(inputs)
            return {
                "vision": self.backbone.get_vision_embeddings(inputs["images"]),
                "text": self.backbone.get_text_embeddings(inputs["token_ids"]),
            }

        def compute_loss(
            self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
        ) -> Any:
            if coupled:
                logits = self.backbone.clip_head(y_pred["vision"], y_pred["text"])
            else:
                logits = y_pred["vision_logits"], y_pred["text_logits"]
            shape: Any = keras.ops.shape(logits[0])
            pairs = keras.ops.arange(shape[0])
            return sum(_cross_entropy()(pairs, one) for one in logits) / 2

    model = Contrastive()
    x = {"images": _images(), "token_ids": _token_ids()}
    model(x)
    model.compile(_momentum(0.01))
    return Program(model, x, None, accumulate_options={"coupled": True} if coupled else {})


def deep_cross_network() -> Program:
    """Click prediction: embeddings, two FeatureCross layers and dense layers."""
    rs: Any = importlib.import_module("keras_rs")
    inputs = {
        name: keras.Input((), name=name, dtype="int32") for name in ("user", "item", "place")
    }
    embedded = [keras.layers.Embedding(VOCABULARY, 4)(one) for one in inputs.values()]
    first = keras.layers.Concatenate()(embedded)
    crossed = rs.layers.FeatureCross(projection_dim=3)(first)
    crossed = rs.layers.FeatureCross(projection_dim=3)(first, crossed)
    outputs = keras.layers.Dense(1)(keras.layers.Dense(8, "relu")(crossed))
    model = keras.Model(inputs, outputs)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["mae"])
    x = {name: _token_ids()[:, i] for i, name in enumerate(inputs)}
    return Program(model, x, (_labels() > 0).astype("float32")[:, None])


def listwise_ranking() -> Program:
    """Each sample is a list of items, some of which are padding with the label -1."""
    rs: Any = importlib.import_module("keras_rs")
    inputs = keras.Input((TOKENS, 4))
    scores = keras.layers.Dense(1)(keras.layers.Dense(8, "relu")(inputs))
    model = keras.Model(inputs, keras.layers.Flatten()(scores))
    loss = rs.losses.PairwiseLogisticLoss()
    model.compile(keras.optimizers.Adagrad(0.1), loss, metrics=[rs.metrics.NDCG(k=3)])
    x = _data().normal(size=(SAMPLES, TOKENS, 4)).astype("float32")
    return Program(model, x, np.where(_padding(), _token_ids() % 4, -1).astype("float32"))


def _tower() -> Any:
    return keras.Sequential([keras.layers.Embedding(VOCABULARY, 8), keras.layers.Dense(6)])


def two_tower_retrieval() -> Program:
    """Queries against the candidates of the whole batch: `coupled=True`."""
    rs: Any = importlib.import_module("keras_rs")

    class TwoTowers(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.queries = _tower()
            self.candidates = _tower()
            self.remove_accidental_hits = rs.layers.RemoveAccidentalHits()
            self.retrieval = rs.layers.BruteForceRetrieval(k=3, return_scores=False)
            self.loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True)

        def call(self, inputs: Any, training: bool = False) -> Any:
            queries = self.queries(inputs["query"])
            result = {"queries": queries, "candidates": self.candidates(inputs["candidate"])}
            if not training:
                result["predictions"] = self.retrieval(queries)
            return result

        def compute_loss(
            self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
        ) -> Any:
            queries, candidates = y_pred["queries"], y_pred["candidates"]
            logits = keras.ops.matmul(queries, keras.ops.transpose(candidates))
            shape: Any = keras.ops.shape(logits)
            labels = keras.ops.eye(shape[0])
            logits = self.remove_accidental_hits(logits, labels, y)
            return self.loss_fn(labels, logits, sample_weight)

    model = TwoTowers()
    x = {"query": _token_ids()[:, 0], "candidate": _token_ids()[:, 1]}
    model(x, training=True)
    model.retrieval.update_candidates(model.candidates(np.arange(VOCABULARY)))
    model.compile(keras.optimizers.Adagrad(0.1))
    return Program(model, x, x["candidate"], accumulate_options={"coupled": True})


def tuned(training: Training) -> Weights:
    """A search over two trials, whose HyperModel accumulates in `build`."""
    tuner: Any = importlib.import_module("keras_tuner")
    before: list[np.ndarray] = []
    after: list[np.ndarray] = []

    class Accumulated(tuner.HyperModel):
        def build(self, hp: Any) -> Any:
            keras.utils.set_random_seed(SEED)
            units = hp.Int("units", 4, 16)
            layers = [keras.layers.Dense(units, "tanh"), keras.layers.Dense(CLASSES)]
            model = keras.Sequential([keras.Input((TOKENS,)), *layers])
            model.compile(_momentum(), _cross_entropy(), metrics=["accuracy"])
            return training.prepare(model)

        def fit(self, hp: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            before.extend(model.get_weights())
            try:
                history = model.fit(*args, batch_size=training.batch_size, **kwargs)
            except Exception as error:  # any other error only ends the trial
                raise tuner.errors.FatalError(str(error)) from error
            after.extend(model.get_weights())
            return history

    x = _data().normal(size=(SAMPLES, TOKENS)).astype("float32")
    options = {"epochs": EPOCHS, "shuffle": False, "verbose": 2}
    with tempfile.TemporaryDirectory() as directory:
        search = tuner.RandomSearch(
            Accumulated(), "val_loss", max_trials=2, seed=SEED, directory=directory
        )
        search.search(x, _labels(), validation_data=(x, _labels()), **options)
        (best,) = search.get_best_models(1)
        saved = best.get_weights()
    return Weights([*before, *(0 * one for one in saved)], [*after, *saved])


def dann(training: Training) -> Weights:
    """DANN: a custom `train_step` with three optimizers, and target data beside the source."""
    adapt: Any = importlib.import_module("adapt.feature_based")
    layers = keras.layers
    encoder = keras.Sequential([keras.Input((4,)), layers.Dense(6, "tanh")])
    task = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    discriminator = keras.Sequential([keras.Input((6,)), layers.Dense(1, "sigmoid")])
    samples = 24  # whole batches: DANN's `fit` repeats samples to fill the last batch
    x = _data().normal(size=(samples, 4)).astype("float32")
    y = x[:, :1] * x[:, 1:2]
    # DANN compiles itself in `fit`; before that, its `compile` misses an attribute and fails.
    options = {"optimizer": _momentum(), "loss": "mse", "copy": False, "random_state": 0}
    model = adapt.DANN(encoder, task, discriminator, Xt=x + 0.5, **options)
    networks = (encoder, task, discriminator)
    before = [weight for network in networks for weight in network.get_weights()]
    training.prepare(model)
    model.fit(x, y, batch_size=training.batch_size, epochs=EPOCHS, shuffle=False, verbose=2)
    after = [weight for network in networks for weight in network.get_weights()]
    return Weights(before, after)


def _fitted(make: Callable[..., Program], **options: Any) -> Callable[[Training], Weights]:
    return lambda training: make(**options).train(training)


PROGRAMS: dict[str, Callable[[Training], Weights]] = {
    "keras_hub.bert": _fitted(bert),
    "keras_hub.bert_dropout": _fitted(bert, dropout=0.2),
    "keras_hub.bert_from_strings": _fitted(bert_from_strings),
    "keras_hub.gpt2": _fitted(gpt2),
    "keras_hub.gemma_lora": _fitted(gemma_lora),
    "keras_hub.gemma_int8_lora": _fitted(gemma_lora, quantized=True),
    "keras_hub.llama_lora": _fitted(llama_lora),
    "keras_hub.t5": _fitted(t5),
    "keras_hub.vit": _fitted(vit),
    "keras_hub.resnet": _fitted(resnet),
    "keras_hub.resnet_frozen": _fitted(resnet, frozen=True),
    "keras_hub.clip_logits": _fitted(clip),
    "keras_hub.clip_coupled": _fitted(clip, coupled=True),
    "keras_rs.deep_cross_network": _fitted(deep_cross_network),
    "keras_rs.listwise_ranking": _fitted(listwise_ranking),
    "keras_rs.two_tower_retrieval": _fitted(two_tower_retrieval),
    "keras_tuner.random_search": tuned,
    "adapt.dann": dann,
}
"""Each function trains from the same seed, and returns the weights before and after."""


def compare(name: str, mode: str) -> Outcome:
    """Train a program in a mode of accumulation, and compare its weights with the plain run."""
    heard: list[str] = []
    said = io.StringIO()
    difference = error = None
    try:
        plain = _plain(name)
    except Exception as exception:
        return Outcome(name, mode, None, f"plain run: {_first_line(exception)}", [], [])
    try:
        with _hearing(heard), contextlib.redirect_stdout(said):
            accumulated = _run(name, TRAININGS[mode])
        difference = _difference(plain, accumulated)
    except Exception as exception:
        error = _first_line(exception)
    # Lines that are too long are continued, indented.
    lines = dict.fromkeys(said.getvalue().replace("\n" + 10 * " ", " ").splitlines())
    announced = [
        text
        for text in (line.partition("bigbatch: ")[2] for line in lines)
        if text.startswith(("BatchNormalization", "random draws", "not checked"))
    ]
    return Outcome(name, mode, difference, error, heard, announced)


@functools.lru_cache(maxsize=1)
def _plain(name: str) -> Weights:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = _run(name, TRAININGS["plain"])
    if not _largest(weights.before, weights.after) > 0:
        raise ValueError("training must change weights, and to finite numbers")
    return weights


def _run(name: str, training: Training) -> Weights:
    library, _ = name.split(".")
    importlib.import_module(library)  # before the seed is set: keras_rs draws when imported
    keras.backend.clear_session()
    keras.utils.set_random_seed(SEED)
    return PROGRAMS[name](training)


def _difference(plain: Weights, accumulated: Weights) -> float:
    if _largest(plain.before, accumulated.before) != 0:
        raise ValueError("the runs must begin with the same weights")
    return _largest(plain.after, accumulated.after) / _largest(plain.before, plain.after)


def _largest(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    """Return the largest difference of two lists of weights; NaN if one of them is NaN."""
    if [a.shape for a in one] != [b.shape for b in other]:
        raise ValueError("the runs must have weights of the same shapes")
    pairs = ((np.float64(a), np.float64(b)) for a, b in zip(one, other) if a.size)
    return float(np.max([np.max(np.abs(a - b)) for a, b in pairs]))


@contextlib.contextmanager
def _hearing(texts: list[str]) -> Iterator[None]:
    """Return a block that keeps the Python warnings of bigbatch, also if the block raises."""
    package = str(Path(bigbatch.__file__).parent)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            given = [
                str(warning.message)
                for warning in caught
                if str(warning.message).startswith("bigbatch")
                or warning.filename.startswith(package)
            ]
            texts.extend(dict.fromkeys(given))


def _first_line(exception: Exception) -> str:
    return f"{type(exception).__name__}: " + (str(exception).splitlines() or [""])[0]


def _line(outcome: Outcome, seconds: float) -> str:
    result = outcome.error or f"{outcome.difference:.1e}"
    notes = [*outcome.warnings, *(f"announced: {text}" for text in outcome.announced)]
    line = f"{outcome.name:30} {outcome.mode:7} {result}"
    return "; ".join([line, *notes, f"{seconds:.0f} s"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help="programs to run; else all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write outcomes")
    given = parser.parse_args(arguments)
    unknown = set(given.names) - set(PROGRAMS)
    if unknown:
        parser.error(f"no program {sorted(unknown)}; there are {', '.join(PROGRAMS)}")
    names = given.names or list(PROGRAMS)
    outcomes = []
    for number, name in enumerate(names, start=1):
        for mode in MODES:
            print(f"[{number}/{len(names)}] {name} {mode} ...", file=sys.stderr, flush=True)
            start = time.perf_counter()
            outcomes.append(compare(name, mode))
            print(_line(outcomes[-1], time.perf_counter() - start), flush=True)
        if given.json:  # after each program: a crash keeps what is known
            text = json.dumps([dataclasses.asdict(one) for one in outcomes], indent=2)
            given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
