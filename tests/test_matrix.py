"""The table of supported versions in the README is that of the last run of `make matrix`."""

from __future__ import annotations

import json

import pytest

import matrix


def results():
    return json.loads(matrix.RESULTS.read_text())


def test_the_readme_has_the_table_of_the_results():
    readme = matrix.README.read_text()
    assert matrix.table(results()) in readme
    assert matrix.with_table(readme, results()) == readme


def test_a_row_that_fails_would_show():
    name = matrix.ROWS[0].name
    noted = {**results()[name], "loops": False}
    assert "fails" in matrix.table({name: noted})
    assert matrix.with_table(matrix.README.read_text(), {name: noted}) != (
        matrix.README.read_text()
    )


def test_every_row_that_was_run_has_passed():
    noted, rows = results(), {row.name: row for row in matrix.ROWS}
    assert noted
    assert set(noted) <= set(rows)
    for name, outcome in noted.items():
        assert outcome["loops"] is True
        assert outcome["fit"] is (True if rows[name].fit else None)


@pytest.mark.parametrize(
    ("ends", "code"),
    [(["passed"], 0), (["SKIPPED: no Python"], 0), (["passed", "FAILED: loops"], 1)],
)
def test_the_exit_code_says_whether_a_row_failed(ends, code, monkeypatch, capsys):
    monkeypatch.setattr(matrix, "build_wheel", lambda: None)
    left = iter(ends)
    monkeypatch.setattr(matrix, "run_row", lambda row, wheel: (next(left), None))
    names = [row.name for row in matrix.ROWS[: len(ends)]]
    assert matrix.main(names) == code
    printed = capsys.readouterr().out
    assert all(end in printed for end in ends)


def test_unknown_rows_are_refused(capsys):
    assert matrix.main(["tf0.1"]) == 2
    assert "tf0.1" in capsys.readouterr().out
