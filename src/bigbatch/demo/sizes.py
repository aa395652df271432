"""The sizes of the demo."""

from __future__ import annotations

BATCH, EPOCHS, MICROBATCH = 512, 15, 64
NORM_EPOCHS, NORM_MICROBATCH = 4, 32
"""How the net with BatchNormalization trains."""
LIMIT = 24
"""The memory of the small device, in MiB."""
