"""DeepSpec's training step: logits, loss and every gradient behind given anchors."""

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.base import Batch
from dspark_jax.config_training import Losses
from dspark_jax.goldens.difference import Difference, Expected, close, same
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.train import anchors, step
from dspark_jax.train.losses import draft_logits
from dspark_jax.train.step import Knowledge
from dspark_jax.weights import deepspec
from dspark_jax.weights.tensors import CheckpointError


def from_folder(
    folder: Path, drafter: Drafter, lent: Lent, expected: Expected
) -> Iterator[Difference]:
    """The training forward, the loss and every gradient, behind the reference's anchors."""
    said = json.loads((folder / "loss.json").read_text())
    losses = Losses(
        cross_entropy=said["ce_loss_alpha"],
        l1=said["l1_loss_alpha"],
        confidence=said["confidence_head_alpha"],
        decay=said["loss_decay_gamma"],
    )
    given = jax.tree.map(jnp.asarray, dict(expected))
    batch = Batch(tokens=given["input_ids"], loss_mask=given["loss_mask"].astype(bool))
    known = Knowledge(
        features=given["target_hidden_states"],
        hidden=given["target_last_hidden_states"],
        lent=lent,
    )
    valid = given["block_keep_mask"].astype(bool)
    yield from training(drafter, batch, known, given["anchor_positions"], valid, losses, expected)


def training(
    drafter: Drafter,
    batch: Batch,
    known: Knowledge,
    chosen: jax.Array,
    valid: jax.Array,
    losses: Losses,
    expected: Expected,
) -> Iterator[Difference]:
    """Logits, loss and gradients of a batch, in the tensors' DeepSpec names."""
    blocks = anchors.cut(batch, chosen, valid, drafter.config.block_size)
    kept = np.asarray(valid)
    yield same("eval_mask", blocks.counted, expected["eval_mask"].astype(bool))
    yield same("target_ids", blocks.labels[kept], expected["target_ids"][kept])
    run = jax.jit(step.predictions, static_argnums=4)
    hidden, aligned = run(drafter, known, blocks, batch.tokens, blocks.anchors.shape[1])
    logits = jnp.stack([
        draft_logits(drafter.heads, known.lent, *row)[1]
        for row in zip(hidden, blocks.prevs, strict=True)
    ])  # fmt: skip
    yield close("draft_logits", logits[kept], expected["draft_logits"][kept])
    target_logits = drafter.heads.base_logits(known.lent, aligned)
    reference = expected["aligned_target_logits"]
    yield close("aligned_target_logits", target_logits[kept], reference[kept])
    if drafter.config.confidence is not None:
        confidence = drafter.heads.confidence(blocks.prevs, hidden)
        yield close("confidence_logits", confidence[kept], expected["confidence_logits"][kept])
    yield from _gradients(drafter, batch, known, blocks, losses, expected)


def _gradients(drafter, batch, known, blocks, losses, expected) -> Iterator[Difference]:
    graphdef, params = nnx.split(drafter)

    def objective(params):
        trained = nnx.merge(graphdef, params)
        return step.loss(trained, known, blocks, batch.tokens, losses, blocks.anchors.size)[0]

    value, gradient = jax.jit(jax.value_and_grad(objective))(params)
    yield close("loss", value, np.squeeze(expected["loss"]))
    names, seen = deepspec.namer(drafter.config), set()
    for path, variable in nnx.to_flat_state(gradient):
        name = "grad." + names(".".join(map(str, path)))
        seen.add(name)
        if not name.endswith("layer_scalar"):  # a stored constant has none
            yield close(name, variable[...], expected[name], floor=0.0)
    absent = {name for name in expected if name.startswith("grad.")} - seen
    if absent:
        raise CheckpointError(f"the reference trains what we do not: {sorted(absent)}")
