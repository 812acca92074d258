"""Sampled softmax: a loss over the frequent tokens and some of the others, drawn each step.

The lm head over the whole vocabulary is most of a small drafter's training step. Here the softmaxes
of drafter and target run over the F tokens frequent in the corpus and n drawn uniformly from the
other V - F, each of which stands for (V - F) / n tokens (Jean et al., 2015, section 3). Every token
is drawn now and then, so that none the corpus lacks can win unseen. Decoding uses all of them.

The expected denominators are those of the whole vocabulary. Labels outside the step's tokens weigh
0: rare labels are learned less than their share.
"""

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from dspark_jax.train.data import Conversation


@chex.dataclass(frozen=True)
class Split:
    """The vocabulary by frequency in a corpus.

    Attributes:
      frequent: tokens that are always in the loss.
      others: the rest.
    """

    frequent: Int[Array, "F"]
    others: Int[Array, "N"]


@chex.dataclass(frozen=True)
class Subset:
    """The tokens of one step's loss.

    Attributes:
      tokens: their ids.
      log_share: logarithm of how many tokens each stands for; added to logits before a softmax.
    """

    tokens: Int[Array, "V"]
    log_share: Float[Array, "V"]


def split(
    conversations: Sequence[Conversation], vocab_size: int, frequent: int, drawn: int
) -> Split:
    """The `frequent` tokens the target wrote most often, ties to the lowest id; and the others.

    Raises:
      ValueError: fewer than `drawn` others are left.
    """
    if frequent + drawn > vocab_size:
        raise ValueError(
            f"frequent_tokens = {frequent} + drawn_tokens = {drawn}: "
            f"the target's vocabulary has {vocab_size}"
        )
    counts = np.zeros(vocab_size, np.int64)
    for conversation in conversations:
        np.add.at(counts, conversation.tokens[conversation.loss_mask], 1)
    order = np.argsort(-counts, kind="stable").astype(np.int32)
    return Split(
        frequent=jnp.asarray(np.sort(order[:frequent])), others=jnp.asarray(order[frequent:])
    )


def draw(key: Key[Array, ""], vocabulary: Split, drawn: int) -> Subset:
    """The frequent tokens and `drawn` of the others, without repetition."""
    others = jax.random.choice(key, vocabulary.others, (drawn,), replace=False)
    share = jnp.log(vocabulary.others.shape[0] / drawn)
    return Subset(
        tokens=jnp.concatenate([vocabulary.frequent, others]),
        log_share=jnp.concatenate(
            [jnp.zeros(vocabulary.frequent.shape), jnp.full((drawn,), share)]
        ),
    )


def locate(subset: Subset, tokens: Int[Array, "*N"], vocab_size: int) -> Int[Array, "*N"]:
    """Index of each token in the subset, -1 where it is absent."""
    places = jnp.arange(subset.tokens.shape[0], dtype=jnp.int32)
    return jnp.full((vocab_size,), -1, jnp.int32).at[subset.tokens].set(places)[tokens]
