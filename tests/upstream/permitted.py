"""The differences that `make upstream` may find: each has a reason, and an end."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass


@dataclass(frozen=True)
class Permitted:
    """Tests or programs that may end differently with accumulation."""

    what: str
    """The name of a test or program; `*` stands for anything."""
    modes: tuple[str, ...]
    reason: str
    until: str
    """A sentence: when there is no such difference, or that it is meant."""

    def covers(self, name: str, mode: str) -> bool:
        """Say whether this is about a test or program in a mode."""
        # Names of tests have brackets, which stand for themselves.
        pattern = self.what.replace("[", "[[]")
        return mode in self.modes and fnmatch.fnmatchcase(name, pattern)


def permission(name: str, mode: str, among: tuple[Permitted, ...]) -> Permitted | None:
    """Return the first entry that permits a difference, if there is one."""
    return next((one for one in among if one.covers(name, mode)), None)


BOTH = ("split", "window")
BY_DESIGN = "By design."
PERMITTED: tuple[Permitted, ...] = (
    Permitted(
        "layers/*test_mel_spectrogram_basics",
        ("split",),
        "Inputs and targets of the test have different numbers of samples, so they cannot be "
        "cut together.",
        BY_DESIGN,
    ),
    Permitted(
        "trainers/*steps_per_e*",
        ("window",),
        "The test counts batches, or compares `fit` with `fit` on batches of another size: "
        "in window mode batches are parts of an update.",
        BY_DESIGN,
    ),
    Permitted(
        "callbacks/*BackupAndRestoreCallbackTest::test_b*",
        ("window",),
        "The test counts the calls of a layer by batches of the data set; in window mode state "
        "that does not depend on samples changes once per update.",
        BY_DESIGN,
    ),
    Permitted(
        "callbacks/*test_model_state_is_current_on_epoch_end",
        ("window",),
        "The test counts the calls of a model by batches of the data set; in window mode state "
        "that does not depend on samples changes once per update.",
        BY_DESIGN,
    ),
    Permitted(
        "trainers/*test_max_epochs_and_steps",
        ("window",),
        "The test counts batches, and window mode has more of them.",
        BY_DESIGN,
    ),
    Permitted(
        "trainers/*test_nested_inputs",
        ("window",),
        "`train_on_batch` after `fit` gives one batch of a window: the update comes later.",
        BY_DESIGN,
    ),
    Permitted(
        "keras_hub.resnet",
        BOTH,
        "BatchNormalization normalises with the statistics of micro-batches.",
        'By default; `batch_norm="exact"` uses the statistics of the batch.',
    ),
    Permitted(
        "keras_hub.clip_logits",
        BOTH,
        "The model compares the samples of a batch in its forward pass.",
        "The check of `fit` names the layer.",
    ),
)
