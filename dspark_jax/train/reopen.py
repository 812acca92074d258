"""A run that has ended, opened again: its config, its drafter as training left it."""

from pathlib import Path

from flax import nnx

from dspark_jax.checkpoint import Checkpoints
from dspark_jax.config import DrafterConfig
from dspark_jax.config_training import TrainConfig
from dspark_jax.folders import locked
from dspark_jax.nn.drafter import Drafter
from dspark_jax.nn.target import Target
from dspark_jax.train import loop
from dspark_jax.train.workdir import pinned
from dspark_jax.weights.native import from_dict


def configs(workdir: Path) -> tuple[TrainConfig, DrafterConfig]:
    """What a run was started with.

    Raises:
      ValueError: the folder holds no run.
    """
    known = pinned(workdir)
    if known is None:
        raise ValueError(f"run = {workdir}: has no config.json, so it is no work folder of a run")
    where = f"{workdir}/config.json"
    config = from_dict(TrainConfig, known["train"], where)
    return config, from_dict(DrafterConfig, known["drafter"], where)


def drafter(workdir: Path, target: Target) -> Drafter:
    """The fp32 parameters of the last checkpoint.

    Raises:
      ValueError: there is no checkpoint, or the run is going on.
    """
    config, drafter_config = configs(workdir)
    graphdef, like, _ = loop.start(config, target, drafter_config, is_new=False)
    with locked(workdir):  # to open checkpoints clears away a save in progress
        checkpoints = Checkpoints(workdir / "checkpoints", config.keep)
        try:
            if checkpoints.latest is None:
                raise ValueError(f"run = {workdir}: has no complete checkpoint")
            state, _ = checkpoints.restore(like)
        finally:
            checkpoints.close()
    return nnx.merge(graphdef, state.params)
