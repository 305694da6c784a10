"""The solve-rate harness: what a policy does to how often an agent succeeds, and what each execution of it costs."""
