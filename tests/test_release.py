"""What is released: a wheel and an sdist, built, looked into, and installed by themselves."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

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
