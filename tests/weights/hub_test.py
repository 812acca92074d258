"""Hub ids: asked for only by hf://, with a clear word where the library or the model is absent."""

import shutil
import sys
import types
from pathlib import Path

import pytest

from dspark_jax.weights import hub
from dspark_jax.weights.load import load_drafter, load_target

GOLDENS = Path(__file__).parent.parent / "goldens"


@pytest.fixture
def hub_of(monkeypatch):
    """Stands a library in whose hub holds some folders; returns what it was asked."""

    def build(**folders: Path) -> list:
        asked = []

        def snapshot_download(repository, revision=None, allow_patterns=()):
            asked.append((repository, revision))
            assert not any("bin" in pattern or "py" in pattern for pattern in allow_patterns)
            if repository not in folders:
                raise OSError("404 not found")
            return str(folders[repository])

        fake = types.SimpleNamespace(snapshot_download=snapshot_download)
        monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
        return asked

    return build


def test_a_drafter_and_a_target_are_fetched_by_id(hub_of, tmp_path):
    target = shutil.copytree(GOLDENS / "target_qwen3", tmp_path / "target")
    asked = hub_of(**{"z-lab/drafter": GOLDENS / "dflash_qwen3", "org/target": target})
    drafter = load_drafter("hf://z-lab/drafter@v1.0")
    assert not drafter.config.predict_from_anchor
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):  # it has no text side
        load_target("hf://org/target")
    assert asked == [("z-lab/drafter", "v1.0"), ("org/target", None)]


def test_what_the_hub_does_not_hold_is_said(hub_of):
    hub_of()
    with pytest.raises(RuntimeError, match="hf://a/b could not be fetched: 404"):
        load_drafter("hf://a/b")


def test_the_library_is_needed_only_when_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RuntimeError, match=r"pip install 'dspark-jax\[hub\]'"):
        load_drafter("hf://a/b")
    load_drafter(str(GOLDENS / "dflash_qwen3"))


@pytest.mark.parametrize("name", ["hf://a", "hf://a/b/c", "hf://", "hf://a/../b"])
def test_what_is_no_id_is_refused(name):
    with pytest.raises(ValueError, match="is no hub id"):
        hub.fetch(name)
