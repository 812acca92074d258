"""Drafter = (backbone, head, confidence) from a config, and the heads' binding to the walk."""

from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.base import Transition
from dspark_jax.config import Domino, DrafterConfig, Markov, Recurrent, TargetConfig
from dspark_jax.nn.backbone import Backbone, Context
from dspark_jax.nn.confidence import ConfidenceHead
from dspark_jax.nn.conv import GroupedConvolution
from dspark_jax.nn.domino import DominoHead
from dspark_jax.nn.layers import accumulator, normal, project, softcap
from dspark_jax.nn.markov import MarkovHead, RecurrentHead


@chex.dataclass(frozen=True)
class Lent:
    """What a drafter borrows from its target, as arguments: never stored twice, never trained.

    Attributes:
      embedding: input embedding.
      head: lm head, or those of its rows that a loss runs over.
    """

    embedding: Float[Array, "V D"]
    head: Float[Array, "rows D"]


class TokenTable(nnx.Variable):
    """Ids in the target's vocabulary, ascending: stored with the parameters, never trained."""


class Heads(nnx.Module):
    """What turns hidden states into logits: base logits, correction head, confidence head."""

    def __init__(self, config: DrafterConfig, dtype: DTypeLike, *, rngs: nnx.Rngs):
        head, confidence = config.head, config.confidence
        with_markov = confidence is not None and confidence.with_markov
        if with_markov and not isinstance(head, Markov | Recurrent):
            raise ValueError(
                f"confidence.with_markov = True needs a Markov head, and head = {head}: "
                "set confidence.with_markov = False"
            )
        self.head = _build_head(config, dtype, rngs)
        rank = head.rank if with_markov else 0
        self.confidence_head = (
            None
            if confidence is None
            else ConfidenceHead(config.geometry.width, rank, dtype, rngs=rngs)
        )
        drafted = config.draft_vocab_size
        shape = (drafted, config.geometry.width)
        self.lm_head = nnx.Param(normal(rngs.params(), shape, dtype)) if drafted else None
        self.draft_tokens = TokenTable(jnp.arange(drafted, dtype=jnp.int32)) if drafted else None
        self.config = config

    def base_logits(self, lent: Lent, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """U in fp32, capped before any bias is added: of the lent lm head or, of fewer tokens, its
        own.
        """
        table = lent.head if self.lm_head is None else self.lm_head[...]
        scores = project(hidden, table) * self.config.logit_multiplier
        return softcap(scores, self.config.logit_softcap)

    def tokens(self, index: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Ids, in the target's vocabulary, of places in the base logits."""
        return index if self.draft_tokens is None else self.draft_tokens[...][index]

    def confidence(
        self, prev: Int[Array, "*rows"], hidden: Float[Array, "*rows D"]
    ) -> Float[Array, "*rows"]:
        """Confidence logits given the token before each position."""
        rows = self.head.rows(prev) if self.config.confidence.with_markov else None
        return self.confidence_head(hidden, rows)

    def transition(
        self,
        rows: int,
        among: slice | Int[Array, "tokens"] = slice(None),
        embedding: Float[Array, "V D"] | None = None,
    ) -> tuple[Any, Transition]:
        """The head's initial state and transition, as `walk` and `follow` take them.

        Args:
          rows: blocks walked together.
          among: next tokens to consider; tables may have padding rows behind the vocabulary.
          embedding: the lent one, for heads that read it.
        """
        if self.head is None:
            return (), lambda state, prev, hidden: (state, jnp.zeros((rows, 1), jnp.float32))
        table = self.head.w2[...][among]

        def step(state, prev, hidden):
            state, query = self.head.query(state, prev, hidden, embedding)
            return state, project(query, table)

        return self.head.init_state(rows), step

    def restricted_transition(
        self, rows: int, embedding: Float[Array, "V D"]
    ) -> tuple[Any, Transition]:
        """As `transition`, but x = (hidden [B D], candidates [B C]) and biases of those alone."""

        def step(state, prev, x):
            hidden, candidates = x
            state, query = self.head.query(state, prev, hidden, embedding)
            table = self.head.w2[...][candidates]
            summed = {"preferred_element_type": accumulator(query)}
            return state, jnp.einsum("br,bcr->bc", query, table, **summed)

        return self.head.init_state(rows), step


def first_order(config: DrafterConfig) -> bool:
    """Whether the head sees the previous token alone, so that a table of pairs holds all of it."""
    return isinstance(config.head, Markov)


def has_table(config: DrafterConfig) -> bool:
    """Whether biases of candidate pairs are known before the walk: first-order, or all zero."""
    return config.head is None or first_order(config)


def _build_head(
    config: DrafterConfig, dtype: DTypeLike, rngs: nnx.Rngs
) -> MarkovHead | RecurrentHead | DominoHead | None:
    width, vocab_size, drafted = config.geometry.width, config.vocab_size, config.draft_vocab_size
    match config.head:
        case None:
            return None
        case Markov():
            return MarkovHead(config.head, width, vocab_size, dtype, drafted, rngs=rngs)
        case Recurrent():
            return RecurrentHead(config.head, width, vocab_size, dtype, drafted, rngs=rngs)
        case Domino():
            return DominoHead(config.head, width, drafted or vocab_size, dtype, rngs=rngs)


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
        first: Int[Array, "B A"],
        valid: Bool[Array, "B A"],
        start: Int[Array, "B A"] | None = None,
    ) -> Float[Array, "B A K D"]:
        """Hidden states of the predicting rows of each block.

        Args:
          lent: the target's embedding and lm head.
          anchors: the anchor tokens.
          positions: rotary positions of the anchors.
          context: keys and values from `backbone.context`.
          first: slots of the anchors; context before them is seen.
          valid: False for dummy blocks, which hold masks only.
          start: first slot of context that is seen, None = 0.
        """
        c = self.config
        lead = jnp.where(valid, anchors, c.mask_token)[..., None]
        masks = jnp.full((*anchors.shape, c.num_inputs - 1), c.mask_token, anchors.dtype)
        x = lent.embedding[jnp.concatenate([lead, masks], -1)]
        if c.embedding_scale is not None:
            x = x * jnp.asarray(c.embedding_scale, x.dtype)
        rows = positions[..., None] + jnp.arange(c.num_inputs)
        out = self.backbone(x, context, first, valid, rows, start)
        return out if c.predict_from_anchor else out[..., 1:, :]


def rebuilt(drafter: Drafter, config: DrafterConfig) -> Drafter:
    """A drafter of another config: convolutions as they start, every other parameter kept."""
    dtype, width = drafter.backbone.fc.weight[...].dtype, config.geometry.width
    shapes = nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0), dtype=dtype))
    known, begun = dict(nnx.to_flat_state(nnx.state(drafter))), {}
    if config.convolution is not None:
        identity = GroupedConvolution(config.convolution, width, dtype, rngs=nnx.Rngs(0))
        begun = dict(nnx.to_flat_state(nnx.state(identity)))
    merged = []
    for path, variable in nnx.to_flat_state(nnx.state(shapes)):
        is_new = "attention_conv" in path or "mlp_conv" in path
        kept = begun[path[4:]] if is_new else known[path]  # behind backbone, layers, number, name
        merged.append((path, variable.replace(kept[...])))  # no two share a variable
    return nnx.merge(nnx.graphdef(shapes), nnx.from_flat_state(merged))


def check_pair(drafter: Drafter, theirs: TargetConfig) -> None:
    """Refuses a drafter made for another target.

    Raises:
      ValueError: names what does not fit.
    """
    ours = drafter.config
    if ours.geometry.width != theirs.geometry.width:
        raise ValueError(
            f"drafter width = {ours.geometry.width}, target width = {theirs.geometry.width}: this "
            "drafter was made for another target; give one made for it, or none"
        )
    if ours.vocab_size < theirs.vocab_size:
        raise ValueError(
            f"drafter vocab_size = {ours.vocab_size} is smaller than the target's "
            f"{theirs.vocab_size}"
        )
    wrong = [i for i in ours.target_layer_ids if not -1 <= i < theirs.num_layers]
    if wrong:
        raise ValueError(
            f"drafter target_layer_ids {wrong} are outside the target's -1..{theirs.num_layers - 1}"
        )
    if not 0 <= ours.mask_token < theirs.vocab_size:
        raise ValueError(
            f"drafter mask_token = {ours.mask_token} is outside the target's vocabulary "
            f"0..{theirs.vocab_size - 1}"
        )
    if ours.draft_vocab_size:
        tokens = np.asarray(drafter.heads.draft_tokens[...])
        if tokens[0] < 0 or tokens[-1] >= theirs.vocab_size or np.any(np.diff(tokens) <= 0):
            raise ValueError(
                f"draft tokens {tokens[0]}..{tokens[-1]} must ascend within the target's "
                f"0..{theirs.vocab_size - 1}"
            )
