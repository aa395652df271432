"""What a batch goes through in `fit`, written once for every backend."""
