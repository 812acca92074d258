"""Drafter = (backbone, head, confidence) from a config, and the heads' binding to the walk."""

import chex
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.base import Transition
from dspark_jax.config import DrafterConfig
from dspark_jax.nn.backbone import Backbone, Context
from dspark_jax.nn.confidence import ConfidenceHead
from dspark_jax.nn.layers import project, softcap
from dspark_jax.nn.markov import MarkovHead


@chex.dataclass(frozen=True)
class Lent:
    """What a drafter borrows from its target, as arguments: never stored twice, never trained.

    Attributes:
      embedding: input embedding.
      head: lm head.
    """

    embedding: Float[Array, "V D"]
    head: Float[Array, "V D"]


class Heads(nnx.Module):
    """What turns hidden states into logits: base logits, correction head, confidence head."""

    def __init__(self, config: DrafterConfig, dtype: DTypeLike, *, rngs: nnx.Rngs):
        head, confidence = config.head, config.confidence
        with_markov = confidence is not None and confidence.with_markov
        if with_markov and head is None:
            raise ValueError(
                "confidence.with_markov = True needs a Markov head, and head = None: "
                "set confidence.with_markov = False"
            )
        self.head = None if head is None else MarkovHead(head, config.vocab_size, dtype, rngs=rngs)
        rank = head.rank if with_markov else 0
        self.confidence_head = (
            None
            if confidence is None
            else ConfidenceHead(config.geometry.width, rank, dtype, rngs=rngs)
        )
        self.config = config

    def base_logits(self, lent: Lent, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """U in fp32: the lent lm head's logits, capped before any bias is added."""
        return softcap(project(hidden, lent.head), self.config.logit_softcap)

    def confidence(
        self, prev: Int[Array, "*rows"], hidden: Float[Array, "*rows D"]
    ) -> Float[Array, "*rows"]:
        """Confidence logits given the token before each position."""
        rows = self.head.rows(prev) if self.config.confidence.with_markov else None
        return self.confidence_head(hidden, rows)

    def transition(
        self, among: slice | Int[Array, "V"] = slice(None)
    ) -> tuple[tuple[()], Transition]:
        """The head's initial state and transition, as `walk` and `follow` take them.

        Args:
          among: next tokens to consider; tables may have padding rows behind the vocabulary.
        """
        if self.head is None:
            return (), lambda state, prev, hidden: (state, jnp.zeros((), jnp.float32))
        return (), lambda state, prev, hidden: (state, self.head.bias(prev, hidden, among))


class Drafter(nnx.Module):
    """A block-parallel backbone and its heads."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.backbone = Backbone(config, dtype, rngs=rngs)
        self.heads = Heads(config, dtype, rngs=rngs)
        self.config = config

    def hidden(
        self,
        lent: Lent,
        anchors: Int[Array, "B A"],
        positions: Int[Array, "B A"],
        context: tuple[Context, ...],
        visible: Bool[Array, "B A S"],
        valid: Bool[Array, "B A"],
    ) -> Float[Array, "B A K D"]:
        """Hidden states of the predicting rows of each block.

        Args:
          lent: the target's embedding and lm head.
          anchors: the anchor tokens.
          positions: rotary positions of the anchors.
          context: keys and values from `backbone.context`.
          visible: which context slots each block sees.
          valid: False for dummy blocks, which hold masks only.
        """
        c = self.config
        first = jnp.where(valid, anchors, c.mask_token)[..., None]
        masks = jnp.full((*anchors.shape, c.num_inputs - 1), c.mask_token, anchors.dtype)
        x = lent.embedding[jnp.concatenate([first, masks], -1)]
        if c.embedding_scale is not None:
            x = x * jnp.asarray(c.embedding_scale, x.dtype)
        rows = positions[..., None] + jnp.arange(c.num_inputs)
        out = self.backbone(x, context, visible, valid, rows)
        return out if c.predict_from_anchor else out[..., 1:, :]
