"""Models and decoding as frozen dataclasses: hashable, hence static under `jax.jit`."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

MOST_LAYERS = 1024  # what a file asks for beyond is an error


def require(
    record: Any, fields: Sequence[str], holds: Callable[[Any], bool], says: str, where: str = ""
) -> None:
    """Raises ValueError at the first field whose value does not hold: "<where><field> = ...".

    Args:
      record: what has the fields.
      fields: their names.
      holds: whether a value is allowed.
      says: what it must be.
      where: what the record is called.
    """
    for field in fields:
        value = getattr(record, field)
        if not holds(value):
            raise ValueError(f"{where}{field} = {value}: must be {says}")


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embedding: how the angle of each frequency pair grows with the position."""

    theta: float  # base of the geometric series of frequencies
    scaling: Literal["none", "linear", "llama3", "yarn", "proportional"] = "none"  # see below
    factor: float = 1.0  # stretch of the context length
    original_length: int = 0  # context length before stretching (llama3, yarn)
    low_frequency: float = 1.0  # llama3: wavelengths longer than original/low are stretched fully
    high_frequency: float = 4.0  # llama3: wavelengths shorter than original/high are kept
    beta_fast: float = 32.0  # yarn: rotations within the original length above which to keep
    beta_slow: float = 1.0  # yarn: rotations below which to stretch fully
    attention_factor: float = 1.0  # multiplies cosine and sine (yarn)
    partial: float = 1.0  # fraction of the head's dimensions that rotate
    interleaved: bool = False  # pairs are (2i, 2i + 1), not (i, i + half)

    # Scalings stretch the frequencies; "proportional" (Gemma4) keeps those of the whole head and
    # stops the slowest 1 - partial of them.

    def __post_init__(self):
        require(self, ("theta", "factor"), lambda x: x > 0, "above 0", "rotary.")


@dataclasses.dataclass(frozen=True)
class Experts:
    """Routed experts of a mixture-of-experts MLP (Qwen3-MoE)."""

    num_experts: int  # experts a layer
    top_k: int  # experts a token
    mlp_width: int  # hidden width of one expert
    normalise: bool = True  # chosen routing weights sum to one
    layers: tuple[int, ...] = ()  # indices of the layers that are sparse


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Shape and numerics of one decoder layer, shared by targets and backbones."""

    width: int  # D, the residual stream
    mlp_width: int  # hidden width of the gated MLP
    heads: int  # query heads
    kv_heads: int  # key/value heads; each serves heads / kv_heads query heads
    head_dim: int  # width of a head
    rotary: Rotary  # position embedding of full-attention layers
    norm_eps: float = 1e-6  # added to the mean square in every RMSNorm
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the gated MLP
    qkv_bias: bool = False  # biases on the q, k, v projections
    out_bias: bool = False  # bias on the attention output projection
    mlp_bias: bool = False  # biases in the MLP
    qk_norm: bool = False  # RMSNorm over each head of q and k, before rotation
    norm_offset: bool = False  # norm weights are stored as w - 1 (Gemma2, Gemma3)
    norm_fp32: bool = False  # norm weights multiply before the cast, stored as w (Gemma4)
    sandwich_norms: bool = False  # norm after attention and MLP too (Gemma)
    value_from_key: bool = False  # no v projection: values are the raw keys (Gemma4)
    unit_values: bool = False  # values are brought to unit rms, without a weight (Gemma4)
    layer_scalar: bool = False  # a stored, untrained factor on each layer's output (Gemma4)
    attention_scale: float | None = None  # of q.k; None = head_dim ** -0.5
    attention_softcap: float | None = None  # c * tanh(scores / c)

    def __post_init__(self):
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"heads = {self.heads}, kv_heads = {self.kv_heads}: each key/value head must "
                "serve as many query heads"
            )

    def plain(self, **numerics: Any) -> "Geometry":
        """The same sizes, rotary and norm_eps; what `numerics` does not name is as by default."""
        sizes = ("width", "mlp_width", "heads", "kv_heads", "head_dim", "rotary", "norm_eps")
        return Geometry(**{name: getattr(self, name) for name in sizes}, **numerics)

    @property
    def scale(self) -> float:
        """Factor on q.k before the softmax."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A target: the frozen language model whose output is reproduced."""

    family: str  # Hugging Face model_type it was read from
    vocab_size: int  # V, rows of the embedding, padding rows included
    num_layers: int  # decoder layers
    geometry: Geometry  # of every layer, or of the sliding ones if there is a full_geometry
    max_length: int  # positions the model may see
    windows: tuple[int | None, ...] = ()  # sliding window a layer, None = full; () = all full
    sliding_rotary: Rotary | None = None  # rotary of sliding layers, None = the same (Gemma3)
    full_geometry: Geometry | None = None  # of full-attention layers, None = the same (Gemma4)
    experts: Experts | None = None  # routed experts, None = dense MLPs
    tied: bool = True  # lm head is the embedding
    embedding_scale: float | None = None  # multiplies embeddings (Gemma: sqrt(D))
    logit_softcap: float | None = None  # c * tanh(logits / c)

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, the current one included; None = full attention."""
        return self.windows[layer] if self.windows else None

    def layer_geometry(self, layer: int) -> Geometry:
        """Geometry of a layer."""
        is_full = self.window(layer) is None and self.full_geometry is not None
        return self.full_geometry if is_full else self.geometry

    def rotary(self, layer: int) -> Rotary:
        """Rotary embedding of a layer."""
        sliding = self.window(layer) is not None and self.sliding_rotary is not None
        return self.sliding_rotary if sliding else self.geometry.rotary


@dataclasses.dataclass(frozen=True)
class Markov:
    """First-order head: logits_t(b | a) = U_t(b) + <W1[a] * g(h_t, a), W2[b]>."""

    rank: int = 256  # R, width of the two tables
    gate: Literal["vanilla", "gated", "linear"] = "vanilla"  # g: 1, sigmoid(W [h; W1[a]]), H h

    def __post_init__(self):
        require(self, ("rank",), lambda n: n >= 1, "at least 1", "head.")


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """DSpark's rnn head: a state of the block's prefix decides the bias."""

    rank: int = 256  # R, width of the tables and of the state

    def __post_init__(self):
        require(self, ("rank",), lambda n: n >= 1, "at least 1", "head.")


@dataclasses.dataclass(frozen=True)
class Domino:
    """Domino's head: a GRU over the target's embeddings of the block's prefix, as stored.

    A drafter's `embedding_scale` is the backbone's alone.
    """

    rank: int = 256  # R, width of the bottleneck and of the vocabulary table
    gru_width: int = 1024  # width of the GRU's state
    pure_prefix: int = 1  # first predictions of a block that keep the base logits

    def __post_init__(self):
        require(self, ("rank", "gru_width"), lambda n: n >= 1, "at least 1", "head.")
        require(self, ("pure_prefix",), lambda n: n >= 0, "at least 0", "head.")


Head = Markov | Recurrent | Domino  # a correction head; None = DFlash


@dataclasses.dataclass(frozen=True)
class Convolution:
    """DFlash-2's grouped dynamic causal convolutions around attention and MLP."""

    kernel_size: int = 2  # taps: the row itself and those before it
    group_size: int = 16  # channels that share a dynamic correction

    def __post_init__(self):
        require(self, ("kernel_size", "group_size"), lambda n: n >= 1, "at least 1", "convolution.")


@dataclasses.dataclass(frozen=True)
class Confidence:
    """Confidence head: the probability that a position will be accepted."""

    with_markov: bool = True  # also sees the Markov row of the previous token


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A drafter: block-parallel backbone, correction head, confidence head."""

    geometry: Geometry  # of every backbone layer; width is the target's
    vocab_size: int  # V of the target
    num_layers: int  # backbone layers
    block_size: int  # K, drafted tokens a round
    target_layer_ids: tuple[int, ...]  # tapped target layers (raw outputs; -1 = embeddings)
    mask_token: int  # id that fills the block behind the anchor
    predict_from_anchor: bool  # True: K inputs, slot k predicts anchor+1+k; False: K+1 inputs
    head: Head | None = None  # correction head, None = DFlash
    confidence: Confidence | None = None  # confidence head, None = none
    feature_scales: tuple[float, ...] = ()  # fixed factor on each tap before fc; () = ones
    embedding_scale: float | None = None  # multiplies the lent embedding
    logit_multiplier: float = 1.0  # of the base logits, before the softcap
    logit_softcap: float | None = None  # of the base logits, before the head's bias
    convolution: Convolution | None = None  # DFlash-2's local convolutions, None = none
    windows: tuple[int | None, ...] = ()  # sliding window a layer, None = full; () = all full
    causal: tuple[bool, ...] = ()  # layers whose block rows see no later row; () = none
    candidates: int = 0  # C it is walked over unless told otherwise; 0 = the vocabulary
    draft_vocab_size: int = 0  # tokens it can draft, through an lm head of its own; 0 = all

    def __post_init__(self):
        require(self, ("num_layers", "block_size"), lambda n: n >= 1, "at least 1")
        require(self, ("num_layers",), lambda n: n <= MOST_LAYERS, f"at most {MOST_LAYERS}")
        require(self, ("candidates", "draft_vocab_size"), lambda n: n >= 0, "at least 0")
        taps = self.target_layer_ids
        if not taps or list(taps) != sorted(set(taps)) or taps[0] < -1:
            raise ValueError(
                f"target_layer_ids = {list(taps)}: must increase strictly, from -1 (embeddings) on"
            )
        if not 0 <= self.mask_token < self.vocab_size:
            raise ValueError(
                f"mask_token = {self.mask_token}: outside the vocabulary, 0..{self.vocab_size - 1}"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size = {self.draft_vocab_size}: the vocabulary has {self.vocab_size}"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"windows = {self.windows}: a row sees itself, so at least 1")
        for field in ("windows", "causal"):
            if len(getattr(self, field)) not in (0, self.num_layers):
                raise ValueError(
                    f"{field} = {getattr(self, field)}: needs one entry for each of "
                    f"{self.num_layers} layers, or none"
                )

    @property
    def num_inputs(self) -> int:
        """Rows a block feeds to the backbone."""
        return self.block_size if self.predict_from_anchor else self.block_size + 1

    @property
    def num_drafted(self) -> int:
        """Tokens that can be drafted."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def feature_width(self) -> int:
        """F, width of the concatenated taps."""
        return len(self.target_layer_ids) * self.geometry.width


@dataclasses.dataclass(frozen=True)
class Options:
    """How prompts are rendered and answers sampled."""

    max_new_tokens: int = 128  # new tokens an answer, at most
    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # keep the k most likely tokens, 0 = all
    top_p: float = 1.0  # then keep the smallest most-likely set of this mass, 1 = all
    seed: int = 0  # prompt i uses seed + i
    system: str | None = None  # system message, the template's own by default
    thinking: bool | None = None  # the template's enable_thinking, its default by default
    raw: bool = False  # continue the text itself, without the chat template


def as_dict(value: Any) -> Any:
    """A config as plain values, ready for JSON; a head says its `kind`."""
    if not dataclasses.is_dataclass(value):
        return value
    fields = {f.name: as_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return {"kind": type(value).__name__, **fields} if isinstance(value, Head) else fields


def spread_layers(num_layers: int, num_taps: int = 5) -> tuple[int, ...]:
    """Evenly spread tapped layers from the second to the third last (DeepSpec's rule)."""
    first, last = min(1, num_layers - 1), max(num_layers - 3, min(1, num_layers - 1))
    if num_taps == 1 or first == last:
        return (last,)
    step = (last - first) / (num_taps - 1)
    return tuple(dict.fromkeys(math.floor(first + i * step + 0.5) for i in range(num_taps)))
