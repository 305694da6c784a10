"""Run the state machines for long, one process for each of SGLang's tree cores: `make fuzz STEPS=100000 SEED=1`.

Batches take turns: edits in one step of the scheduler (`queue_machine.py`), and in two (`machine.py`).

Prints its seed, a line of progress every so often, and where a check fails the shortest failing example it finds. The
same seed does the same operations again; a failure names the batch it was found in, with which it can be repeated
alone.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time

_CORES = ("rust", "python")
_STEPS_OF_AN_EDIT = ("one", "two")
_EXAMPLES = 25
"""Examples of one batch, each of `_STEPS` rules; a rule is one operation or a few."""
_STEPS = 50
_PROGRESS_S = 15.0
_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    # The order of a set of strings must not differ from run to run.
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
}


def main() -> int:
    """Fuzz both cores side by side, or one batch or core alone; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.in_process.fuzz", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="operations in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--core", choices=_CORES, help="this tree core alone, in this process")
    parser.add_argument("--edits", choices=_STEPS_OF_AN_EDIT, help="edits in so many steps alone (default: both)")
    parser.add_argument("--batch", type=int, help="with --core: this batch alone")
    args = parser.parse_args()
    if os.environ | _ENVIRONMENT != os.environ:
        # Some of it is read when an interpreter starts.
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.in_process.fuzz", *sys.argv[1:]], os.environ | _ENVIRONMENT
        )
    seed = secrets.randbelow(1 << 32) if args.seed is None else args.seed
    if args.core is not None:
        return _fuzz(args.core, args.edits, seed, args.steps, args.batch)
    print(f"fuzz: {args.steps:,} operations, SEED={seed}", flush=True)
    command = [sys.executable, "-m", "tests.in_process.fuzz", "--seed", str(seed), "--steps", str(args.steps // 2)]
    command += ["--edits", args.edits] if args.edits else []
    running = [subprocess.Popen([*command, "--core", core]) for core in _CORES]
    try:
        while any(process.poll() is None for process in running) and not any(process.poll() for process in running):
            time.sleep(0.5)
    finally:
        # Where one has failed, its example is what matters.
        for process in running:
            if process.poll() is None:
                process.terminate()
    statuses = [process.wait() for process in running]
    print(f"fuzz: {'failed' if any(statuses) else 'passed'}, SEED={seed}", flush=True)
    return 1 if any(statuses) else 0


def _fuzz(core: str, edits: str | None, seed: int, num_steps: int, only: int | None) -> int:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    import torch

    # What the server would log of each refusal, thousands of times.
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis import seed as seeded
    from hypothesis.stateful import run_state_machine_as_test

    from tests.in_process.machine import CacheMachine
    from tests.in_process.queue_machine import QueueMachine

    started = time.monotonic()
    told = started
    done = 0
    batch = 0

    def step(_machine: CacheMachine) -> None:
        nonlocal done, told
        done += 1
        if time.monotonic() - told > _PROGRESS_S:
            told = time.monotonic()
            print(f"fuzz: {core}: {done:,} of {num_steps:,} operations, {told - started:.0f} s", flush=True)

    while done < num_steps:
        batch = batch + 1 if only is None else only
        one_step = edits == "one" if edits else batch % 2 == 1
        machine = type("Machine", (QueueMachine if one_step else CacheMachine,), {"core": core, "on_step": step})
        try:
            run_state_machine_as_test(  # type: ignore[no-untyped-call]
                seeded((seed * 1_000_003 + batch) * len(_CORES) + _CORES.index(core))(machine),
                settings=settings(
                    max_examples=_EXAMPLES,
                    stateful_step_count=_STEPS,
                    database=None,
                    deadline=None,
                    phases=[Phase.generate, Phase.shrink],
                    suppress_health_check=list(HealthCheck),
                ),
            )
        except BaseException:
            again = f" --edits {edits}" if edits else ""
            repeat = f"python -m tests.in_process.fuzz --core {core} --seed {seed} --batch {batch}{again}"
            print(f"fuzz: {core}: failed in batch {batch}; again, alone: {repeat}", flush=True)
            raise
        if only is not None:
            break
    print(f"fuzz: {core}: {done:,} operations, {time.monotonic() - started:.0f} s, all checks held", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
