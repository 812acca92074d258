"""Cached drafting of DeepSpec's and z-lab's drafters, round by round."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from dspark_jax.decode.draft import proposer
from dspark_jax.decode.propose import Candidates
from dspark_jax.decode.verify import rule
from dspark_jax.goldens import training
from dspark_jax.goldens.difference import Difference, Expected, close, same
from dspark_jax.nn import selector
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.sampling import Sampling, law
from dspark_jax.train.losses import draft_logits
from dspark_jax.weights import deepspec, zlab

_GARBAGE = 2  # rows behind the anchor that a round feeds and must not see


def dspark(folder: Path, expected: Expected) -> Iterator[Difference]:
    """A training step, then hidden states, logits, confidence and tokens of each round."""
    drafter, lent = deepspec.read(folder)
    yield from training.from_folder(folder, drafter, lent, expected)
    features = expected["target_hidden_states"][:1]
    for number, anchor, hidden, draft in _rounds(drafter, lent, features, expected, Candidates()):
        reference = {
            name.split(".")[1]: value
            for name, value in expected.items()
            if name.startswith(f"round{number}.")
        }
        prevs = jnp.concatenate([anchor[:, None], draft.tokens[:, :-1]], 1)
        ours = {
            "block_hidden": hidden,
            "base_logits": drafter.heads.base_logits(lent, hidden),
            "draft_logits": draft_logits(drafter.heads, lent, hidden, prevs)[1],
        }
        if drafter.config.confidence is not None:
            ours["confidence_logits"] = drafter.heads.confidence(prevs, hidden)
        for name, value in ours.items():
            yield close(f"round{number}.{name}", value, reference[name])
        yield same(f"round{number}.tokens", draft.tokens, reference["tokens"][:, 1:])


def _rounds(drafter: Drafter, lent: Lent, features, expected: Expected, cut: Candidates):
    """Cached greedy rounds on row 0: number, anchor, hidden states, draft."""
    functions, params = proposer(drafter, cut)
    slots = features.shape[1] + _GARBAGE
    keys = jax.random.split(jax.random.key(0), (1, functions.block_size))

    @jax.jit
    def run(cache, anchor, start):
        draft = functions.draft(params, lent, anchor, cache, start, start, rule(None).choose, keys)
        where, valid = start[:, None], jnp.ones((1, 1), bool)
        return drafter.hidden(lent, anchor[:, None], where, cache, where, valid)[:, 0], draft

    cache, done = functions.init_cache(params, 1, slots), 0
    for number in range(max(1, sum(name.endswith(".start") for name in expected))):
        start = int(expected[f"round{number}.start"][0])
        rows = jnp.pad(features[:, done:start], ((0, 0), (0, _GARBAGE), (0, 0)), constant_values=9)
        where = jnp.arange(done, start + _GARBAGE)[None]
        cache = functions.extend(params, rows, cache, jnp.asarray([done]), where)
        anchor, done = jnp.asarray(expected["input_ids"][:1, start]), start
        yield number, anchor, *run(cache, anchor, jnp.asarray([start]))


def dflash(folder: Path, expected: Expected) -> Iterator[Difference]:
    """Hidden states, base logits and tokens of each round; a Selector's law too."""
    drafter = zlab.read(folder)
    count = drafter.config.candidates
    lent = Lent(
        embedding=jnp.asarray(expected["target_embed"]),
        head=jnp.asarray(expected["target_lm_head"]),
    )
    cut, size = Candidates(count=count), drafter.config.block_size
    for number, anchor, hidden, draft in _rounds(
        drafter, lent, expected["target_hidden"], expected, cut
    ):
        base, prefix = drafter.heads.base_logits(lent, hidden), f"round{number}."
        reference = expected[prefix + "block_hidden"][:, -size:]  # theirs has the anchor's row too
        yield close(prefix + "block_hidden", hidden, reference)
        yield close(prefix + "base_logits", base, expected[prefix + "base_logits"])
        yield same(prefix + "tokens", draft.tokens, expected[prefix + "tokens"])
        if count:
            yield from _sampled(drafter, anchor, hidden, base, count, expected, prefix)


def _sampled(drafter, anchor, hidden, base, count, expected, prefix) -> Iterator[Difference]:
    """The Selector's candidates, and its law along the reference's sampled path."""
    ids = selector.top_candidates(base, count)
    yield same(prefix + "candidates", ids, expected[prefix + "candidates_sorted"])
    scores = selector.pair_scores(drafter.heads.head, anchor, ids, hidden)
    logits = jnp.take_along_axis(base, ids, -1)
    at = Sampling(temperature=jnp.asarray([0.8]), top_k=jnp.asarray([0]), top_p=jnp.asarray([1.0]))
    tokens, row, laws = expected[prefix + "sampled_tokens_T0.8"], 0, []
    for k in range(ids.shape[1]):
        q = law(logits[:, k] + scores[:, k, row], at)
        laws.append(jnp.zeros((1, base.shape[-1])).at[0, ids[0, k]].set(q[0]))
        row = int(jnp.argmax(ids[0, k] == tokens[0, k]))
    yield close(prefix + "draft_probs", jnp.stack(laws, 1), expected[prefix + "draft_probs_T0.8"])
