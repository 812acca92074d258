"""Work folders: a resumed run is the run that was stopped, or an error says what differs."""

import dataclasses
import json

import numpy as np
import pytest

from dspark_jax.config import Markov, Recurrent
from dspark_jax.config_training import DrafterRecipe, Losses, Optimizer, TrainConfig
from dspark_jax.train import initial, workdir

RECIPE = DrafterRecipe(mask_token=30, target_layer_ids=(0, 1), head=Markov(rank=3))
CONFIG = TrainConfig(data="data.jsonl", workdir="runs/one", drafter=RECIPE, num_anchors=64)


@pytest.fixture
def pin(micro_target, corpus, tmp_path):
    """Pins a config and corpus to one folder."""

    def pinning(config=CONFIG, conversations=corpus.conversations):
        drafter = initial.drafter_config(config.drafter, micro_target.config)
        given = corpus.replace(conversations=conversations)
        workdir.pin(tmp_path, config, drafter, given)

    return pinning


def recipe(**changes) -> dict:
    return {"drafter": dataclasses.replace(RECIPE, **changes)}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"seed": 43}, "train.seed was 42, is 43"),
        ({"target": "disk/other"}, "train.target was 'smollm2', is 'other'"),
        ({"losses": Losses(decay=2.0)}, "train.losses.decay was 4.0, is 2.0"),
        ({"optimizer": Optimizer(learning_rate=1.0)}, "train.optimizer.learning_rate was 0.0006"),
        (recipe(head=Markov(rank=4)), "drafter.head.rank was 3, is 4; train.drafter.head.rank was"),
        (recipe(head=Recurrent(rank=3)), "drafter.head.kind was 'Markov', is 'Recurrent'"),
        (recipe(head=None, confidence=None), "drafter.head was .*, is None"),
        (recipe(predict_from_anchor=False), "drafter.predict_from_anchor was True, is False"),
    ],
)
def test_a_changed_setting_is_named_on_resume(pin, changes, complaint):
    """T17: nothing turns itself on or off behind a resume."""
    pin()
    with pytest.raises(ValueError, match=complaint):
        pin(dataclasses.replace(CONFIG, **changes))
    pin()


def test_what_changes_no_parameter_may_change(pin):
    pin()
    pin(dataclasses.replace(CONFIG, target="/another/disk/smollm2"))
    pin(
        dataclasses.replace(
            CONFIG, data="elsewhere.jsonl", log_every=3, save_every=5, keep=9, max_cache_bytes=7
        )
    )


@pytest.mark.parametrize("change", ["token", "mask", "order", "fewer"])
def test_another_corpus_is_not_the_same_run(pin, corpus, change):
    pin()
    others = list(corpus.conversations)
    match change:
        case "token":
            others[0] = others[0].replace(tokens=np.append(others[0].tokens[:-1], 29).astype("i4"))
        case "mask":
            others[0] = others[0].replace(loss_mask=~others[0].loss_mask)
        case "order":
            others.reverse()
        case "fewer":
            others.pop()
    with pytest.raises(ValueError, match="corpus was"):
        pin(conversations=others)


def test_metrics_of_lost_steps_are_dropped(tmp_path):
    """A crash loses the steps behind the last checkpoint, and perhaps half a line."""
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) for step in (1, 2, 3, 4)]
    path.write_text("\n".join(lines) + '\n{"st')
    with workdir.open_metrics(tmp_path, 2) as file:
        file.write(json.dumps({"step": 3, "new": True}) + "\n")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
        {"step": 3, "new": True},
    ]
