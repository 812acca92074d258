"""The run: build, restore, and for each batch: step, log, save."""

import dataclasses
import functools
import json
import logging
import signal
import time
from collections.abc import Callable
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
from dspark_jax.train.losses import Tally
from dspark_jax.train.step import TrainState, train_step

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
    _pin_config(workdir, config, drafter_config)
    graphdef, state, chain = start(config, target, drafter_config)
    samples = corpus.conversations
    batches = data.batches(
        samples,
        config.batch_size,
        config.length_multiple,
        config.seed,
        _attach(config, target, samples, drafter_config),
    )
    checkpoints = Checkpoints(workdir / "checkpoints", config.keep)
    if checkpoints.latest is not None:
        state, position = checkpoints.restore(state)
        batches.set_state(position)
        log.info("resumed at step %d", int(state.step))
    step = jax.jit(
        functools.partial(
            train_step,
            chain,
            graphdef,
            config.losses,
            config.num_anchors,
            config.anchor_chunk,
            config.drawn_tokens,
        ),
        donate_argnums=0,
    )
    split = None
    if config.frequent_tokens:
        split = vocabulary.split(samples, target.config.vocab_size, config.frequent_tokens)
    step = functools.partial(step, split=split)
    try:
        state = _steps(config, step, state, target, batches, checkpoints, report)
    finally:
        checkpoints.close()
    return nnx.merge(graphdef, state.params)


def _attach(config: TrainConfig, target: Target, samples, drafter: DrafterConfig) -> Callable:
    """How samples get the target's features: from disk, or not before the step."""
    if not config.max_cache_bytes:
        return lambda index, conversation: conversation
    folder = Path(config.workdir) / "features"
    ids = drafter.target_layer_ids
    cache = features.build(target, samples, ids, folder, config.max_cache_bytes)

    def attach(index: int, conversation: data.Conversation) -> data.Conversation:
        known = cache.rows(index, len(conversation.tokens))
        return conversation.replace(features=known[0], hidden=known[1])

    return attach


def start(
    config: TrainConfig, target: Target, drafter_config: DrafterConfig
) -> tuple[nnx.GraphDef, TrainState, optax.GradientTransformation]:
    """Initial state; only the drafter's parameters are in the optimizer."""
    chain = optimizer.build(config.optimizer, config.steps)

    def build(key, target):
        key_params, key_anchors = jax.random.split(key)
        drafter = initial.drafter(drafter_config, key_params, target, config.drafter.start)
        params = nnx.state(drafter)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            optimizer=chain.init(params),
            key=key_anchors,
        )

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Drafter(drafter_config, rngs=nnx.Rngs(0))))
    return graphdef, jax.jit(build)(jax.random.key(config.seed), target), chain


def _steps(
    config: TrainConfig,
    step: Callable,
    state: TrainState,
    target: Target,
    batches: grain.DatasetIterator[Batch],
    checkpoints: Checkpoints,
    report: Report,
) -> TrainState:
    begun, supervised = time.monotonic(), 0
    with _StopRequests() as stop_requested, _metrics_file(config) as lines:
        for number in range(int(state.step) + 1, config.steps + 1):
            batch = next(batches)
            supervised += int(batch.loss_mask.sum())
            state, metrics = step(state, target, jax.tree.map(jnp.asarray, batch))
            if number % config.log_every == 0 or number == config.steps:
                line = {"step": number, **summary(metrics)}
                line["tokens_per_second"] = supervised / (time.monotonic() - begun)
                begun, supervised = time.monotonic(), 0
                lines.write(json.dumps(line) + "\n")
                lines.flush()
                report(line)
            last = number == config.steps or stop_requested()
            if last or number % config.save_every == 0:
                checkpoints.save(number, state, batches.get_state())
            if stop_requested():
                log.warning("stopped by a signal; step %d is saved", number)
                raise SystemExit(143)
    return state


def summary(metrics: dict) -> dict:
    """Plain numbers of one step's metrics; ratios of pooled sums."""
    tally: Tally = jax.device_get(metrics["tally"])
    counted, blocks = np.maximum(tally.counted, 1), max(float(tally.blocks), 1)
    return {
        "loss": float(metrics["loss"]),
        "gradient_norm": float(metrics["gradient_norm"]),
        "cross_entropy": float(tally.cross_entropy),
        "l1": float(tally.l1),
        "confidence": float(tally.confidence),
        "accept_rate": [round(float(x), 4) for x in tally.accepted / counted],
        "agree_rate": [round(float(x), 4) for x in tally.agreed / counted],
        "expected_length": float(tally.expected) / blocks,
        "greedy_length": float(tally.greedy) / blocks,
        "blocks": int(tally.blocks),
    }


def _pin_config(workdir: Path, config: TrainConfig, drafter: DrafterConfig) -> None:
    """Stores the resolved config; a resumed run must have the same, field by field."""
    resolved = json.loads(
        json.dumps({"train": dataclasses.asdict(config), "drafter": dataclasses.asdict(drafter)})
    )
    path = workdir / "config.json"
    if path.exists():
        changed = _differences(json.loads(path.read_text(encoding="utf-8")), resolved)
        if changed:
            raise ValueError(
                f"{path} was written by a run with other settings: {'; '.join(changed)}. "
                "Use the same settings to resume, or another workdir"
            )
        return
    workdir.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(resolved, indent=1) + "\n", encoding="utf-8")


_MAY_CHANGE = {"train.log_every", "train.save_every", "train.keep", "train.workdir"}


def _differences(old: dict, new: dict, prefix: str = "") -> list[str]:
    found = []
    for name in sorted(set(old) | set(new)):
        was, now, path = old.get(name), new.get(name), prefix + name
        if isinstance(was, dict) and isinstance(now, dict):
            found += _differences(was, now, path + ".")
        elif was != now and path not in _MAY_CHANGE:
            found.append(f"{path} was {was!r}, is {now!r}")
    return found


class _StopRequests:
    """Context: SIGTERM becomes a question that the loop asks at step boundaries."""

    def __enter__(self) -> Callable[[], bool]:
        self._requested = False
        self._before = signal.signal(signal.SIGTERM, self._request)
        return lambda: self._requested

    def _request(self, *_) -> None:
        self._requested = True

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGTERM, self._before)


def _metrics_file(config: TrainConfig):
    return (Path(config.workdir) / "metrics.jsonl").open("a", encoding="utf-8")
