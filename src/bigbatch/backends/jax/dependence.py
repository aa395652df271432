"""Which results of a traced function depend on the samples: read off its jaxpr."""

from __future__ import annotations

from typing import Any, Iterable

from bigbatch.backends.jax.exact.sums import SUM
from bigbatch.backends.jax.steps import number_of_mark
from bigbatch.core.passes import NONE

_INSIDE = ("jaxpr", "call_jaxpr")
_PLUS, _OTHER = "plus", "other"


def independent_outputs(
    jaxpr: Any, samples: Iterable[int], carried: dict[int, int]
) -> set[int]:
    """Return the numbers of outputs that are the same for any samples.

    Args:
        jaxpr: a traced function.
        samples: the numbers of the inputs that are samples.
        carried: by the number of an output that of the input that it becomes in the next
            micro-batch; what depends on samples there does so in the next one, too.
    """
    tainted = set(samples)
    while True:
        outputs = _tainted_outputs(jaxpr, tainted)
        more = {carried[one] for one in outputs if one in carried} - tainted
        if not more:
            return set(range(len(jaxpr.outvars))) - outputs
        tainted |= more


def _tainted_outputs(jaxpr: Any, inputs: set[int]) -> set[int]:
    """Return the numbers of outputs that depend on inputs, by their numbers."""
    tainted = {id(jaxpr.invars[number]) for number in inputs}
    for equation in jaxpr.eqns:
        given = {n for n, one in enumerate(equation.invars) if id(one) in tainted}
        if not given or equation.primitive is SUM:
            continue
        inner = _inner(equation)
        reached = range(len(equation.outvars))
        if inner is not None:
            reached = _tainted_outputs(inner, given)
        tainted |= {id(equation.outvars[number]) for number in reached}
    return {n for n, one in enumerate(jaxpr.outvars) if id(one) in tainted}


def last_updates(jaxpr: Any, given: dict[int, int] | None = None) -> list[int]:
    """Return for each output the number of the last update on whose result it depends.

    Args:
        jaxpr: a traced function.
        given: by the number of an input the last update on which that depends.
    """
    last = {id(jaxpr.invars[number]): update for number, update in (given or {}).items()}
    for equation in jaxpr.eqns:
        of_inputs = {
            n: last[id(one)] for n, one in enumerate(equation.invars) if id(one) in last
        }
        mark, inner = number_of_mark(equation), _inner(equation)
        if inner is not None and of_inputs:
            found = dict(enumerate(last_updates(inner, of_inputs)))
        else:
            number = max([*of_inputs.values(), NONE if mark is None else mark], default=NONE)
            found = dict.fromkeys(range(len(equation.outvars)), number)
        pairs = ((equation.outvars[n], number) for n, number in found.items())
        last.update((id(one), number) for one, number in pairs if number != NONE)
    return [last.get(id(one), NONE) for one in jaxpr.outvars]


def is_added_to(jaxpr: Any, output: int, start: int) -> bool:
    """Say whether an output is an input plus something that does not depend on that input.

    Args:
        jaxpr: a traced function.
        output: the number of the output.
        start: the number of the input.
    """
    return _roles(jaxpr, {start: _PLUS}).get(output) == _PLUS


def _roles(jaxpr: Any, given: dict[int, str]) -> dict[int, str]:
    """Return by number which outputs are an input plus something, or depend otherwise on it."""
    roles = {id(jaxpr.invars[number]): role for number, role in given.items()}
    for equation in jaxpr.eqns:
        of_inputs = {
            n: roles[id(one)] for n, one in enumerate(equation.invars) if id(one) in roles
        }
        if not of_inputs:
            continue
        inner = _inner(equation)
        if inner is not None:
            found = _roles(inner, of_inputs)
        else:
            is_plus = [*of_inputs.values()] == [_PLUS] and _adds(equation, *of_inputs)
            found = dict.fromkeys(range(len(equation.outvars)), _PLUS if is_plus else _OTHER)
        roles.update((id(equation.outvars[number]), role) for number, role in found.items())
    return {n: roles[id(one)] for n, one in enumerate(jaxpr.outvars) if id(one) in roles}


def _adds(equation: Any, number: int) -> bool:
    """Say whether an equation adds to its input of that number, or leaves it as it is."""
    one, result = equation.invars[number].aval, equation.outvars[0].aval
    if (one.shape, one.dtype) != (result.shape, result.dtype):
        return False
    name = equation.primitive.name
    return name in ("add", "add_any", "convert_element_type") or (name == "sub" and not number)


def _inner(equation: Any) -> Any:
    """Return the function that an equation calls once with its own inputs, if it does."""
    if equation.primitive.name in ("scan", "while", "cond"):
        return None
    for name in _INSIDE:
        inner = equation.params.get(name)
        inner = getattr(inner, "jaxpr", inner)
        if inner is not None and hasattr(inner, "eqns"):
            same_inputs = len(inner.invars) == len(equation.invars)
            same_outputs = len(inner.outvars) == len(equation.outvars)
            return inner if same_inputs and same_outputs else None
    return None
