"""Benchmarks of single parts, and of edited conversations side by side; their rows are JSON lines."""
