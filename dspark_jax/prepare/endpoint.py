"""Prompts answered by a server that speaks OpenAI's protocol, such as vLLM, SGLang, sglang-jax.

It must serve the target itself: its answers are text, which the target's own template renders
again.
"""

import dataclasses
import logging
import os
import random
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import httpx2

from dspark_jax.config import Options
from dspark_jax.decode.answer import Message, Prompt, opening
from dspark_jax.prepare.sample import REFUSED, TOO_LONG, Recipe, Talk

log = logging.getLogger(__name__)
_PLAIN: Message = {"role": "user", "content": "Hello"}  # what any server answers
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds before asking again; each wait doubles


@dataclasses.dataclass(frozen=True)
class Server:
    """Who answers instead of the target here."""

    endpoint: str | None = None  # URL of an OpenAI-compatible server; key from OPENAI_API_KEY
    endpoint_model: str | None = None  # what it calls the model; None = the only one it serves
    concurrency: int = 16  # conversations asked at once
    retries: int = 6  # after 429, 5xx, time-outs and lost connections, with growing waits
    timeout: float = 600.0  # seconds an answer may take

    def __post_init__(self):
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint = {self.endpoint!r}: must begin with http:// or https://")
        if self.concurrency < 1 or self.retries < 0 or not self.timeout > 0:
            raise ValueError(
                f"concurrency = {self.concurrency}, retries = {self.retries}, timeout = "
                f"{self.timeout}: must be at least 1, at least 0, above 0"
            )

    @property
    def base(self) -> str:
        """URL that paths are relative to."""
        url = self.endpoint.rstrip("/")
        return url if url.endswith("/v1") else url + "/v1"


class EndpointError(RuntimeError):
    """The server refuses, or is out of reach for longer than the retries last."""


class Refusal(EndpointError):
    """The server refuses one request (400, 422): it is too long, not allowed, or not understood."""


def model_name(server: Server) -> str:
    """What the server calls the model.

    Raises:
      EndpointError: it serves none or several, and none was named.
    """
    if server.endpoint_model is not None:
        return server.endpoint_model
    with Asker(server) as asker:
        found = [model.get("id") for model in asker.ask("GET", "/models").get("data", [])]
    if len(found) != 1:
        raise EndpointError(f"{server.base} serves {found}: name one with --endpoint-model")
    return found[0]


class Asker:
    """A connection that asks again where that may help.

    Args:
      server: whom.

    Attributes:
      has_answered: whether it has sent any completion.
    """

    def __init__(self, server: Server):
        key = os.environ.get("OPENAI_API_KEY")
        self._server, self._stop, self.has_answered = server, threading.Event(), False
        self._client = httpx2.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=server.timeout,
            limits=httpx2.Limits(max_connections=server.concurrency),
        )

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *problem: Any) -> None:
        self.stop()
        self._client.close()

    def stop(self) -> None:
        """No more waiting: whoever waits gives up."""
        self._stop.set()

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The server's JSON answer.

        Raises:
          EndpointError: it refuses the request (4xx), or fails more often than the retries.
          Refusal: it refuses it by 400 or 422, which may be the request's own fault.
        """
        url, problem = self._server.base + path, ""
        for attempt in range(self._server.retries + 1):
            pause = min(_FIRST_WAIT * 2**attempt, _LONGEST_WAIT) * random.uniform(0.5, 1)
            try:
                response = self._client.request(method, url, json=body)
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == 200:
                    self.has_answered |= method == "POST"
                    return _json(url, response)
                problem = f"{response.status_code}: {response.text[:300]}"
                if response.status_code not in (408, 429) and response.status_code < 500:
                    kind = Refusal if response.status_code in (400, 422) else EndpointError
                    raise kind(f"{url} refuses: {problem}; mend the request or the server")
                asked = response.headers.get("Retry-After", "")
                pause = max(pause, min(float(asked), 300)) if asked.isdigit() else pause
            if attempt < self._server.retries and self._stop.wait(pause):
                break
        raise EndpointError(
            f"{url} failed after {attempt + 1} attempts: {problem}; what was answered is kept: run "
            "the same command again when it is back"
        )


def _json(url: str, response: httpx2.Response) -> dict[str, Any]:
    try:
        value = response.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise EndpointError(f"{url} answered no JSON object: {response.text[:300]}")
    return value


@dataclasses.dataclass(frozen=True)
class Talker:
    """How one conversation is held."""

    asker: Asker
    model: str  # the server's name of it
    recipe: Recipe  # the target's tokenizer, to know lengths; names for the chat template
    options: Options  # how answers are drawn; a prompt's seed is `seed` + its name

    def talk(self, name: int, prompt: Prompt) -> Talk | str:
        """Asks the turns in order; what came of it, or why there is nothing."""
        said: list[Message] = list(opening(prompt, self.options))
        given, talk = len(said), None
        for turn, user in enumerate(prompt.turns):
            said.append({"role": "user", "content": user})
            try:
                prompt_tokens = self.recipe.tokenizer.render(said, **self.recipe.variables)
            except ValueError:
                return talk or REFUSED
            room = self.recipe.max_length - len(prompt_tokens)
            if room < 1:
                return talk or TOO_LONG
            try:
                reply, reason = self._reply(name, said, room)
            except Refusal as refusal:
                if not self.asker.has_answered:
                    self._reply(name, [_PLAIN], 1)  # refused too, no row is at fault: it is raised
                log.warning("row %d is left out: %s", name, refusal)
                return talk or "refused by the server"
            if reason not in ("stop", "length"):
                return talk or f"finish_reason {reason}"
            said.append(reply)
            talk = Talk(
                messages=tuple(said),
                given=given,
                finished=reason == "stop",
                turns_left=len(prompt.turns) - turn - 1,
            )
            if not talk.finished:
                break
        return talk

    def _reply(self, name: int, said: list[Message], room: int) -> tuple[Message, str]:
        o = self.options
        body = {
            "model": self.model,
            "messages": said,
            "max_tokens": min(o.max_new_tokens, room),
            "temperature": o.temperature,
            "top_p": o.top_p,
            "seed": o.seed + name,
            # Said even where they change nothing: servers take defaults from the model's folder.
            "top_k": o.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        if self.recipe.variables:
            body["chat_template_kwargs"] = dict(self.recipe.variables)
        answer = self.asker.ask("POST", "/chat/completions", body)
        try:
            choice = answer["choices"][0]
            message, reason = choice["message"], choice["finish_reason"]
            reply = {"role": "assistant", "content": message.get("content") or ""}
        except (KeyError, IndexError, TypeError, AttributeError):
            raise EndpointError(f"the server answered no completion: {str(answer)[:300]}") from None
        thought = message.get("reasoning") or message.get("reasoning_content")  # new, old vLLM
        if thought:
            reply["reasoning_content"] = thought
        return reply, reason


def answers(
    talker: Talker, prompts: Iterator[tuple[int, Prompt]], concurrency: int
) -> Iterator[tuple[int, Talk | str]]:
    """Every prompt's name with its conversation, or why there is none; as they end.

    After a failure no prompt is begun, and those under way end before it is raised.

    Raises:
      EndpointError: as `Asker.ask`.
    """
    running: dict[Future, int] = {}
    failure = None
    with ThreadPoolExecutor(concurrency) as pool:
        try:
            while True:
                while failure is None and len(running) < concurrency:
                    new = next(prompts, None)
                    if new is None:
                        break
                    running[pool.submit(talker.talk, *new)] = new[0]
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    name = running.pop(future)
                    if future.exception() is None:
                        yield name, future.result()
                    else:
                        failure = future.exception()
                        talker.asker.stop()
        finally:
            talker.asker.stop()
    if failure is not None:
        raise failure
