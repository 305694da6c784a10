"""Replay a recorded trajectory through a live server, with and without splices: `python -m evals.replay`."""
