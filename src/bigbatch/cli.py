"""The command `bigbatch`: parse what is asked for, and print what comes out."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from typing import Any, Sequence

from bigbatch.errors import ArgumentError, BigbatchError, explain

_EXAMPLE = """\
examples:
  bigbatch plan train:make --batch-size 256
  bigbatch plan train:make --batch-size 256 --memory-limit 8GiB --plot plan.png

  where train.py, in this directory, has

    def make():
        ...
        model.compile("adam", "mse")
        return model, x, y          # or: return model, dataset

exit codes: 0 all is well, 1 it does not fit, 2 what was asked for cannot be done
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parser().parse_args(arguments)
    # Before TensorFlow is imported: quiet, and with an allocator that counts every byte.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")
    try:
        return options.run(options)
    except BigbatchError as error:
        print(error, file=sys.stderr)
    except ModuleNotFoundError as error:
        if error.name not in ("tensorflow", "keras"):
            raise
        print(f"{error}. Fix: pip install 'bigbatch[tensorflow]'", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "bigbatch",
        description="Train with any batch size on the memory you have.",
        epilog=_EXAMPLE,
        formatter_class=shape,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        help="which micro-batch fits, and what it takes",
        description="Measure what micro-batches take, and choose one that fits.",
        epilog=_EXAMPLE,
        formatter_class=shape,
    )
    plan.add_argument(
        "factory", metavar="MODULE:FACTORY", help="a function that returns (model, x, y)"
    )
    plan.add_argument(
        "--batch-size", type=int, required=True, metavar="N", help="samples per update"
    )
    plan.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="the memory to plan for: 8GiB; if not given, that of this machine",
    )
    plan.add_argument("--time", action="store_true", help="measure the time of updates, too")
    plan.add_argument("--plot", metavar="FILE", help="draw the plan into a PNG or PDF file")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.set_defaults(run=_plan)
    return parser


def _plan(options: argparse.Namespace) -> int:
    from bigbatch.planner.measure import plan as measured_plan

    model, *data = _made_by(options.factory)
    plan = measured_plan(
        model,
        *data,
        batch_size=options.batch_size,
        memory_limit=options.memory_limit,
        measure_time=options.time,
    )
    _show(plan, plan.to_dict() if options.json else None)
    if options.plot:
        plan.plot().savefig(options.plot, dpi=150)
        print(f"wrote {options.plot}", file=sys.stderr)
    return 0 if plan.microbatch_size else 1


def _show(report: Any, as_json: Any) -> None:
    if as_json is not None:
        print(json.dumps(as_json, indent=2))
        return
    from rich.console import Console

    Console().print(report)


def _made_by(factory: str) -> tuple[Any, ...]:
    """Return the model and the data that a function of the user's makes."""
    module, _, name = factory.partition(":")
    sys.path.insert(0, os.getcwd())
    make = reason = None
    try:
        make = getattr(importlib.import_module(module or "?"), name or "?", None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module or '?'}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        reason = error
    if not callable(make):
        raise ArgumentError(
            explain(
                received=f"{factory!r}" + (f" ({reason})" if reason else ""),
                expected="MODULE:FACTORY, a function of a module that can be imported here",
                fix="for a function make() in train.py of this directory: train:make",
            )
        )
    made = make()
    if not isinstance(made, (tuple, list)) or not 2 <= len(made) <= 3:
        raise ArgumentError(
            explain(
                received=f"{type(made).__name__} from {factory}",
                expected="(model, x, y) or (model, dataset), the model compiled",
                fix="return model, x, y",
            )
        )
    return tuple(made)


if __name__ == "__main__":
    sys.exit(main())
