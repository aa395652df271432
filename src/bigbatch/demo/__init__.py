"""The demo: a batch too large for a small device, the line that makes it fit, the proof."""
