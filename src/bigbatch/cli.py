"""The command `bigbatch`: parse arguments and print results."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Sequence

from bigbatch import __version__
from bigbatch.core.arguments import positive_integer
from bigbatch.core.quiet import quiet_import
from bigbatch.errors import ArgumentError, BigbatchError, explain

_FACTORY = """
  where train.py, in this directory, has

    def make():
        ...
        model.compile("adam", "mse")
        return model, x, y

"""

_PLAN = f"""\
examples:
  bigbatch plan train:make --batch-size 256
  bigbatch plan train:make --batch-size 256 --memory-limit 8GiB --plot plan.png
{_FACTORY}\
exit codes: 0 it fits, 1 it does not, 2 the plan cannot be made
"""

_VERIFY = f"""\
examples:
  bigbatch verify train:make --microbatch-size 32
  bigbatch verify train:make --microbatch-size 32 --coupled --json
{_FACTORY}\
exit codes: 0 equal, 1 not equal, 2 the comparison cannot be made
"""

_DEMO = """\
examples:
  bigbatch demo
  bigbatch demo --output results

exit codes: 0 it ran, 2 it could not be run
"""

_BATCH_NORM = ("pooled", "exact", "microbatch", "frozen")
"""What `batch_norm` can be: the engine, which says so too, would import Keras."""

_RUN = """\
examples:
  bigbatch run train.py --microbatch-size auto
  bigbatch run -m package.train --microbatch-size auto
  bigbatch run train.py --microbatch-size 32 -- --epochs 10
  bigbatch run train.py --accumulation-steps 8

exit codes: the exit code of the script, or 2 if the arguments are wrong
"""

_ALL = """\
examples:
  bigbatch demo
  bigbatch run train.py --microbatch-size auto
  bigbatch verify train:make --microbatch-size 32
  bigbatch plan train:make --batch-size 256

`bigbatch COMMAND --help` says more.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    parser = _parser()
    options, unknown = parser.parse_known_args(given[:end])
    if unknown:
        parser.error(_unrecognized(options, given[:end], unknown, given[end + 1 :]))
    if options.run is None:
        parser.print_help()
        return 0
    options.arguments = given[end + 1 :]
    # Before TensorFlow is imported: quiet, and with an allocator that counts every byte.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")
    try:
        with quiet_import("tensorflow"):
            return options.run(options)
    except BigbatchError as error:
        print(error, file=sys.stderr)
    except ModuleNotFoundError as error:
        if error.name not in ("tensorflow", "keras"):
            raise
        print(f"{error}. Fix: pip install 'bigbatch[tensorflow]'", file=sys.stderr)
    return 2


def _unrecognized(
    options: argparse.Namespace, given: list[str], unknown: list[str], after: list[str]
) -> str:
    """Say what was not understood, and where arguments of a script belong."""
    message = f"unrecognized arguments: {' '.join(unknown)}"
    if options.run is not _run:
        return message
    left = list(given)
    for argument in reversed(unknown):  # the last of equal ones is the script's
        del left[len(left) - 1 - left[::-1].index(argument)]
    command = " ".join(["bigbatch", *left, "--", *unknown, *after])
    return f"{message}\narguments of the script come after --: {command}"


def _parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "bigbatch",
        description="Gradient accumulation for Keras that equals the full batch.",
        epilog=_ALL,
        formatter_class=shape,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(run: Any, summary: str, description: str, epilog: str, **more: Any) -> Any:
        added = commands.add_parser(
            run.__name__.lstrip("_"),
            **more,
            help=summary,
            description=description,
            epilog=epilog,
            formatter_class=shape,
        )
        added.set_defaults(run=run)
        return added

    for add in (_add_demo, _add_run, _add_verify, _add_plan):
        add(command)
    return parser


def _add_demo(command: Any) -> None:
    demo = command(
        _demo,
        "show in a minute what bigbatch does",
        "Train with a batch that does not fit a small device, and compare with the full batch.",
        _DEMO,
    )
    demo.add_argument(
        "--output",
        default=".",
        metavar="DIRECTORY",
        help="where demo.html, demo.png and demo.svg go",
    )


def _add_run(command: Any) -> None:
    run = command(
        _run,
        "run a script with gradient accumulation in every fit()",
        "Run an unmodified Keras script with gradient accumulation in every fit().",
        _RUN,
        usage="bigbatch run (SCRIPT | -m MODULE)\n"
        "                    (--microbatch-size N|auto | --accumulation-steps N)\n"
        "                    [--batch-norm MODE] [--coupled] [-- ARGS]",
    )
    what = run.add_mutually_exclusive_group(required=True)
    what.add_argument("script", nargs="?", metavar="SCRIPT", help="a Python file")
    what.add_argument("-m", "--module", metavar="MODULE", help="a module, as for python -m")
    how = run.add_mutually_exclusive_group(required=True)
    how.add_argument(
        "--microbatch-size",
        type=_size,
        metavar="N|auto",
        help="cut each batch into micro-batches of N samples",
    )
    how.add_argument(
        "--accumulation-steps",
        type=_number,
        metavar="N",
        help="make one update from N batches of the data set",
    )
    _add_setting(run)


def _add_verify(command: Any) -> None:
    verify = command(
        _verify,
        "compare accumulation with the full batch on your model",
        "Compare one update from micro-batches with the full batch on your model.",
        _VERIFY,
    )
    _add_factory(verify)
    verify.add_argument(
        "--microbatch-size",
        type=_number,
        required=True,
        metavar="N",
        help="samples per micro-batch",
    )
    _add_setting(verify)
    verify.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_plan(command: Any) -> None:
    plan = command(
        _plan,
        "find the micro-batch size that fits this device",
        "Measure the memory of micro-batches, and choose a size that fits.",
        _PLAN,
    )
    _add_factory(plan)
    plan.add_argument(
        "--batch-size", type=_number, required=True, metavar="N", help="samples per update"
    )
    plan.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="the memory to plan for, such as 8GiB; default: this device",
    )
    plan.add_argument("--time", action="store_true", help="measure the time of updates, too")
    plan.add_argument("--plot", metavar="FILE", help="draw the plan into a PNG or PDF file")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")


def _size(text: str) -> int | str:
    return "auto" if text.lower() == "auto" else _number(text)


def _number(text: str) -> int:
    try:
        return positive_integer(int(text), "N")
    except ValueError as error:  # an `ArgumentError` is one
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer") from error


def _add_factory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "factory", metavar="MODULE:FACTORY", help="a function that returns (model, x, y)"
    )


def _add_setting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-norm",
        default="pooled",
        choices=_BATCH_NORM,
        metavar="MODE",
        help=f"{', '.join(_BATCH_NORM[:-1])} or {_BATCH_NORM[-1]}",
    )
    parser.add_argument(
        "--coupled",
        action="store_const",
        const=True,
        default="auto",
        help="compute the loss on the whole batch, by two passes, without trying it",
    )


def _demo(options: argparse.Namespace) -> int:
    from bigbatch.demo.story import run

    def show(report: Any) -> None:
        _show(report, None)
        print(flush=True)

    run(Path(options.output), show)
    return 0


def _run(options: argparse.Namespace) -> int:
    from bigbatch.engine.script import run_module, run_script

    names = ("microbatch_size", "accumulation_steps", "batch_norm", "coupled")
    setting = {name: getattr(options, name) for name in names}
    if options.module:
        return run_module(options.module, options.arguments, setting)
    return run_script(options.script, options.arguments, setting)


def _verify(options: argparse.Namespace) -> int:
    from bigbatch.diagnostics.verify import verify

    model, *data = _made_by(options.factory)
    result = verify(
        model,
        *data,
        microbatch_size=options.microbatch_size,
        batch_norm=options.batch_norm,
        coupled=options.coupled,
    )
    _show(result, result.to_dict() if options.json else None)
    return 0 if result.ok else 1


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
                expected="(model, x, y) or (model, dataset), with the model compiled",
                fix="return model, x, y",
            )
        )
    return tuple(made)


if __name__ == "__main__":
    sys.exit(main())
