"""The packages, the direction of imports, and the public names."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import bigbatch
from bigbatch import cli

SOURCE = Path(bigbatch.__file__).parent
MAY_IMPORT = {
    "errors": set(),
    "core": {"errors"},
    "backends": {"core", "errors"},
    "loops": {"backends", "core", "errors"},
    "engine": {"backends", "core", "errors"},
    "planner": {"engine", "backends", "core", "errors"},
    "diagnostics": {"engine", "backends", "core", "errors"},
    "demo": {"diagnostics", "planner", "engine", "core", "errors"},
    "cli": {"demo", "planner", "diagnostics", "engine", "core", "errors", "__version__"},
}
"""What a package may import of bigbatch, beside itself."""
TF1 = "loops/tf1.py"
"""The file for TensorFlow 1, which ends at Python 3.7."""
FRAMEWORKS = {"tensorflow", "keras", "tf_keras", "torch", "jax"}


def may_import(path: str) -> set[str]:
    """Return the parts of bigbatch that a file may import."""
    package = path.split("/")[0].split(".")[0]
    return {"core", "errors"} if path == TF1 else {package, *MAY_IMPORT[package]}


def allowed_frameworks(path: str) -> set[str]:
    """Return the frameworks that a file may import."""
    package = path.split("/")[0]
    if path.startswith(("backends/tensorflow/", "backends/keras2/")):
        return {"tensorflow", "keras"}
    if path.startswith("backends/torch/"):
        return {"torch", "keras"}
    if path.startswith("backends/jax/"):
        return {"jax", "keras"}
    if path == "demo/programs.py":
        return {"tensorflow", "keras"}  # a program of a user's
    return {"loops": {"tensorflow"}, "backends": {"keras"}}.get(package, set())


def violations(path: str, source: str) -> list[str]:
    """Return what `source`, standing at `path` inside the package, imports but may not."""
    package = path.split("/")[0].split(".")[0]
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                found.append(f"{path}: relative import")
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, *rest = name.split(".")
            if top in FRAMEWORKS - allowed_frameworks(path):
                found.append(f"{path}: {name}")
            if top == "bigbatch" and rest[0] not in may_import(path):
                found.append(f"{path}: {name}")
            # The parts of other packages that know TensorFlow are reached by an interface.
            if name.startswith("bigbatch.backends.tensorflow") and package not in (
                "backends",
                "loops",
            ):
                found.append(f"{path}: {name}")
    return found


def modules() -> dict[str, str]:
    files = {str(p.relative_to(SOURCE)): p.read_text() for p in SOURCE.rglob("*.py")}
    del files["__init__.py"]  # the public face; see the test of lazy imports
    return files


def test_imports_go_one_way():
    assert [v for path, source in modules().items() for v in violations(path, source)] == []


def test_every_module_is_in_a_package():
    assert {path.split("/")[0].split(".")[0] for path in modules()} <= set(MAY_IMPORT)


def test_there_is_no_cycle_of_imports():
    assert cycle_in(imports_of(modules())) is None


def test_the_guard_of_cycles_can_fail():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def imports_of(files: dict[str, str]) -> dict[str, set[str]]:
    """Return which module of bigbatch imports which, when it is loaded."""
    names = {path[: -len(".py")].replace("/", ".") for path in files}
    found: dict[str, set[str]] = {}
    for path, source in files.items():
        own = found.setdefault(path[: -len(".py")].replace("/", "."), set())
        for node in ast.parse(source).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bigbatch."):
                module = node.module[len("bigbatch.") :]
                inner = {f"{module}.{alias.name}" for alias in node.names} & names
                own |= inner or ({module} & names)
    return found


def cycle_in(graph: dict[str, set[str]]) -> list[str] | None:
    """Return modules of which each imports the next, and the last the first, if there are."""

    def search(path: list[str]) -> list[str] | None:
        for following in sorted(graph.get(path[-1], ())):
            if following == path[0]:
                return [*path, following]
            if following not in path and following not in done:
                found = search([*path, following])
                if found:
                    return found
        return None

    done: set[str] = set()
    for name in sorted(graph):
        found = search([name])
        if found:
            return found
        done.add(name)
    return None


def runs_on_tensorflow_1(path: str) -> bool:
    """Say whether Python 3.7 reads a file: that for TensorFlow 1, and what it may import."""
    return path == TF1 or path.split("/")[0].split(".")[0] in may_import(TF1)


def parses_with_python_3_7(source: str) -> bool:
    try:
        ast.parse(source, feature_version=(3, 7))
    except SyntaxError:
        return False
    return True


def test_tensorflow_1_needs_no_new_syntax():
    files = {"__init__.py": (SOURCE / "__init__.py").read_text(), **modules()}
    bound = {path for path in files if path == "__init__.py" or runs_on_tensorflow_1(path)}
    assert {TF1, "errors.py", "core/window.py", "core/versions.py"} <= bound
    assert [path for path in sorted(bound) if not parses_with_python_3_7(files[path])] == []


def test_the_guard_of_syntax_can_fail():
    assert parses_with_python_3_7("x = 1")
    assert not parses_with_python_3_7("if (x := 1): pass")
    assert not parses_with_python_3_7("def f(x, /): pass")


def test_files_and_functions_are_short():
    for path, source in modules().items():
        assert source.count("\n") <= 400, path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = lines_of_code(node)
                assert lines <= 60, f"{path}: {node.name} has {lines} lines"


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many lines a function has, without its docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        lines -= (first.end_lineno or 0) - first.lineno + 1
    return lines


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/window.py", "from bigbatch.loops.buffers import GradientBuffer"),
        ("core/window.py", "import tensorflow as tf"),
        ("core/window.py", "def late():\n    from bigbatch.loops import buffers"),
        ("engine/trainer.py", "import tensorflow as tf"),
        ("engine/trainer.py", "import keras"),
        ("engine/trainer.py", "from bigbatch.backends.tensorflow import ops"),
        ("engine/trainer.py", "from bigbatch.loops.window import GradientWindow"),
        ("backends/keras3.py", "import tensorflow as tf"),
        ("backends/tensorflow/ops.py", "import jax"),
        ("backends/torch/ops.py", "import tensorflow as tf"),
        ("loops/buffers.py", "import keras"),
        ("loops/buffers.py", "from bigbatch.engine import trainer"),
        ("loops/buffers.py", "from bigbatch import GradientAccumulator"),
        (TF1, "from bigbatch.loops.checks import checked_weight"),
        (TF1, "from bigbatch.backends.tensorflow.values import widen"),
        ("planner/plan.py", "from bigbatch.diagnostics import verify"),
        ("errors.py", "from bigbatch.core.window import is_full"),
        ("engine/trainer.py", "from .phases import Phases"),
    ],
)
def test_the_guard_of_imports_can_fail(path, source):
    assert violations(path, "from bigbatch.errors import explain") == [] or path == "errors.py"
    assert violations(path, "import math") == []
    assert violations(path, source)


def loaded_after(statement: str) -> set[str]:
    program = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    run = [sys.executable, "-c", program]
    return set(
        json.loads(subprocess.run(run, capture_output=True, check=True, text=True).stdout)
    )


def test_import_loads_no_framework():
    loaded = loaded_after("import bigbatch; dir(bigbatch)")
    assert "bigbatch" in loaded
    assert not loaded & {*FRAMEWORKS, "numpy"}


def test_the_guard_of_lazy_imports_can_fail():
    assert "numpy" not in loaded_after("import bigbatch.core.window")
    assert "numpy" in loaded_after("import bigbatch.core.window, numpy")


def test_without_tensorflow_the_error_says_what_to_install():
    program = (
        "import sys; sys.modules['tensorflow'] = None\n"
        "import bigbatch\n"
        "try: bigbatch.GradientAccumulator\n"
        "except ImportError as error: print(type(error).__name__, error)"
    )
    run = [sys.executable, "-c", program]
    output = subprocess.run(run, capture_output=True, check=True, text=True).stdout
    assert output.startswith("MissingFrameworkError Received: bigbatch.GradientAccumulator")
    assert "pip install 'bigbatch[tensorflow]'" in output


def test_commands_and_flags_are_frozen():
    def flags(parser):
        return sorted(
            name
            for action in parser._actions
            for name in action.option_strings or [action.dest]
            if name not in ("-h", "--help")
        )

    (commands,) = (a for a in cli._parser()._actions if isinstance(a.choices, dict))
    setting = ["--batch-norm", "--coupled"]
    assert {name: flags(one) for name, one in commands.choices.items()} == {
        "demo": ["--output"],
        "run": [
            "--accumulation-steps",
            *setting,
            "--microbatch-size",
            "--module",
            "-m",
            "script",
        ],
        "verify": [*setting, "--json", "--microbatch-size", "factory"],
        "plan": ["--batch-size", "--json", "--memory-limit", "--plot", "--time", "factory"],
    }


def test_public_names_are_frozen():
    assert bigbatch.__all__ == [
        "ExactBatchNorm",
        "GradientAccumulator",
        "Monitor",
        "NoiseScale",
        "NoiseScaleEstimator",
        "NotEqualWarning",
        "Plan",
        "Verification",
        "__version__",
        "accumulate",
        "cross_microbatch_gather",
        "cross_microbatch_sum",
        "grow",
        "microbatch_size",
        "piecewise",
        "plan",
        "restore",
        "scale_learning_rate",
        "value_and_gradients",
        "verify",
    ]
    public = [n for n in dir(bigbatch.GradientAccumulator) if not n.startswith("_")]
    own = [n for n in public if n in vars(bigbatch.GradientAccumulator)]
    assert own == [
        "accumulate",
        "apply_when_full",
        "deserialize",
        "flush",
        "gradients",
        "is_full",
        "reset",
        "serialize",
        "step",
        "total_weight",
    ]


def test_every_public_name_is_documented():
    for name in bigbatch.__all__:
        member = getattr(bigbatch, name)
        assert isinstance(member, str) or member.__doc__
    for name, member in vars(bigbatch.GradientAccumulator).items():
        assert name.startswith("_") or member.__doc__


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'accumulated'"):
        _ = bigbatch.accumulated
