"""One adapter for each framework, behind the interface of `base`."""
