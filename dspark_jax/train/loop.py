"""The run: build, restore, and for each batch: step, log, save."""

import functools
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dspark_jax.base import Batch
from dspark_jax.checkpoint import Checkpoints
from dspark_jax.config import DrafterConfig, TrainConfig
from dspark_jax.nn.drafter import Drafter
from dspark_jax.nn.target import Target
from dspark_jax.train import data, features, holdout, initial, optimizer, probe, vocabulary
from dspark_jax.train.metrics import summary
from dspark_jax.train.probe import Probe
from dspark_jax.train.records import Records
from dspark_jax.train.step import TrainState, train_step
from dspark_jax.train.workdir import pin

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
    workdir = Path(config.workdir)
    graphdef, state, chain = start(config, target, drafter_config)
    everything = corpus
    corpus, held = holdout.split(corpus, config.holdout, config.seed, config.batch_size)
    attach, samples = _attach(config, target, corpus, drafter_config), corpus.conversations
    pin(workdir, config, drafter_config, everything)
    batches = data.batches(samples, config.batch_size, config.length_multiple, config.seed, attach)
    checkpoints = Checkpoints(workdir / "checkpoints", config.keep)
    if checkpoints.latest is not None:
        state, position = checkpoints.restore(state)
        batches.set_state(position)
        log.info("resumed at step %d", int(state.step))
    step = _jitted_step(config, chain, graphdef, target, corpus)
    watch = probe.build(config, graphdef, target, held, _place)
    try:
        state = _steps(config, step, watch, state, batches, checkpoints, report)
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


def _place(batch: Batch) -> Batch:
    return jax.tree.map(jnp.asarray, batch)


def _steps(
    config: TrainConfig,
    step: Callable,
    watch: Probe,
    state: TrainState,
    batches: grain.DatasetIterator[Batch],
    checkpoints: Checkpoints,
    report: Report,
) -> TrainState:
    window, begun, first = [], time.monotonic(), int(state.step) + 1
    records = Records(Path(config.workdir), first - 1, config.tensorboard)
    with _StopRequests() as stop_requested, records:
        for number in range(first, config.steps + 1):
            batch, is_due = next(batches), functools.partial(_is_due, number, config.steps)
            on_device = _place(batch)
            seen = watch.batch(state, on_device) if is_due(config.log_every) else {}
            state, metrics = step(state, on_device)
            window.append({**metrics, "supervised": int(batch.loss_mask.sum())})
            if is_due(config.log_every):
                line = _line(number, window, seen, time.monotonic() - begun)
                records.write(line)
                report(line)
                window, begun = [], time.monotonic()
            if config.evaluate_every and is_due(config.evaluate_every):
                jax.block_until_ready(state)
                paused = time.monotonic()
                for line in _held_out(watch, number, state, stop_requested):
                    records.write(line)
                    report(line)
                begun += time.monotonic() - paused
            is_stopping = stop_requested()
            if is_stopping or is_due(config.save_every):
                checkpoints.save(number, state, batches.get_state())
            if is_stopping:
                log.warning("stopped by a signal; step %d is saved", number)
                raise SystemExit(143)
    return state


def _held_out(
    watch: Probe, number: int, state: TrainState, stop_requested: Callable[[], bool]
) -> Iterator[dict]:
    """The line of the held-out data; none if the run is to stop before it is complete."""
    found = watch.held_out(state, stop_requested)
    if found is None:
        log.warning("step %d: stopped before the held-out data were measured", number)
    else:
        yield {"step": number, "held_out": found}


def _is_due(number: int, last: int, every: int) -> bool:
    return number == last or number % every == 0


def _line(number: int, window: list[dict], seen: dict, seconds: float) -> dict:
    """The line of a window of steps."""
    norms = jax.device_get([entry["gradient_norm"] for entry in window])
    line = {
        "step": number,
        **summary(window),
        "gradient_norm": float(sum(norms)) / len(norms),
        "tokens_per_second": sum(entry["supervised"] for entry in window) / seconds,
        **seen,
    }
    _refuse_nonfinite(line)
    return line


def _refuse_nonfinite(line: dict) -> None:
    """Stops before a broken state is saved over a good one."""
    if not math.isfinite(line["loss"] + line["gradient_norm"]):
        raise FloatingPointError(
            f"step {line['step']}: loss = {line['loss']}, gradient norm = {line['gradient_norm']}; "
            "resume from the last checkpoint with a lower optimizer.learning_rate"
        )


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
