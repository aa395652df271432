"""Execute the notebooks and store them with their outputs: `make notebooks`."""

from __future__ import annotations

import os
from pathlib import Path

import nbclient
import nbformat

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", TF_CPU_ALLOCATOR_USE_BFC="true")


def joined(outputs: list) -> list:
    """Return outputs with text that was printed in pieces as one."""
    found: list = []
    for one in outputs:
        if found and one.output_type == found[-1].output_type == "stream":
            found[-1].text += one.text
        else:
            found.append(one)
    return found


for path in sorted(Path(__file__).parent.glob("*.ipynb")):
    notebook = nbformat.read(path, 4)
    nbclient.NotebookClient(notebook, timeout=300, record_timing=False).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":  # what frameworks write to standard error is no result
            kept = [one for one in cell.outputs if one.get("name") != "stderr"]
            cell.outputs = joined(kept)
    nbformat.write(notebook, path)
    print(f"stored {path.name}")
