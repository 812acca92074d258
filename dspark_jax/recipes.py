"""The six drafters of the family as their authors train them, and config files that name runs."""

import dataclasses
import importlib.util
from pathlib import Path

from dspark_jax.config import Confidence, Convolution, Domino, Markov, Recurrent
from dspark_jax.config_training import DrafterRecipe, Losses, TrainConfig


def pod(name: str, target: str, mask_token: int, mesh: str) -> TrainConfig:
    """DSpark's published budget on a pod slice, in packed rows: 10 passes over 1.3 M conversations.

    Args:
      name: of the data and work folders.
      target: its folder; held in bf16, as targets are published and served.
      mask_token: a row of its embedding that no text holds.
      mesh: the slice's chips.
    """
    return TrainConfig(
        data=f"data/{name}",
        workdir=f"runs/{name}",
        target=target,
        target_dtype="bfloat16",
        drafter=DrafterRecipe(num_layers=5, block_size=7, mask_token=mask_token),
        losses=Losses(cross_entropy=0.1, l1=0.9, confidence=1.0, decay=4.0),
        steps=24_000,
        batch_size=128,
        num_anchors=2048,
        anchor_chunk=128,
        max_length=4096,
        pack=True,
        mesh=mesh,
        holdout=256,
        evaluate_every=1000,
    )


def six(base: TrainConfig, rank: int = 256, gru_width: int = 1024) -> dict[str, TrainConfig]:
    """A run for each drafter, alike in everything but head, layout and losses.

    DSpark's three take the losses of `base`; the others learn from the data's tokens alone. Work
    folders are named below that of `base`.

    Args:
      base: the target, the backbone, data, optimizer and budget.
      rank: R of every head.
      gru_width: of Domino's state.
    """
    dspark = {"confidence": Confidence(), "predict_from_anchor": True}
    plain = {"confidence": None, "predict_from_anchor": False}
    labels = {"cross_entropy": 1.0, "l1": 0.0, "confidence": 0.0}
    runs = {
        "dflash": _run(base, {"head": None, **plain}, labels),
        "dspark": _run(base, {"head": Markov(rank), **dspark}, {}),
        "dspark-gated": _run(base, {"head": Markov(rank, "gated"), **dspark}, {}),
        "dspark-rnn": _run(base, {"head": Recurrent(rank), **dspark}, {}),
        "domino": _run(
            base,
            {"head": Domino(rank, gru_width), "confidence": None, "predict_from_anchor": True},
            {**labels, "base": 1.0, "base_decay": 1.0, "is_contiguous": False},
        ),
        "dflash2": _run(
            base,
            {"head": Markov(rank, "linear"), "convolution": Convolution(), "candidates": 16}
            | plain,
            {**labels, "base": 1.0, "base_decay": None, "selector": 1.0},
        ),
    }
    return {
        name: dataclasses.replace(run, workdir=str(Path(base.workdir) / name))
        for name, run in runs.items()
    }


def _run(base: TrainConfig, drafter: dict, losses: dict) -> TrainConfig:
    changed: DrafterRecipe = dataclasses.replace(base.drafter, **drafter)
    minimised: Losses = dataclasses.replace(base.losses, **losses)
    return dataclasses.replace(base, drafter=changed, losses=minimised)


def read(spec: str) -> TrainConfig:
    """The run that FILE.py or FILE.py:NAME stands for.

    Raises:
      ValueError: the file defines no such run.
    """
    name, _, chosen = spec.partition(":")
    runs = read_all(name)
    if chosen in runs:
        return runs[chosen]
    named = ", ".join(filter(None, runs))
    if not chosen:
        raise ValueError(f"config = {spec}: name one of its runs, as in {name}:NAME: {named}")
    raise ValueError(f"config = {spec}: {name} has {named or 'one run, without a name'}")


def read_all(file: str) -> dict[str, TrainConfig]:
    """The runs of a config file: its `configs`, or its `config` under the empty name.

    Raises:
      ValueError: there is no such file, or it defines neither.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"config = {path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    runs = getattr(module, "configs", None) or {"": getattr(module, "config", None)}
    if not all(isinstance(run, TrainConfig) for run in runs.values()):
        raise ValueError(
            f"{path} must define `config`, a dspark_jax.config.TrainConfig, or `configs`, "
            "several of them by name"
        )
    return runs
