"""Which results of a traced function depend on the samples: read off its jaxpr."""

from __future__ import annotations

from typing import Any, Iterable

_INSIDE = ("jaxpr", "call_jaxpr")


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
        if not given:
            continue
        inner = _inner(equation)
        reached = range(len(equation.outvars))
        if inner is not None:
            reached = _tainted_outputs(inner, given)
        tainted |= {id(equation.outvars[number]) for number in reached}
    return {n for n, one in enumerate(jaxpr.outvars) if id(one) in tainted}


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
