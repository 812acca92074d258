"""Domino's head alone."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from dspark_jax.decode.verify import rule
from dspark_jax.goldens.difference import Difference, Expected, close, same
from dspark_jax.nn.domino import DominoHead
from dspark_jax.walk import Steps, follow, walk
from dspark_jax.weights import specforge
from dspark_jax.weights.tensors import read_json, required


def domino(folder: Path, expected: Expected) -> Iterator[Difference]:
    """The head alone: corrections along given tokens, and a greedy roll-out."""
    head, fields = specforge.read_head(folder), read_json(folder / "config.json")["dflash_config"]
    is_shifted = required(fields, "shift_label")
    first = 0 if is_shifted else 1  # without a shift row 0 is the anchor's and predicts nothing
    flat = {
        name: jnp.asarray(expected[name].reshape(-1, *expected[name].shape[2:]))
        for name in ("prev_token_ids", "hidden_states", "base_logits", "draft_logits")
    }
    hidden = flat["hidden_states"][:, first:]
    prevs = flat["prev_token_ids"][:, : hidden.shape[1]]
    transition = _transition(head, jnp.asarray(expected["target_embed"]))
    bias = follow(transition, head.init_state(len(prevs)), prevs.T, jnp.swapaxes(hidden, 0, 1))
    ours = flat["base_logits"][:, first:] + jnp.swapaxes(bias, 0, 1)
    yield close("draft_logits", ours, flat["draft_logits"][:, first:])
    rows = slice(0, -1) if is_shifted else slice(1, None)  # theirs always drafts B - 1
    hidden = jnp.asarray(expected["greedy_hidden"][:, rows])
    base = hidden @ expected["target_lm_head"].T
    keys = jax.random.split(jax.random.key(0), (base.shape[1], 1))
    across = Steps(logits=jnp.swapaxes(base, 0, 1), hidden=jnp.swapaxes(hidden, 0, 1), keys=keys)
    anchor = jnp.asarray(expected["greedy_anchor"])
    tokens, _ = walk(transition, rule(None).choose, head.init_state(1), anchor, across)
    yield same("greedy_tokens", tokens.T, expected["greedy_tokens"])


def _transition(head: DominoHead, embedding):
    def step(state, prev, hidden):
        state, query = head.query(state, prev, hidden, embedding)
        return state, query @ head.w2[...].T

    return step
