"""Training samples replayed through the decoding path: both paths must draft the same.

Behind every anchor of a sample the drafter drafts twice: in the training step's forward, all blocks
of the sample at once, and as it decodes, from slot caches filled in chunks. A drafter that has
learnt in a layout, on features or at positions other than those it is run with is right in the
first and wrong in the second.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.base import Batch
from dspark_jax.decode import generate
from dspark_jax.decode.draft import proposer
from dspark_jax.decode.generate import Models, ModelTarget, Requests
from dspark_jax.decode.verify import rule
from dspark_jax.nn.drafter import Drafter
from dspark_jax.nn.target import Target
from dspark_jax.train import anchors, metrics
from dspark_jax.train.data import Conversation, collate
from dspark_jax.train.step import ask, predictions

_MULTIPLE, _CHUNK = 128, 32  # lengths are padded to a multiple; anchors drafted for at once
_MARGIN, _ERRORS = 0.01, 3.0  # by how much accuracies may differ, and standard errors besides
_SAME = 0.9  # share of anchors behind which both paths must draft the same first token


@dataclasses.dataclass(frozen=True)
class Audit:
    """Sums over the anchors of some samples; a tuple has one entry a draft position."""

    anchors: int  # blocks drafted by each path
    expected: int  # of them, blocks whose first label is the target's own argmax
    counted: tuple[int, ...]  # blocks with a label there
    trained: tuple[int, ...]  # of them, the training path drafts the label
    decoded: tuple[int, ...]  # of them, the decoding path does
    differ: tuple[int, ...]  # of them, exactly one of the two does
    same: tuple[int, ...]  # of them, both paths draft the same token, right or wrong

    def __add__(self, other: "Audit") -> "Audit":
        """Two sets of samples as one."""
        added = []
        for field in dataclasses.fields(self):
            a, b = getattr(self, field.name), getattr(other, field.name)
            is_sum = isinstance(a, int)
            added.append(a + b if is_sum else tuple(x + y for x, y in zip(a, b, strict=True)))
        return Audit(*added)

    def shares(self, hits: Sequence[int]) -> list[float]:
        """Of the labels, by position."""
        return [n / max(count, 1) for n, count in zip(hits, self.counted, strict=True)]

    @property
    def agrees(self) -> tuple[bool, ...]:
        """Whether both accuracies are the same within noise, by position.

        Anchors are paired: where exactly one path is right it is either one by chance, so that the
        difference of the two counts has the variance `differ`. Rounding may add a point.
        """
        rows = zip(self.counted, self.trained, self.decoded, self.differ, strict=True)
        return tuple(
            abs(a - b) <= _MARGIN * count + _ERRORS * math.sqrt(differ)
            for count, a, b, differ in rows
        )

    @property
    def passed(self) -> bool:
        """Accuracies agree, and so do first tokens: a drafter that knows little is never right."""
        return all(self.agrees) and self.same[0] >= _SAME * self.counted[0]


def audit(
    target: Target, trained: Drafter, decoded: Drafter, samples: Sequence[Conversation]
) -> Audit:
    """Drafts behind all anchors of the samples on both paths.

    Args:
      target: the frozen model.
      trained: takes the training path: as training left it.
      decoded: takes the decoding path: as it is run; the same, if nothing came in between.
      samples: conversations that were trained on.

    Raises:
      ValueError: a drafter's vocabulary is a reduced one, the drafters' blocks differ in size, or
        no sample has an anchor.
    """
    if reduced := trained.config.draft_vocab_size or decoded.config.draft_vocab_size:
        raise ValueError(
            f"draft_vocab_size = {reduced}: only drafters of the whole vocabulary are audited, as "
            "only those are trained"
        )
    sizes = trained.config.block_size, decoded.config.block_size
    if sizes[0] != sizes[1]:
        raise ValueError(f"block_size = {sizes[1]} of the decoded drafter, {sizes[0]} trained with")
    found = [part for sample in samples for part in _parts(target, trained, decoded, sample)]
    if not found:
        raise ValueError(f"none of {len(samples)} samples has two supervised tokens in a row")
    return functools.reduce(operator.add, found)


def _parts(
    target: Target, trained: Drafter, decoded: Drafter, sample: Conversation
) -> Iterator[Audit]:
    """One sample, some anchors at a time."""
    batch = jax.tree.map(jnp.asarray, collate([sample], _MULTIPLE))
    where = np.flatnonzero(np.asarray(anchors.candidates(batch.loss_mask))[0])
    chunks = np.pad(where, (0, -len(where) % _CHUNK)).reshape(-1, _CHUNK).astype(np.int32)
    valid = (np.arange(chunks.size) < len(where)).reshape(chunks.shape)
    known = _ask(target, batch, trained.config.target_layer_ids)
    functions, params = proposer(decoded)
    caches = _fill(target, decoded, batch.tokens, len(sample.tokens))
    for at, is_valid in zip(map(jnp.asarray, chunks), map(jnp.asarray, valid), strict=True):
        taught = _draft_as_trained(trained, known, batch, at, is_valid)
        tokens = _draft_as_decoded(functions, params, known.lent, caches, batch.tokens, at)
        yield _compare(*jax.device_get((*taught, tokens)))


_ask = jax.jit(ask, static_argnums=2)


@jax.jit
def _draft_as_trained(drafter: Drafter, known, batch: Batch, at, valid):
    """Drafted tokens, labels, which of them count, and whether the first is the target's argmax."""
    blocks = anchors.cut(batch, at[None], valid[None], drafter.config.block_size)
    hidden, target_hidden = predictions(drafter, known, blocks, batch.tokens, _CHUNK)
    heads, lent = drafter.heads, known.lent
    base = metrics.cut_to_candidates(heads, heads.base_logits(lent, hidden[0]))
    drafted = metrics.greedy_walk(heads, lent, blocks.prevs[0, :, 0], hidden[0], base)
    best = jnp.argmax(heads.base_logits(lent, target_hidden[0, :, 0]), -1)
    return drafted, blocks.labels[0], blocks.counted[0], best == blocks.labels[0, :, 0]


def _fill(target: Target, drafter: Drafter, tokens, length: int):
    """The drafter's context cache behind a sample, filled as a prompt fills it."""
    (functions, drafter_params), (graphdef, params) = proposer(drafter), nnx.split(target)
    requests = Requests(
        sampling=None,
        limits=jnp.asarray([length]),
        offsets=jnp.zeros(1, jnp.int32),
        keys=jax.random.split(jax.random.key(0), 1),
        stop_tokens=jnp.asarray([-1]),
    )
    progress, _ = generate.prefill(
        ModelTarget(graphdef, drafter.config.target_layer_ids),
        functions,
        _MULTIPLE // 2,
        Models(target=params, proposer=drafter_params),
        requests,
        jnp.array(tokens),  # a copy, which the prefill may overwrite
        jnp.arange(tokens.shape[1])[None],
        jnp.asarray([length]),
    )
    return progress.context


@functools.partial(jax.jit, static_argnums=0)
def _draft_as_decoded(functions, params, lent, caches, tokens, at):
    """Drafted tokens; each anchor is a row of a batch."""
    rows = at.shape[0]
    caches = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), caches)
    keys = jnp.broadcast_to(jax.random.key(0), (rows, functions.block_size))
    choose = rule(None).choose
    return functions.draft(params, lent, tokens[0, at], caches, at, at, choose, keys).tokens


def _compare(trained, labels, counted, expected, decoded) -> Audit:
    """Counts of some blocks; those without a label count nowhere."""
    there, is_right = counted.any(1), [(path == labels) & counted for path in (trained, decoded)]

    def sums(flags) -> tuple[int, ...]:
        return tuple(flags.sum(0).tolist())

    return Audit(
        anchors=int(there.sum()),
        expected=int((expected & there).sum()),
        counted=sums(counted),
        trained=sums(is_right[0]),
        decoded=sums(is_right[1]),
        differ=sums(is_right[0] != is_right[1]),
        same=sums((trained == decoded) & counted),
    )
