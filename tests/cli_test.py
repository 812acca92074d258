"""The command line on a tiny target with a character tokenizer: what users type, what they see."""

import json
import shutil
import sys
from io import StringIO
from pathlib import Path

import jax.numpy as jnp
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models

from dspark_jax import cli
from dspark_jax.arguments import Models
from dspark_jax.config import Confidence, DrafterConfig, Markov, Options
from dspark_jax.nn.drafter import Drafter
from dspark_jax.shards import Shards
from dspark_jax.verbs import decoding
from dspark_jax.weights import card, native, targets
from dspark_jax.weights.card import Card, Mode
from dspark_jax.weights.load import load_target, load_text

GOLDEN = Path(__file__).parent / "goldens" / "target_qwen3"
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """A Hugging Face folder: golden weights, one token a printable character, `~` ends a turn."""
    folder = tmp_path_factory.mktemp("target")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder / name)
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {c: i for i, c in enumerate(characters)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "~"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def drafter_folder(target_folder, tmp_path_factory):
    """An untrained drafter for it, in our own format."""
    geometry = targets.load(target_folder).config.geometry
    config = DrafterConfig(
        geometry=geometry,
        vocab_size=97,
        num_layers=1,
        block_size=3,
        target_layer_ids=(0, 2),
        mask_token=96,
        predict_from_anchor=True,
        head=Markov(rank=4),
        confidence=Confidence(),
    )
    folder = tmp_path_factory.mktemp("drafter")
    native.save(folder, Drafter(config, rngs=nnx.Rngs(0)), jnp.float32, "card")
    return folder


@pytest.fixture
def run(target_folder, drafter_folder, capsys):
    """Runs `dspark`; returns its standard output."""

    def call(*argv: str, drafter: str | None = None) -> str:
        models = ["--target", str(target_folder), "--drafter", drafter or str(drafter_folder)]
        cli.main([argv[0], *argv[1:], *models])
        return capsys.readouterr().out

    return call


def records(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_has_every_promised_field(run):
    (record,) = records(run("generate", "--prompt", "hello", "--json", "--max-new-tokens", "9"))
    assert set(record) == {
        "index",
        "turn",
        "text",
        "tokens",
        "num_tokens",
        "rounds",
        "accepted_length",
        "finish_reason",
        "tokens_per_second",
    }
    assert record["num_tokens"] == len(record["tokens"]) <= 9
    assert record["accepted_length"] >= 1


def test_a_drafter_never_changes_the_output(run):
    flags = ("generate", "--prompt", "hello", "--json", "--max-new-tokens", "20")
    (fast,), (slow,) = records(run(*flags)), records(run(*flags, drafter="none"))
    assert fast["tokens"] == slow["tokens"]


def test_streamed_text_is_the_text(run):
    flags = ("generate", "--prompt", "hello", "--max-new-tokens", "20")
    (record,) = records(run(*flags, "--json"))
    assert run(*flags) == record["text"] + "\n"


def test_turns_are_answered_in_order_and_batches_change_nothing(run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"turns": ["one", "two"]},
        {"messages": [{"role": "user", "content": "three"}]},
        {"turns": ["four"]},
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    flags = ("generate", "--prompts", str(prompts), "--json", "--max-new-tokens", "6")
    alone = records(run(*flags))
    assert [(r["index"], r["turn"]) for r in alone] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    together = records(run(*flags, "--batch-size", "2"))
    assert [r["tokens"] for r in together] == [r["tokens"] for r in alone]


def test_prompts_are_read_from_standard_input(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", StringIO("one\ntwo\n"))
    assert len(records(run("generate", "--json", "--max-new-tokens", "2"))) == 2


def test_raw_leaves_the_template_out_and_system_adds_to_it(run):
    flags = ("generate", "--prompt", "hello", "--json", "--max-new-tokens", "8")
    texts = [run(*flags, *more) for more in ((), ("--raw",), ("--system", "be brief"))]
    assert len({tuple(records(text)[0]["tokens"]) for text in texts}) == 3


def test_compare_prints_both_and_the_break_even(run):
    text = run("generate", "--prompt", "hello", "--compare", "--max-new-tokens", "8")
    assert "speculative" in text and "plain" in text and "break-even" in text


def test_a_mesh_gives_the_same_tokens(run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"turns": [t]}) for t in ("one", "a longer one")))
    flags = ("generate", "--prompts", str(prompts), "--json", "--batch-size", "2")
    flags += ("--max-new-tokens", "12")
    one, eight = records(run(*flags)), records(run(*flags, "--mesh", "data=2,tensor=4"))
    assert [r["tokens"] for r in one] == [r["tokens"] for r in eight]


@pytest.mark.parametrize("flags", [(), ("--widen", "1")])
def test_a_walk_over_candidates_gives_the_same_output(run, flags):
    asked = ("generate", "--prompt", "hello", "--json", "--max-new-tokens", "12")
    (cut,), (whole,) = records(run(*asked, "--candidates", "8", *flags)), records(run(*asked))
    assert cut["tokens"] == whole["tokens"]


def test_evaluate_pools_rounds(run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"turns": [t, "x"]}) for t in ("one", "two", "six")))
    rows = records(run("evaluate", f"{prompts}:2", str(prompts), "--json"))
    assert [row["answers"] for row in rows] == [2, 3, 5]
    assert rows[2]["rounds"] == rows[0]["rounds"] + rows[1]["rounds"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prompt", "a", "--prompts", "b.jsonl"), ["--prompt", "--prompts"]),
        (("--prompts", "absent.jsonl"), ["absent.jsonl", "no such file"]),
        (("--prompt", "a", "--top-p", "0"), ["top_p = 0"]),
        (("--prompt", "a", "--temperature", "-1"), ["temperature = -1"]),
        (("--prompt", "a", "--batch-size", "0"), ["batch_size = 0"]),
        (("--prompt", "a", "--mesh", "rows=2"), ["mesh", "rows=2", "data"]),
        (("--prompt", "a", "--mesh", "data=99"), ["99 devices"]),
    ],
)
def test_errors_name_the_field_the_value_and_the_remedy(target_folder, capsys, flags, words):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", "--target", str(target_folder), "--drafter", "none", *flags])
    said = " ".join(capsys.readouterr().err.split())
    assert all(word in said for word in words), said


@pytest.mark.parametrize("missing", ["target", "drafter"])
def test_unknown_models_are_named(target_folder, capsys, missing):
    models = {"target": str(target_folder), "drafter": "none"} | {missing: "nowhere"}
    with pytest.raises(SystemExit, match="2"):
        cli.main(
            ["generate", "--prompt", "a", *(x for k, v in models.items() for x in (f"--{k}", v))]
        )
    assert f"{missing} = 'nowhere'" in " ".join(capsys.readouterr().err.split())


def test_train_reads_a_config_file_trains_and_its_drafter_decodes(
    run, target_folder, tmp_path, capsys
):
    """It says beforehand what it needs; an audit finds that training and decoding agree."""
    answers = tmp_path / "answers.jsonl"
    row = {"tokens": list(range(10, 40)), "reply_start": 4}
    answers.write_text(json.dumps(row) + "\n")
    config = tmp_path / "config.py"
    config.write_text(
        "from dspark_jax.config import Markov\n"
        "from dspark_jax.config_training import DrafterRecipe, TrainConfig\n"
        f"config = TrainConfig(data={str(answers)!r}, workdir={str(tmp_path / 'run')!r},\n"
        f"    target={str(target_folder)!r}, num_anchors=4, anchor_chunk=4, batch_size=1,\n"
        "    drafter=DrafterRecipe(num_layers=1, block_size=3, mask_token=96,\n"
        "                          target_layer_ids=(0, 2), head=Markov(rank=4)))\n"
    )
    flags = ["--steps", "2", "--drafter.head.rank", "8", "--export-dtype", "float32"]
    cli.main(["train", str(config), *flags, "--dry-run"])
    planned = capsys.readouterr().out
    assert "trainable parameters" in planned and "26 of them the target's" in planned
    assert not (tmp_path / "run").exists()
    cli.main(["train", str(config), *flags])
    cli.main(["audit", "--run", str(tmp_path / "run")])
    assert "both paths agree" in capsys.readouterr().out
    drafter = tmp_path / "run" / "drafter"
    assert native.load(drafter).config.head == Markov(rank=8)
    (record,) = records(
        run("generate", "--prompt", "a", "--json", "--max-new-tokens", "3", drafter=str(drafter))
    )
    assert record["num_tokens"] <= 3


def test_train_says_what_is_wrong_before_it_reads_weights(target_folder, tmp_path, capsys):
    bare, config = tmp_path / "target", tmp_path / "config.py"
    shutil.copytree(target_folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    config.write_text(
        "from dspark_jax.config_training import TrainConfig\n"
        f"config = TrainConfig(data='data.jsonl', workdir='run', target={str(bare)!r})\n"
    )
    with pytest.raises(SystemExit):
        cli.main(["train", str(config)])
    assert "drafter.mask_token is not set" in capsys.readouterr().err


def test_prepare_asks_the_target_and_takes_what_was_answered(run, target_folder, tmp_path, capsys):
    prompts, folder = tmp_path / "prompts.jsonl", tmp_path / "shards"
    rows = [{"turns": ["one"]}, {"tokens": list(range(10, 40)), "reply_start": 4}]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    flags = ("--max-new-tokens", "4", "--batch-size", "1", "--min-supervised", "2")
    cli.main(["prepare", str(prompts), str(folder), *flags, "--target", str(target_folder)])
    assert "2 samples, " in capsys.readouterr().err
    run("prepare", str(prompts), str(folder), *flags, drafter="none")  # finished: nothing to do
    asked, given = Shards(folder)
    assert asked.loss_mask.sum() == 4 and given.loss_mask.sum() == 26
    with pytest.raises(SystemExit, match="2"):
        run("prepare", str(prompts), str(folder), *flags, "--seed", "1", drafter="none")
    assert "seed was 0, is 1" in " ".join(capsys.readouterr().err.split())


def test_the_text_side_alone_is_that_of_the_whole_target(target_folder):
    config, tokenizer = load_text(str(target_folder))
    whole = load_target(str(target_folder))
    assert config == whole.model.config
    assert tokenizer.fingerprint == whole.tokenizer.fingerprint


HEADS = """
from dspark_jax.config_training import DrafterRecipe, TrainConfig
from dspark_jax.recipes import six

configs = six(
    TrainConfig(
        data={data!r},
        workdir={workdir!r},
        target={target!r},
        num_anchors=4,
        anchor_chunk=4,
        batch_size=1,
        max_cache_bytes=1_000_000,
        cache={workdir!r} + "/features",
        drafter=DrafterRecipe(
            num_layers=1, block_size=3, mask_token=96, target_layer_ids=(0, 2)
        ),
    ),
    rank=4,
    gru_width=4,
)
"""


@pytest.mark.slow
def test_bench_heads_trains_all_six_and_compares_them(target_folder, tmp_path, capsys):
    """U01: one command; a second time nothing is trained again."""
    answers, prompts, config = (tmp_path / name for name in ("a.jsonl", "p.jsonl", "config.py"))
    answers.write_text(json.dumps({"tokens": list(range(10, 40)), "reply_start": 4}) + "\n")
    prompts.write_text('{"turns": ["hello"]}\n{"turns": ["abc"]}\n')
    names = {"data": str(answers), "workdir": str(tmp_path / "run"), "target": str(target_folder)}
    config.write_text(HEADS.format(**names))
    argv = ["bench", "heads", str(config), str(prompts), "--steps", "2", "--max-new-tokens", "8"]
    cli.main([*argv, "--json"])
    first = records(capsys.readouterr().out)
    names = ["dflash", "dspark", "dspark-gated", "dspark-rnn", "domino", "dflash2"]
    assert [row["run"] for row in first] == names
    assert all(row["tokens"] == 16 and row["accepted_length"] >= 1 for row in first)
    assert [row["candidates"] for row in first] == [0, 0, 0, 0, 0, 16]
    before = {path: path.read_bytes() for path in tmp_path.rglob("metrics.jsonl")}
    assert len(before) == 6
    cli.main([*argv, "--runs", "domino"])
    assert "domino" in capsys.readouterr().out
    assert all(path.read_bytes() == text for path, text in before.items())


def test_train_lists_free_rows_when_the_mask_token_is_missing(target_folder, tmp_path, capsys):
    config = tmp_path / "config.py"
    config.write_text(
        "from dspark_jax.config_training import TrainConfig\n"
        f"config = TrainConfig(data='x', workdir='y', target={str(target_folder)!r})\n"
    )
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", str(config)])
    assert "drafter.mask_token" in capsys.readouterr().err


def test_check_equivalence_prints_a_table_and_passes(run):
    out = run("check", "equivalence", "--rows", "2")
    assert "Selector with unit gate" in out
    assert "FAIL" not in out and out.count("pass") == 8


def test_check_goldens_exits_1_beyond_the_tolerance(tmp_path, capsys):
    folder = shutil.copytree(GOLDEN, tmp_path / "golden")
    cli.main(["check", "goldens", str(folder)])
    assert "logits" in capsys.readouterr().out
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 1.01
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["check", "goldens", str(folder)])
    assert stopped.value.code == 1
    assert "FAIL" in capsys.readouterr().out


def test_bench_walk_times_every_walk_of_every_shape(capsys):
    shape = ["--vocabularies", "300", "--block-sizes", "2", "3", "--batch-sizes", "1"]
    cli.main(["bench", "walk", *shape, "--candidates", "4", "--rank", "3", "--json"])
    rows = records(capsys.readouterr().out)
    assert [(row["vocab_size"], row["block_size"]) for row in rows] == [(300, 2), (300, 3)]
    assert set(rows[0]["seconds"]) == {"full", "scan k=4", "associative k=4"}
    assert all(seconds > 0 for row in rows for seconds in row["seconds"].values())
    cli.main(["bench", "walk", *shape, "--candidates", "4", "--rank", "3"])
    assert "associative" in capsys.readouterr().out


def test_bench_loss_compares_three_ways(capsys):
    sizes = {"vocab-size": 60, "width": 8, "rank": 2, "blocks": 4, "chunk": 2, "repeats": 1}
    argv = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    cli.main(["bench", "loss", *argv])
    out = capsys.readouterr().out
    assert all(name in out for name in ("whole", "chunked", "remat", "1.00x"))


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["check"], "unknown verb 'check'"),
        (["bench", "loss", "--chunk", "48"], "chunk = 48: must divide the 128 blocks"),
        (["bench", "other"], "unknown verb 'bench other'"),
        (["bench", "walk", "--candidates", "0"], "candidates = (0,)"),
        (
            ["bench", "heads", "configs/smollm2_cpu.py", "p.jsonl", "--runs", "eagle"],
            "runs = ['eagle']: configs/smollm2_cpu.py has dflash",
        ),
        (["check", "equivalence", "--drafter", "none"], "name a drafter"),
        (["audit"], "give the work folder of a run, or data"),
        (["audit", "--run", "nowhere"], "no work folder of a run"),
        (["audit", "--data", "x", "--samples", "0"], "samples = 0"),
    ],
)
def test_checks_and_benches_refuse_by_name(argv, complaint, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_bench_candidates_pairs_every_cut(run, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["hello"]}\n{"turns": ["abc", "never asked"]}\n')
    options = ["--counts", "2", "0", "--widen", "3", "--max-new-tokens", "12"]
    rows = records(run("bench", "candidates", str(prompts), *options, "--json"))
    assert [(row["candidates"], row["widen"]) for row in rows] == [(2, 0), (0, 0), (16, 3)]
    assert rows[1]["recall"] == [1.0] * 3
    assert "to the full walk" in run("bench", "candidates", str(prompts), *options)


def test_a_drafter_is_converted_and_inspected(target_folder, drafter_folder, tmp_path, capsys):
    there, back = tmp_path / "deepspec", tmp_path / "native"
    target = ["--target", str(target_folder)]
    cli.main(["convert", str(drafter_folder), str(there), "--to", "deepspec", *target])
    cli.main(["convert", str(there), str(back), "--to", "native", *target])
    before, after = (load_file(f / "model.safetensors") for f in (drafter_folder, back))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    assert "from deepspec (deepspec)" in (back / "README.md").read_text()
    small, alike, native = tmp_path / "small", tmp_path / "alike", ["--to", "native", *target]
    cli.main(["convert", str(there), str(small), "--dtype", "bfloat16", *native])
    cli.main(["convert", str(small), str(alike), *native])
    assert {t.dtype.name for t in load_file(alike / "model.safetensors").values()} == {"bfloat16"}
    capsys.readouterr()
    cli.main(["inspect", str(there)])
    out = capsys.readouterr().out
    assert "deepspec" in out and "Markov(rank=4" in out
    assert any("fc.weight" in line and "float32" in line for line in out.splitlines())
    with pytest.raises(SystemExit) as stopped:
        cli.main(["convert", str(there), str(tmp_path / "x"), "--to", "dflash2", *target])
    assert stopped.value.code == 2
    assert "predict_from_anchor = True" in capsys.readouterr().err


@pytest.fixture
def carded(drafter_folder, tmp_path):
    """The drafter with a card that says in which mode it was trained."""
    folder = shutil.copytree(drafter_folder, tmp_path / "carded")
    known = Card(
        target="org/target", mode=Mode(thinking=False), accepted_length=2.5, measured_on="GSM8K"
    )
    (folder / "README.md").write_text(card.front_matter(known) + "# Mine\n")
    return folder


def test_inspect_prints_the_trained_mode_and_what_to_expect(carded, drafter_folder, capsys):
    """U04: the accepted length comes from the card, and so does what it counts."""
    cli.main(["inspect", str(carded)])
    out = " ".join(capsys.readouterr().out.split())
    assert "thinking off" in out and "2.5 over GSM8K" in out and "the bonus counts" in out
    cli.main(["inspect", str(drafter_folder), "--format", "native"])
    assert "no metadata" in capsys.readouterr().out


def test_prompts_in_another_mode_are_warned_of(carded, capsys, caplog):
    """U03: the output stays the same, so that only a word can tell."""
    for thinking, said in ((False, 0), (True, 1), (None, 1)):
        caplog.clear()
        decoding.check_mode(Models(drafter=str(carded)), Options(thinking=thinking))
        assert sum("was trained with" in record.message for record in caplog.records) == said
