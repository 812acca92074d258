"""One of two processes that share a run: HOST:PORT,COUNT,INDEX WORKDIR STOP_AFTER."""

import os
import signal
import sys
from pathlib import Path

import numpy as np

from dspark_jax import processes


def main(how: str, workdir: str, stop_after: str) -> None:
    """Trains on a mesh over all processes; the last one gets a SIGTERM behind a step."""
    processes.meet(how)
    import jax
    from flax import nnx

    from dspark_jax.train import initial, loop
    from tests.train import mesh_test

    jax.config.update("jax_disable_most_optimizations", True)
    target, corpus = mesh_test.make_target(), mesh_test.make_corpus()
    config = mesh_test.make_config(workdir, mesh_test.MESHES[0])
    shape = initial.drafter_config(config.drafter, target.config)

    def stop(line: dict) -> None:
        if line["step"] == int(stop_after) and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    drafter = loop.run(config, target, corpus, shape, stop)
    if processes.is_first():
        parameters = [np.asarray(x) for x in jax.tree.leaves(nnx.state(drafter))]
        np.savez(Path(workdir) / "parameters.npz", *parameters)


if __name__ == "__main__":
    main(*sys.argv[1:])
