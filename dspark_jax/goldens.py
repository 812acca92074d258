"""Reference outputs against ours: any folder of tests/goldens/README.md's format.

A folder holds a checkpoint in some format and `expected.safetensors`: inputs, and what the public
reference implementation makes of them in fp32. What a folder is, its content says.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.base import Batch
from dspark_jax.config import Losses
from dspark_jax.decode.draft import proposer
from dspark_jax.decode.propose import Candidates
from dspark_jax.decode.verify import rule
from dspark_jax.nn import selector
from dspark_jax.nn.domino import DominoHead
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.sampling import Sampling, law
from dspark_jax.train import anchors, step
from dspark_jax.train.losses import draft_logits
from dspark_jax.train.step import Knowledge
from dspark_jax.walk import Steps, follow, walk
from dspark_jax.weights import deepspec, specforge, targets, zlab
from dspark_jax.weights.tensors import CheckpointError, read_file, read_json, required

TOLERANCE = 1e-4
_GARBAGE = 2  # rows behind the anchor that a round feeds and must not see


class Expected(dict[str, np.ndarray]):
    """The reference's tensors by name; one that is absent is an error with its name."""

    def __missing__(self, name: str):
        raise CheckpointError(f"expected.safetensors has no {name!r}")


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one tensor is from the reference's."""

    name: str  # of the tensor
    error: float  # largest absolute difference; of token ids: how many differ
    limit: float  # what is tolerated

    @property
    def passed(self) -> bool:
        """NaN never passes."""
        return self.error <= self.limit


def compare(folder: Path) -> list[Difference]:
    """Every output of a folder.

    Raises:
      CheckpointError: the folder is of no known kind, or its checkpoint is broken.
    """
    kind = _KINDS[kind_of(folder)]
    expected = Expected(jax.device_get(read_file(folder / "expected.safetensors")))
    with jax.default_matmul_precision("highest"):  # TPUs and GPUs round operands otherwise
        return list(kind(folder, expected))


def kind_of(folder: Path) -> str:
    """Which format a folder is in."""
    hf = read_json(folder / "config.json")
    architecture = (hf.get("architectures") or [None])[0]
    if "speculators_model_type" in hf:
        raise CheckpointError(f"{folder}: speculators' format is not read yet")
    if (hf.get("dflash_config") or {}).get("projector_type") == "domino":
        return "domino head"
    if architecture in zlab.ARCHITECTURES:
        return "dflash"
    if architecture in deepspec.ARCHITECTURES:
        return "dspark"
    if hf.get("model_type") in targets.FAMILIES:
        return "target"
    raise CheckpointError(
        f"{folder}: architectures = {architecture!r}, model_type = {hf.get('model_type')!r}: "
        f"neither a known drafter nor a known target"
    )


def close(name: str, ours, theirs, floor: float = 1.0) -> Difference:
    """Floats: 1e-4 of the largest reference value, or of `floor` if that is larger."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    limit = TOLERANCE * max(floor, float(np.abs(theirs).max(initial=0)))
    if ours.shape != theirs.shape:
        return Difference(f"{name} {ours.shape}, not {theirs.shape}", np.inf, limit)
    return Difference(name, float(np.abs(ours - theirs).max(initial=0)), limit)


def same(name: str, ours, theirs) -> Difference:
    """Ids: all equal."""
    return Difference(name, float(np.sum(np.asarray(ours) != np.asarray(theirs))), 0.0)


def _target(folder: Path, expected: Expected) -> Iterator[Difference]:
    target = targets.load(folder)
    layers = range(-1, target.config.num_layers)
    run = jax.jit(lambda target, tokens: target(tokens, tuple(layers))[:2])
    hidden, features = run(target, expected["input_ids"])
    outputs = np.split(np.asarray(features), len(layers), axis=-1)
    for layer, output in zip(layers, outputs, strict=True):
        name = "embeddings" if layer < 0 else f"layer_output.{layer}"
        yield close(name, output, expected[name])
    yield close("final_normed", hidden, expected["final_normed"])
    yield close("logits", target.logits(hidden), expected["logits"])


def _dspark(folder: Path, expected: Expected) -> Iterator[Difference]:
    drafter, lent = deepspec.read(folder)
    yield from _training(folder, drafter, lent, expected)
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


def _training(
    folder: Path, drafter: Drafter, lent: Lent, expected: Expected
) -> Iterator[Difference]:
    """The training forward, the loss and every gradient, behind the reference's anchors."""
    said = json.loads((folder / "loss.json").read_text())
    losses = Losses(
        cross_entropy=said["ce_loss_alpha"],
        l1=said["l1_loss_alpha"],
        confidence=said["confidence_head_alpha"],
        decay=said["loss_decay_gamma"],
    )
    given = jax.tree.map(jnp.asarray, dict(expected))
    batch = Batch(tokens=given["input_ids"], loss_mask=given["loss_mask"].astype(bool))
    known = Knowledge(
        features=given["target_hidden_states"],
        hidden=given["target_last_hidden_states"],
        lent=lent,
    )
    valid = given["block_keep_mask"].astype(bool)
    yield from training(drafter, batch, known, given["anchor_positions"], valid, losses, expected)


def training(
    drafter: Drafter,
    batch: Batch,
    known: Knowledge,
    chosen: jax.Array,
    valid: jax.Array,
    losses: Losses,
    expected: Expected,
) -> Iterator[Difference]:
    """Logits, loss and gradients of a batch, in the tensors' DeepSpec names."""
    blocks = anchors.cut(batch, chosen, valid, drafter.config.block_size)
    kept = np.asarray(valid)
    yield same("eval_mask", blocks.counted, expected["eval_mask"].astype(bool))
    yield same("target_ids", blocks.labels[kept], expected["target_ids"][kept])
    hidden, aligned = jax.jit(step.predictions)(drafter, known, blocks, batch.tokens)
    logits = jnp.stack([
        draft_logits(drafter.heads, known.lent, *row)[1]
        for row in zip(hidden, blocks.prevs, strict=True)
    ])  # fmt: skip
    yield close("draft_logits", logits[kept], expected["draft_logits"][kept])
    target_logits = drafter.heads.base_logits(known.lent, aligned)
    reference = expected["aligned_target_logits"]
    yield close("aligned_target_logits", target_logits[kept], reference[kept])
    if drafter.config.confidence is not None:
        confidence = drafter.heads.confidence(blocks.prevs, hidden)
        yield close("confidence_logits", confidence[kept], expected["confidence_logits"][kept])
    yield from _gradients(drafter, batch, known, blocks, losses, expected)


def _gradients(drafter, batch, known, blocks, losses, expected) -> Iterator[Difference]:
    graphdef, params = nnx.split(drafter)

    def objective(params):
        trained = nnx.merge(graphdef, params)
        return step.loss(trained, known, blocks, batch.tokens, losses, blocks.anchors.size)[0]

    value, gradient = jax.jit(jax.value_and_grad(objective))(params)
    yield close("loss", value, np.squeeze(expected["loss"]))
    names, seen = deepspec.namer(drafter.config), set()
    for path, variable in nnx.to_flat_state(gradient):
        name = "grad." + names(".".join(map(str, path)))
        seen.add(name)
        if not name.endswith("layer_scalar"):  # a stored constant has none
            yield close(name, variable[...], expected[name], floor=0.0)
    absent = {name for name in expected if name.startswith("grad.")} - seen
    if absent:
        raise CheckpointError(f"the reference trains what we do not: {sorted(absent)}")


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


def _dflash(folder: Path, expected: Expected) -> Iterator[Difference]:
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


def _domino(folder: Path, expected: Expected) -> Iterator[Difference]:
    """The head alone: corrections along given tokens, and a greedy roll-out."""
    head, fields = specforge.read_head(folder), read_json(folder / "config.json")["dflash_config"]
    is_shifted = required(fields, "shift_label")
    first = 0 if is_shifted else 1  # without a shift row 0 is the anchor's and predicts nothing
    flat = {
        name: jnp.asarray(expected[name].reshape(-1, *expected[name].shape[2:]))
        for name in ("prev_token_ids", "hidden_states", "base_logits", "draft_logits")
    }
    hidden = flat["hidden_states"][:, first:]
    prevs = flat["prev_token_ids"][:, : hidden.shape[1]]
    transition = _transition(head, jnp.asarray(expected["target_embed"]))
    bias = follow(transition, head.init_state(len(prevs)), prevs.T, jnp.swapaxes(hidden, 0, 1))
    ours = flat["base_logits"][:, first:] + jnp.swapaxes(bias, 0, 1)
    yield close("draft_logits", ours, flat["draft_logits"][:, first:])
    rows = slice(0, -1) if is_shifted else slice(1, None)  # theirs always drafts B - 1
    hidden = jnp.asarray(expected["greedy_hidden"][:, rows])
    base = hidden @ expected["target_lm_head"].T
    keys = jax.random.split(jax.random.key(0), (base.shape[1], 1))
    across = Steps(logits=jnp.swapaxes(base, 0, 1), hidden=jnp.swapaxes(hidden, 0, 1), keys=keys)
    anchor = jnp.asarray(expected["greedy_anchor"])
    tokens, _ = walk(transition, rule(None).choose, head.init_state(1), anchor, across)
    yield same("greedy_tokens", tokens.T, expected["greedy_tokens"])


def _transition(head: DominoHead, embedding):
    def step(state, prev, hidden):
        state, query = head.query(state, prev, hidden, embedding)
        return state, query @ head.w2[...].T

    return step


_KINDS = {"target": _target, "dspark": _dspark, "dflash": _dflash, "domino head": _domino}
