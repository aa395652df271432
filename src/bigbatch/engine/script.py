"""Run an unmodified script with gradient accumulation in every `fit` of a Keras model.

Nothing of Keras is imported here: the script may have something to set up before it does.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import traceback
import types
from pathlib import Path
from typing import Any, Callable, Sequence

from bigbatch.errors import ArgumentError, explain


def run_script(path: str, arguments: Sequence[str], setting: dict[str, Any]) -> int:
    """Run a Python script with `accumulate(model, **setting)` before every first `fit`.

    Returns:
        The exit code the script would have had. An error is printed as Python would.
    """
    script = Path(path).absolute()
    if not script.is_file():
        raise ArgumentError(
            explain(
                received=path,
                expected="a Python script",
                fix="pass the path of a file: bigbatch run train.py --microbatch-size auto",
            )
        )
    names = {"__file__": str(script), "__builtins__": __builtins__}

    def load() -> tuple[Any, dict[str, Any]]:
        return compile(script.read_bytes(), str(script), "exec", dont_inherit=True), names

    return _run(load, path, str(script.parent), arguments, setting)


def run_module(name: str, arguments: Sequence[str], setting: dict[str, Any]) -> int:
    """Run a module as `python -m` does, with what `run_script` does.

    Returns:
        The exit code it would have had.
    """

    def load() -> tuple[Any, dict[str, Any]]:
        spec = _spec_of(name)
        loader: Any = spec and spec.loader
        if spec is None or not hasattr(loader, "get_code"):
            raise ArgumentError(
                explain(
                    received=f"-m {name}",
                    expected="a module, or a package with a module __main__, that can be "
                    "imported here",
                    fix="bigbatch run -m package.module --microbatch-size auto, in the "
                    "directory that holds the package",
                )
            )
        names = {"__spec__": spec, "__loader__": loader, "__package__": spec.parent}
        sys.argv[0] = str(spec.origin)
        return loader.get_code(spec.name), {**names, "__file__": spec.origin}

    return _run(load, "-m", str(Path.cwd()), arguments, setting)


def _spec_of(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return where a module is, or that which runs for a package; `None` if there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the package itself imports
        return None
    is_package = spec is not None and spec.submodule_search_locations is not None
    return _spec_of(f"{name}.__main__") if is_package else spec


def _run(
    load: Callable[[], tuple[Any, dict[str, Any]]],
    path: str,
    directory: str,
    arguments: Sequence[str],
    setting: dict[str, Any],
) -> int:
    """Run what `load` returns, code and names, as the main module; return the exit code."""
    main = types.ModuleType("__main__")
    before = sys.modules["__main__"], sys.argv, sys.path[:]
    fits: list[Any] = []
    finder = _AfterImport("keras", functools.partial(_patch, setting, fits.append))
    sys.modules["__main__"], sys.argv = main, [path, *arguments]
    sys.path.insert(0, directory)
    sys.meta_path.insert(0, finder)
    file = ""
    try:
        code, names = load()
        file = names["__file__"]
        main.__dict__.update(names)
        exec(code, main.__dict__)
    except ArgumentError:
        if not file:
            raise  # there is nothing to run
        return _failed(file)
    except SystemExit as leave:
        if not isinstance(leave.code, (int, type(None))):
            print(leave.code, file=sys.stderr)
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        return _failed(file or path)
    finally:
        sys.meta_path.remove(finder)
        sys.modules["__main__"], sys.argv, sys.path[:] = before
    if not fits:
        print("bigbatch: the script has not called fit() of a Keras 3 model", file=sys.stderr)
    return 0


def _failed(path: str) -> int:
    """Print the error that is being handled as Python would; return the exit code."""
    kind, error, _ = sys.exc_info()
    assert error is not None
    traceback.print_exception(kind, error, _frames_of_script(error, path))
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _patch(setting: dict[str, Any], note: Callable[[Any], None], keras: Any) -> None:
    """Let every model accumulate from its first `fit` on, unless it does already."""
    original = keras.Model.fit

    @functools.wraps(original)
    def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
        from bigbatch.engine.accumulate import accumulate
        from bigbatch.engine.hooks import fit_with, is_attached

        note(type(model))
        if is_attached(model):
            return original(model, *args, **kwargs)
        # Past a custom `fit` of the model's class, which may be what has called this.
        return fit_with(accumulate(model, **setting), original, *args, **kwargs)

    keras.Model.fit = fit


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module as soon as it has been imported.

    Others may only look for the module, as TensorFlow does for Keras: whatever they find
    calls the function if it is loaded.
    """

    def __init__(self, name: str, function: Callable[[Any], None]) -> None:
        self._name = name
        self._function = function

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as if this was not here, and stay next to its loader."""
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._function)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module as its own loader does, and then calls a function with it."""

    def __init__(self, loader: Any, function: Callable[[Any], None]) -> None:
        self._loader = loader
        self._function = function

    def create_module(self, spec: Any) -> Any:
        """Leave it to the module's own loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Do as the module's own loader, and then call the function."""
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._function(module)


def _frames_of_script(error: BaseException, path: str) -> Any:
    """Return a traceback without what runs the script, and without what runs `fit`."""
    own = str(Path(__file__).parent)
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    names = [frame.tb_frame.f_code.co_filename for frame in frames]
    first = names.index(path) if path in names else len(names)
    kept = [
        frame for frame, name in zip(frames[first:], names[first:]) if not name.startswith(own)
    ]
    for frame, following in zip(kept, [*kept[1:], None]):
        frame.tb_next = following
    return kept[0] if kept else None
