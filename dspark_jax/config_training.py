"""What a user chooses about a training run, as frozen dataclasses."""

import dataclasses
from typing import Literal

from dspark_jax.config import Confidence, Convolution, Head, Markov, require


@dataclasses.dataclass(frozen=True)
class DrafterRecipe:
    """What a user chooses about a new drafter; the rest follows from the target."""

    num_layers: int = 5  # backbone layers
    block_size: int = 7  # K, drafted tokens a round
    mask_token: int | None = None  # required: a reserved row of the target's embedding
    target_layer_ids: tuple[int, ...] = ()  # () = five layers, evenly spread
    predict_from_anchor: bool = True  # DSpark layout; False = z-lab DFlash
    head: Head | None = Markov()  # correction head
    confidence: Confidence | None = Confidence()  # confidence head
    convolution: Convolution | None = None  # DFlash-2's local convolutions
    window: int | None = None  # sliding window of every layer, None = full attention
    is_causal: bool = False  # block rows see no later row
    candidates: int = 0  # C it is walked over by default; 0 = the vocabulary (DFlash-2: 16)
    start: str = "random"  # random, target_last (its last layers copied), or a drafter's folder
    scale_features: bool = False  # measure each tap and bring it to unit mean square

    def __post_init__(self):
        require(self, ("num_layers", "block_size"), lambda n: n >= 1, "at least 1", "drafter.")


@dataclasses.dataclass(frozen=True)
class Losses:
    """What is minimised: DSpark's terms by default (DSpark paper, section 3).

    DFlash: cross_entropy=1, l1=0, confidence=0. Domino: those and base=1, is_contiguous=False.
    DFlash-2: those of DFlash, base=1, base_decay=None, selector=1. All terms share one denominator,
    the sum of the weights of all positions of the whole batch.
    """

    cross_entropy: float = 0.1  # against the data's next token
    l1: float = 0.9  # sum over the vocabulary of |draft - target| probabilities
    length: float = 0.0  # minus the expected accepted drafts: products of 1 - l1 / 2
    confidence: float = 1.0  # binary cross entropy against 1 - l1 / 2
    confidence_to_backbone: bool = True  # the backbone learns from the confidence term too
    selector: float = 0.0  # cross entropy over the drafter's own best candidates (DFlash-2)
    candidates: int = 16  # of the selector term
    missing: Literal["mask", "inject"] = "mask"  # a label that is no candidate: left out, or put in
    base: float = 0.0  # share of the base logits in the cross entropy at first (Domino's lambda)
    base_decay: float | None = 1.0  # share of the run in which it falls to 0; None = it never falls
    decay: float = 4.0  # position k weighs exp(-k / decay); 0 = no decay
    dpace: float | None = None  # alpha of D-PACE's weights, used instead of the decay; None = it
    is_contiguous: bool = True  # supervision ends at a gap; False = only the gap is left out

    def __post_init__(self):
        weights = ("cross_entropy", "l1", "length", "confidence", "selector", "decay")
        require(self, weights, lambda x: x >= 0, "0 or more", "losses.")
        require(self, ("base",), lambda x: 0 <= x <= 1, "in 0..1", "losses.")
        shares, says = ("base_decay", "dpace"), "in 0..1, or None"
        require(self, shares, lambda x: x is None or 0 <= x <= 1, says, "losses.")
        require(self, ("candidates",), lambda n: n >= 1, "at least 1", "losses.")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW, linear warm-up, cosine to zero."""

    learning_rate: float = 6e-4  # peak
    warmup: float = 0.04  # fraction of the steps
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.999  # decay of the second moment
    eps: float = 1e-8  # in the denominator
    weight_decay: float = 0.0  # decoupled
    clip_norm: float = 1.0  # global norm of the gradient

    def __post_init__(self):
        scales = ("learning_rate", "clip_norm", "eps")
        require(self, scales, lambda x: x > 0, "above 0", "optimizer.")
        require(self, ("warmup",), lambda x: 0 <= x <= 1, "in 0..1", "optimizer.")
        require(self, ("beta1", "beta2"), lambda x: 0 <= x < 1, "at least 0, below 1", "optimizer.")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    data: str  # conversations answered by the target: a folder of shards, or JSON lines
    workdir: str  # checkpoints, metrics and the resolved config go here
    target: str = "smollm2"  # name or folder
    target_dtype: Literal["float32", "bfloat16"] = "float32"  # of the target's parameters
    thinking: bool | None = None  # the template's enable_thinking, its default by default
    drafter: DrafterRecipe = DrafterRecipe()  # what to train
    losses: Losses = Losses()  # what to minimise
    optimizer: Optimizer = Optimizer()  # how
    steps: int = 1000  # optimizer steps
    batch_size: int = 8  # rows a step; a row is one conversation, or several packed
    accumulate: int = 1  # parts of a step's rows, taken one after another; the result is the same
    num_anchors: int = 512  # A, blocks a row
    anchor_chunk: int = 64  # blocks of a device whose logits exist at once
    frequent_tokens: int = 0  # sampled softmax: tokens always in the loss; 0 = the whole vocabulary
    drawn_tokens: int = 0  # sampled softmax: other tokens drawn each step
    max_length: int = 4096  # tokens a conversation, cut on the right
    pack: bool = False  # fill rows of max_length with conversations that do not see each other
    length_multiple: int = 128  # batches are padded to a multiple of this
    min_supervised: int = 14  # supervised tokens below which a conversation is dropped
    threads: int = 1  # batches read at once; more for many small samples on a slow disk
    max_cache_bytes: int = 0  # keep the target's features on disk; 0 = compute them in the step
    cache: str | None = None  # folder of kept features, which runs may share; None = in workdir
    mesh: str | None = None  # devices, as in data=4,fsdp=2,tensor=1; None = one
    seed: int = 42  # of initial weights, shuffling and anchors
    holdout: int = 0  # conversations kept out of training and measured instead, drawn by seed
    evaluate_every: int = 0  # steps between two measurements of them; 0 = never
    log_every: int = 10  # steps between two lines of metrics
    term_gradients: bool = False  # also log each loss term's gradient norm (a gradient a term)
    tensorboard: bool = False  # also write metrics as TensorBoard events, to workdir/tensorboard
    save_every: int = 500  # steps between two checkpoints
    keep: int = 2  # checkpoints kept
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the exported drafter

    def __post_init__(self):
        sizes = ("batch_size", "num_anchors", "anchor_chunk", "max_length", "length_multiple")
        counts = ("accumulate", "threads", "steps", "log_every", "save_every", "keep")
        require(self, sizes + counts, lambda n: n >= 1, "at least 1")
        require(self, ("holdout", "evaluate_every"), lambda n: n >= 0, "0 or more")
        for field in ("data", "workdir"):
            if "://" in getattr(self, field):
                raise ValueError(
                    f"{field} = {getattr(self, field)!r}: must be a path of a mounted disk; mount "
                    "the bucket (gcsfuse, s3fs) and name where"
                )
        if self.evaluate_every and not self.holdout:
            raise ValueError(
                f"evaluate_every = {self.evaluate_every} needs held-out conversations: set holdout"
            )
        walked, trained = self.drafter.candidates, self.losses.candidates
        if self.losses.selector and walked and walked != trained:
            raise ValueError(
                f"losses.candidates = {trained}, drafter.candidates = {walked}: it learns to "
                "choose among as many as it is walked over; set both alike"
            )
        if bool(self.frequent_tokens) != bool(self.drawn_tokens):
            raise ValueError(
                f"frequent_tokens = {self.frequent_tokens}, drawn_tokens = {self.drawn_tokens}: "
                "set both for a sampled softmax, or neither"
            )
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate = {self.accumulate} must divide batch_size = {self.batch_size}"
            )
        blocks = self.batch_size // self.accumulate * self.num_anchors
        if blocks % self.anchor_chunk:
            raise ValueError(
                f"anchor_chunk = {self.anchor_chunk} must divide "
                f"batch_size / accumulate * num_anchors = {blocks}"
            )
