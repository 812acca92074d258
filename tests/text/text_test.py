"""Tokenizer, chat template, stop tokens, loss masks and streaming, on small vocabularies."""

import itertools
import json
import pickle

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from dspark_jax import text
from dspark_jax.weights import assets, gguf

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>", "<jupyter_code>")
MERGES = ("Ċ Ċ", "h e", "Ġ t", "Ġt he", "a s")
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Parts thinking from the answer, drops it from all turns but the last, and lets a caller forbid it.
THINKING = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.last %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n' + call | tojson + '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
# Trims every content, renames the assistant, begins with bos, insists on the order of roles.
TRIMMING = """
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<|im_start|>' + role + '\n' + message.content | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>model\n' }}{%- endif %}
"""
QUESTION = {"role": "user", "content": "What is gravity?"}
ANSWER = {"role": "assistant", "content": "A force."}


def vocabulary(**changes) -> text.Vocabulary:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = (*SPECIALS, *symbols, *(merge.replace(" ", "") for merge in MERGES))
    fields = {
        "model": "gpt2",
        "pre_tokenizer": "smollm",
        "tokens": tokens,
        "token_types": (3,) * len(SPECIALS) + (1,) * (len(tokens) - len(SPECIALS)),
        "merges": MERGES,
        "stop_tokens": (2,),
        "bos_token": 1,
        "pad_token": 2,
        "unknown_token": 0,
        "chat_template": CHATML,
    }
    return text.Vocabulary(**fields | changes)


def tokenizer(template: str | None = CHATML, **changes) -> text.Tokenizer:
    return text.from_vocabulary(vocabulary(chat_template=template, **changes))


def sentencepiece() -> text.Tokenizer:
    """Words with a visible space, bytes for the rest: the other kind of decoder."""
    tokens = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "é", "▁a", "\ufffd"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(tokens)}, merges=[("▁", "a")], byte_fallback=True
        )
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_tokens([AddedToken("<s>", special=True, normalized=False)])
    return text.Tokenizer(backend)


PLAIN = tokenizer()
PIECES = sentencepiece()


def write_out(tok: text.Tokenizer, tokens: list[int]) -> str:
    return tok.backend.decode(tokens, skip_special_tokens=False)


def written(tok: text.Tokenizer, messages: list[dict], **options) -> list[str]:
    """The text of each run of masked tokens."""
    tokens, mask = tok.assistant_mask(messages, **options)
    runs, current = [], []
    for token, is_written in zip([*tokens, 0], [*mask, False], strict=True):
        if is_written:
            current.append(token)
        elif current:
            runs.append(write_out(tok, current))
            current = []
    return runs


# Encoding


@given(st.text())
@settings(deadline=None)
def test_text_survives_encoding(value):
    assert PLAIN.decode(PLAIN.encode(value)) == value


@given(st.lists(st.sampled_from([*SPECIALS, "<|im_", "end|>", "a", "\n", " "])).map("".join))
@settings(deadline=None)
def test_special_tokens_written_by_users_stay_text(value):
    tokens = PLAIN.encode(value)
    assert not set(tokens) & set(PLAIN.special_tokens.values())
    assert PLAIN.decode(tokens) == value


def test_digits_of_any_script_stand_alone():
    words = [PLAIN.decode([token]) for token in PLAIN.encode("12")]
    assert words == ["1", "2"]
    coded = PLAIN.backend.pre_tokenizer.pre_tokenize_str("٣٤")
    assert [span for _, span in coded] == [(0, 1), (1, 2)]


def test_user_defined_tokens_are_read_inside_text():
    symbols = vocabulary().tokens
    tok = tokenizer(tokens=(*symbols, "<think>"), token_types=(*vocabulary().token_types, 4))
    assert tok.encode("a<think>")[-1] == len(symbols)
    assert tok.decode([len(symbols)]) == "<think>"


def test_vocabulary_size_counts_special_tokens():
    assert PLAIN.vocab_size == len(vocabulary().tokens)


def test_free_tokens_have_no_part_in_a_chat():
    assert PLAIN.free_tokens == {"<file_sep>": 3, "<jupyter_code>": 4}


def test_a_tokenizer_travels_to_another_process():
    PLAIN.render([QUESTION])
    copy = pickle.loads(pickle.dumps(PLAIN))
    assert copy.encode("<|im_end|> the") == PLAIN.encode("<|im_end|> the")
    assert copy.render([QUESTION]) == PLAIN.render([QUESTION])
    assert copy.fingerprint == PLAIN.fingerprint


def test_the_fingerprint_is_of_vocabulary_and_template():
    others = tokenizer(THINKING), tokenizer(None), PIECES
    assert len({PLAIN.fingerprint, *(other.fingerprint for other in others)}) == 4


@pytest.mark.parametrize("changes", [{"model": "llama"}, {"pre_tokenizer": "default"}])
def test_unknown_kinds_of_vocabulary_are_refused(changes):
    with pytest.raises(ValueError, match="take the tokenizer from the model's Hugging Face folder"):
        tokenizer(**changes)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", ["it", "'s", " 1234", "  ", " ok"]),
        ("smollm", ["it", "'s", " ", "1", "2", "3", "4", "  ", " ok"]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", "  ", " ok"]),
        ("llama-bpe", ["it", "'s", " ", "123", "4", "  ", " ok"]),
    ],
)
def test_words_are_cut_by_the_named_rule(name, words):
    value = "it's 1234   ok"
    cut = tokenizer(pre_tokenizer=name).backend.pre_tokenizer.pre_tokenize_str(value)
    assert [value[a:b] for _, (a, b) in cut] == words


# The chat template


def test_the_template_supplies_the_default_system_prompt():
    assert write_out(PLAIN, PLAIN.render([QUESTION])) == (
        "<|im_start|>system\nBe kind<|im_end|>\n"
        "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_given_system_prompt_replaces_the_default():
    shown = write_out(PLAIN, PLAIN.render([{"role": "system", "content": "Be brief"}, QUESTION]))
    assert "Be kind" not in shown
    assert "Be brief" in shown


def test_special_tokens_of_the_template_become_their_ids():
    assert [t for t in PLAIN.render([QUESTION]) if t < len(SPECIALS)] == [1, 2, 1, 2, 1]


@given(
    st.lists(st.sampled_from([*SPECIALS, "<|im_", "end|>", "user\n", "standin0x1x"])).map("".join)
)
@settings(deadline=None)
def test_messages_cannot_inject_special_tokens(content):
    tokens = PLAIN.render([{"role": "user", "content": content, "name": content}])
    assert [t for t in tokens if t < len(SPECIALS)] == [1, 2, 1, 2, 1]
    assert f"user\n{content}<|im_end|>\n<|im_start|>assistant" in write_out(PLAIN, tokens)


def test_tool_calls_cannot_inject_special_tokens():
    call = {"name": "<|im_end|>", "arguments": {"<|im_start|>": ["<|im_end|>"]}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    tokens = tokenizer(THINKING).render([QUESTION, turn], add_generation_prompt=False)
    assert [t for t in tokens if t < len(SPECIALS)] == [1, 2, 1, 2]
    assert json.dumps(call) in write_out(PLAIN, tokens)


def test_templates_use_the_names_of_special_tokens():
    assert tokenizer(TRIMMING).render([QUESTION])[:2] == [1, 1]


def test_templates_may_refuse_a_conversation():
    with pytest.raises(ValueError, match="refuses these 2 messages: roles must alternate"):
        tokenizer(TRIMMING).render([QUESTION, QUESTION])


def test_templates_run_in_a_sandbox():
    tok = tokenizer("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="the chat template refuses"):
        tok.render([QUESTION])


def test_templates_may_tell_the_year_and_mark_generation():
    tok = tokenizer("{{ strftime_now('%Y') }}{% generation %}{{ 'x' }}{% endgeneration %}")
    shown = tok.decode(tok.render([]))
    assert shown[:2] == "20"
    assert shown[4:] == "x"


def test_broken_templates_are_named():
    with pytest.raises(ValueError, match="not valid jinja2"):
        tokenizer("{% for %}").render([QUESTION])


def test_rendering_without_a_template_says_what_to_do():
    with pytest.raises(ValueError, match=r"put a chat_template\.jinja"):
        tokenizer(None).render([QUESTION])


# The loss mask


def test_the_mask_holds_answers_and_their_end_of_turn():
    again = [QUESTION, ANSWER, {"role": "user", "content": "as"}, ANSWER]
    assert written(PLAIN, again) == ["A force.<|im_end|>", "A force.<|im_end|>"]


def test_the_mask_leaves_out_a_system_prompt():
    messages = [{"role": "system", "content": "A force."}, QUESTION, ANSWER]
    assert written(PLAIN, messages) == ["A force.<|im_end|>"]
    _, mask = PLAIN.assistant_mask(messages)
    assert sum(mask) == len(PLAIN.encode("A force.")) + 1


def test_an_empty_answer_is_its_end_of_turn():
    assert written(PLAIN, [QUESTION, {**ANSWER, "content": ""}]) == ["<|im_end|>"]


def test_a_truncated_answer_stays_open():
    tokens, mask = PLAIN.assistant_mask([QUESTION, ANSWER], finished=False)
    assert tokens == PLAIN.render([QUESTION]) + PLAIN.encode("A force.")
    assert written(PLAIN, [QUESTION, ANSWER], finished=False) == ["A force."]
    assert mask[-1]


def test_only_an_answer_can_be_unfinished():
    with pytest.raises(ValueError, match="finished=False"):
        PLAIN.assistant_mask([QUESTION], finished=False)


def test_a_think_block_of_the_template_is_not_the_assistants():
    tok = tokenizer(THINKING)
    assert written(tok, [QUESTION, ANSWER]) == ["A force.<|im_end|>"]
    tokens, mask = tok.assistant_mask([QUESTION, ANSWER], enable_thinking=False)
    served = tok.render([QUESTION], enable_thinking=False)
    assert tokens[: mask.index(True)] == served
    assert write_out(tok, served).endswith("<think>\n\n</think>\n\n")


def test_a_think_block_in_the_content_is_the_assistants():
    tok = tokenizer(THINKING)
    thinking = {**ANSWER, "content": "<think>\nmass\n</think>\n\nA force."}
    shown = "<think>\nmass\n</think>\n\nA force.<|im_end|>"
    assert written(tok, [QUESTION, thinking]) == [shown]


def test_thinking_the_template_drops_is_not_masked():
    tok = tokenizer(THINKING)
    thinking = {**ANSWER, "content": "<think>\nmass\n</think>\n\nA force."}
    runs = written(tok, [QUESTION, thinking, QUESTION, ANSWER])
    assert runs == ["A force.<|im_end|>", "A force.<|im_end|>"]


@pytest.mark.parametrize("content", ["", None, "I look it up."])
def test_tool_calls_are_the_assistants(content):
    tok = tokenizer(THINKING)
    turn = {"role": "assistant", "content": content, "tool_calls": [{"name": "search"}]}
    call = '\n<tool_call>\n{"name": "search"}\n</tool_call><|im_end|>'
    assert written(tok, [QUESTION, turn]) == [(content or "") + call]


def test_templates_that_trim_are_followed():
    tok = tokenizer(TRIMMING)
    assert written(tok, [QUESTION, {**ANSWER, "content": " A force. \n"}]) == ["A force.<|im_end|>"]


def test_no_token_reaches_from_the_prompt_into_the_answer():
    messages = [QUESTION, {**ANSWER, "content": "\n\nA force."}]
    tokens, mask = PLAIN.assistant_mask(messages)
    served = PLAIN.render([QUESTION])
    assert tokens[: len(served)] == served
    assert mask == [False] * len(served) + [True] * (len(mask) - len(served) - 1) + [False]
    # The line breaks would have merged across the border otherwise.
    assert tokens != PLAIN.render(messages, add_generation_prompt=False)


CONTENTS = st.text(st.sampled_from("a th1\n<é") | st.characters(codec="utf-8"), max_size=12)


@pytest.mark.parametrize("template", [CHATML, TRIMMING])
@given(st.lists(CONTENTS, min_size=2, max_size=6), st.sampled_from(["", "<|im_end|>"]))
@settings(deadline=None, max_examples=40)
def test_masked_tokens_are_what_a_server_would_have_answered(template, contents, tail):
    tok = tokenizer(template)
    roles = ["user", "assistant"] * 3
    messages = [
        {"role": role, "content": content + tail}
        for role, content in zip(roles, contents, strict=False)
    ]
    trim = str.strip if template == TRIMMING else str
    answers = [trim(m["content"]) + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert written(tok, messages) == answers
    tokens, mask = tok.assistant_mask(messages)
    served = tok.render(messages[:1])
    assert mask.index(True) == len(served)
    assert tokens[: len(served)] == served
    assert write_out(tok, tokens) == write_out(
        tok, tok.render(messages, add_generation_prompt=False)
    )


def test_content_in_parts_cannot_be_masked():
    with pytest.raises(ValueError, match="give one string"):
        tokenizer(THINKING).assistant_mask([QUESTION, {**ANSWER, "content": [{"text": "a"}]}])


def test_templates_that_hide_an_answer_are_refused():
    tok = tokenizer("{{ messages[0].content }}")
    with pytest.raises(ValueError, match=r"does not show where messages\[1\] ends"):
        tok.assistant_mask([QUESTION, ANSWER])


# Streaming


@given(st.lists(st.lists(st.integers(0, PLAIN.vocab_size + 3), max_size=5)))
@settings(deadline=None)
def test_streamed_pieces_join_to_the_whole(chunks):
    stream = text.Detokenizer(PLAIN)
    pieces = [stream.feed(chunk) for chunk in chunks]
    assert "".join(pieces) + stream.flush() == PLAIN.decode(itertools.chain(*chunks))


SENTENCEPIECE_TOKENS = st.sampled_from([0, 258, 257, 259, 260, 261]) | st.sampled_from(
    [1 + byte for byte in "é€".encode()]
)


@given(st.lists(st.lists(SENTENCEPIECE_TOKENS, max_size=4)))
@settings(deadline=None)
def test_streamed_byte_tokens_join_to_the_whole(chunks):
    stream = text.Detokenizer(PIECES)
    pieces = [stream.feed(chunk) for chunk in chunks]
    assert "".join(pieces) + stream.flush() == PIECES.decode(itertools.chain(*chunks))


def test_a_run_of_byte_tokens_waits_for_its_end():
    letter, broken = [1 + byte for byte in "é".encode()], [1 + 0xE2]
    assert PIECES.decode(letter) == "é"
    assert PIECES.decode(letter + broken) == "\ufffd" * 3  # such decoders give up a whole run
    stream = text.Detokenizer(PIECES)
    assert [stream.feed(letter), stream.feed(broken), stream.feed([258])] == [
        "",
        "",
        "\ufffd" * 3 + "a",
    ]


def test_half_a_character_is_held_back():
    stream = text.Detokenizer(PLAIN)
    pieces = [stream.feed([token]) for token in PLAIN.encode("a€b")]
    assert pieces == ["a", "", "", "€", "b"]
    assert stream.flush() == ""


def test_half_a_character_is_given_up_at_the_end():
    stream = text.Detokenizer(PLAIN)
    assert stream.feed(PLAIN.encode("a€")[:-1]) == "a"
    assert stream.flush() == "\ufffd"


# Files


def folder_with(path, **files):
    """A Hugging Face folder; `files` are JSON contents by stem, or text by whole name."""
    backend = tokenizer().backend
    backend.enable_truncation(3)
    backend.save(str(path / "tokenizer.json"))
    for stem, content in files.items():
        (path / f"{stem}.json").write_text(json.dumps(content))
    return path


def test_a_folder_gives_the_same_tokenizer(tmp_path):
    config = {
        "chat_template": CHATML,
        "eos_token": "<|im_end|>",
        "bos_token": {"content": "<|im_start|>"},
    }
    tok = text.from_hf(folder_with(tmp_path, tokenizer_config=config))
    assert tok.render([QUESTION]) == PLAIN.render([QUESTION])
    assert tok.encode("the <|im_end|> cat") == PLAIN.encode("the <|im_end|> cat")
    assert (tok.bos_token, tok.eos_token, tok.pad_token) == (1, 2, None)
    assert tok.special_tokens == PLAIN.special_tokens


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({"generation_config": {"eos_token_id": [7, 11]}}, (7, 11)),
        ({"generation_config": {"eos_token_id": 7}}, (7,)),
        ({"generation_config": {"eos_token_id": 0}, "config": {"eos_token_id": 9}}, (0,)),
        ({"generation_config": {}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, (2,)),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}, "config": {"eos_token_id": 9}}, (2,)),
        ({"config": {"eos_token_id": [9]}}, (9,)),
        ({"config": {"text_config": {"eos_token_id": 8}}}, (8,)),
        ({}, ()),
    ],
)
def test_stop_tokens_come_from_the_first_file_that_names_some(tmp_path, files, stops):
    assert text.from_hf(folder_with(tmp_path, **files)).stop_tokens == stops


@pytest.mark.parametrize("value", ["<|im_end|>", [2, None], True, -1])
def test_stop_tokens_that_are_no_ids_are_named(tmp_path, value):
    folder = folder_with(tmp_path, generation_config={"eos_token_id": value})
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is"):
        text.from_hf(folder)


def test_the_default_of_several_templates_is_taken(tmp_path):
    several = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    assert (
        text.from_hf(
            folder_with(tmp_path, tokenizer_config={"chat_template": several})
        ).chat_template
        == "d"
    )
    with pytest.raises(ValueError, match="none of them 'default'"):
        text.from_hf(folder_with(tmp_path, tokenizer_config={"chat_template": several[:1]}))


def test_a_template_file_goes_before_the_config(tmp_path):
    folder = folder_with(
        tmp_path, tokenizer_config={"chat_template": "c"}, chat_template={"chat_template": "j"}
    )
    assert text.from_hf(folder).chat_template == "j"
    (folder / "chat_template.jinja").write_text("own")
    assert text.from_hf(folder).chat_template == "own"


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        text.from_hf(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_damaged_files_are_named(tmp_path, name):
    folder = folder_with(tmp_path)
    (folder / name).write_text('{"a":')
    with pytest.raises(ValueError, match=f"{name} is not"):
        text.from_hf(folder)


# The embedded target


@pytest.fixture(scope="module")
def smollm2() -> text.Tokenizer:
    file = assets.cached("smollm2")
    if file is None:
        pytest.skip("SmolLM2 is not in the cache")
    return text.from_vocabulary(gguf.read(file)[2])


@pytest.mark.smollm2
def test_smollm2_renders_its_default_system_prompt(smollm2):
    tokens, mask = smollm2.assistant_mask([QUESTION, ANSWER])
    assert tokens[:6] == [1, 9690, 198, 2683, 359, 253]
    assert write_out(smollm2, tokens).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokens[: mask.index(True)] == smollm2.render([QUESTION])
    assert smollm2.stop_tokens == (2,)
    assert smollm2.vocab_size == 49152
    assert smollm2.free_tokens["<file_sep>"] == 5


@pytest.mark.parametrize(("add_bos", "tokens"), [(True, [2, 0, 1]), (False, [0, 1])])
def test_a_plain_document_begins_with_bos_where_the_vocabulary_says_so(add_bos, tokens):
    vocabulary = text.Vocabulary(
        model="gpt2",
        pre_tokenizer="gpt-2",
        tokens=("a", "b", "<s>"),
        token_types=(1, 1, 3),
        merges=(),
        stop_tokens=(),
        bos_token=2,
        add_bos=add_bos,
    )
    tokenizer = text.from_vocabulary(vocabulary)
    assert tokenizer.encode_document("ab") == tokens
    assert tokenizer.encode("ab") == [0, 1]
