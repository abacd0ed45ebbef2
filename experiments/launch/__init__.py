"""Thin recipes that start a program on many machines. Each prints what it would do with --dry-run."""
