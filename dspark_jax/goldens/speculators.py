"""speculators' training forward behind given anchors, teacher forced."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dspark_jax.goldens.difference import Difference, Expected, close, same
from dspark_jax.nn import selector
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.nn.layers import rms_norm
from dspark_jax.train.losses import draft_logits
from dspark_jax.weights import speculators as format_
from dspark_jax.weights.tensors import read_json


def speculators(folder: Path, expected: Expected) -> Iterator[Difference]:
    """Logits of every predicting row; a Selector's training candidates and their logits."""
    drafter, _ = format_.read(folder)
    given = {name: jnp.asarray(value) for name, value in expected.items()}
    lent = Lent(embedding=given["target_embed"], head=given["target_lm_head"])
    anchors, tokens = given["anchor_positions"], given["input_ids"]
    hidden = _hidden(drafter, lent, given["target_hidden_states"], tokens, anchors)
    ahead = anchors[0, :, None] + jnp.arange(drafter.config.block_size)
    first = drafter.config.num_inputs - drafter.config.block_size  # theirs has the anchor's row
    aligned = _aligned(folder, drafter, lent, given, ahead)
    yield close("aligned_target_logits", aligned, expected["aligned_target_logits"][0, :, first:])
    prevs = tokens[0, ahead]
    base, logits = draft_logits(drafter.heads, lent, hidden, prevs)
    if drafter.config.candidates:
        yield close("base_logits", base, expected["base_logits"][0, :, first:])
        yield from _candidates(drafter, base, logits, aligned, expected, first)
    else:
        yield close("draft_logits", logits, expected["draft_logits"][0, :, first:])
    if drafter.config.confidence is not None:
        confidence = drafter.heads.confidence(prevs, hidden)
        yield close("confidence_logits", confidence, expected["confidence_logits"][0, :, first:])


def _hidden(
    drafter: Drafter,
    lent: Lent,
    features: Float[Array, "1 T F"],
    tokens: Int[Array, "1 T"],
    anchors: Int[Array, "1 A"],
) -> Float[Array, "A K D"]:
    """Final-normed states of the rows that predict."""

    @jax.jit
    def run(features, tokens, anchors):
        context = drafter.backbone.context(features, jnp.arange(tokens.shape[1])[None])
        valid = jnp.ones(anchors.shape, bool)
        given = tokens[:, anchors[0]], anchors, context, anchors, valid
        return drafter.hidden(lent, *given)[0]

    return run(features, tokens, anchors)


def _aligned(folder, drafter, lent, given, ahead) -> Float[Array, "A K V"]:
    """The target's logits for the tokens that rows predict, of the tokens that can be drafted."""
    states, weight = given["target_last_hidden_states"][0], given["target_final_norm"]
    eps = read_json(folder / "config.json")["transformer_layer_config"]["rms_norm_eps"]
    logits = rms_norm(states, weight, eps)[ahead] @ lent.head.T
    return logits[..., drafter.heads.tokens(jnp.arange(drafter.config.num_drafted))]


def _candidates(drafter, base, logits, aligned, expected, first) -> Iterator[Difference]:
    """The best base logits, the target's choice put in last where it is absent."""
    count = drafter.config.candidates
    ids = np.array(selector.top_candidates(base, count))
    order = np.take_along_axis(np.asarray(base), ids, -1).argmin(-1)
    label = np.asarray(jnp.argmax(aligned, -1))
    absent = ~np.any(ids == label[..., None], -1)
    where = *np.nonzero(absent), order[absent]
    ids[where] = label[absent]
    ids = np.sort(ids, -1)
    theirs = expected["training_candidates"][0, :, first:]
    by_id = np.argsort(theirs, -1)
    yield same("training_candidates", ids, np.take_along_axis(theirs, by_id, -1))
    reference = expected["training_candidate_logits"][0, :, first:]
    reference = np.take_along_axis(reference, by_id, -1)
    ours = np.take_along_axis(np.asarray(logits), ids, -1)
    yield close("training_candidate_logits", ours, reference)
