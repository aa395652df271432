"""The table of versions in docs/versions.md is that of the last run of `make matrix`."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

import matrix


def results():
    return json.loads(matrix.RESULTS.read_text())


def test_the_page_has_the_table_of_the_results():
    page = matrix.PAGE.read_text()
    assert matrix.table(results()) in page
    assert matrix.with_table(page, results()) == page


def test_a_row_that_fails_would_show():
    assert "fails" not in matrix.table(results())
    name = matrix.ROWS[0].name
    noted = {**results()[name], "loops": False}
    assert "fails" in matrix.table({name: noted})
    assert matrix.with_table(matrix.PAGE.read_text(), {name: noted}) != (
        matrix.PAGE.read_text()
    )


def test_every_row_that_was_run_has_passed():
    noted, rows = results(), {row.name: row for row in matrix.ROWS}
    assert noted
    assert set(noted) <= set(rows)
    for name, outcome in noted.items():
        assert outcome["loops"] is True
        assert outcome["fit"] is (True if rows[name].fit else None)


def is_in_history(commit):
    """Whether git knows a commit, where it has all of the history; if not, nobody can say."""
    try:
        shallow = matrix.git("rev-parse", "--is-shallow-repository").strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return True  # a source distribution
    command = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    return (
        shallow == "true"
        or not subprocess.run(
            command, cwd=matrix.ROOT, capture_output=True, check=False
        ).returncode
    )


def check_commits(noted):
    for name, outcome in noted.items():
        commit = outcome.get("commit", "")
        # Not with changes, either: nobody could run that again.
        assert re.fullmatch("[0-9a-f]{7}", commit), f"{name} was run on commit {commit!r}"
        assert is_in_history(commit), f"{name} was run on {commit}, which is not in the history"


def test_every_row_says_the_commit_it_was_run_on():
    check_commits(results())


@pytest.mark.parametrize("commit", [None, "", "8acaf1b+changes", "HEAD", "0000000"])
def test_a_row_without_a_commit_would_be_seen(commit):
    name, noted = next(iter(results().items()))
    check_commits({name: noted})
    if commit == "0000000" and is_in_history(commit):
        pytest.skip("there is no history here")
    changed = {**noted, "commit": commit}
    if commit is None:
        del changed["commit"]
    with pytest.raises(AssertionError, match=f"{name} was run on"):
        check_commits({name: changed})


def test_the_commit_says_whether_files_were_changed(monkeypatch):
    answers = {"status": "", "rev-parse": "0123456789abcdef\n"}
    monkeypatch.setattr(matrix, "git", lambda command, *_: answers[command])
    assert matrix.current_commit() == "0123456"
    answers["status"] = " M src/bigbatch/core/window.py\n"
    assert matrix.current_commit() == "0123456+changes"


def test_the_results_themselves_are_no_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "matrix.json")
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "page.md")
    for path in (matrix.RESULTS, matrix.PAGE, source := tmp_path / "source.py"):
        path.write_text("1")
    matrix.git("init", "--quiet")
    matrix.git("add", ".")
    author = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    matrix.git(*author, "commit", "--quiet", "--no-verify", "-m", "test")
    matrix.RESULTS.write_text("2")
    matrix.PAGE.write_text("2")
    assert re.fullmatch("[0-9a-f]{7}", matrix.current_commit())
    source.write_text("2")
    assert matrix.current_commit().endswith("+changes")


@pytest.mark.parametrize(
    ("ends", "code"),
    [(["passed"], 0), (["SKIPPED: no Python"], 0), (["passed", "FAILED: loops"], 1)],
)
def test_the_exit_code_says_whether_a_row_failed(ends, code, monkeypatch, capsys):
    monkeypatch.setattr(matrix, "build_wheel", lambda: None)
    left = iter(ends)
    monkeypatch.setattr(matrix, "current_commit", lambda: "0123456")
    monkeypatch.setattr(matrix, "run_row", lambda row, wheel, commit: (next(left), None))
    names = [row.name for row in matrix.ROWS[: len(ends)]]
    assert matrix.main(names) == code
    printed = capsys.readouterr().out
    assert all(end in printed for end in ends)


def test_a_run_notes_its_commit(monkeypatch, tmp_path):
    row = matrix.ROWS[0]
    monkeypatch.setattr(matrix, "find_python", lambda _: "python")
    monkeypatch.setattr(matrix, "environment_of", lambda *_: "python")
    monkeypatch.setattr(matrix, "versions_of", lambda *_: {})
    monkeypatch.setattr(matrix, "passed", lambda *_: True)
    assert matrix.run_row(row, tmp_path, "0123456")[1]["commit"] == "0123456"


def test_unknown_rows_are_refused(capsys):
    assert matrix.main(["tf0.1"]) == 2
    assert "tf0.1" in capsys.readouterr().out


def test_the_workflow_runs_the_rows_that_there_are():
    workflow = (matrix.ROOT / ".github" / "workflows" / "ci.yml").read_text()
    found = set(re.findall(r"\{ row: (\S+), python: \"([\d.]+)\" \}", workflow))
    # Python 3.7 is not offered there.
    assert found == {(row.name, row.python) for row in matrix.ROWS if row.name != "tf1.14"}
