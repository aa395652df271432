"""Pictures that notebooks show."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class Drawing(Figure):
    """A Matplotlib figure that a notebook shows, also if pyplot was never imported."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png", dpi=100)
        return stream.getvalue()
