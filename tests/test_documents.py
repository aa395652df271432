"""What the documents say is run: code blocks of the README and docs, and the examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from comparison import paired

from workers.cluster import run_workers

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
FOR_THE_MATRIX = {
    "02_distributed_loop.py",
    "05_multi_gpu.py",  # a guide has the same
    "06_contrastive.py",
    "07_out_of_memory.py",
    "09_two_workers.py",
}
"""Examples that take long, or show what something else that is tested shows."""
EXAMPLES = [
    pytest.param(path, marks=pytest.mark.matrix) if path.name in FOR_THE_MATRIX else path
    for path in sorted(ROOT.glob("examples/*.py"))
]


def run(*arguments: str, directory: Path | None = None, timeout: float = 300) -> str:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        cwd=directory,
        env=environment,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


ON_WORKERS = "tf.distribute.MultiWorkerMirroredStrategy()"
ON_PROCESSES = "DistributedDataParallel(model)"
ON_THE_OLD_STACK = "from gradient_accumulator import"
"""What is in a block that needs several processes, or another TensorFlow: run by itself."""
APART = (ON_WORKERS, ON_PROCESSES, ON_THE_OLD_STACK)


def blocks(text: str) -> list[str]:
    """Return the Python blocks of a document."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def openings(text: str) -> list[str]:
    """Return the lines that open a block of Python, in whatever way."""
    return re.findall(r"^[^\w\n]*(?:```|~~~)[^\w\n]*i?py.*$", text, re.I | re.M)


def program(path: Path) -> str:
    """Return the Python blocks of a document, which build on each other, as one program."""
    return "\n".join(
        block
        for block in blocks(path.read_text())
        if not any(words in block for words in APART)
    )


OTHER_BACKENDS = [path for path in DOCUMENTS if "KERAS_BACKEND" in program(path)]
"""Those that choose the backend of Keras, each a process."""
ALONE = [
    path
    for path in DOCUMENTS
    if path.name == "README.md"
    or re.search(r"\bset_(logical|floatx|dtype|global)", program(path))
]
"""Those that change what holds for the whole process, and the README."""
TOGETHER = [
    path for path in DOCUMENTS if program(path) and path not in [*ALONE, *OTHER_BACKENDS]
]
"""Run one after the other in one process: TensorFlow takes seconds to start."""
ONE_BY_ONE = """
import runpy, sys
import keras

for path in sys.argv[1:]:
    print(path)
    keras.utils.clear_session()
    runpy.run_path(path)
    print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "paths", [*([path] for path in ALONE), TOGETHER], ids=lambda paths: paths[0].name
)
def test_code_in_documents_runs_and_prints_what_they_say(paths, tmp_path):
    """Of what it prints, the banner; the figures of the demo are measured."""
    programs = []
    for path in paths:
        programs.append(str(tmp_path / f"{path.stem}.py"))
        Path(programs[-1]).write_text(program(path))
    output = run("-c", ONE_BY_ONE, *programs)
    for path, name in paired(paths, programs):
        printed = output.split(f"{name}\n")[1].split("\ndone\n")[0]
        lines = re.findall(r"^bigbatch: .*$", path.read_text(), re.MULTILINE)
        assert lines or path.name != "README.md"
        assert [line for line in lines if line not in printed] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", OTHER_BACKENDS, ids=lambda path: path.name)
def test_code_for_other_backends_runs(path, tmp_path):
    (tmp_path / "program.py").write_text(program(path))
    printed = run(str(tmp_path / "program.py"))
    lines = re.findall(r"^bigbatch: .*$", path.read_text(), re.MULTILINE)
    assert lines
    assert [line for line in lines if line not in printed] == []


@pytest.mark.slow
def test_code_for_many_machines_runs_on_two_workers(tmp_path):
    scripts = [block for path in DOCUMENTS for block in blocks(path.read_text())]
    (script,) = [block for block in scripts if ON_WORKERS in block]
    (tmp_path / "train.py").write_text(script)
    outputs = run_workers(str(tmp_path / "train.py"))
    losses = [re.findall(r"loss: (\d\.\d+)", output)[-1] for output in outputs]
    assert losses[0] == losses[1]  # each logs that of all samples


@pytest.mark.slow
@pytest.mark.matrix  # sets up an environment: minutes the first time
def test_code_for_gradient_accumulator_runs_with_it(tmp_path):
    """And leaves the last window out, as the document says."""
    documents = [blocks(path.read_text()) for path in DOCUMENTS]
    (document,) = [parts for parts in documents if ON_THE_OLD_STACK in "".join(parts)]
    (index,) = [i for i, block in enumerate(document) if ON_THE_OLD_STACK in block]
    parts = [*document[: index + 1], "print('updates:', int(model.optimizer.iterations))"]
    (tmp_path / "before.py").write_text("\n".join(parts))
    script = str(tmp_path / "before.py")
    output = run("-m", "benchmarks.peer", script, directory=ROOT, timeout=1800)
    if output.startswith("skipped"):
        pytest.skip(output)
    assert output.splitlines()[-1] == "updates: 2"


def test_no_code_is_left_out():
    others = [*ROOT.glob("*.md"), *ROOT.glob("benchmarks/**/*.md")]
    for path in {*DOCUMENTS, *others}:
        text = path.read_text()
        assert len(openings(text)) == len(blocks(text)), path
        assert path in DOCUMENTS or not blocks(text), path


@pytest.mark.parametrize(
    "opening", ["```py", "``` python", "```pycon", "~~~python", "- ```python", "```{.python}"]
)
def test_code_that_is_left_out_is_found(opening):
    text = "```python\nx = 1\n```\n"
    assert len(openings(text)) == len(blocks(text)) == 1
    text += f"\n{opening}\nx = 2\n{opening[:3]}\n"
    assert len(openings(text)) > len(blocks(text))


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    run("-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path), directory=ROOT)
    assert (tmp_path / "api.html").stat().st_size > 10_000


def test_readme_has_code():
    assert "bigbatch.GradientAccumulator" in program(ROOT / "README.md")


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert "benchmarks/results/memory.png" in links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_table_of_the_readme_is_the_one_that_was_measured():
    shown = (ROOT / "README.md").read_text().split("<!-- equality -->")[1].split("<!--")[0]
    measured = (ROOT / "benchmarks/results/equality.md").read_text()
    assert shown.strip()
    assert shown.strip() in measured


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        ["equality", "speed", "memory", "tracing"],
        ["growth", "options"],
        ["workers"],
    ],
    ids=lambda sections: sections[0],
)
def test_the_benchmarks_can_be_run(sections):
    """What they measure here means nothing, and goes nowhere."""
    output = run("-m", "benchmarks", "--smoke", *sections, directory=ROOT)
    written = re.findall(r"^wrote \S+/(\w+)\.md$", output, re.MULTILINE)
    assert written == sections


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(path, tmp_path):
    output = run(str(path), directory=tmp_path)
    for name in re.findall(r"wrote (\S+)", output):
        assert (tmp_path / name).stat().st_size > 0
    if path.name == "06_contrastive.py":
        full, plain, coupled = re.findall(r"(\d\.\d{4}) +(\d\.\d{4}) +(\d+\.\d)%", output)
        assert float(plain[2]) < float(full[2]) - 4
        # The same but for rounding over 150 updates: loss, temperature, accuracy.
        assert [float(value) for value in coupled] == pytest.approx(
            [float(value) for value in full], rel=0.02
        )


EXECUTE = """
import sys
import nbclient, nbformat

notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=200).execute()
print(sum(bool(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("examples/notebooks/*.ipynb")), ids=lambda path: path.name
)
def test_notebooks_run(path, tmp_path):
    assert (
        int(run("-c", EXECUTE, str(path), directory=tmp_path)) >= 4
    )  # cells that say something


def test_documents_name_no_machine():
    examples = [path for path in ROOT.glob("examples/**/*") if path.is_file()]
    for path in [*DOCUMENTS, ROOT / "CHANGELOG.md", *examples]:
        assert not re.search(r"/(root|home|work|tmp)/", path.read_text()), path
