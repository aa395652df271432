"""The training of a batch in `fit`, written once for every backend."""
