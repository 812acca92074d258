"""The run: build, restore, and for each batch: step, log, save."""

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dspark_jax.base import Batch
from dspark_jax.checkpoint import Checkpoints
from dspark_jax.config import DrafterConfig
from dspark_jax.config_training import TrainConfig
from dspark_jax.folders import locked
from dspark_jax.nn.drafter import Drafter
from dspark_jax.nn.target import Target
from dspark_jax.processes import StopRequests, is_first, wait_for_all
from dspark_jax.train import (
    data,
    features,
    holdout,
    initial,
    optimizer,
    placement,
    probe,
    vocabulary,
)
from dspark_jax.train.metrics import summary
from dspark_jax.train.placement import ONE_DEVICE, Placement
from dspark_jax.train.probe import Probe
from dspark_jax.train.records import Records
from dspark_jax.train.step import TrainState, train_step
from dspark_jax.train.workdir import pin, pinned

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
    workdir, place = Path(config.workdir), placement.of(config)
    workdir.mkdir(parents=True, exist_ok=True)
    with locked(workdir) if is_first() else contextlib.nullcontext():
        return _run(config, workdir, place, target, corpus, drafter_config, report)


def _run(
    config: TrainConfig,
    workdir: Path,
    place: Placement,
    target: Target,
    corpus: data.Corpus,
    drafter_config: DrafterConfig,
    report: Report,
) -> Drafter:
    _pin_together(workdir, config, drafter_config, corpus)
    target, checkpoints = place.module(target), Checkpoints(workdir / "checkpoints", config.keep)
    is_new = checkpoints.latest is None
    graphdef, state, chain = start(config, target, drafter_config, place, is_new)
    corpus, held = holdout.split(corpus, config.holdout, config.seed, config.batch_size)
    attach, samples = _attach(config, target, corpus, drafter_config), corpus.conversations
    batches = _batches(config, samples, attach, place)
    if not is_new:
        state, position = checkpoints.restore(state)
        batches.set_state(position)
        log.info("resumed at step %d", int(state.step))
    jitted, given = jitted_step(config, chain, graphdef, target, corpus, state, place)
    watch = probe.build(config, graphdef, target, held, place)

    def step(state, batch):
        return jitted(state, batch, *given)

    # A signal kills no save: requests are heard until the last one is complete.
    with StopRequests() as stop, contextlib.closing(checkpoints):
        state = _steps(config, step, watch, state, batches, place, checkpoints, stop.now, report)
    return nnx.merge(graphdef, place.whole(state.params))


def _batches(
    config: TrainConfig, samples: Sequence, attach: Callable, place: Placement
) -> grain.DatasetIterator[Batch]:
    """The part of each batch that this process loads."""
    return data.batches(
        samples,
        config.batch_size,
        config.length_multiple,
        config.seed,
        attach,
        capacity=config.max_length if config.pack else 0,
        mine=place.mine,
        threads=config.threads,
    )


def _pin_together(workdir: Path, *settings: Any) -> None:
    """The first process writes if the run is new; all compare, so that all fail or none."""
    if pinned(workdir) is not None or is_first():
        pin(workdir, *settings)
    wait_for_all("pinned")
    if pinned(workdir) is None:
        raise ValueError(
            f"workdir = {workdir}: process {jax.process_index()} does not see what the first wrote "
            "there; name a disk that all processes share"
        )
    pin(workdir, *settings)


def jitted_step(
    config: TrainConfig,
    chain: optax.GradientTransformation,
    graphdef: nnx.GraphDef,
    target: Target,
    corpus: data.Corpus,
    state: TrainState,
    place: Placement,
) -> tuple[Callable, tuple]:
    """(state, batch, *given) -> (state, metrics), and what is given; the state is donated.

    It is compiled once per padded length. To lower it, shapes are enough.
    """
    target_graphdef, target_params = nnx.split(target)
    split = None
    if config.frequent_tokens:
        sizes = target.config.vocab_size, config.frequent_tokens, config.drawn_tokens
        split = vocabulary.split(corpus.conversations, *sizes)

    def step(state, batch, params, split):
        return train_step(
            chain,
            graphdef,
            config,
            state,
            nnx.merge(target_graphdef, params),
            batch,
            split,
            place.mesh,
        )

    return place.step(step, state), (target_params, split)


def _attach(
    config: TrainConfig, target: Target, corpus: data.Corpus, drafter: DrafterConfig
) -> Callable:
    """How samples get the target's features: from disk, or not before the step."""
    if not config.max_cache_bytes:
        return lambda index, conversation: conversation
    folder = Path(config.cache or Path(config.workdir) / "features")
    ids, limit = drafter.target_layer_ids, config.max_cache_bytes
    cache = features.build(target, corpus, ids, folder, limit)

    def attach(index: int, conversation: data.Conversation) -> data.Conversation:
        known = cache.rows(index, len(conversation.tokens))
        return conversation.replace(features=known[0], hidden=known[1])

    return attach


def start(
    config: TrainConfig,
    target: Target,
    drafter_config: DrafterConfig,
    place: Placement = ONE_DEVICE,
    is_new: bool = True,
) -> tuple[nnx.GraphDef, TrainState, optax.GradientTransformation]:
    """Initial state; only the drafter's parameters are in the optimizer.

    If the run is not new a checkpoint takes its place, and no drafter is read to start from.
    """
    chain = optimizer.build(config.optimizer, config.steps)
    begin = config.drafter.start if is_new else "random"
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
    return graphdef, place.build(build, jax.random.key(config.seed), target, before), chain


def _steps(
    config: TrainConfig,
    step: Callable,
    watch: Probe,
    state: TrainState,
    batches: grain.DatasetIterator[Batch],
    place: Placement,
    checkpoints: Checkpoints,
    stop_requested: Callable[[], bool],
    report: Report,
) -> TrainState:
    window, begun, first = [], time.monotonic(), int(state.step) + 1
    with Records(Path(config.workdir), first - 1, config.tensorboard, is_first()) as records:
        for number in range(first, config.steps + 1):
            batch, is_due = next(batches), functools.partial(_is_due, number, config.steps)
            on_device = place.rows(batch)
            seen = watch.batch(state, on_device) if is_due(config.log_every) else {}
            state, metrics = step(state, on_device)
            window.append(metrics)
            if is_due(config.log_every):
                _refuse_nonfinite(number, window)
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
                _refuse_nonfinite(number, window)
                checkpoints.save(number, state, batches.get_state())
            if is_stopping:
                if window:  # of steps behind the last line
                    records.write(_line(number, window, {}, time.monotonic() - begun))
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
    norms, supervised = (
        jax.device_get([entry[name] for entry in window])
        for name in ("gradient_norm", "supervised")
    )
    return {
        "step": number,
        **summary(window),
        "gradient_norm": float(sum(norms)) / len(norms),
        "tokens_per_second": int(sum(supervised)) / seconds,
        **seen,
    }


def _refuse_nonfinite(number: int, window: list[dict]) -> None:
    """Stops before a broken state is saved over a good one."""
    for loss, norm in jax.device_get([(e["loss"], e["gradient_norm"]) for e in window]):
        if not math.isfinite(loss + norm):
            raise FloatingPointError(
                f"at or shortly before step {number}: loss = {loss}, gradient norm = {norm}; "
                "resume from the last checkpoint with a lower optimizer.learning_rate"
            )
