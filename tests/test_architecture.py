"""The rooms of the house, the direction of imports, and the public face."""

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
# A room may import from rooms of a lower floor, and from itself.
FLOORS = {
    "errors": 0,
    "core": 1,
    "tf": 2,
    "keras": 3,
    "planner": 4,
    "diagnostics": 4,
    "demo": 5,
    "cli": 6,
}
FRAMEWORKS = {"tensorflow", "keras", "tf_keras", "torch", "jax"}
ALLOWED_FRAMEWORKS = {"errors": set(), "core": set(), "tf": {"tensorflow"}}


def violations(path: str, source: str) -> list[str]:
    """Return what `source`, standing at `path` inside the package, imports but may not."""
    room = path.split("/")[0].split(".")[0]
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
            package, *rest = name.split(".")
            if package in FRAMEWORKS - ALLOWED_FRAMEWORKS.get(room, FRAMEWORKS):
                found.append(f"{path}: {name}")
            if package == "bigbatch" and rest[0] != room and rest[0] in FLOORS:
                if FLOORS[rest[0]] >= FLOORS[room]:
                    found.append(f"{path}: {name}")
            elif package == "bigbatch" and rest[0] not in FLOORS:
                found.append(f"{path}: {name}")
    return found


def modules() -> dict[str, str]:
    files = {str(p.relative_to(SOURCE)): p.read_text() for p in SOURCE.rglob("*.py")}
    del files["__init__.py"]  # the public face; see the test of lazy imports
    return files


def test_imports_go_one_way():
    assert [v for path, source in modules().items() for v in violations(path, source)] == []


def test_every_module_is_in_a_room():
    assert {path.split("/")[0].split(".")[0] for path in modules()} <= set(FLOORS)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/window.py", "from bigbatch.tf.buffers import GradientBuffer"),
        ("core/window.py", "import tensorflow as tf"),
        ("core/window.py", "def late():\n    from bigbatch.tf import buffers"),
        ("tf/buffers.py", "import keras"),
        ("tf/buffers.py", "from bigbatch.keras import fit"),
        ("tf/buffers.py", "from bigbatch import GradientAccumulator"),
        ("planner/plan.py", "from bigbatch.diagnostics import verify"),
        ("errors.py", "from bigbatch.core.window import is_full"),
        ("keras/fit.py", "from .step import train_step"),
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
        "run": ["--accumulation-steps", *setting, "--microbatch-size", "script"],
        "verify": [*setting, "--json", "--microbatch-size", "factory"],
        "plan": ["--batch-size", "--json", "--memory-limit", "--plot", "--time", "factory"],
    }


def test_public_names_are_frozen():
    assert bigbatch.__all__ == [
        "GradientAccumulator",
        "Monitor",
        "NoiseScale",
        "NoiseScaleEstimator",
        "Plan",
        "Verification",
        "__version__",
        "accumulate",
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
