"""A loss in which samples meet is exact with `coupled=True`: two passes over the batch."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import bigbatch
from bigbatch.errors import ArgumentError, ContextError
from comparison import paired
from coupled_cases import LOSSES, clip, correlation, sim_clr

from stack import IS_KERAS_3, keras

TOLERANCE = 1e-12  # float64: rounding only
MODES = {
    "eager": lambda function: function,
    "graph": lambda function: tf.function(function),
    "any size": lambda function: tf.function(
        function, input_signature=[tf.TensorSpec([None, 5], tf.float64), tf.TensorSpec([None])]
    ),
    "jit": lambda function: tf.function(function, jit_compile=True),
}
rng = np.random.default_rng(5)
X = tf.constant(rng.normal(size=(11, 5)))
Y = tf.constant(rng.integers(0, 4, 11), tf.float32)


def encoder(*more):
    return keras.Sequential(
        [
            keras.Input((5,), dtype="float64"),
            keras.layers.Dense(8, "tanh", dtype="float64"),
            *more,
            keras.layers.Dense(6, dtype="float64"),
        ]
    )


def of_full_batch(forward, loss, variables, batch):
    with tf.GradientTape() as tape:
        value = loss(forward(*batch), *batch)
    return value, tape.gradient(value, variables)


def check(result, expected, tolerance=TOLERANCE):
    assert abs(result[0] - expected[0]) <= tolerance
    for one, other in paired(result[1], expected[1]):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(
                tf.convert_to_tensor(one), tf.convert_to_tensor(other), 0, tolerance
            )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 4, 11, 20])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_the_full_batch(name, size, mode):
    model = encoder()

    def forward(x, y):
        return model(x, training=True)

    def loss(outputs, x, y):
        return tf.reduce_mean(LOSSES[name](y, outputs))

    def compute(x, y):
        return bigbatch.value_and_gradients(
            loss,
            model.trainable_variables,
            (x, y),
            microbatch_size=size,
            coupled=True,
            forward=forward,
        )

    expected = of_full_batch(forward, loss, model.trainable_variables, (X, Y))
    check(MODES[mode](compute)(X, Y), expected)


def test_micro_batches_alone_are_wrong():
    """The mistake everybody makes: the tests above would see it."""
    model = encoder()
    expected = of_full_batch(
        lambda x: model(x), lambda out, x: correlation(Y, out), model.trainable_variables, (X,)
    )

    def difference(**options):
        loss, _ = bigbatch.value_and_gradients(
            lambda x, y: correlation(y, model(x)),
            model.trainable_variables,
            (X, Y),
            **options,
        )
        return abs(loss - expected[0])

    assert difference(microbatch_size=len(X)) <= 1e-12  # all samples together
    assert difference(microbatch_size=4) > 1e-2


def test_a_temperature_in_the_loss_gets_its_gradient_once():
    one, two = encoder(), encoder()
    temperature = tf.Variable(tf.constant(0.7, tf.float64))
    variables = [temperature, one.trainable_variables, two.trainable_variables]

    def forward(x, y):
        return {"one": one(x), "two": two(x)}

    def loss(outputs, x, y):
        return clip(outputs["one"], outputs["two"], temperature)

    result = bigbatch.value_and_gradients(
        loss, variables, (X, Y), microbatch_size=4, coupled=True, forward=forward
    )
    expected = of_full_batch(forward, loss, variables, (X, Y))
    tf.nest.assert_same_structure(result[1], expected[1])
    check(*((value, tf.nest.flatten(gradients)) for value, gradients in (result, expected)))


def test_weights_that_also_stand_in_the_loss_and_embeddings():
    table = tf.Variable(rng.normal(size=(9, 6)))
    unused = tf.Variable(1.0)
    ids = tf.constant(rng.integers(0, 9, 11))

    def forward(ids):
        return tf.gather(table, ids), ids

    def loss(outputs, ids):
        return tf.reduce_mean(sim_clr(None, outputs[0]))

    def with_decay(outputs, ids):
        return loss(outputs, ids) + tf.reduce_sum(tf.square(table))

    for one, kind in ((loss, tf.IndexedSlices), (with_decay, tf.Tensor)):
        result = bigbatch.value_and_gradients(
            one, [table, unused], (ids,), microbatch_size=4, coupled=True, forward=forward
        )
        assert isinstance(result[1][0], kind)
        check(result, of_full_batch(forward, one, [table, unused], (ids,)))


def test_half_precision_outputs_reach_the_loss_as_they_are():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6, dtype="mixed_bfloat16")])
    seen = []

    def loss(outputs, x):
        seen.append(outputs.dtype)
        return tf.reduce_mean(sim_clr(None, tf.cast(outputs, tf.float32)))

    x = tf.cast(X, tf.float32)
    result = bigbatch.value_and_gradients(
        loss, model.trainable_variables, (x,), microbatch_size=4, coupled=True, forward=model
    )
    assert seen == [tf.bfloat16]
    expected = of_full_batch(model, loss, model.trainable_variables, (x,))
    check(result, expected, 1e-2)  # bfloat16 has three digits


class Counter(keras.layers.Layer):
    def __init__(self):
        super().__init__(dtype="float64")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x * self.calls


@pytest.mark.parametrize("mode", MODES)
def test_random_layers_draw_once_and_state_changes_once(mode):
    """Against the full batch, drawn from the same state."""
    counter, generator = Counter(), tf.random.Generator.from_seed(1)
    layers, states = [counter], [counter.calls, generator.state]
    if IS_KERAS_3:  # Keras 2 cannot draw the same numbers twice
        layers.append(keras.layers.Dropout(0.5, seed=3, dtype="float64"))
        states.append(layers[-1].seed_generator.state)
    model = encoder(*layers)
    before = [tf.identity(state) for state in states]

    def forward(x, y):
        return model(x, training=True) + 0.1 * generator.normal([6], dtype=tf.float64)

    def loss(outputs, x, y):
        return tf.reduce_mean(sim_clr(y, outputs))

    # XLA draws other numbers from the same state.
    def one_tape(x, y):
        return of_full_batch(forward, loss, model.trainable_variables, (x, y))

    expected = MODES["jit" if mode == "jit" else "eager"](one_tape)(X, Y)
    after = [tf.identity(state) for state in states]
    for state, value in paired(states, before):
        state.assign(value)

    def compute(x, y):
        return bigbatch.value_and_gradients(
            loss,
            model.trainable_variables,
            (x, y),
            microbatch_size=4,
            coupled=True,
            forward=forward,
        )

    check(MODES[mode](compute)(X, Y), expected)
    for state, value in paired(states, after):
        np.testing.assert_array_equal(state, value)
    assert counter.calls == 1


def test_random_numbers_that_cannot_be_drawn_again_are_refused():
    def forward(x):
        return tf.nn.dropout(x, 0.5)

    with pytest.raises(ContextError, match="SeedGenerator"):
        bigbatch.value_and_gradients(
            lambda outputs, x: tf.reduce_mean(outputs),
            [tf.Variable(1.0)],
            (X,),
            microbatch_size=4,
            coupled=True,
            forward=forward,
        )


def test_one_trace_for_batches_of_any_size():
    model, calls = encoder(), []

    def forward(x):
        calls.append(1)
        return model(x)

    @tf.function(input_signature=[tf.TensorSpec([None, 5], tf.float64)])
    def compute(x):
        return bigbatch.value_and_gradients(
            lambda outputs, x: tf.reduce_mean(sim_clr(None, outputs)),
            model.trainable_variables,
            (x,),
            microbatch_size=4,
            coupled=True,
            forward=forward,
        )

    for count in (11, 8, 3):
        compute(X[:count])
    assert len(calls) == 2  # one for each pass


@pytest.mark.parametrize("counts", [(6, 5), (11, 0), (1, 10)])
def test_replicas_see_the_global_batch(counts, mirrored):
    with mirrored.scope():
        model = encoder()
        temperature = tf.Variable(tf.constant(0.7, tf.float64))
    variables = [*model.trainable_variables, temperature]

    def forward(x, y):
        return model(x)

    def loss(outputs, x, y):
        value = clip(outputs[:, :3], outputs[:, 3:], temperature)
        return value + correlation(y, outputs) + tf.reduce_mean(x)

    def part(tensor):
        def of(context):
            one = context.replica_id_in_sync_group
            return tensor[: counts[0]] if one == 0 else tensor[counts[0] :]

        return mirrored.experimental_distribute_values_from_function(of)

    @tf.function
    def compute(x, y):
        def local(x, y):
            value, gradients = bigbatch.value_and_gradients(
                loss, variables, (x, y), microbatch_size=4, coupled=True, forward=forward
            )
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, [value, *gradients])

        return mirrored.run(local, args=(x, y))

    value, *gradients = [
        mirrored.experimental_local_results(one)[1] for one in compute(part(X), part(Y))
    ]
    expected = of_full_batch(forward, loss, variables, (X, Y))
    check((value, gradients), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coupled": True}, "forward"),
        ({"forward": lambda x: x}, "coupled"),
        ({"coupled": True, "forward": lambda x: tf.reduce_mean(x)}, "one row per sample"),
        ({"coupled": True, "forward": lambda x: x, "microbatch_size": 0}, "microbatch_size"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ArgumentError, match=message):
        bigbatch.value_and_gradients(
            lambda *_: tf.constant(0.0),
            [tf.Variable(1.0)],
            (X,),
            **{"microbatch_size": 4, **options},
        )
