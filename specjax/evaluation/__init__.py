"""Benchmarks, prompts and reports: whether speculation paid, on which text, and by how much."""
