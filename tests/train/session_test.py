"""What a training session needs, and what its card says of its data."""

import dataclasses

import numpy as np
import pytest

from dspark_jax.config_training import TrainConfig
from dspark_jax.manifest import Manifest
from dspark_jax.shards import Sample, add_shard
from dspark_jax.train import session
from dspark_jax.weights.card import Mode


@pytest.fixture
def prepared(tmp_path):
    """A folder of shards, by its manifest alone, answered without thinking."""
    mode = {"system": "be brief", "thinking": False}
    settings = {"sampling": {}, "seed": 0, "source": {}}
    Manifest(target="t", template="abc", vocab_size=9, mode=mode, **settings).save(tmp_path)
    return tmp_path


def test_the_mode_is_the_one_the_data_were_prepared_in(prepared):
    """U03: the drafter's card says what its data were."""
    found = session.trained_mode(prepared, None)
    assert found == Mode(thinking=False, system="be brief")
    with pytest.raises(ValueError, match="thinking = True, but .* was prepared with False"):
        session.trained_mode(prepared, True)


def test_conversations_are_rendered_as_the_config_says(tmp_path):
    assert session.trained_mode(tmp_path / "answers.jsonl", True) == Mode(thinking=True)


def test_a_session_that_leaves_out_the_cpu_is_told_how_to_have_it(monkeypatch):
    def devices(backend):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(session.jax, "local_devices", devices)
    with pytest.raises(ValueError, match=r"set JAX_PLATFORMS=.*,cpu"):
        session.placed_target(TrainConfig(data="data", workdir="run"))


def test_a_dry_run_compares_shards_with_their_checksums(prepared, monkeypatch):
    """One byte is another, as a copy may leave it."""
    tokens = np.arange(9, dtype=np.int32)
    sample = Sample(tokens=tokens, loss_mask=tokens > 3, provenance={})
    begun = dataclasses.replace(Manifest.load(prepared), complete=True)
    (shard,) = add_shard(prepared, begun, [sample], 1, {}).shards
    path = prepared / shard.name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    monkeypatch.setattr(session, "_outlined", lambda config: (None, None, None))
    with pytest.raises(ValueError, match=f"{shard.name}: .*sha256"):
        session.dry_run(TrainConfig(data=str(prepared), workdir="run"))
