"""What is compiled on JAX, what is given away, and what is refused."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import bigbatch
from bigbatch.backends.jax import data as batches
from bigbatch.backends.jax import dependence
from bigbatch.backends.jax import keras3 as jax_keras3
from bigbatch.backends.jax.state import values_of
from bigbatch.errors import ArgumentError
from comparison import largest_difference
from fit_cases import DENSE_X, DENSE_Y, dense
from fixes import refused
from jax_apply_cases import Program
from jax_cases import OwnTrainStep

X, Y = DENSE_X.astype("float32"), DENSE_Y.astype("float32")


class Counting(keras.Sequential):
    traces = 0

    def train_step(self, state, data):
        Counting.traces += 1
        return super().train_step(state, data)


def compiled(model=None, **setting):
    keras.utils.set_random_seed(3)
    model = model or dense()
    model.compile("adam", "mse")
    if setting:
        bigbatch.accumulate(model, **setting)
    return model


def test_two_micro_batches_and_one_update_are_compiled(caplog):
    """Micro-batches of eight and a tail of five, whatever the number of batches and epochs.

    And three for the few samples that `fit` checks itself with: of 5, 3 and 2.
    """
    model = compiled(microbatch_size=8)
    with caplog.at_level("WARNING"), jax.log_compiles():
        model.fit(X[:42], Y[:42], batch_size=21, epochs=3, verbose=0)
    programs = [
        record.args[0] if isinstance(record.args, tuple) else record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("Compiling")
    ]
    text = " ".join(map(str, programs))
    assert text.count("_add") == 2, programs
    assert text.count("try_samples") == 3, programs
    assert text.count("pure") == 1, programs


def test_a_train_step_is_traced_once_for_each_size():
    def traces(**setting):
        Counting.traces = 0
        model = Counting([keras.Input((5,)), keras.layers.Dense(3)])
        model = compiled(model, microbatch_size=7, **setting)
        for _ in range(2):
            model.fit(X[:42], Y[:42], batch_size=21, epochs=2, verbose=0)
        return Counting.traces

    assert traces(check="off") == 1
    assert traces() == 1 + 3  # once for each size of the few samples, and not in every fit


def test_an_error_in_the_first_batch_leaves_the_weights():
    """Plain Keras loses them: its step has been given the arrays to overwrite."""

    class Fails(keras.layers.Layer):
        fails = False

        def call(self, x):
            if self.fails:
                raise KeyError("on purpose")
            return x

    fails = Fails()
    model = compiled(
        keras.Sequential([keras.Input((5,)), fails, keras.layers.Dense(3)]), microbatch_size=8
    )
    model.fit(X, Y, batch_size=21, verbose=0)
    before, iterations = model.get_weights(), int(model.optimizer.iterations)
    fails.fails = True
    model.train_function = None
    with pytest.raises(KeyError):
        model.fit(X, Y, batch_size=20, verbose=0)
    assert largest_difference(model.get_weights(), before) == 0
    assert int(model.optimizer.iterations) == iterations


class Interrupts(keras.utils.PyDataset):
    """Raises when its second batch is asked for."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 2:
            raise OSError("no data")
        return X[:20], Y[:20]


@pytest.mark.parametrize("setting", [{"microbatch_size": 8}, {"accumulation_steps": 2}])
def test_data_that_fails_leaves_the_last_update(setting):
    model = compiled(**setting)
    with pytest.raises(OSError, match="no data"):
        model.fit(Interrupts(workers=1), shuffle=False, verbose=0)
    updates = 2 if "microbatch_size" in setting else 1
    assert int(model.optimizer.iterations) == updates
    assert np.all(np.isfinite(model.get_weights()[0]))
    model.fit(X, Y, batch_size=21, verbose=0)


def test_weights_that_a_train_step_makes_of_samples_are_refused():
    class Moves(keras.Sequential):
        def train_step(self, state, data):
            logs, (weights, *rest) = super().train_step(state, data)
            return logs, ([one + 0.1 * data[0][0, 0] for one in weights], *rest)

    model = compiled(Moves([keras.Input((5,)), keras.layers.Dense(3)]), microbatch_size=8)
    before = model.get_weights()
    with refused(
        "return the trainable and optimizer variables that stateless_apply returned; keep"
        " other values that change in variables that are not trainable"
    ):
        model.fit(X, Y, batch_size=21, verbose=0)
    assert largest_difference(model.get_weights(), before) == 0
    compiled(microbatch_size=8).fit(X, Y, batch_size=21, verbose=0)


def test_what_several_processes_cannot_share_is_refused(monkeypatch):
    """What they can is in `test_processes.py`."""
    model = compiled(microbatch_size=8)
    bigbatch.restore(model)
    monkeypatch.setattr(jax_keras3, "number_of_processes", lambda: 2)
    mesh = keras.distribution.DeviceMesh((1, 1), ("batch", "model"), jax.devices()[:1])
    layouts = keras.distribution.LayoutMap(mesh)
    parts = keras.distribution.ModelParallel(layout_map=layouts, auto_shard_dataset=False)
    with parts.scope(), pytest.raises(ArgumentError, match="under ModelParallel"):
        bigbatch.accumulate(model, microbatch_size=8)
    monkeypatch.setattr(jax_keras3, "shards_of_all", lambda: "devices")
    with pytest.raises(ArgumentError, match='"auto" for a model that 2 processes'):
        bigbatch.accumulate(model, microbatch_size="auto")


def test_an_update_that_has_no_number_is_refused():
    class Compiles(OwnTrainStep):
        def train_step(self, state, data):
            (loss, (_, others)), gradients = self.gradients_of(state, data)
            apply = jax.jit(self.optimizer.stateless_apply)
            weights, slots = apply(state[2], gradients, state[0])
            return {"my_loss": loss}, (weights, others, slots, state[3])

    model = compiled(Compiles(), microbatch_size=8)
    model(X[:2])
    with refused(
        "call stateless_apply in train_step itself, which Keras compiles, in a Python loop if "
        "there are several updates"
    ):
        model.fit(X, Y, batch_size=21, verbose=0)
    compiled(OwnTrainStep(), microbatch_size=8).fit(X, Y, batch_size=21, verbose=0)


def test_an_optimizer_whose_state_nobody_keeps_is_refused():
    """Keras would train with it, and forget its state after every batch."""

    class Two(Program):
        def __init__(self, *, keeps):
            super().__init__()
            self.net, self.other = dense(), keras.optimizers.SGD(0.1, name="other")
            self.other.build(self.net.trainable_variables)
            if keeps:
                self.slots = self.other.variables

        def call(self, x):
            return self.net(x)

        def train_step(self, state, data):
            known = {id(one): at for at, one in enumerate(self.non_trainable_variables)}
            places = [known.get(id(one)) for one in self.other.variables]
            weights, others, slots, metrics = state
            others, gradients = list(others), [jax.numpy.ones_like(one) for one in weights]
            its = [one.value for one in self.other.variables]
            its = [value if at is None else others[at] for at, value in zip(places, its)]
            weights, its = self.other.stateless_apply(its, gradients, weights)
            for at, value in zip(places, its):
                if at is not None:
                    others[at] = value
            return {}, (weights, others, slots, metrics)

    model = compiled(Two(keeps=False), microbatch_size=8)
    before = model.get_weights()
    with refused(
        "compile the model with this optimizer; build a second one, and keep its variables in "
        "an attribute of the model: self.slots = optimizer.variables"
    ):
        model.fit(X, Y, batch_size=21, verbose=0)
    assert largest_difference(model.get_weights(), before) == 0
    model = compiled(Two(keeps=True), microbatch_size=8)
    model.fit(X[:21], Y[:21], batch_size=21, verbose=0)
    np.testing.assert_allclose(model.net.get_weights()[-1], before[-1] - 0.1, rtol=1e-6)


def test_batches_that_cannot_be_cut():
    model = compiled(microbatch_size=8)
    with refused("make the inputs dense"):
        batches.as_tensors(BCOO.fromdense(X))
    with refused("slice or stack the arrays of the batch to one length"):
        batches.checked_count((X, Y[:20]))
    with refused("slice or stack the arrays of the batch to one length"):
        batches.check_can_be_cut(model, (X, Y[:20]))
    model.train_on_batch(*batches.as_tensors((X[:20], Y[:20])))


def test_fit_twice_with_an_average_of_weights():
    """After the first, weights and their average are the same arrays."""
    model = dense()
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
    bigbatch.accumulate(model, microbatch_size=8)
    for _ in range(2):
        model.fit(X, Y, batch_size=25, verbose=0)
    assert int(model.optimizer.iterations) == 4


def test_what_depends_on_samples():
    def function(x, counter, mean, follows):
        return counter + 1, 0.9 * mean + jax.numpy.mean(x), follows + mean

    jaxpr = jax.make_jaxpr(function)(np.ones(3), 1.0, 2.0, 3.0).jaxpr
    found = dependence.independent_outputs(jaxpr, [0], {0: 1, 1: 2, 2: 3})
    assert found == {0}  # the third depends on the second of the micro-batch before
    alone = jax.make_jaxpr(jax.jit(function))(np.ones(3), 1.0, 2.0, 3.0).jaxpr
    assert dependence.independent_outputs(alone, [0], {}) == {0, 2}


def test_what_is_added_to():
    """Such a metric may have a value on each device; the others must not."""

    def function(x, total, most, mean, twice):
        added = jax.jit(jax.numpy.add)(total, jax.numpy.sum(x))
        return added, jax.numpy.maximum(most, x[0]), 0.9 * mean + x[0], twice + twice

    jaxpr = jax.make_jaxpr(function)(np.ones(3), 1.0, 2.0, 3.0, 4.0).jaxpr
    found = [dependence.is_added_to(jaxpr, n, n + 1) for n in range(4)]
    assert found == [True, False, False, False]
    assert not dependence.is_added_to(jaxpr, 0, 2)


def test_private_names_of_keras():
    """What `backends/jax/compat.py` uses: an upgrade of Keras breaks here first."""
    model = compiled()
    model.fit(X[:10], Y[:10], verbose=0)
    assert callable(model._update_metrics_variables)
    assert callable(model._symbolic_build)
    assert model._jax_state is None
    assert model._losses_override == []
    iterator = __import__("keras.src.backend.jax.trainer", fromlist=["*"]).JAXEpochIterator
    assert callable(iterator._get_iterator)
    module = __import__("keras.src.backend.jax.random", fromlist=["jax"])
    assert module.jax is jax
    assert all(isinstance(one, jax.Array) for one in values_of(model.variables))
