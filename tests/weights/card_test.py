"""The model card: what it says is what is read, and a mode that differs is noticed."""

import json

import jax.numpy as jnp
import pytest
import yaml

from dspark_jax.config import Options
from dspark_jax.nn.drafter import Lent
from dspark_jax.weights import card, formats
from dspark_jax.weights.card import Card, Mode
from dspark_jax.weights.load import BUNDLED
from dspark_jax.weights.tensors import CheckpointError

from ..conftest import TARGET
from .conftest import PLAIN, drafter_of

FULL = Card(
    target="org/target",
    mode=Mode(thinking=False, system='be "brief"'),
    data="10 conversations: the target's own",
    budget="5 steps",
    accepted_length=2.5,
    measured_on="GSM8K, greedy",
)


@pytest.mark.parametrize("known", [FULL, Card(target="t")], ids=["full", "bare"])
def test_what_is_written_is_read_by_us_and_by_yaml(known, tmp_path):
    text = card.front_matter(known) + "# Title\n"
    (tmp_path / "README.md").write_text(text)
    assert card.read(tmp_path) == known
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["base_model"] == known.target and head["dspark"]["counted"] == card.COUNTED
    assert head["dspark"].get("accepted_length") == known.accepted_length


def test_a_folder_without_metadata_has_no_card(tmp_path):
    assert card.read(tmp_path) is None
    (tmp_path / "README.md").write_text("# Title\n\n---\nno front matter\n---\n")
    assert card.read(tmp_path) is None


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("dspark: {", "not valid JSON"), ('dspark: {"target": 3}', "target: 3 is not")],
)
def test_broken_metadata_is_refused(line, complaint, tmp_path):
    (tmp_path / "README.md").write_text(f"---\n{line}\n---\n")
    with pytest.raises(CheckpointError, match=complaint):
        card.read(tmp_path)


@pytest.mark.parametrize("change", [{"thinking": True}, {"system": "x"}, {"raw": True}])
def test_prompts_rendered_otherwise_than_in_training_are_noticed(change):
    """U03: thinking on or off, another system message, no template."""
    known = Card(target="t", mode=Mode(thinking=False))
    assert card.warning(known, Options(thinking=False)) is None
    said = card.warning(known, Options(**{"thinking": False} | change))
    assert str(Mode(thinking=False)) in said and "accepted lengths may be lower" in said


@pytest.mark.parametrize("known", [None, Card(target="t")])
def test_an_unknown_mode_is_not_complained_about(known):
    assert card.warning(known, Options(system="x")) is None


@pytest.mark.parametrize("kind", ["native", "dflash", "speculators"])
def test_a_card_stands_beside_every_export_and_travels(kind, tmp_path):
    before = tmp_path / "before"
    before.mkdir()
    (before / "README.md").write_text(card.front_matter(FULL) + "# Mine\n\nBy hand.\n")
    text, table = card.carried(before, "ignored", "Written anew."), jnp.zeros((97, 32))
    lent = Lent(embedding=table, head=table)
    formats.write(tmp_path / kind, kind, drafter_of(**PLAIN), TARGET, lent, jnp.float32, text)
    assert card.read(tmp_path / kind) == FULL
    body = (tmp_path / kind / "README.md").read_text()
    assert "By hand." in body and body.endswith("Written anew.\n")
    assert body.count("library_name") == 1


def test_a_card_is_begun_where_there_was_none(tmp_path):
    text = card.carried(tmp_path, "org/target", "Written anew.")
    (tmp_path / "README.md").write_text(text)
    assert card.read(tmp_path) == Card(target="org/target")


def test_another_s_front_matter_gets_our_line(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\nbase_model: org/t\n---\n# Theirs\n")
    (tmp_path / "README.md").write_text(card.carried(tmp_path, "hf://org/t@v2", "Written anew."))
    assert card.read(tmp_path) == Card(target="hf://org/t@v2")
    text = (tmp_path / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1])["license"] == "mit"
    assert text.count("base_model") == 1 and "# Theirs" in text


def test_hubs_are_told_the_target_by_its_id_there():
    head = yaml.safe_load(card.front_matter(Card(target="hf://org/t@v2")).split("---\n")[1])
    assert head["base_model"] == "org/t"


def test_the_bundled_drafter_says_what_to_expect():
    """U04: the card's number is the one measured in the project's README."""
    known = card.read(BUNDLED)
    assert (known.target, known.accepted_length, known.mode) == ("smollm2", 2.01, Mode())
    assert json.loads((BUNDLED / "config.json").read_text())["format"] == "dspark_jax"
