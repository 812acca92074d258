"""First-order heads: a low-rank bias on the logits that depends on the previous token.

logits_t(b | a) = U_t(b) + <W1[a] * g(h_t, a), W2[b]>        (DSpark paper, section 2.2)
"""

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dspark_jax.config import Markov
from dspark_jax.nn.layers import normal, project


class MarkovHead(nnx.Module):
    """Two tables over the vocabulary; the vanilla gate is 1."""

    def __init__(self, config: Markov, vocab_size: int, dtype: DTypeLike, *, rngs: nnx.Rngs):
        shape = (vocab_size, config.rank)
        self.w1 = nnx.Param(normal(rngs.params(), shape, dtype))
        self.w2 = nnx.Param(normal(rngs.params(), shape, dtype))

    def rows(self, prev: Int[Array, "*rows"]) -> Float[Array, "*rows R"]:
        """W1 rows of previous tokens."""
        return self.w1[...][prev]

    def bias(
        self,
        prev: Int[Array, "*rows"],
        hidden: Float[Array, "*rows D"],
        among: slice | Int[Array, "V"] = slice(None),
    ) -> Float[Array, "*rows V"]:
        """Transition bias towards every next token, or some of them, in fp32."""
        del hidden  # the vanilla gate does not look at it
        return project(self.rows(prev), self.w2[...][among])
