"""The meaning of accumulation in plain Python: no framework is imported here."""
