"""The jaxpr of one micro-batch as a list of operations that can be put into stages."""

from __future__ import annotations

from typing import Any, Iterator

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from bigbatch.backends.jax.exact.sums import SEED, SUM
from bigbatch.core.stages import Operation
from bigbatch.errors import ContextError, explain

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_LOOPS = ("scan", "while", "cond")
_COSTLY = ("conv_general_dilated", "dot_general", "fft", *_LOOPS)
_FEW = 64
"""Constants of so few numbers are compared to find out whether they count samples."""


class MicrobatchGraph:
    """The equations of a traced micro-batch, of a known number of samples.

    Args:
        traced: its jaxpr.
        samples: the numbers of the inputs that differ between micro-batches.
        variables: by the number of an input that is a variable, the output with its new value.
        results: the numbers of the outputs that are results.
    """

    def __init__(
        self,
        traced: ClosedJaxpr,
        samples: range,
        variables: dict[int, int],
        results: list[int],
    ) -> None:
        flat = jax.make_jaxpr(_flattened(traced))(*traced.in_avals)
        jaxpr = flat.jaxpr
        self.inputs = [_name(n) for n in range(len(jaxpr.invars))]
        """The names of the arguments."""
        self.constants: dict[str, Any] = {}
        """Values that are in the program itself, by name."""
        self.equations = dict(zip(map(_operation, range(len(jaxpr.eqns))), jaxpr.eqns))
        """The equations, by the name of their operation."""
        self._names = dict(zip(jaxpr.invars, self.inputs))
        for variable, value in zip(jaxpr.constvars, flat.consts):
            self._names[variable] = self._constant(value)
        for name, equation in self.equations.items():
            for number, variable in enumerate(equation.outvars):
                self._names[variable] = f"{name}:{number}"
        # A sum of numbers that are in the program, such as counts, needs their names.
        self._inputs = {
            name: tuple(
                self._named(one)
                for one in equation.invars
                if equation.primitive is SUM or not isinstance(one, Literal)
            )
            for name, equation in self.equations.items()
        }
        self.outputs = [self._named(one) for one in jaxpr.outvars]
        """The names of the outputs."""
        self.results = [self.outputs[number] for number in results]
        self._samples, self._variables = samples, variables
        self.types = {name: one.aval for one, name in self._names.items()}
        self.types.update((name, jax.typeof(one)) for name, one in self.constants.items())
        """The types of values, by name."""

    def _constant(self, value: Any) -> str:
        name = f"constant {len(self.constants)}"
        self.constants[name] = value
        return name

    def _named(self, variable: Any) -> str:
        if isinstance(variable, Literal):
            return self._constant(variable.val)
        return self._names[variable]

    def run(self, names: list[str], values: dict[str, Any]) -> None:
        """Run equations, by name; add what they return to `values`."""
        for name in names:
            equation = self.equations[name]
            given = [
                one.val if isinstance(one, Literal) else values[self._names[one]]
                for one in equation.invars
            ]
            results = given if equation.primitive is SEED else _run(equation, given)
            values.update((f"{name}:{number}", one) for number, one in enumerate(results))

    def check_like(self, other: MicrobatchGraph) -> None:
        """Raise if another number of samples makes other operations."""
        if [*map(_kind, self.equations.values())] != [*map(_kind, other.equations.values())]:
            raise ContextError(
                explain(
                    received="a train_step that does something else with another number of "
                    "samples",
                    expected="the same operations for every micro-batch",
                    fix="write it without a look at the number of samples, or use "
                    'batch_norm="pooled"',
                )
            )

    def operations(self, other: MicrobatchGraph) -> list[Operation]:
        """Return what runs in stages, given the graph of another number of samples."""
        self.check_like(other)
        found = [*self._of_inputs(), *self._of_constants(other)]
        keys: dict[Any, str] = {}
        for name, equation in self.equations.items():
            found.append(self._described(name, equation, other.equations[name], keys))
        for number, output in self._variables.items():
            if self.outputs[output] != self.inputs[number]:
                place = self.inputs[number]
                value = self.outputs[output]
                found.append(
                    Operation(_assignment(place), (value,), (f"new {place}",), changes=(place,))
                )
        return found

    def _of_inputs(self) -> Iterator[Operation]:
        for number, name in enumerate(self.inputs):
            reads = (name,) if number in self._variables else ()
            yield Operation(
                name, outputs=(name,), is_sample=number in self._samples, reads=reads
            )

    def _of_constants(self, other: MicrobatchGraph) -> Iterator[Operation]:
        for name, value in self.constants.items():
            its = other.constants.get(name)
            yield Operation(name, outputs=(name,), is_sample=not _is_same(value, its))

    def _described(self, name: str, equation: Any, its: Any, keys: dict[Any, str]) -> Operation:
        """Describe an equation; what differs with the number of samples belongs to samples."""
        is_sum = equation.primitive is SUM
        if is_sum and equation.params["key"] is not None:
            keys[equation.params["key"]] = name
        of = equation.params["gradient_of"] if is_sum else None
        numbers = [one.val for one in equation.invars if isinstance(one, Literal)]
        its_numbers = [one.val for one in its.invars if isinstance(one, Literal)]
        shapes = [one.aval.shape for one in equation.outvars]
        is_same = shapes == [one.aval.shape for one in its.outvars]
        is_same = is_same and all(map(_is_same, numbers, its_numbers))
        return Operation(
            name,
            self._inputs[name],
            tuple(self._names[one] for one in equation.outvars),
            is_sample=not is_same and not is_sum,
            is_sum=is_sum,
            gradient_of=None if of is None else keys.get(of),
            is_seed=equation.primitive is SEED,
            is_costly=equation.primitive.name in _COSTLY,
            widens=_widens(equation),
        )


def _flattened(traced: ClosedJaxpr) -> Any:
    """Return what a jaxpr does as a function without calls of others."""

    def run(jaxpr: Any, constants: Any, arguments: Any) -> list[Any]:
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments]))

        def value(variable: Any) -> Any:
            return variable.val if isinstance(variable, Literal) else known[variable]

        for equation in jaxpr.eqns:
            given = [*map(value, equation.invars)]
            inner = _called(equation)
            if inner is not None:
                results: Any = run(*inner, given)
            else:
                _refuse_sums_inside(equation)
                results = _run(equation, given)
            known.update(zip(equation.outvars, results))
        return [*map(value, jaxpr.outvars)]

    return lambda *arguments: run(traced.jaxpr, traced.consts, arguments)


def _run(equation: Any, given: list[Any]) -> list[Any]:
    options = equation.primitive.get_bind_params(equation.params)
    # Before JAX 0.10 functions come apart.
    functions, options = options if isinstance(options, tuple) else ((), options)
    results = equation.primitive.bind(*functions, *given, **options)
    return results if equation.primitive.multiple_results else [results]


def _called(equation: Any) -> tuple[Any, Any] | None:
    """Return the jaxpr, and its constants, that an equation calls once; `None` if none."""
    if equation.primitive.name in _LOOPS:
        return None
    for name in _CALLS:
        found = equation.params.get(name)
        inner = getattr(found, "jaxpr", found)
        if hasattr(inner, "eqns") and len(inner.invars) == len(equation.invars):
            return inner, getattr(found, "consts", ())
    return None


def _refuse_sums_inside(equation: Any) -> None:
    parts = [one for value in equation.params.values() for one in _listed(value)]
    inner = [getattr(one, "jaxpr", one) for one in parts]
    if any(_has_sums(one) for one in inner if hasattr(one, "eqns")):
        raise ContextError(
            explain(
                received=f"BatchNormalization, or cross_microbatch_sum, inside "
                f"jax.lax.{equation.primitive.name}",
                expected="sums over the whole batch that every micro-batch needs once, "
                "whatever its samples are",
                fix='call the layer outside, or use batch_norm="pooled"',
            )
        )


def _has_sums(jaxpr: Any) -> bool:
    for equation in jaxpr.eqns:
        parts = [one for value in equation.params.values() for one in _listed(value)]
        inner = [getattr(one, "jaxpr", one) for one in parts]
        if equation.primitive is SUM or any(_has_sums(o) for o in inner if hasattr(o, "eqns")):
            return True
    return False


def _listed(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


def _kind(equation: Any) -> str:
    return equation.primitive.name


def _is_same(one: Any, other: Any) -> bool:
    if np.shape(one) != np.shape(other):
        return False
    return np.size(one) > _FEW or bool(np.array_equal(np.asarray(one), np.asarray(other)))


def _widens(equation: Any) -> bool:
    if equation.primitive.name != "convert_element_type" or not equation.invars:
        return False
    (given,), (made,) = equation.invars, equation.outvars
    return given.aval.dtype.itemsize < made.aval.dtype.itemsize


def _name(number: int) -> str:
    return f"input {number}"


def _operation(number: int) -> str:
    return f"equation {number}"


def _assignment(place: str) -> str:
    return f"assign {place}"
