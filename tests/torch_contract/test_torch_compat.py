"""Names of Keras on torch that are not public: a newer Keras that moves them fails here."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import torch

from bigbatch.backends.torch import compat, dependence, draws
from bigbatch.backends.torch.keras3 import BUILD_BEFORE_FIT, END_OF_EPOCH
from bigbatch.backends.torch.memory import is_out_of_memory


def test_draws_go_through_one_module():
    module = compat.random_module()
    for name in (*compat.BY_SHAPE, "normal", *compat.WITH_GLOBAL_SEED):
        assert next(iter(inspect.signature(getattr(module, name)).parameters)) == "shape"
    assert [*inspect.signature(module.dropout).parameters] == [
        "inputs",
        "rate",
        "noise_shape",
        "seed",
    ]
    assert [*inspect.signature(module.torch_seed_generator).parameters] == ["seed"]
    seen = []
    with draws.watching_draws(seen.append):
        keras.random.uniform((2, 3), seed=1)
        keras.layers.Dropout(0.5, seed=1)(np.ones((4, 5)), training=True)
        keras.random.truncated_normal((2,), seed=1)
    assert [one.shape for one in seen] == [(2, 3), (4, 5), (2, 4)]


def test_a_tensor_that_has_been_changed_is_noted():
    read, data, written, other = (keras.Variable(np.zeros(2)).value for _ in range(4))
    noted = dependence.Operations([], lambda _: [])
    with dependence.noting(noted), torch.no_grad():
        written.copy_(read + 1)
        data.data = read + 1
        torch._foreach_add_([other], 1.0)
    assert [*map(id, noted.written([read, data, written, other]))] == [
        *map(id, (data, written, other))
    ]


def test_the_memory_of_a_tensor_has_a_number_that_is_not_used_again():
    one = torch.zeros(3)
    number = compat.address_of(one.untyped_storage())
    assert number == compat.address_of(one[1:].detach().untyped_storage())
    reference = compat.weak_reference_to(one.untyped_storage())
    del one
    assert number not in {compat.address_of(torch.zeros(3).untyped_storage())}
    assert reference.expired()


def test_operations_are_noted_in_the_backward_pass_too():
    weight = torch.ones(2, requires_grad=True)
    noted = dependence.Operations([weight], lambda _: [])
    with dependence.noting(noted):
        loss = (weight * torch.ones(2)).sum()
        forward = len(noted.all)
        loss.backward()
        backward = len(noted.all)
        weight.detach().numpy()
    assert noted.memory.of(weight)[0] in {number for one in noted.all for number in one.read}
    assert backward > forward
    assert noted.memory.of(weight.grad)[0] in {
        number for one in noted.all[forward:backward] for number in one.written
    }
    assert [one.read for one in noted.all if one.is_seen] == [noted.memory.of(weight)]
    assert not any(noted.memory.of(weight)[0] in one.written for one in noted.all)


def test_dropout_without_a_seed_follows_torch():
    layer = keras.layers.Dropout(0.5)
    assert compat.follows_torch(None, layer.seed_generator)
    assert not compat.follows_torch(None, keras.layers.Dropout(0.5, seed=1).seed_generator)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    layer(np.ones((4, 5)), training=True)
    assert not torch.equal(before, torch.get_rng_state())
    assert int(layer.seed_generator.state.numpy()[1]) == 0


def test_dropout_draws_one_number_after_the_other():
    """The numbers of a layer of many samples are those of two with fewer, for any threads."""
    torch.manual_seed(0)
    whole = torch.nn.functional.dropout(torch.ones(1000, 333), 0.3)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    parts = [torch.nn.functional.dropout(torch.ones(n, 333), 0.3) for n in (300, 500)]
    torch.empty(200 * 333).bernoulli_(0.7)
    assert torch.equal(torch.cat(parts), whole[:800])
    assert torch.equal(after, torch.get_rng_state())


def test_the_generator_of_seeds_of_keras_is_found():
    keras.utils.set_random_seed(1)
    keras.random.uniform((2,))
    (state,) = compat.global_seed_state()
    before = state.clone()
    keras.random.uniform((2,))
    assert not torch.equal(before, state)


def test_fit_calls_what_is_replaced():
    source = inspect.getsource(keras.Model.fit)
    assert f"self.{BUILD_BEFORE_FIT}(iterator=epoch_iterator)" in source
    assert f"self.{END_OF_EPOCH}(logs)" in source
    step = inspect.getsource(keras.Model.train_step)
    for line in ("self.zero_grad()", "self.optimizer.scale_loss(loss)", "loss.backward()"):
        assert line in step
    assert "self.optimizer.apply(gradients, trainable_weights)" in step


def test_what_allocators_say():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    text = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
    assert is_out_of_memory(RuntimeError(f"Exception encountered when calling layer.\n{text}"))
    assert is_out_of_memory(RuntimeError("could not create a primitive"))  # of oneDNN
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))
