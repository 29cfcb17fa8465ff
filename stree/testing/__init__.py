"""Checks of drafters, growths, verifiers and model families, for their authors."""
