"""Domino's head: the reference's corrections and its greedy roll-out, both alignments."""

import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.flax import load_file

from dspark_jax.config import Domino, DrafterConfig, Geometry, Rotary
from dspark_jax.decode.verify import rule
from dspark_jax.nn.drafter import Heads
from dspark_jax.walk import Steps, follow, walk

GOLDENS = Path(__file__).parent.parent / "goldens"


@pytest.fixture(params=["shift", "noshift_prefix1"])
def golden(request):
    """The head with the reference's weights, whether labels are shifted, and its outputs."""
    folder = GOLDENS / f"domino_head_{request.param}"
    hf = json.loads((folder / "config.json").read_text())
    fields, width = hf["dflash_config"], hf["hidden_size"]
    config = DrafterConfig(
        geometry=Geometry(
            width=width, mlp_width=1, heads=1, kv_heads=1, head_dim=2, rotary=Rotary(theta=1e4)
        ),
        vocab_size=hf["vocab_size"],
        num_layers=1,
        block_size=hf["block_size"],
        target_layer_ids=(0,),
        mask_token=0,
        predict_from_anchor=fields["shift_label"],
        head=Domino(
            rank=fields["emb_dim"],
            gru_width=fields["gru_hidden_dim"],
            pure_prefix=fields["pure_draft_prefix_len"],
        ),
    )
    heads = Heads(config, jnp.float32, rngs=nnx.Rngs(0))
    tensors = load_file(folder / "model.safetensors")
    heads.head.input_gates.set_value(tensors["prefix_gru.weight_ih_l0"])
    heads.head.state_gates.set_value(tensors["prefix_gru.weight_hh_l0"])
    heads.head.bottleneck.weight.set_value(tensors["embed_proj.0.weight"])
    heads.head.w2.set_value(tensors["embed_proj.2.weight"])
    return heads, fields["shift_label"], load_file(folder / "expected.safetensors")


def test_corrections_along_given_tokens_are_the_references(golden):
    heads, is_shifted, expected = golden
    first = 0 if is_shifted else 1  # without a shift, row 0 is the anchor and predicts nothing
    flat = {
        name: expected[name].reshape(-1, *expected[name].shape[2:])
        for name in ("prev_token_ids", "hidden_states", "base_logits", "draft_logits")
    }
    hidden, logits = (flat[n][:, first:] for n in ("hidden_states", "draft_logits"))
    prevs = flat["prev_token_ids"][:, : hidden.shape[1]]
    state, transition = heads.transition(len(prevs), embedding=expected["target_embed"])
    bias = follow(transition, state, prevs.T, jnp.swapaxes(hidden, 0, 1))
    ours = flat["base_logits"][:, first:] + jnp.swapaxes(bias, 0, 1)
    chex.assert_trees_all_close(ours, logits, atol=1e-4 * float(jnp.abs(logits).max()))


def test_the_greedy_roll_out_is_the_references(golden):
    heads, is_shifted, expected = golden
    rows = slice(0, -1) if is_shifted else slice(1, None)  # theirs always drafts B - 1
    hidden = expected["greedy_hidden"][:, rows]
    base = hidden @ expected["target_lm_head"].T
    state, transition = heads.transition(1, embedding=expected["target_embed"])
    steps = Steps(
        logits=jnp.swapaxes(base, 0, 1),
        hidden=jnp.swapaxes(hidden, 0, 1),
        keys=jax.random.split(jax.random.key(0), (7, 1)),
    )
    tokens, _ = walk(transition, rule(None).choose, state, expected["greedy_anchor"], steps)
    np.testing.assert_array_equal(tokens.T, expected["greedy_tokens"])
