"""z-lab's DFlash and DFlash-2: three cached rounds as the reference drafts them."""

import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file

from dspark_jax.config import Convolution, Markov
from dspark_jax.decode.draft import proposer
from dspark_jax.decode.propose import Candidates
from dspark_jax.decode.verify import rule
from dspark_jax.nn import selector
from dspark_jax.nn.drafter import Lent
from dspark_jax.sampling import Sampling, law
from dspark_jax.weights import zlab
from dspark_jax.weights.tensors import CheckpointError

GOLDENS = Path(__file__).parent.parent / "goldens"
SLOTS = 32


@pytest.fixture(scope="module", params=["dflash_qwen3", "dflash_qwen3_sliding", "dflash2_qwen3"])
def golden(request):
    """A drafter, what the reference drafted with it, the lent tables, and its candidates."""
    folder = GOLDENS / request.param
    expected = load_file(folder / "expected.safetensors")
    lent = Lent(embedding=expected["target_embed"], head=expected["target_lm_head"])
    count = 16 if "dflash2" in request.param else 0
    return zlab.read(folder), expected, lent, Candidates(count=count)


def rounds(golden):
    """Each round's anchor, its hidden states and the context cache, fed as it grows."""
    drafter, expected, _, cut = golden
    functions, params = proposer(drafter, cut)
    cache, done = functions.init_cache(params, 1, SLOTS), 0
    for number in range(3):
        start = int(expected[f"round{number}.start"][0])
        features = expected["target_hidden"][:, done:start]
        where = jnp.arange(done, start)[None]
        cache = functions.extend(params, features, cache, jnp.asarray([done]), where)
        done = start
        yield number, start, expected["input_ids"][:, start], cache


def hidden_of(golden, start, anchor, cache):
    drafter, _, lent, _ = golden
    valid = jnp.ones((1, 1), bool)
    where = jnp.asarray([[start]])
    return drafter.hidden(lent, anchor[:, None], where, cache, where, valid)[:, 0]


def test_rounds_are_the_references(golden):
    drafter, expected, lent, cut = golden
    functions, params = proposer(drafter, cut)
    keys = jax.random.split(jax.random.key(0), (1, 7))
    for number, start, anchor, cache in rounds(golden):
        hidden = hidden_of(golden, start, anchor, cache)
        base = drafter.heads.base_logits(lent, hidden)
        reference = {n: expected[f"round{number}.{n}"] for n in ("block_hidden", "base_logits")}
        for ours, theirs in zip((hidden, base), reference.values(), strict=True):
            theirs = theirs[:, -7:]  # their hidden states have the anchor's row too
            chex.assert_trees_all_close(ours, theirs, atol=1e-4 * max(1, jnp.abs(theirs).max()))
        where = jnp.asarray([start])
        drafted = functions.draft(
            params, lent, anchor, cache, where, where, rule(None).choose, keys
        )
        np.testing.assert_array_equal(drafted.tokens, expected[f"round{number}.tokens"])


@pytest.mark.parametrize("golden", ["dflash2_qwen3"], indirect=True)
def test_the_law_along_the_sampled_path_is_the_references(golden):
    """Field reports C37, C38: the whole top-16, at the right predecessor, zero elsewhere."""
    drafter, expected, lent, cut = golden
    sampling = Sampling(
        temperature=jnp.asarray([0.8]), top_k=jnp.asarray([0]), top_p=jnp.asarray([1.0])
    )
    for number, start, anchor, cache in rounds(golden):
        hidden = hidden_of(golden, start, anchor, cache)
        base = drafter.heads.base_logits(lent, hidden)
        ids = selector.top_candidates(base, cut.count)
        np.testing.assert_array_equal(ids, expected[f"round{number}.candidates_sorted"])
        scores = selector.pair_scores(drafter.heads.head, anchor, ids, hidden)
        logits = jnp.take_along_axis(base, ids, -1)
        tokens = expected[f"round{number}.sampled_tokens_T0.8"]
        row = 0
        for k in range(7):
            q = law(logits[:, k] + scores[:, k, row], sampling)
            whole = jnp.zeros((1, base.shape[-1])).at[0, ids[0, k]].set(q[0])
            reference = expected[f"round{number}.draft_probs_T0.8"][:, k]
            chex.assert_trees_all_close(whole, reference, atol=1e-4)
            row = int(jnp.argmax(ids[0, k] == tokens[0, k]))


@pytest.fixture
def hf():
    return json.loads((GOLDENS / "dflash2_qwen3" / "config.json").read_text())


def test_block_size_counts_their_anchor_and_the_selector_is_a_linear_gate(hf):
    config = zlab.drafter_config(hf)
    assert (config.block_size, config.num_inputs, config.predict_from_anchor) == (7, 8, False)
    assert config.head == Markov(rank=12, gate="linear")
    assert config.convolution == Convolution(kernel_size=2, group_size=16)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["Other"]}, "architectures = 'Other'"),
        ({"block_size": 9}, r"disagree about \['block_size'\]"),
        ({"layer_types": ["sliding_attention", "other"]}, r"layer_types has \['other'\]"),
        ({"layer_types": ["sliding_attention"] * 2}, "no `sliding_window`"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 0},
            "sliding_window = 0: must be",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers = 2"),
        ({"head_dim": None}, "no `head_dim`"),
    ],
)
def test_what_is_not_understood_is_refused(hf, changes, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        zlab.drafter_config({**hf, **changes})


@pytest.mark.parametrize(
    ("said", "windows", "causal"),
    [
        ({}, (4, None), (True, False)),
        ({"is_causal": False}, (4, None), ()),
        ({"is_causal": True}, (4, None), (True, True)),
        ({"dflash_config": {"causal": False}}, (4, None), ()),
        ({"is_causal": True, "dflash_config": {"causal": False}}, (4, None), (True, True)),
        ({"sliding_window": 4, "layer_types": ["full_attention"] * 2}, (), ()),
    ],
)
def test_sliding_layers_are_causal_unless_the_checkpoint_says_otherwise(said, windows, causal):
    """C39: `is_causal` first, then `causal`, then the kind of the layer."""
    plain = json.loads((GOLDENS / "dflash_qwen3" / "config.json").read_text())
    plain["dflash_config"].update(said.pop("dflash_config", {}))
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    config = zlab.drafter_config({**plain, **mixed, **said})
    assert (config.windows, config.causal) == (windows, causal)
