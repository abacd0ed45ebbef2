"""Trained drafters in the formats of other projects, read and written."""
