"""A training session as users start it: models and data from a config, progress, export."""

import dataclasses
import functools
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import progress
from dspark_jax.config import DrafterConfig, spread_layers
from dspark_jax.config_training import TrainConfig
from dspark_jax.manifest import Manifest
from dspark_jax.nn.drafter import Drafter
from dspark_jax.nn.target import Target
from dspark_jax.processes import is_first
from dspark_jax.shards import Shards
from dspark_jax.train import data, initial, loop, placement, sources
from dspark_jax.train.budget import Budget
from dspark_jax.train.plan import plan
from dspark_jax.train.workdir import pinned
from dspark_jax.weights import formats, native
from dspark_jax.weights.card import Card, Mode, front_matter
from dspark_jax.weights.load import LoadedTarget, load_drafter, load_target, outline_target

log = logging.getLogger(__name__)
_SCALE_ROWS, _SCALE_TOKENS = 8, 128  # conversations and tokens over which taps are measured


def train(config: TrainConfig) -> Path:
    """Trains a drafter and writes it to `workdir`/drafter; a stopped run continues.

    Returns:
      The folder of the drafter, in our own format.
    """
    mode = trained_mode(Path(config.data), config.thinking)
    _, corpus, _ = _outlined(config)  # what is wrong is said before weights are read
    target = placed_target(config)
    drafter_config = resolve(config, target.model, corpus, pinned(Path(config.workdir)))
    with progress.bar() as shown:
        task = shown.add_task("training", total=config.steps, note="")

        def report(line: dict) -> None:
            if held_out := line.get("held_out"):
                log.info("step %d, held out: %s", line["step"], _note(held_out))
            else:
                note = f"{_note(line)}  {line['tokens_per_second']:.0f} tokens/s"
                shown.update(task, completed=line["step"], note=note)

        drafter = loop.run(config, target.model, corpus, drafter_config, report)
    folder = Path(config.workdir) / "drafter"
    if is_first():
        native.save(
            folder, drafter, jnp.dtype(config.export_dtype), card(config, drafter, corpus, mode)
        )
        log.info("drafter written to %s", folder)
    return folder


def placed_target(config: TrainConfig) -> LoadedTarget:
    """The target, read into the host's memory and put where the run's mesh wants it."""
    place = placement.of(config)
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        raise ValueError(
            f"JAX_PLATFORMS = {jax.config.jax_platforms!r}: targets are read through the CPU; set "
            f"JAX_PLATFORMS={jax.config.jax_platforms},cpu"
        ) from None
    with jax.default_device(host):
        target = load_target(config.target, jnp.dtype(config.target_dtype))
    return dataclasses.replace(target, model=place.module(target.model))


def dry_run(config: TrainConfig) -> Budget:
    """What the run would need: the target's weights are not read, nothing is trained or written.

    Shards are read whole, and compared with their checksums: they may have come from afar.
    """
    target, corpus, drafter = _outlined(config)
    if Path(config.data).is_dir():
        Shards(Path(config.data)).verify()
    return plan(config, target.model, corpus, drafter)


def _outlined(config: TrainConfig) -> tuple[LoadedTarget, data.Corpus, DrafterConfig]:
    """The target without its weights, the conversations, and the drafter but for its scales."""
    target = outline_target(config.target, jnp.dtype(config.target_dtype))
    _check_mask_token(config, target)
    drafter = initial.drafter_config(config.drafter, target.model.config)
    held = formats.holders(drafter, target.model.config)
    log.info(
        "can be converted to: %s", ", ".join(held) or "no format of others, see dspark convert"
    )
    return target, read_corpus(config, target), drafter


def read_corpus(config: TrainConfig, target: LoadedTarget) -> data.Corpus:
    """The run's conversations; what was left out is said."""
    corpus = sources.read(
        Path(config.data),
        _render(config, target),
        target.model.config.vocab_size,
        config.max_length,
        config.min_supervised,
        config.target,
        target.tokenizer.fingerprint,
    )
    log.info(sources.summary(corpus))
    return corpus


def _note(line: dict) -> str:
    """Loss and accepted lengths: along the drafter's own tokens, and by its base logits alone."""
    walked, unary = line["walked"]["length"], line["unary"]["length"]
    return f"loss {line['loss']:.3f}  accepted length {walked:.2f} (base logits {unary:.2f})"


def resolve(
    config: TrainConfig, target: Target, corpus: data.Corpus, before: dict | None = None
) -> DrafterConfig:
    """The drafter's full config; taps are measured if the recipe asks for it and no run has."""
    scales = ()
    if before is not None:
        scales = tuple(before["drafter"]["feature_scales"])
    elif config.drafter.start not in ("random", "target_last"):
        scales = load_drafter(config.drafter.start).config.feature_scales
    elif config.drafter.scale_features:
        long = np.flatnonzero(data.lengths(corpus.conversations) >= _SCALE_TOKENS)[:_SCALE_ROWS]
        if not long.size:
            raise ValueError(
                f"drafter.scale_features = True needs a conversation of {_SCALE_TOKENS} tokens"
            )
        rows = [corpus.conversations[i].tokens[:_SCALE_TOKENS] for i in long.tolist()]
        ids = config.drafter.target_layer_ids or spread_layers(target.config.num_layers)
        scales = initial.measure_scales(target, jnp.asarray(np.stack(rows)), ids)
    return initial.drafter_config(config.drafter, target.config, scales)


def _render(config: TrainConfig, target: LoadedTarget) -> sources.Render:
    """The chat template, in the mode that the card will name."""
    names = target.tokenizer.mode(config.thinking)
    return functools.partial(target.tokenizer.assistant_mask, **names)


def trained_mode(data: Path, thinking: bool | None) -> Mode:
    """How training data are rendered: as their shards were prepared, or by `thinking`.

    Raises:
      ValueError: the two disagree.
    """
    if not data.is_dir():
        return Mode(thinking=thinking)
    said = Manifest.load(data).mode
    if thinking not in (None, said.get("thinking")):
        raise ValueError(
            f"thinking = {thinking}, but {data} was prepared with {said.get('thinking')}: leave it "
            "out, or prepare the data anew"
        )
    return Mode(thinking=said.get("thinking"), system=said.get("system"))


def _check_mask_token(config: TrainConfig, target: LoadedTarget) -> None:
    """The mask token must be a row no text uses: never the end of a turn or padding."""
    mask, tokenizer = config.drafter.mask_token, target.tokenizer
    free = ", ".join(f"{number} {name}" for name, number in tokenizer.free_tokens.items())
    taken = {*tokenizer.stop_tokens, tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
    if mask is None:
        raise ValueError(f"drafter.mask_token is not set; free reserved rows: {free}")
    if mask in taken:
        raise ValueError(
            f"drafter.mask_token = {mask} begins, ends or pads texts; free reserved rows: {free}"
        )


def card(config: TrainConfig, drafter: Drafter, corpus: data.Corpus, mode: Mode) -> str:
    """The model card: what was trained, for which target, on what."""
    c = drafter.config
    head = "none" if c.head is None else str(c.head)
    supervised = sum(int(x.loss_mask.sum()) for x in corpus.conversations)
    known = Card(
        target=config.target,
        mode=mode,
        data=f"{sources.summary(corpus)}; {supervised} tokens of the target's own answers",
        budget=f"{config.steps} steps of {config.batch_size} x {config.num_anchors} anchors",
    )
    return f"""{front_matter(known)}# Drafter for {config.target}

| | |
|---|---|
| target | {config.target} |
| backbone | {c.num_layers} layers, width {c.geometry.width}, taps {list(c.target_layer_ids)} |
| block | {c.block_size} tokens, predicts from the anchor: {c.predict_from_anchor} |
| head | {head} |
| data | {known.data} |
| budget | {known.budget} |
| mode | {known.mode} |

Output is the target's own whatever the drafter: it decides speed, never content.
"""
