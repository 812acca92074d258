"""The run: build, restore, and for each batch: step, log, save."""

import functools
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from dspark_jax.base import Batch
from dspark_jax.checkpoint import Checkpoints
from dspark_jax.config import DrafterConfig, TrainConfig
from dspark_jax.nn.drafter import Drafter
from dspark_jax.nn.target import Target
from dspark_jax.train import data, features, initial, optimizer, vocabulary
from dspark_jax.train.losses import TERMS, Tally
from dspark_jax.train.step import TrainState, train_step
from dspark_jax.train.workdir import open_metrics, pin

log = logging.getLogger(__name__)
Report = Callable[[dict], None]


def run(
    config: TrainConfig,
    target: Target,
    corpus: data.Corpus,
    drafter_config: DrafterConfig,
    report: Report = lambda metrics: None,
) -> Drafter:
    """Trains a drafter, continuing where the work folder stopped.

    Args:
      config: the run.
      target: the frozen model.
      corpus: what it answered.
      drafter_config: what to build.
      report: called with each line of metrics.

    Returns:
      The trained drafter, in fp32.
    """
    workdir, samples = Path(config.workdir), corpus.conversations
    graphdef, state, chain = start(config, target, drafter_config)
    attach = _attach(config, target, corpus, drafter_config)
    pin(workdir, config, drafter_config, corpus)
    batches = data.batches(samples, config.batch_size, config.length_multiple, config.seed, attach)
    checkpoints = Checkpoints(workdir / "checkpoints", config.keep)
    if checkpoints.latest is not None:
        state, position = checkpoints.restore(state)
        batches.set_state(position)
        log.info("resumed at step %d", int(state.step))
    step = _jitted_step(config, chain, graphdef, target, corpus)
    try:
        state = _steps(config, step, state, batches, checkpoints, report)
    finally:
        checkpoints.close()
    return nnx.merge(graphdef, state.params)


def _jitted_step(
    config: TrainConfig,
    chain: optax.GradientTransformation,
    graphdef: nnx.GraphDef,
    target: Target,
    corpus: data.Corpus,
) -> Callable:
    """(state, batch) -> (state, metrics), compiled once per padded length; the state is donated."""
    target_graphdef, target_params = nnx.split(target)
    split = None
    if config.frequent_tokens:
        sizes = target.config.vocab_size, config.frequent_tokens, config.drawn_tokens
        split = vocabulary.split(corpus.conversations, *sizes)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, params, batch, split):
        return train_step(
            chain,
            graphdef,
            config,
            state,
            nnx.merge(target_graphdef, params),
            batch,
            split,
        )

    return lambda state, batch: step(state, target_params, batch, split)


def _attach(
    config: TrainConfig, target: Target, corpus: data.Corpus, drafter: DrafterConfig
) -> Callable:
    """How samples get the target's features: from disk, or not before the step."""
    if not config.max_cache_bytes:
        return lambda index, conversation: conversation
    folder = Path(config.workdir) / "features"
    ids, limit = drafter.target_layer_ids, config.max_cache_bytes
    cache = features.build(target, corpus, ids, folder, limit)

    def attach(index: int, conversation: data.Conversation) -> data.Conversation:
        known = cache.rows(index, len(conversation.tokens))
        return conversation.replace(features=known[0], hidden=known[1])

    return attach


def start(
    config: TrainConfig, target: Target, drafter_config: DrafterConfig
) -> tuple[nnx.GraphDef, TrainState, optax.GradientTransformation]:
    """Initial state; only the drafter's parameters are in the optimizer."""
    chain = optimizer.build(config.optimizer, config.steps)

    begin = config.drafter.start
    before = None
    if begin not in ("random", "target_last"):
        before = initial.continued(drafter_config, Path(begin))

    def build(key, target, drafter):
        key_params, key_anchors = jax.random.split(key)
        if drafter is None:
            drafter = initial.drafter(drafter_config, key_params, target, begin)
        params = nnx.state(drafter)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            optimizer=chain.init(params),
            key=key_anchors,
        )

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Drafter(drafter_config, rngs=nnx.Rngs(0))))
    return graphdef, jax.jit(build)(jax.random.key(config.seed), target, before), chain


def _steps(
    config: TrainConfig,
    step: Callable,
    state: TrainState,
    batches: grain.DatasetIterator[Batch],
    checkpoints: Checkpoints,
    report: Report,
) -> TrainState:
    window, begun, first = [], time.monotonic(), int(state.step) + 1
    with _StopRequests() as stop_requested, open_metrics(Path(config.workdir), first - 1) as lines:
        for number in range(first, config.steps + 1):
            batch = next(batches)
            state, metrics = step(state, jax.tree.map(jnp.asarray, batch))
            window.append({**metrics, "supervised": int(batch.loss_mask.sum())})
            if number == config.steps or number % config.log_every == 0:
                line = {"step": number, **summary(window)}
                _refuse_nonfinite(line)
                supervised = sum(entry["supervised"] for entry in window)
                line["tokens_per_second"] = supervised / (time.monotonic() - begun)
                window, begun = [], time.monotonic()
                lines.write(json.dumps(line) + "\n")
                lines.flush()
                report(line)
            is_stopping = stop_requested()
            if is_stopping or number == config.steps or number % config.save_every == 0:
                checkpoints.save(number, state, batches.get_state())
            if is_stopping:
                log.warning("stopped by a signal; step %d is saved", number)
                raise SystemExit(143)
    return state


def _refuse_nonfinite(line: dict) -> None:
    """Stops before a broken state is saved over a good one."""
    if not math.isfinite(line["loss"] + line["gradient_norm"]):
        raise FloatingPointError(
            f"step {line['step']}: loss = {line['loss']}, gradient norm = {line['gradient_norm']}; "
            "resume from the last checkpoint with a lower optimizer.learning_rate"
        )


def summary(window: Sequence[dict]) -> dict:
    """Plain numbers of some steps' metrics: means of the losses, ratios of pooled sums."""
    window = jax.device_get(list(window))
    tally: Tally = jax.tree.map(lambda *xs: np.sum(xs, 0), *(entry["tally"] for entry in window))
    counted, blocks = np.maximum(tally.counted, 1), max(float(tally.blocks), 1)
    return {
        "loss": float(np.mean([entry["loss"] for entry in window])),
        "gradient_norm": float(np.mean([entry["gradient_norm"] for entry in window])),
        **{name: float(tally[name]) / len(window) for name in TERMS},
        "accept_rate": [round(float(x), 4) for x in tally.accepted / counted],
        "agree_rate": [round(float(x), 4) for x in tally.agreed / counted],
        "expected_length": float(tally.expected) / blocks,
        "greedy_length": float(tally.greedy) / blocks,
        "blocks": int(tally.blocks),
    }


class _StopRequests:
    """Context: SIGTERM becomes a question that the loop asks at step boundaries."""

    def __enter__(self) -> Callable[[], bool]:
        self._requested = False
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:  # Python lets no other thread handle signals
            self._before = signal.signal(signal.SIGTERM, self._request)
        return lambda: self._requested

    def _request(self, *_) -> None:
        self._requested = True

    def __exit__(self, *_) -> None:
        if self._is_main:
            signal.signal(signal.SIGTERM, self._before)
