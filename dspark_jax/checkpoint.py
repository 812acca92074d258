"""Orbax: save and restore train state and data position; an unfinished save is never latest."""

from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

State = Any  # a pytree of arrays


class Checkpoints:
    """The checkpoints of one run, in a folder."""

    def __init__(self, folder: Path, keep: int):
        policy = ocp.training.preservation_policies.LatestN(keep)
        self._checkpointer = ocp.training.Checkpointer(
            folder.absolute(), preservation_policy=policy, cleanup_tmp_directories=True
        )

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        metadata = self._checkpointer.latest
        return None if metadata is None else metadata.step

    def save(self, step: int, state: State, position: dict) -> None:
        """Starts saving; the arrays are copied before it returns.

        A save still in progress is waited for: without `force` orbax would skip this one instead.
        """
        self._checkpointer.save_checkpointables_async(
            step, {"state": state, "position": position}, overwrite=True, force=True
        )

    def restore(self, like: State) -> tuple[State, dict]:
        """The newest state, placed as `like` is, and the data position.

        Args:
          like: a state of the same shapes, dtypes and shardings.
        """
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        wanted = {"state": abstract, "position": None}
        loaded = self._checkpointer.load_checkpointables(self.latest, wanted)
        return loaded["state"], loaded["position"]

    def close(self) -> None:
        """Waits for saves in progress."""
        self._checkpointer.close()
