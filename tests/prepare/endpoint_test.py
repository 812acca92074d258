"""A small server on this machine: what is asked, what is asked again, what is not."""

import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dspark_jax.prepare import endpoint
from dspark_jax.prepare.endpoint import EndpointError, Server
from dspark_jax.prepare.sample import Recipe
from dspark_jax.prepare.session import prepare
from dspark_jax.shards import Shards

from .conftest import OPTIONS

CHARACTERS = ["\n", *map(chr, range(32, 127))]
PROMPTS = [{"turns": [f"q{i}", "so"]} for i in range(6)]


class Handler(BaseHTTPRequestHandler):
    """Answers with the number of words said; misbehaves as the test says."""

    def log_message(self, *words):
        """Nothing to print."""

    def do_GET(self):
        self._send(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((body, self.headers.get("Authorization")))
            status = self.server.trouble.pop(0) if self.server.trouble else 200
            if self.server.refused(body["messages"][-1]["content"]):
                status = 400
            self.server.busy += 1
            self.server.busiest = max(self.server.busiest, self.server.busy)
        threading.Event().wait(self.server.delay)
        answer = self.server.reply(body)
        with self.server.lock:
            self.server.busy -= 1
        if status == "hang up":
            self.close_connection = True
            return
        self._send(status, answer if status == 200 else {"error": "no"})

    def _send(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def completion(body, reason="stop", **message):
    text = f"said {len(body['messages'])}"
    return {"choices": [{"message": {"content": text, **message}, "finish_reason": reason}]}


def text(sample) -> str:
    return "".join(CHARACTERS[token] for token in sample.tokens)


@pytest.fixture
def http(monkeypatch):
    """The server; its waits between attempts are short."""
    monkeypatch.setattr(endpoint, "_FIRST_WAIT", 0.001)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.lock, server.asked, server.trouble = threading.Lock(), [], []
    server.busy, server.busiest, server.delay = 0, 0, 0.0
    server.models, server.reply, server.refused = ["tiny"], completion, lambda text: False
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def run(http, write, subject, settings, tmp_path):
    """Prepares from the server."""

    def call(rows=PROMPTS, options=OPTIONS, folder="run", settings=settings, **fields):
        url = f"http://127.0.0.1:{http.server_address[1]}"
        server = Server(**{"endpoint": url, "concurrency": 2, "retries": 3, **fields})
        prepare(write(*rows), tmp_path / folder, subject, settings, options, server)
        return Shards(tmp_path / folder)

    return call


def test_turns_are_asked_in_order_and_rendered_by_the_template(run, http, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    shards = run(options=dataclasses.replace(OPTIONS, top_k=5, system="be brief"))
    assert text(shards[2]) == "s:be brief\nu:q2\na:said 2~\nu:so\na:said 4~\n"
    assert [sample.provenance["row"] for sample in shards] == list(range(6))
    assert shards[0].provenance["tokens"] == "rendered"
    assert shards[0].provenance["answered_by"] == "tiny"
    body, key = next(a for a in http.asked if len(a[0]["messages"]) == 4)
    assert key == "Bearer secret"
    assert {body[name] for name in ("temperature", "top_p", "top_k")} == {1.0, 5}
    seeds = {a[0]["messages"][1]["content"]: a[0]["seed"] for a in http.asked}
    assert seeds == {f"q{i}": 7 + i for i in range(6)}
    assert shards.manifest.source["endpoint_model"] == "tiny"
    assert "drafter" not in shards.manifest.sampling


def test_concurrency_is_bounded_and_used(run, http):
    http.delay = 0.03
    run(concurrency=3)
    assert http.busiest == 3


@pytest.mark.parametrize("trouble", [429, 500, 503, 408, "hang up"])
def test_passing_trouble_is_asked_again(run, http, trouble):
    http.trouble = [trouble, trouble]
    shards = run(PROMPTS[:1], concurrency=1)
    assert len(http.asked) == 4 and len(shards) == 1


def test_a_slow_answer_is_asked_again(run, http):
    http.delay = 0.3
    with pytest.raises(EndpointError, match=r"failed after 2 attempts: ReadTimeout"):
        run(PROMPTS[:1], timeout=0.05, retries=1, endpoint_model="tiny")


def test_a_refusal_is_not_asked_again_and_what_was_answered_is_kept(run, http, tmp_path):
    http.trouble = [200, 200, 200, 200, 403]
    with pytest.raises(EndpointError, match=r"/chat/completions refuses: 403: .*no"):
        run(concurrency=1)
    assert len(http.asked) == 5
    shards = run(concurrency=1)
    assert len(shards) == 6 and len(http.asked) == 5 + 8
    assert shards.fingerprint == run(folder="never stopped").fingerprint


@pytest.mark.parametrize("refused", ["a", "b"])
def test_a_row_the_server_refuses_is_left_out_and_counted(run, http, refused):
    """The first one too, before any answer has come."""
    http.refused = refused.__eq__
    shards = run([{"turns": [text]} for text in "abc"])
    assert len(shards) == 2 and shards.manifest.dropped == {"refused by the server": 1}


def test_a_row_the_server_refuses_does_not_keep_a_preparation_from_its_end(run, http):
    """Though it is the only one left."""
    rows = [{"turns": ["a"]}, {"turns": ["b"]}]
    http.trouble = [200, 403]
    with pytest.raises(EndpointError, match="refuses: 403"):
        run(rows, concurrency=1)
    http.refused = "b".__eq__
    shards = run(rows)
    assert len(shards) == 1 and shards.manifest.dropped == {"refused by the server": 1}


def test_where_the_server_refuses_every_request_no_row_is_at_fault(run, http):
    http.refused = lambda text: True
    with pytest.raises(EndpointError, match="refuses: 400"):
        run()
    http.refused = lambda text: False
    assert len(run()) == 6


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_reach_the_template_under_either_name(http, subject, name):
    http.reply = lambda body: completion(body, **{name: "hm"})
    url = f"http://127.0.0.1:{http.server_address[1]}"
    recipe = Recipe(tokenizer=subject.tokenizer, variables={}, max_length=9, min_supervised=1)
    with endpoint.Asker(Server(endpoint=url)) as asker:
        talker = endpoint.Talker(asker, "tiny", recipe, OPTIONS)
        reply, _ = talker._reply(0, [{"role": "user", "content": "a"}], 9)
    assert reply["reasoning_content"] == "hm"


def test_a_server_that_stays_away_ends_the_run_which_then_goes_on(run, http):
    http.trouble = [200] * 3 + [503] * 8
    with pytest.raises(EndpointError, match=r"after \d attempts: 503.*run the same command"):
        run(retries=2)
    http.trouble = []
    assert len(run()) == 6
    asked = [json.dumps(body["messages"]) for body, _ in http.asked]
    assert len(set(asked)) == 12


def test_endings_of_the_server_become_endings_of_samples(run, http):
    def reply(body):
        reason = {"q0": "length", "q1": "content_filter"}.get(body["messages"][0]["content"])
        return completion(body, reason or "stop")

    http.reply = reply
    shards = run(PROMPTS[:3])
    cut, whole = shards[0], shards[1]
    assert (cut.provenance["finished"], cut.provenance["turns_left"]) == (False, 1)
    assert text(cut) == "u:q0\na:said 1"
    assert whole.provenance["row"] == 2 and whole.provenance["answers"] == 2
    assert shards.manifest.dropped == {"finish_reason content_filter": 1}


def test_prompts_without_room_are_not_asked(run, http):
    http.reply = lambda body: completion(body, "length", content="abc")
    shards = run([{"turns": ["x" * 70]}, {"turns": ["y" * 50]}])
    assert shards.manifest.dropped == {"longer than max_length": 1} and len(shards) == 1
    assert [body["max_tokens"] for body, _ in http.asked] == [9]


def test_the_mode_is_asked_for(run, http):
    run(PROMPTS[:1], options=dataclasses.replace(OPTIONS, thinking=False))
    assert http.asked[0][0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_model_must_be_named_if_there_are_several(run, http):
    http.models = ["a", "b"]
    with pytest.raises(EndpointError, match=r"serves \['a', 'b'\]: name one with --endpoint-model"):
        run()
    assert run(endpoint_model="b")[0].provenance["answered_by"] == "b"


@pytest.mark.parametrize("value", [{}, {"choices": []}, {"choices": [{"message": None}]}, [1]])
def test_an_answer_of_another_kind_is_named(run, http, value):
    http.reply = lambda body: value
    with pytest.raises(EndpointError, match="answered no"):
        run(PROMPTS[:1])


@pytest.mark.parametrize(
    "fields", [{"endpoint": "host:80"}, {"concurrency": 0}, {"retries": -1}, {"timeout": 0.0}]
)
def test_settings_without_a_meaning_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Server(**fields)
