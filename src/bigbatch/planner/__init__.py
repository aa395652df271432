"""Memory: what an update takes, predicted from measurements, for devices here and elsewhere."""
