"""Training steps that apply gradients several times, or assign weights after it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from fit_cases import Case

from stack import keras

layers = keras.layers
SAMPLES = 50
rng = np.random.default_rng(5)
REAL = rng.normal(size=(SAMPLES, 4))
CODE = rng.normal(size=(SAMPLES, 3))


def mlp(inputs: int, outputs: int) -> Any:
    return keras.Sequential(
        [keras.Input((inputs,)), layers.Dense(6, "tanh"), layers.Dense(outputs)]
    )


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def gradients_of(tape: Any, loss: Any, model: Any) -> tuple[Any, Any]:
    return tape.gradient(loss, model.trainable_variables), model.trainable_variables


class Program(keras.Model):
    """A model that is a `train_step`: nobody calls it."""

    def call(self, inputs: Any) -> Any:
        return inputs


class Gan(Program):
    """The critic is updated first; the generator meets the new critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = mlp(3, 4), mlp(4, 1)
        self.of_critic, self.of_generator = adam(), adam()
        self.critic_loss = keras.metrics.Mean(name="critic_loss")
        self.generator_loss = keras.metrics.Mean(name="generator_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.critic_loss, self.generator_loss]

    def train_step(self, data: Any) -> dict[str, Any]:
        real, code = data
        with tf.GradientTape() as tape:
            fake, true = self.critic(self.generator(code)), self.critic(real)
            of_critic = tf.reduce_mean(tf.nn.softplus(fake) + tf.nn.softplus(-true))
        self.of_critic.apply(*gradients_of(tape, of_critic, self.critic))
        self.critic_loss.update_state(of_critic)
        with tf.GradientTape() as tape:
            fake = self.critic(self.generator(code))
            of_generator = tf.reduce_mean(tf.nn.softplus(-fake))
        self.of_generator.apply(*gradients_of(tape, of_generator, self.generator))
        self.generator_loss.update_state(of_generator)
        return {"raw": of_generator, **{one.name: one.result() for one in self.metrics}}


class WassersteinGan(Program):
    """Three critic steps with a gradient penalty, with draws, then the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = mlp(3, 4), mlp(4, 1)
        self.of_critic, self.of_generator = adam(), adam()
        self.seed = keras.random.SeedGenerator(7)
        self.counter = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def penalty(self, real: Any, fake: Any) -> Any:
        share = keras.random.uniform((tf.shape(real)[0], 1), seed=self.seed, dtype=real.dtype)
        mixed = share * real + (1 - share) * fake
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            value = self.critic(mixed)
        norm = tf.norm(tape.gradient(value, mixed), axis=1)
        return tf.reduce_mean(tf.square(norm - 1))

    def train_step(self, data: Any) -> dict[str, Any]:
        real, code = data
        logs = {}
        for index in range(3):
            with tf.GradientTape() as tape:
                fake = self.generator(code + 0.1 * index)
                loss = tf.reduce_mean(self.critic(fake) - self.critic(real))
                loss += 10 * self.penalty(real, fake)
            self.of_critic.apply_gradients(zip(*gradients_of(tape, loss, self.critic)))
            logs[f"critic_{index}"] = loss
            self.counter.assign_add(1.0)
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(self.critic(self.generator(code)))
        self.of_generator.apply_gradients(zip(*gradients_of(tape, loss, self.generator)))
        return {**logs, "generator": loss}


class Clipped(Gan):
    """Weights of the critic are clipped after its update, and the generator's after its."""

    def train_step(self, data: Any) -> dict[str, Any]:
        real, code = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.critic(self.generator(code)) - self.critic(real))
        self.of_critic.apply(*gradients_of(tape, loss, self.critic))
        for weight in self.critic.trainable_variables:
            weight.assign(tf.clip_by_value(weight, -0.3, 0.3))
        with tf.GradientTape() as tape:
            other = -tf.reduce_mean(self.critic(self.generator(code)))
        self.of_generator.apply(*gradients_of(tape, other, self.generator))
        for weight in self.generator.trainable_variables:
            weight.assign(tf.clip_by_value(weight, -0.3, 0.3))
        return {"critic": loss, "generator": other}


class FourOptimizers(Program):
    """Two generators and two critics from one forward pass, as CycleGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back, self.one, self.two = mlp(4, 3), mlp(3, 4), mlp(3, 1), mlp(4, 1)
        self.optimizers_ = [adam() for _ in range(4)]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        mean, square = tf.reduce_mean, tf.square
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.there(x), self.back(y)
            cycle = mean(square(self.back(fake_y) - x)) + mean(square(self.there(fake_x) - y))
            there = mean(square(self.one(fake_y) - 1)) + cycle
            back = mean(square(self.two(fake_x) - 1)) + cycle
            one = mean(square(self.one(y) - 1)) + mean(square(self.one(fake_y)))
            two = mean(square(self.two(x) - 1)) + mean(square(self.two(fake_x)))
        losses = {"there": there, "back": back, "one": one, "two": two}
        for optimizer, (name, loss) in zip(self.optimizers_, losses.items()):
            optimizer.apply(*gradients_of(tape, loss, getattr(self, name)))
        return losses


class Teacher(Program):
    """A teacher follows the student after its update; its momentum follows the iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(4, 3), mlp(4, 3)
        self.teacher.trainable = False
        self.teacher.set_weights(self.student.get_weights())
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            target = self.teacher(x)
            loss = tf.reduce_mean(tf.square(self.student(x) - target - y))
        self.optimizer.apply(*gradients_of(tape, loss, self.student))
        momentum = 0.9 + 0.01 * tf.cast(self.optimizer.iterations, y.dtype)
        for slow, fast in zip(self.teacher.weights, self.student.weights):
            slow.assign(momentum * slow + (1 - momentum) * fast)
        self.seen.assign_add(1.0)
        return {"loss": loss, "target": tf.reduce_mean(target)}


class Adapter(Program):
    """Adversarial adaptation: two updates from one forward pass, one of shared weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.label, self.domain = mlp(4, 5), mlp(5, 3), mlp(5, 1)
        self.first, self.second = adam(), keras.optimizers.SGD(0.1, momentum=0.9)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            features = self.features(x)
            label = tf.reduce_mean(tf.square(self.label(features) - y))
            domain = tf.reduce_mean(tf.nn.softplus(self.domain(features) * y[:, :1]))
            fooled = label - 0.1 * domain
        own = [*self.features.trainable_variables, *self.label.trainable_variables]
        self.first.apply(tape.gradient(fooled, own), own)
        other = [*self.domain.trainable_variables, *self.features.trainable_variables]
        self.second.apply(tape.gradient(domain, other), other)
        return {"label": label, "domain": domain}


class Captions(Program):
    """One optimizer, applied once for each caption, as the image captioning example does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 3)
        self.accuracy = keras.metrics.MeanSquaredError(name="mse")

    @property
    def metrics(self) -> list[Any]:
        return [self.accuracy]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        total = 0.0
        for index in range(3):
            with tf.GradientTape() as tape:
                outputs = self.net(x)
                loss = tf.reduce_mean(tf.square(outputs - y * (1 + index)))
            self.optimizer.apply(*gradients_of(tape, loss, self.net))
            self.accuracy.update_state(y, outputs)
            total += loss
        return {"loss": total, "mse": self.accuracy.result()}


class Distiller(Program):
    """A student learns from a frozen teacher, with one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(4, 3), mlp(4, 3)
        self.teacher.trainable = False

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        target = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            outputs = self.student(x, training=True)
            loss = tf.reduce_mean(tf.square(outputs - target) + 0.5 * tf.square(outputs - y))
        self.optimizer.apply(*gradients_of(tape, loss, self.student))
        return {"loss": loss}


class LateLogs(Distiller):
    """Measures again after the update."""

    def train_step(self, data: Any) -> dict[str, Any]:
        logs = super().train_step(data)
        after = tf.reduce_mean(tf.square(self.student(data[0]) - data[1]))
        return {**logs, "after": after, "iterations": self.optimizer.iterations}


class GanWithAverage(Gan):
    """The average of the generator moves after its update."""

    def __init__(self) -> None:
        super().__init__()
        self.average = mlp(3, 4)
        self.average.trainable = False
        self.average.set_weights(self.generator.get_weights())

    def train_step(self, data: Any) -> dict[str, Any]:
        logs = super().train_step(data)
        for slow, fast in zip(self.average.weights, self.generator.weights):
            slow.assign(0.9 * slow + 0.1 * fast)
        return logs


PROGRAMS = {
    "gan": Gan,
    "wgan-gp": WassersteinGan,
    "clipped weights": Clipped,
    "four optimizers": FourOptimizers,
    "teacher": Teacher,
    "adapter": Adapter,
    "captions": Captions,
    "distiller": Distiller,
    "late logs": LateLogs,
    "gan with average": GanWithAverage,
}


def case_of(name: str, make_model: Any = None) -> Case:
    """Return a `Case` of `fit_cases` that trains a program."""
    uses_own = name in ("teacher", "captions", "distiller", "late logs")
    # An optimizer that is compiled and not used has slots if Keras can build the model.
    optimizer = adam if uses_own else keras.optimizers.SGD
    make_model = make_model or PROGRAMS[name]
    return Case(make_model, x=REAL, y=CODE, loss=None, optimizer=optimizer)
