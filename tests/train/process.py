"""A run in its own process: HOST:PORT,COUNT,INDEX (or "") WORKDIR STOP_AFTER [STEPS [HELD]]."""

import os
import signal
import sys
from pathlib import Path

from dspark_jax import processes


def main(how: str, workdir: str, stop_after: str, steps: str = "6", held: str = "0") -> None:
    """Trains, on a mesh if there are several; the second gets a SIGTERM behind a step."""
    if how:
        processes.meet(how)
    import jax

    from dspark_jax.train import initial, loop, placement
    from dspark_jax.weights import native
    from tests.train import mesh_test

    jax.config.update("jax_disable_most_optimizations", True)
    target, corpus = mesh_test.make_target(), mesh_test.make_corpus()
    mesh = "fsdp=4,tensor=2" if how else None  # parameters span the processes
    config = mesh_test.make_config(workdir, mesh, steps=int(steps), **mesh_test.measured(int(held)))
    shape = initial.drafter_config(config.drafter, target.config)

    def stop(line: dict) -> None:
        if line["step"] == int(stop_after) and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    target = placement.of(config).module(target)  # as a session places it
    drafter = loop.run(config, target, corpus, shape, stop)
    if processes.is_first():
        native.save(Path(workdir) / "drafter", drafter, "float32", "# A card\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
