"""Training steps in torch that apply gradients several times, or assign weights after it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import torch

from fit_cases import Case

layers = keras.layers
softplus = torch.nn.functional.softplus
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


def apply(optimizer: Any, gradients: Any, weights: Any) -> None:
    with torch.no_grad():
        optimizer.apply(gradients, weights)


class Program(keras.Model):
    """A model that is a `train_step`: nobody calls it."""

    def call(self, inputs: Any) -> Any:
        return inputs

    def update(self, optimizer: Any, loss: Any, *models: Any) -> None:
        """Do what the Keras guide for torch does, for some networks."""
        self.zero_grad()
        loss.backward()
        weights = [weight for model in models for weight in model.trainable_weights]
        apply(optimizer, [weight.value.grad for weight in weights], weights)


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
        fake, true = self.critic(self.generator(code).detach()), self.critic(real)
        of_critic = torch.mean(softplus(fake) + softplus(-true))
        self.update(self.of_critic, of_critic, self.critic)
        self.critic_loss.update_state(of_critic)
        fake = self.critic(self.generator(code))
        of_generator = torch.mean(softplus(-fake))
        self.update(self.of_generator, of_generator, self.generator)
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
        share = keras.random.uniform((real.shape[0], 1), seed=self.seed)
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        value = self.critic(mixed)
        (slope,) = torch.autograd.grad(value.sum(), mixed, create_graph=True)
        return torch.mean(torch.square(torch.linalg.vector_norm(slope, dim=1) - 1))

    def train_step(self, data: Any) -> dict[str, Any]:
        real, code = data
        logs = {}
        for index in range(3):
            fake = self.generator(code + 0.1 * index).detach()
            loss = torch.mean(self.critic(fake) - self.critic(real))
            loss = loss + 10 * self.penalty(real, fake)
            self.update(self.of_critic, loss, self.critic)
            logs[f"critic_{index}"] = loss
            self.counter.assign_add(1.0)
        loss = -torch.mean(self.critic(self.generator(code)))
        self.update(self.of_generator, loss, self.generator)
        return {**logs, "generator": loss}


class Clipped(Gan):
    """Weights of the critic are clipped after its update, and the generator's after its."""

    def clip(self, network: Any) -> None:
        with torch.no_grad():
            for weight in network.trainable_weights:
                weight.value.clamp_(-0.3, 0.3)

    def train_step(self, data: Any) -> dict[str, Any]:
        real, code = data
        fake = self.generator(code).detach()
        loss = torch.mean(self.critic(fake) - self.critic(real))
        self.update(self.of_critic, loss, self.critic)
        self.clip(self.critic)
        other = -torch.mean(self.critic(self.generator(code)))
        self.update(self.of_generator, other, self.generator)
        self.clip(self.generator)
        return {"critic": loss, "generator": other}


class FourOptimizers(Program):
    """Two generators and two critics from one forward pass, as CycleGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back, self.one, self.two = mlp(4, 3), mlp(3, 4), mlp(3, 1), mlp(4, 1)
        self.optimizers_ = [adam() for _ in range(4)]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        mean, square = torch.mean, torch.square
        fake_y, fake_x = self.there(x), self.back(y)
        cycle = mean(square(self.back(fake_y) - x)) + mean(square(self.there(fake_x) - y))
        there = mean(square(self.one(fake_y) - 1)) + cycle
        back = mean(square(self.two(fake_x) - 1)) + cycle
        one = mean(square(self.one(y) - 1)) + mean(square(self.one(fake_y)))
        two = mean(square(self.two(x) - 1)) + mean(square(self.two(fake_x)))
        losses = {"there": there, "back": back, "one": one, "two": two}
        gradients = {}
        for name, loss in losses.items():
            weights = [weight.value for weight in getattr(self, name).trainable_weights]
            gradients[name] = torch.autograd.grad(loss, weights, retain_graph=True)
        for optimizer, name in zip(self.optimizers_, losses):
            apply(optimizer, gradients[name], getattr(self, name).trainable_weights)
        return losses


class Teacher(Program):
    """A teacher follows the student after its update; its momentum follows the iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(4, 3), mlp(4, 3)
        self.teacher.trainable = False
        self.teacher.set_weights(self.student.get_weights())
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.samples = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        target = self.teacher(x)
        loss = torch.mean(torch.square(self.student(x) - target - y))
        self.update(self.optimizer, loss, self.student)
        momentum = 0.9 + 0.01 * self.optimizer.iterations.value.float()
        self.follow(momentum)
        self.seen.assign_add(1.0)
        self.samples.assign_add(float(len(x)))
        return {"loss": loss, "target": torch.mean(target)}

    def follow(self, momentum: Any) -> None:
        for slow, fast in zip(self.teacher.weights, self.student.weights):
            slow.assign(momentum * slow + (1 - momentum) * fast)


class TeacherInTorch(Teacher):
    """As programs of torch have it: past the counter of changes."""

    def follow(self, momentum: Any) -> None:
        kernel, *others = zip(self.teacher.parameters(), self.student.parameters())
        for slow, fast in others:
            slow.data = momentum * slow.data + (1 - momentum) * fast.data
        kernel[0].data.mul_(momentum).add_(kernel[1].data * (1 - momentum))


class Adapter(Program):
    """Adversarial adaptation: two updates from one forward pass, one of shared weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.label, self.domain = mlp(4, 5), mlp(5, 3), mlp(5, 1)
        self.first, self.second = adam(), keras.optimizers.SGD(0.1, momentum=0.9)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        features = self.features(x)
        label = torch.mean(torch.square(self.label(features) - y))
        domain = torch.mean(softplus(self.domain(features) * y[:, :1]))
        own = [*self.features.trainable_weights, *self.label.trainable_weights]
        other = [*self.domain.trainable_weights, *self.features.trainable_weights]
        grad = torch.autograd.grad
        fooled = label - 0.1 * domain
        of_own = grad(fooled, [one.value for one in own], retain_graph=True)
        of_other = grad(domain, [one.value for one in other])
        apply(self.first, of_own, own)
        apply(self.second, of_other, other)
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
            outputs = self.net(x)
            loss = torch.mean(torch.square(outputs - y * (1 + index)))
            self.update(self.optimizer, loss, self.net)
            self.accuracy.update_state(y, outputs)
            total = total + loss
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
        outputs = self.student(x, training=True)
        loss = torch.mean(torch.square(outputs - target) + 0.5 * torch.square(outputs - y))
        self.update(self.optimizer, loss, self.student)
        return {"loss": loss}


class LateLogs(Distiller):
    """Measures again after the update."""

    def train_step(self, data: Any) -> dict[str, Any]:
        logs = super().train_step(data)
        after = torch.mean(torch.square(self.student(data[0]) - data[1]))
        return {**logs, "after": after, "iterations": self.optimizer.iterations.value}


class LogsByPython(Distiller):
    """Measures again after the update, in NumPy, and hands over floats."""

    def train_step(self, data: Any) -> dict[str, Any]:
        logs = super().train_step(data)
        after = self.student(data[0]).detach().numpy() - data[1].numpy()
        return {"loss": logs["loss"].item(), "after": float(np.mean(np.square(after)))}


class GanOfModules(Gan):
    """Its critic is a module of torch, whose parameters nobody reads through Keras."""

    def __init__(self) -> None:
        super().__init__()
        linear = torch.nn.Linear
        module = torch.nn.Sequential(linear(4, 6), torch.nn.Tanh(), linear(6, 1))
        self.critic = layers.TorchModuleWrapper(module)
        self.critic.build((None, 4))


class GanWithAverage(Gan):
    """The average of the generator moves after its update."""

    def __init__(self) -> None:
        super().__init__()
        self.average = mlp(3, 4)
        self.average.trainable = False
        self.average.set_weights(self.generator.get_weights())

    def train_step(self, data: Any) -> dict[str, Any]:
        logs = super().train_step(data)
        with torch.no_grad():
            for slow, fast in zip(self.average.weights, self.generator.weights):
                slow.value.mul_(0.9).add_(0.1 * fast.value)
        return logs


PROGRAMS = {
    "gan": Gan,
    "wgan-gp": WassersteinGan,
    "clipped weights": Clipped,
    "four optimizers": FourOptimizers,
    "teacher": Teacher,
    "teacher in torch": TeacherInTorch,
    "adapter": Adapter,
    "captions": Captions,
    "distiller": Distiller,
    "late logs": LateLogs,
    "logs by python": LogsByPython,
    "gan with average": GanWithAverage,
    "gan of modules": GanOfModules,
}


def case_of(name: str, make_model: Any = None) -> Case:
    """Return a `Case` of `fit_cases` that trains a program."""
    uses_own = name in (
        "teacher",
        "teacher in torch",
        "captions",
        "distiller",
        "late logs",
        "logs by python",
    )
    # An optimizer that is compiled and not used has slots if Keras can build the model.
    optimizer = adam if uses_own else keras.optimizers.SGD
    make_model = make_model or PROGRAMS[name]
    return Case(make_model, x=REAL, y=CODE, loss=None, optimizer=optimizer)
