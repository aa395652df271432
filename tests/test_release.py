"""What is released: a wheel and an sdist, built, looked into, and installed by themselves."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import bigbatch

ROOT = Path(__file__).parent.parent


def run(*command: str, directory: Path = ROOT) -> str:
    done = subprocess.run(
        command, capture_output=True, cwd=directory, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def build(source: Path, kind: str, target: Path) -> Path:
    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        kind,
        "-d",
        str(target),
        directory=source,
    )
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """The wheel, built from the sdist: nothing that is not in it is needed."""
    directory = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    (source,) = directory.iterdir()
    return build(source, "wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_package_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"bigbatch"}
    assert "bigbatch/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    sources = {str(path.relative_to(ROOT / "src")) for path in ROOT.glob("src/**/*.py")}
    assert sources <= set(names)


def test_the_sdist_holds_what_a_contributor_needs(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ("Makefile", "constraints.txt", "tests/conftest.py", "docs/index.md", "README.md")
    assert [name for name in wanted if name not in names] == []


@pytest.fixture(scope="module")
def readme_of() -> Any:
    """What makes a package page of the README."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.for_package_page


def test_the_package_page_has_no_links_that_lead_nowhere(wheel, readme_of):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith("/METADATA")]
        page = archive.read(name).decode()
    assert "bigbatch.accumulate(model, microbatch_size=32)" in page
    relative = r"\]\((?!https?:|#)"
    assert not re.search(relative, page)
    assert "classifier: license" not in page.lower()  # deprecated beside License-Expression
    readme = (ROOT / "README.md").read_text()
    assert re.search(relative, readme)  # or this tests nothing
    there = readme_of(readme, "https://example.org/files")
    assert not re.search(relative, there)
    assert "![Terminal recording of the demo](https://example.org/files/docs/demo.svg)" in there


def test_twine_finds_nothing_wrong(sdist, wheel):
    pytest.importorskip("twine", reason="twine is in the extra `dev`; make sets it up")
    said = run(sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel))
    assert said.count("PASSED") == 2


def test_the_package_shows_public_names_only():
    names = [name for name in dir(bigbatch) if not name.startswith("__")]
    assert names == sorted(name for name in bigbatch.__all__ if not name.startswith("__"))
    assert "accumulate" in names


def test_versions_agree():
    version = bigbatch.__version__
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text().replace('"', "")
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_it_installs_where_there_is_nothing_else(wheel, tmp_path):
    venv.create(tmp_path, with_pip=True)
    python = str(tmp_path / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", str(wheel), directory=tmp_path)
    code = "import bigbatch, sys; print(bigbatch.__version__, 'tensorflow' in sys.modules)"
    printed = run(python, "-c", code, directory=tmp_path)
    assert printed == f"{bigbatch.__version__} False\n"
    assert "verify" in run(str(tmp_path / "bin" / "bigbatch"), "--help", directory=tmp_path)
    code = "import bigbatch; bigbatch.accumulate"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'bigbatch[tensorflow]'" in done.stderr
