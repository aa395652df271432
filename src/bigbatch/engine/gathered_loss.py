"""The loss of the whole batch where micro-batches run in stages: its arguments are gathered.

Two passes over a batch would not know the statistics of its layers. But a stage can gather the
rows of all micro-batches, as it adds up statistics. The loss of gathered rows is the same in
all micro-batches, and computed once; the gradient of a row goes back to the micro-batch that
has the sample. Micro-batch i, of nᵢ of N samples, begins its backward pass with nᵢ/N: together
they begin with one.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager as Block
from typing import Any

from bigbatch.backends.cross_microbatch import cross_microbatch_gather
from bigbatch.backends.keras import backend_of, logits_of, mask_of, set_logits, set_mask
from bigbatch.core.patching import replaced

_NAMES = ("x", "y", "y_pred", "sample_weight")
"""The arguments of `compute_loss` that have a row for each sample, in their order."""


def loss_of_gathered_rows(model: Any) -> Block[None]:
    """Return a block in which `compute_loss` of a model gets the rows of the whole batch."""
    backend, compute = backend_of(model), model.compute_loss
    names = _NAMES if backend.uses_inputs_after_call(model) else _NAMES[1:]
    rows_of = functools.partial(_gathered, backend.ops)

    def gathered(name: str, argument: Any) -> Any:
        return backend.ops.map_structure(rows_of, argument) if name in names else argument

    @functools.wraps(compute)
    def of_batch(*args: Any, **options: Any) -> Any:
        first = map(gathered, _NAMES, args)
        named = {name: gathered(name, argument) for name, argument in options.items()}
        return compute(*first, *args[len(_NAMES) :], **named)

    return replaced(model, compute_loss=of_batch)


def _gathered(ops: Any, leaf: Any) -> Any:
    """Return a tensor of the whole batch, with what Keras has attached to it."""
    if not ops.is_tensor(leaf):
        return leaf
    rows = cross_microbatch_gather(leaf)
    for attached, attach in ((mask_of(leaf), set_mask), (logits_of(leaf), set_logits)):
        if attached is not None:
            attach(rows, cross_microbatch_gather(attached))
    return rows
