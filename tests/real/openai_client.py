#!/usr/bin/env python3
"""Checks a gateway with the real `openai` client, against the real llama.cpp server behind it.

    tests/real/openai_client.py --base-url http://HOST:PORT/v1 --engine-url http://HOST:PORT [--only NAME]

Each check prints `ok NAME` or `not ok NAME - why`; the exit status is 1 when any failed. The engine
is asked directly too: for what it is doing (`/slots`), and for its own answer to the same request.
It must serve `--model` with the template in `tools.jinja`, and nobody else may be using it.
"""

import argparse
import contextlib
import http.client
import json
import pathlib
import sys
import threading
import time
import traceback
import urllib.parse

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / ".llmgw" / "openai" / "site"))

import openai

LEFT_MAX_SECONDS = 1.0    # A client that left is noticed within this.
BUSY_MAX_SECONDS = 20.0   # The engine has taken a request within this.
REQUEST_MAX_SECONDS = 60.0
POLL_SECONDS = 0.01
LONG_TOKENS = 1500        # A generation that ends only when it is cancelled, within a check's time.
USER = [{"role": "user", "content": "What is the capital of France?"}]
EXACT = {"temperature": 0, "max_tokens": 24}
UNCACHED = {"cache_prompt": False}          # llama.cpp: else the second of two equal requests counts cached tokens.
ENDLESS = {"ignore_eos": True}              # llama.cpp: go on until max_tokens.
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
CHECKS = {}


class Wrong(Exception):
    """What a check saw instead of what it expects."""


def check(function):
    """Registers a check under its function's name."""
    CHECKS[function.__name__] = function
    return function


def expect(holds, what):
    if not holds:
        raise Wrong(what)


class Target:
    """The gateway under test, as a client sees it, and the engine behind it."""

    def __init__(self, options):
        self.model, self.alias = options.model, options.alias
        self.base_url, self.engine_url = options.base_url, options.engine_url
        # Retries would hide a failed request from the checks.
        self.client = openai.OpenAI(base_url=options.base_url, api_key="none", max_retries=0,
                                    timeout=REQUEST_MAX_SECONDS)

    def chat(self, **options):
        return self.client.chat.completions.create(**{"model": self.model, "messages": USER, **EXACT, **options})

    def completion(self, **options):
        prompt = "The capital of France is"
        return self.client.completions.create(**{"model": self.model, "prompt": prompt, **EXACT, **options})

    def through_gateway(self, path, body):
        return post(self.base_url.removesuffix("/v1"), path, body)

    def from_engine(self, path, body):
        return post(self.engine_url, path, body)

    def busy_slots(self):
        """How many requests the engine is working on at this moment."""
        return sum(slot["is_processing"] for slot in get(self.engine_url, "/slots"))

    def wait_busy(self, slots):
        self.wait(lambda: self.busy_slots() == slots, BUSY_MAX_SECONDS, f"the engine never had {slots} busy slots")

    def expect_noticed(self, slots=0):
        """The engine gives up what nobody waits for, so that `slots` stay busy."""
        self.wait(lambda: self.busy_slots() <= slots, LEFT_MAX_SECONDS,
                  f"the engine still worked for a client that left {LEFT_MAX_SECONDS} s ago")

    @staticmethod
    def wait(holds, seconds, otherwise):
        deadline = time.monotonic() + seconds
        while not holds():
            expect(time.monotonic() < deadline, otherwise)
            time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def connection(url):
    parts = urllib.parse.urlsplit(url)
    opened = http.client.HTTPConnection(parts.hostname, parts.port, timeout=REQUEST_MAX_SECONDS)
    try:
        yield opened
    finally:
        opened.close()


def get(url, path):
    with connection(url) as opened:
        opened.request("GET", path)
        return json.loads(opened.getresponse().read())


def post(url, path, body):
    """Status and JSON of a POST, without the openai package between."""
    with connection(url) as opened:
        opened.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = opened.getresponse()
        return response.status, json.loads(response.read())


# --- answers


@check
def models_list_names_the_model(target):
    names = [model.id for model in target.client.models.list()]
    expect(target.model in names, f"listed: {names}")


@check
def chat(target):
    answer = target.chat()
    choice = answer.choices[0]
    expect("Paris" in choice.message.content, f"content: {choice.message.content!r}")
    expect(choice.finish_reason == "stop", f"finish_reason: {choice.finish_reason}")
    expect(answer.model == target.model, f"model: {answer.model}")
    expect(answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0,
           f"usage: {answer.usage}")


@check
def chat_by_alias_is_named_as_asked(target):
    plain = target.chat(model=target.alias)
    expect(plain.model == target.alias, f"not streamed: {plain.model}")
    streamed = {chunk.model for chunk in target.chat(model=target.alias, stream=True)}
    expect(streamed == {target.alias}, f"streamed: {streamed}")


@check
def chat_streamed_has_the_text_of_the_plain_answer(target):
    chunks = list(target.chat(stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    expect(text == target.chat().choices[0].message.content, f"streamed: {text!r}")
    expect(chunks[0].choices[0].delta.role == "assistant", f"first delta: {chunks[0].choices[0].delta}")
    expect(chunks[-1].choices[0].finish_reason == "stop", f"last chunk: {chunks[-1]}")
    expect(all(chunk.usage is None for chunk in chunks), "usage was not asked for")


@check
def chat_streamed_with_usage_ends_in_it(target):
    chunks = list(target.chat(stream=True, stream_options={"include_usage": True}))
    expect(chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0, f"last chunk: {chunks[-1]}")
    expect([bool(chunk.usage) for chunk in chunks].count(True) == 1, "usage came more than once")


@check
def chat_streamed_arrives_while_it_is_made(target):
    with target.chat(stream=True, max_tokens=LONG_TOKENS, extra_body=ENDLESS) as stream:
        while not next(stream).choices[0].delta.content:
            pass
        expect(target.busy_slots() == 1, "the first word came when the engine had finished")
    target.expect_noticed()


@check
def chat_has_several_choices(target):
    choices = target.chat(n=2).choices
    expect([choice.index for choice in choices] == [0, 1], f"choices: {choices}")
    expect(all("Paris" in choice.message.content for choice in choices), f"choices: {choices}")


@check
def chat_streamed_has_several_choices(target):
    text, finished = {0: "", 1: ""}, set()
    for chunk in target.chat(n=2, stream=True):
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finished.add(choice.index)
    expect(all("Paris" in words for words in text.values()), f"text: {text}")
    expect(finished == {0, 1}, f"finished: {finished}")


@check
def chat_has_logprobs(target):
    tokens = target.chat(logprobs=True, top_logprobs=2, max_tokens=4).choices[0].logprobs.content
    expect(len(tokens) == 4 and all(len(token.top_logprobs) == 2 for token in tokens), f"logprobs: {tokens}")


@check
def chat_streamed_has_logprobs(target):
    chunks = list(target.chat(logprobs=True, top_logprobs=2, max_tokens=4, stream=True))
    tokens = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    expect(len(tokens) == 4 and all(len(token.top_logprobs) == 2 for token in tokens), f"logprobs: {tokens}")


@check
def chat_calls_a_tool(target):
    choice = target.chat(**tool_request()).choices[0]
    expect(choice.finish_reason == "tool_calls", f"finish_reason: {choice.finish_reason}")
    calls = choice.message.tool_calls
    expect(len(calls) == 1 and calls[0].id and calls[0].function.name == "get_weather", f"calls: {calls}")
    expect(json.loads(calls[0].function.arguments) == {"city": "Paris"}, f"arguments: {calls[0].function.arguments}")


@check
def chat_streamed_calls_a_tool(target):
    name, arguments, finish = "", "", None
    for chunk in target.chat(**tool_request(), stream=True):
        finish = chunk.choices[0].finish_reason or finish
        for call in chunk.choices[0].delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    expect((name, finish) == ("get_weather", "tool_calls"), f"name {name!r}, finish_reason {finish}")
    expect(json.loads(arguments) == {"city": "Paris"}, f"arguments: {arguments}")


def tool_request():
    """A talk in which the model has called the tool before: so small a model needs the hint."""
    messages = []
    for city in ("Rome", "Oslo", "Lima"):
        call = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        messages += [{"role": "user", "content": f"Weather in {city}?"},
                     {"role": "assistant", "content": None,
                      "tool_calls": [{"id": f"call-{city}", "type": "function", "function": call}]},
                     {"role": "tool", "tool_call_id": f"call-{city}", "content": "sunny"}]
    messages.append({"role": "user", "content": "Weather in Paris?"})
    return {"messages": messages, "tools": TOOLS, "tool_choice": "required", "max_tokens": 60}


@check
def completion(target):
    answer = target.completion()
    expect("Paris" in answer.choices[0].text, f"text: {answer.choices[0].text!r}")
    expect(answer.object == "text_completion", f"object: {answer.object}")


@check
def completion_streamed_has_the_text_of_the_plain_answer(target):
    text = "".join(chunk.choices[0].text for chunk in target.completion(stream=True) if chunk.choices)
    expect(text == target.completion().choices[0].text, f"streamed: {text!r}")


@check
def responses_route_passes_through(target):
    answer = target.client.responses.create(model=target.model, input=USER[0]["content"], temperature=0,
                                            max_output_tokens=24)
    expect("Paris" in answer.output_text, f"output: {answer.output_text!r}")
    kinds = [event.type for event in target.client.responses.create(
        model=target.model, input=USER[0]["content"], temperature=0, max_output_tokens=24, stream=True)]
    expect(kinds[-1] == "response.completed", f"events: {kinds}")


@check
def many_requests_share_a_connection(target):
    for _ in range(40):
        target.chat(max_tokens=1)


@check
def request_id_is_kept(target):
    raw = target.client.chat.completions.with_raw_response.create(
        model=target.model, messages=USER, max_tokens=1, extra_headers={"x-request-id": "kept-by-the-gateway"})
    expect(raw.headers.get("x-request-id") == "kept-by-the-gateway", f"headers: {dict(raw.headers)}")


# --- the same answer as the engine's own


COMPARED = {
    "plain": ("/v1/chat/completions", {"messages": USER}),
    "stop_word": ("/v1/chat/completions", {"messages": USER, "stop": ["Paris"]}),
    "cut_by_length": ("/v1/chat/completions", {"messages": USER, "max_tokens": 3}),
    "several_choices": ("/v1/chat/completions", {"messages": USER, "n": 2}),
    "logprobs": ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 2, "max_tokens": 4}),
    "tool_call": ("/v1/chat/completions", tool_request()),
    "completion": ("/v1/completions", {"prompt": "The capital of France is"}),
    "completion_logprobs": ("/v1/completions", {"prompt": "The capital of France is", "logprobs": 2, "max_tokens": 3}),
    "completion_several_prompts": ("/v1/completions", {"prompt": ["The capital of France is", "Rome is"],
                                                       "max_tokens": 3}),
}
# Of each request's own: identifiers, the clock, and how long it took.
VOLATILE = {"id", "created"}


def leaves(value, path=""):
    """Every leaf of a JSON value by its path; times and identifiers as their type only."""
    if isinstance(value, dict):
        return {key: leaf for name, inner in value.items() for key, leaf in leaves(inner, f"{path}.{name}").items()}
    if isinstance(value, list):
        return {key: leaf for at, inner in enumerate(value) for key, leaf in leaves(inner, f"{path}[{at}]").items()}
    own = path.rsplit(".", 1)[-1] in VOLATILE and "logprobs" not in path
    return {path: type(value).__name__ if own or path.startswith(".timings") else value}


def compare(target, name):
    path, body = COMPARED[name]
    body = {"model": target.model, **EXACT, **UNCACHED, **body}
    direct, through = target.from_engine(path, body), target.through_gateway(path, body)
    expect(through[0] == direct[0], f"status {through[0]}, the engine's own is {direct[0]}: {through[1]}")
    ours, own = leaves(through[1]), leaves(direct[1])
    expect(not own.keys() - ours.keys(), f"fields missing: {sorted(own.keys() - ours.keys())}")
    expect(not ours.keys() - own.keys(), f"fields added: {sorted(ours.keys() - own.keys())}")
    unlike = {key: (ours[key], own[key]) for key in own if not same(ours[key], own[key])}
    expect(not unlike, f"(gateway's, engine's own): {unlike}")


def same(ours, own):
    """Equal; timings may be whole or not."""
    return ours == own or {ours, own} == {"int", "float"}


for compared in COMPARED:
    CHECKS[f"same_as_engine_{compared}"] = lambda target, name=compared: compare(target, name)


# --- errors


def refused(kind, request, **options):
    """The error that the client raises for a request."""
    try:
        request(**options)
    except kind as error:
        return error
    except openai.OpenAIError as error:
        raise Wrong(f"{type(error).__name__}: {error}") from error
    raise Wrong("no error")


@check
def embeddings_error_is_the_engines_own(target):
    body = {"model": target.model, "input": "hello"}
    direct, through = target.from_engine("/v1/embeddings", body), target.through_gateway("/v1/embeddings", body)
    expect(direct[0] == 501, f"the engine answered {direct[0]}")
    expect(through == direct, f"{through}, the engine's own is {direct}")
    error = refused(openai.InternalServerError, target.client.embeddings.create, model=target.model, input="hello")
    expect(error.status_code == 501 and error.type == "not_supported_error", f"{error.status_code} {error.body}")


@check
def unknown_model_is_not_found(target):
    for stream in (False, True):
        error = refused(openai.NotFoundError, target.chat, model="no-such-model", stream=stream)
        expect(error.code == "model_not_found", f"body: {error.body}")
        expect(target.model in error.message, f"does not say what there is: {error.message}")


@check
def too_long_a_prompt_is_the_clients_error(target):
    long = [{"role": "user", "content": "word " * 6000}]
    for stream in (False, True):
        error = refused(openai.BadRequestError, target.chat, messages=long, stream=stream)
        expect(error.type == "exceed_context_size_error", f"stream {stream}: {error.body}")
    target.chat(max_tokens=1)  # And the replica is still in use.


@check
def broken_json_is_the_clients_error(target):
    with connection(target.base_url) as opened:
        opened.request("POST", "/v1/chat/completions", b'{"model": ', {"content-type": "application/json"})
        response = opened.getresponse()
        status, body = response.status, json.loads(response.read())
    expect((status, body["error"]["code"]) == (400, "invalid_json"), f"{status} {body}")


# --- clients that leave


@contextlib.contextmanager
def endless_chat(target, **options):
    """A chat that goes on until its client leaves, which it does at the end of the block."""
    with target.chat(stream=True, max_tokens=LONG_TOKENS, extra_body=ENDLESS, **options) as stream:
        next(stream)
        yield stream


def read_on(stream):
    """Takes what comes until the stream is closed elsewhere."""
    with contextlib.suppress(openai.OpenAIError):
        for _ in stream:
            pass


def leave_unanswered(target, path, body, busy):
    """Sends a request, waits until the engine works on it, and closes the connection without an answer."""
    body = {"model": target.model, "max_tokens": LONG_TOKENS, **ENDLESS, **body}
    with connection(target.base_url) as opened:
        opened.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        target.wait_busy(busy)


@check
def leaving_a_stream_stops_the_engine(target):
    with endless_chat(target):
        expect(target.busy_slots() == 1, "the engine is not working")
    target.expect_noticed()


@check
def leaving_a_stream_to_be_kept_stops_the_engine(target):
    # llama.cpp goes on for minutes when it sees this header.
    with endless_chat(target, extra_headers={"x-conversation-id": "a-client"}):
        expect(target.busy_slots() == 1, "the engine is not working")
    target.expect_noticed()


@check
def leaving_a_plain_chat_stops_the_engine(target):
    leave_unanswered(target, "/v1/chat/completions", {"messages": USER}, busy=1)
    target.expect_noticed()


@check
def leaving_a_plain_completion_stops_the_engine(target):
    leave_unanswered(target, "/v1/completions", {"prompt": "Once upon a time"}, busy=1)
    target.expect_noticed()


@check
def leaving_a_plain_chat_stops_a_busy_engine(target):
    # While another request gets words, llama.cpp itself does not look whether a plain one's client left.
    with endless_chat(target) as other:
        threading.Thread(target=read_on, args=(other,), daemon=True).start()
        leave_unanswered(target, "/v1/chat/completions", {"messages": USER}, busy=2)
        target.expect_noticed(slots=1)
        expect(target.busy_slots() == 1, "the other client's request was stopped too")
    target.expect_noticed()


@check
def a_client_that_times_out_has_left(target):
    error = []

    def impatient():
        try:
            target.client.with_options(timeout=1.5).chat.completions.create(
                model=target.model, messages=USER, max_tokens=LONG_TOKENS, extra_body=ENDLESS)
        except openai.APITimeoutError as timeout:
            error.append(timeout)

    client = threading.Thread(target=impatient)
    client.start()
    target.wait_busy(1)
    client.join()
    expect(error, "the client did not time out")
    target.expect_noticed()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1", help="the gateway's, with /v1")
    parser.add_argument("--engine-url", default="http://127.0.0.1:9001", help="the engine's own")
    parser.add_argument("--model", default="smollm2", help="the name that both serve")
    parser.add_argument("--alias", default="default", help="another name of it, at the gateway")
    parser.add_argument("--only", metavar="NAME", choices=CHECKS, help="one check instead of all")
    parser.add_argument("--list", action="store_true", help="print the names of the checks")
    options = parser.parse_args()
    if options.list:
        print("\n".join(CHECKS))
        return 0
    target, failed = Target(options), 0
    for name in [options.only] if options.only else CHECKS:
        try:
            target.wait(lambda: target.busy_slots() == 0, BUSY_MAX_SECONDS, "the engine is not idle")
            CHECKS[name](target)
            print(f"ok {name}", flush=True)
        except Exception as error:  # Whatever a check meets is its result.
            failed += 1
            why = str(error) if isinstance(error, Wrong) else "".join(traceback.format_exception(error)).strip()
            print(f"not ok {name} - {why}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
