"""Target features on disk: the same as in the step, bounded, and continued after a stop."""

import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.base import Batch
from dspark_jax.config import Markov
from dspark_jax.config_training import DrafterRecipe, Losses
from dspark_jax.folders import locked
from dspark_jax.nn.drafter import Drafter
from dspark_jax.train import anchors, data, features, initial, step

TAPS, ROOM = (0, 1), 10**6


def build(target, corpus, folder, max_bytes=ROOM):
    return features.build(target, corpus, TAPS, folder, max_bytes, batch_size=3)


def attached(target, corpus, folder, some):
    """Conversations with what the cache holds of them."""
    cache, rows = build(target, corpus, folder), []
    for i in some:
        conversation = corpus.conversations[i]
        known = cache.rows(i, len(conversation.tokens))
        rows.append(conversation.replace(features=known[0], hidden=known[1]))
    return rows


def test_features_from_disk_are_those_of_a_packed_row(micro_target, corpus, tmp_path):
    """The target sees each conversation of a row as if it were alone."""
    row = data.join(attached(micro_target, corpus, tmp_path, [6, 0, 3]))
    batch = jax.tree.map(jnp.asarray, data.collate([row], 8))
    plain = batch.replace(features=None, hidden=None)
    online = jax.jit(step.ask, static_argnums=2)(micro_target, plain, TAPS)
    for field in ("features", "hidden"):
        found = online[field][0, : len(row.tokens)]
        chex.assert_trees_all_close(found, row[field], atol=1e-4, rtol=1e-5)


def test_features_from_disk_are_those_of_the_step(micro_target, corpus, tmp_path):
    """T03, T24: ids, mask, features and hidden states of one index are of one token."""
    some = [6, 0, 3]
    rows = attached(micro_target, corpus, tmp_path / "features", some)
    cached = jax.tree.map(jnp.asarray, data.collate(rows, 8))
    plain = Batch(tokens=cached.tokens, loss_mask=cached.loss_mask)
    ask = jax.jit(step.ask, static_argnums=2)
    online, offline = (ask(micro_target, batch, TAPS) for batch in (plain, cached))
    inside = (
        np.arange(16) < np.asarray([len(corpus.conversations[i].tokens) for i in some])[:, None]
    )
    for field in ("features", "hidden"):
        actual, expected = np.asarray(offline[field]), np.asarray(online[field])
        np.testing.assert_allclose(actual[inside], expected[inside], atol=1e-4, rtol=1e-5)
        assert not actual[~inside].any()
    chex.assert_trees_all_equal(online.lent, offline.lent)
    recipe = DrafterRecipe(
        num_layers=1, block_size=2, mask_token=30, target_layer_ids=TAPS, head=Markov(rank=3)
    )
    config = initial.drafter_config(recipe, micro_target.config)
    drafter = jax.jit(lambda: Drafter(config, rngs=nnx.Rngs(0)))()

    @jax.jit
    def loss(known, batch):
        blocks = anchors.cut(batch, *anchors.sample(jax.random.key(0), batch.loss_mask, 4), 2)
        return step.loss(drafter, known, blocks, batch.tokens, Losses(), 4)[0]

    losses = [float(loss(known, plain)) for known in (online, offline)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_a_stopped_run_continues_behind_what_is_done(micro_target, corpus, tmp_path):
    whole = build(micro_target, corpus, tmp_path)
    kept = np.array(whole.features)
    progress = tmp_path / "progress.json"
    record = json.loads(progress.read_text())
    assert record["done"] == 7
    whole.features[:] = 7
    progress.write_text(json.dumps({**record, "done": 3}))
    rebuilt = build(micro_target, corpus, tmp_path)
    short = len(kept[: rebuilt.starts[3]])  # conversations 0, 1, 2 are the shortest
    assert (rebuilt.features[:short] == 7).all()
    np.testing.assert_array_equal(rebuilt.features[short:], kept[short:])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_finished_cache_is_read_back(micro_target, corpus, tmp_path, dtype):
    graphdef, state = nnx.split(micro_target)
    target = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(dtype), state))
    first = build(target, corpus, tmp_path)
    again = build(target, corpus, tmp_path)
    assert again.features.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(*(np.asarray(c.features, np.float32) for c in (first, again)))
    assert np.asarray(again.hidden, np.float32).any()


def test_a_cache_over_the_limit_is_refused_before_anything_is_written(
    micro_target, corpus, tmp_path
):
    """T24: 84 tokens of two taps and one state of 16 fp32 numbers."""
    tokens = sum(len(c.tokens) for c in corpus.conversations)
    size = tokens * 3 * 16 * 4
    complaint = f"max_cache_bytes = {size - 1}: {tokens} tokens need {size} bytes"
    with pytest.raises(ValueError, match=complaint):
        build(micro_target, corpus, tmp_path / "features", size - 1)
    assert not (tmp_path / "features").exists()
    build(micro_target, corpus, tmp_path / "features", size)


@pytest.mark.parametrize("change", ["fewer", "edited"])
def test_the_cache_of_another_corpus_is_refused(micro_target, corpus, tmp_path, change):
    build(micro_target, corpus, tmp_path)
    others = list(corpus.conversations)
    match change:
        case "fewer":
            del others[3:]
        case "edited":
            others[2] = others[2].replace(tokens=others[2].tokens[::-1].copy())
    with pytest.raises(ValueError, match="delete the folder or set another cache"):
        build(micro_target, corpus.replace(conversations=others), tmp_path)


@pytest.mark.parametrize("text", ["", "{}", '{"done": "all"}'])
def test_a_record_that_says_nothing_is_named(micro_target, corpus, tmp_path, text):
    (tmp_path / "progress.json").write_text(text)
    with pytest.raises(ValueError, match=r"progress.json: says not .* delete the folder"):
        build(micro_target, corpus, tmp_path)


def test_features_that_are_gone_are_computed_again(micro_target, corpus, tmp_path):
    kept = np.array(build(micro_target, corpus, tmp_path).features)
    (tmp_path / "features.npy").unlink()
    np.testing.assert_array_equal(build(micro_target, corpus, tmp_path).features, kept)


def test_one_run_fills_a_shared_cache(micro_target, corpus, tmp_path):
    with locked(tmp_path), pytest.raises(ValueError, match="another process works in it"):
        build(micro_target, corpus, tmp_path)


def test_a_cache_larger_than_its_disk_is_refused(micro_target, corpus, tmp_path, monkeypatch):
    size = sum(len(c.tokens) for c in corpus.conversations) * 3 * 16 * 4
    usage = shutil.disk_usage(tmp_path)._replace(free=size - 1)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match=f"need {size} more bytes, its disk has {size - 1} free"):
        build(micro_target, corpus, tmp_path)
    assert not list(tmp_path.glob("*.npy"))
