"""Training steps on JAX that apply gradients several times, or change weights after it."""

from __future__ import annotations

from typing import Any, Callable

import jax
import jax.numpy as jnp
import keras
import numpy as np

from fit_cases import Case

layers = keras.layers
softplus = jax.nn.softplus
SAMPLES = 50
rng = np.random.default_rng(5)
REAL = rng.normal(size=(SAMPLES, 4)).astype("float32")
CODE = rng.normal(size=(SAMPLES, 3)).astype("float32")


def mlp(inputs: int, outputs: int) -> Any:
    return keras.Sequential(
        [keras.Input((inputs,)), layers.Dense(6, "tanh"), layers.Dense(outputs)]
    )


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


class Values:
    """The state of a model in one `train_step`: values by variable."""

    def __init__(self, model: Any, state: Any) -> None:
        self.parts = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        pairs = [pair for some in zip(self.parts, state) for pair in zip(*some)]
        self._values = {id(variable): value for variable, value in pairs}

    def of(self, variables: Any) -> list[Any]:
        return [self._values[id(variable)] for variable in variables]

    def set(self, variables: Any, values: Any) -> None:
        self._values.update(zip(map(id, variables), values))

    def state(self) -> Any:
        return tuple(map(self.of, self.parts))

    def call(self, network: Any, x: Any, weights: Any = None) -> Any:
        weights = self.of(network.trainable_variables) if weights is None else weights
        others = self.of(network.non_trainable_variables)
        return network.stateless_call(weights, others, x)[0]

    def gradients(self, loss: Callable[..., Any], *networks: Any) -> Any:
        """Differentiate a function of the weights of networks."""
        weights = [self.of(one.trainable_variables) for one in networks]
        return jax.value_and_grad(loss, argnums=tuple(range(len(networks))))(*weights)

    def apply(self, optimizer: Any, gradients: Any, variables: Any) -> None:
        flat = jax.tree.leaves(gradients)
        slots, weights = self.of(optimizer.variables), self.of(variables)
        weights, slots = optimizer.stateless_apply(slots, flat, weights)
        self.set([*variables, *optimizer.variables], [*weights, *slots])

    def minimize(self, optimizer: Any, loss: Callable[..., Any], network: Any) -> Any:
        value, gradients = self.gradients(loss, network)
        self.apply(optimizer, gradients, network.trainable_variables)
        return value

    def update(self, metric: Any, *args: Any) -> Any:
        new = metric.stateless_update_state(self.of(metric.variables), *args)
        self.set(metric.variables, new)
        return metric.stateless_result(new)


class Program(keras.Model):
    """A model that is a `train_step`: nobody calls it."""

    def call(self, inputs: Any) -> Any:
        return inputs

    def keep(self, optimizer: Any, *networks: Any) -> Any:
        """Build an optimizer, and keep its variables where Keras finds them."""
        optimizer.build([one for net in networks for one in net.trainable_variables])
        setattr(self, f"slots_{len(vars(self))}", list(optimizer.variables))
        return optimizer

    def train_step(self, state: Any, data: Any) -> Any:
        values = Values(self, state)
        return self.run(values, *data), values.state()

    def run(self, values: Values, x: Any, y: Any) -> dict[str, Any]:
        raise NotImplementedError


class Gan(Program):
    """The critic is updated first; the generator meets the new critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = mlp(3, 4), mlp(4, 1)
        self.of_critic = self.keep(adam(), self.critic)
        self.of_generator = self.keep(adam(), self.generator)
        self.critic_loss = keras.metrics.Mean(name="critic_loss")

    def of_fake(self, values: Values, code: Any) -> Callable[..., Any]:
        def loss(weights: Any) -> Any:
            fake = values.call(self.generator, code, weights)
            return jnp.mean(softplus(-values.call(self.critic, fake)))

        return loss

    def run(self, values: Values, x: Any, y: Any) -> dict[str, Any]:
        def of_critic(weights: Any) -> Any:
            fake = values.call(self.critic, values.call(self.generator, y), weights)
            true = values.call(self.critic, x, weights)
            return jnp.mean(softplus(fake) + softplus(-true))

        critic = values.minimize(self.of_critic, of_critic, self.critic)
        logged = values.update(self.critic_loss, critic)
        loss = values.minimize(self.of_generator, self.of_fake(values, y), self.generator)
        return {"raw": loss, "critic_loss": logged}


class WassersteinGan(Gan):
    """Three critic steps with a gradient penalty, with draws, then the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(7)
        self.counter = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def run(self, values: Values, x: Any, y: Any) -> dict[str, Any]:
        logs = {}
        for index in range(3):
            fake = values.call(self.generator, y + 0.1 * index)
            with keras.StatelessScope(
                [(self.seed.state, values.of([self.seed.state])[0])]
            ) as scope:
                share = keras.random.uniform((len(x), 1), seed=self.seed, dtype=x.dtype)
                values.set([self.seed.state], [scope.get_current_value(self.seed.state)])
            mixed = share * x + (1 - share) * fake

            def of_critic(weights: Any, fake: Any = fake, mixed: Any = mixed) -> Any:
                critic = lambda one: values.call(self.critic, one, weights)  # noqa: E731
                slope = jax.grad(lambda one: jnp.sum(critic(one)))(mixed)
                penalty = jnp.mean(jnp.square(jnp.linalg.norm(slope, axis=1) - 1))
                return jnp.mean(critic(fake) - critic(x)) + 10 * penalty

            logs[f"critic_{index}"] = values.minimize(self.of_critic, of_critic, self.critic)
            values.set([self.counter], [values.of([self.counter])[0] + 1.0])
        logs["raw"] = values.minimize(
            self.of_generator, self.of_fake(values, y), self.generator
        )
        return logs


class Clipped(Gan):
    """Two critic steps and one of the generator; weights are clipped after each."""

    def clip(self, values: Values, network: Any) -> None:
        weights = network.trainable_variables
        values.set(weights, [jnp.clip(one, -0.3, 0.3) for one in values.of(weights)])

    def run(self, values: Values, x: Any, y: Any) -> dict[str, Any]:
        def of_critic(weights: Any) -> Any:
            fake = values.call(self.critic, values.call(self.generator, y), weights)
            return jnp.mean(fake - values.call(self.critic, x, weights))

        for _ in range(2):
            loss = values.minimize(self.of_critic, of_critic, self.critic)
            self.clip(values, self.critic)
        other = values.minimize(self.of_generator, self.of_fake(values, y), self.generator)
        self.clip(values, self.generator)
        return {"critic": loss, "generator": other}


class ClippedAndLogged(Clipped):
    """Logs what weights are after they have been clipped."""

    def run(self, values: Values, x: Any, y: Any) -> dict[str, Any]:
        logs = super().run(values, x, y)
        kernel = values.of(self.generator.trainable_variables)[0]
        return {**logs, "largest": jnp.max(jnp.abs(kernel))}


class FourOptimizers(Program):
    """Two generators and two critics from one forward pass, as CycleGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.networks = [mlp(4, 3), mlp(3, 4), mlp(3, 1), mlp(4, 1)]
        self.optimizers_ = [self.keep(adam(), one) for one in self.networks]

    def run(self, values: Values, x: Any, y: Any) -> dict[str, Any]:
        mean, square = jnp.mean, jnp.square

        def losses(*weights: Any) -> Any:
            there, back, one, two = [
                lambda data, net=net, own=own: values.call(net, data, own)
                for net, own in zip(self.networks, weights)
            ]
            fake_y, fake_x = there(x), back(y)
            cycle = mean(square(back(fake_y) - x)) + mean(square(there(fake_x) - y))
            return jnp.stack(
                [
                    mean(square(one(fake_y) - 1)) + cycle,
                    mean(square(two(fake_x) - 1)) + cycle,
                    mean(square(one(y) - 1)) + mean(square(one(fake_y))),
                    mean(square(two(x) - 1)) + mean(square(two(fake_x))),
                ]
            )

        weights = [values.of(one.trainable_variables) for one in self.networks]
        found, back = jax.vjp(losses, *weights)
        for number, (network, optimizer) in enumerate(zip(self.networks, self.optimizers_)):
            gradients = back(jnp.eye(4, dtype=found.dtype)[number])[number]
            values.apply(optimizer, gradients, network.trainable_variables)
        return {"one": found[0], "two": found[1]}


class Teacher(Program):
    """A teacher follows the student after its update; its momentum follows the iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(4, 3), mlp(4, 3)
        self.teacher.trainable = False
        self.teacher.set_weights(self.student.get_weights())
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def run(self, values: Values, x: Any, y: Any) -> dict[str, Any]:
        target = values.call(self.teacher, x)

        def of_student(weights: Any) -> Any:
            return jnp.mean(jnp.square(values.call(self.student, x, weights) - target - y))

        loss = values.minimize(self.optimizer, of_student, self.student)
        momentum = 0.9 + 0.01 * values.of([self.optimizer.iterations])[0].astype(y.dtype)
        pairs = zip(values.of(self.teacher.weights), values.of(self.student.weights))
        new = [momentum * slow + (1 - momentum) * fast for slow, fast in pairs]
        values.set(self.teacher.weights, new)
        values.set([self.seen], [values.of([self.seen])[0] + 1.0])
        return {"loss": loss, "target": jnp.mean(target)}


class Adapter(Program):
    """Adversarial adaptation: two updates from one forward pass, one of shared weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.label, self.domain = mlp(4, 5), mlp(5, 3), mlp(5, 1)
        self.first = self.keep(adam(), self.features, self.label)
        second = keras.optimizers.SGD(0.1, momentum=0.9)
        self.second = self.keep(second, self.domain, self.features)

    def run(self, values: Values, x: Any, y: Any) -> dict[str, Any]:
        def label(features: Any, own: Any) -> Any:
            of_x = values.call(self.features, x, features)
            return jnp.mean(jnp.square(values.call(self.label, of_x, own) - y))

        def domain(own: Any, features: Any) -> Any:
            of_x = values.call(self.features, x, features)
            return jnp.mean(softplus(values.call(self.domain, of_x, own) * y[:, :1]))

        of_label, (of_features, of_own) = values.gradients(label, self.features, self.label)
        of_domain, reverse = values.gradients(domain, self.domain, self.features)
        of_features = [one - 0.1 * other for one, other in zip(of_features, reverse[1])]
        features = self.features.trainable_variables
        own = [*features, *self.label.trainable_variables]
        values.apply(self.first, (of_features, of_own), own)
        own = [*self.domain.trainable_variables, *features]
        values.apply(self.second, reverse, own)
        return {"label": of_label, "domain": of_domain}


class Captions(Program):
    """One optimizer, applied once for each caption, as the image captioning example does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 3)
        self.accuracy = keras.metrics.MeanSquaredError(name="mse")

    def run(self, values: Values, x: Any, y: Any) -> dict[str, Any]:
        total = 0.0
        for index in range(3):

            def loss(weights: Any, target: Any = y * (1 + index)) -> Any:
                return jnp.mean(jnp.square(values.call(self.net, x, weights) - target))

            outputs = values.call(self.net, x)
            total += values.minimize(self.optimizer, loss, self.net)
            mse = values.update(self.accuracy, y, outputs)
        return {"loss": total, "mse": mse}


class LateLogs(Program):
    """Measures again after the update."""

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp(4, 3)

    def run(self, values: Values, x: Any, y: Any) -> dict[str, Any]:
        def loss(weights: Any) -> Any:
            return jnp.mean(jnp.square(values.call(self.student, x, weights) - y))

        before = values.minimize(self.optimizer, loss, self.student)
        after = loss(values.of(self.student.trainable_variables))
        return {"loss": before, "after": after}


class GanWithAverage(Gan):
    """The average of the generator moves after its update."""

    def __init__(self) -> None:
        super().__init__()
        self.average = mlp(3, 4)
        self.average.trainable = False
        self.average.set_weights(self.generator.get_weights())

    def run(self, values: Values, x: Any, y: Any) -> dict[str, Any]:
        logs = super().run(values, x, y)
        pairs = zip(values.of(self.average.weights), values.of(self.generator.weights))
        values.set(self.average.weights, [0.9 * slow + 0.1 * fast for slow, fast in pairs])
        return logs


class InScope(Gan):
    """As Keras is written elsewhere: variables are assigned, in a scope that keeps values."""

    def train_step(self, state: Any, data: Any) -> Any:
        x, y = data
        variables = [one for part in Values(self, state).parts for one in part]
        scope = keras.StatelessScope(list(zip(variables, jax.tree.leaves(state))))
        with scope:
            now = [[one.value for one in part] for part in Values(self, state).parts]
            values = Values(self, now)

            def of_critic(weights: Any) -> Any:
                fake = values.call(self.critic, values.call(self.generator, y), weights)
                return jnp.mean(
                    softplus(fake) + softplus(-values.call(self.critic, x, weights))
                )

            loss, gradients = values.gradients(of_critic, self.critic)
            self.of_critic.apply(gradients[0], self.critic.trainable_variables)
            values.set(self.critic.weights, [one.value for one in self.critic.weights])
            other, gradients = values.gradients(self.of_fake(values, y), self.generator)
            self.of_generator.apply(gradients[0], self.generator.trainable_variables)
        parts = Values(self, state).parts
        new = [[scope.get_current_value(one) for one in part] for part in parts]
        return {"critic": loss, "generator": other}, tuple(new)


PROGRAMS = {
    "gan": Gan,
    "wgan-gp": WassersteinGan,
    "clipped weights": Clipped,
    "clipped and logged": ClippedAndLogged,
    "four optimizers": FourOptimizers,
    "teacher": Teacher,
    "adapter": Adapter,
    "captions": Captions,
    "late logs": LateLogs,
    "gan with average": GanWithAverage,
    "in a scope": InScope,
}


def case_of(name: str, make_model: Any = None) -> Case:
    """Return a `Case` of `fit_cases` that trains a program."""
    uses_own = name in ("teacher", "captions", "late logs")
    # An optimizer that is compiled and not used has slots if Keras can build the model.
    optimizer = adam if uses_own else keras.optimizers.SGD
    return Case(make_model or PROGRAMS[name], x=REAL, y=CODE, loss=None, optimizer=optimizer)
