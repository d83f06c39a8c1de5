"""The steps that examples take: build llmgw, prepare an engine, wait, ask a question, each said as it is taken."""

import contextlib
import fcntl
import http.client
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import children
import pypi

HERE = pathlib.Path(__file__).resolve().parent
ROOT = pypi.repository()
WORK = ROOT / ".llmgw"
READY_MAX_SECONDS = 120
POLL_SECONDS = 0.05
# Between asking an llmgw to stop and killing it: its requests (`drain_timeout`), then its engines (10 s of grace), then itself.
STOP_MAX_SECONDS = 20
QUESTION = "What is the capital of France, and what is it known for?"
ANSWER_MAX_TOKENS = 120


class Failed(Exception):
    """A step that did not work, as a sentence for the person who ran this."""


def say(line):
    print(line, flush=True)


@contextlib.contextmanager
def alone(name):
    """The example's directory below `.llmgw/`, for one run at a time; a killed one gives it back."""
    directory = WORK / name
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failed(f"another {name} runs in this clone already: end that first") from None
        yield directory


def build(running, step):
    """The path of the binary: built with cargo, whose progress is on the screen, or LLMGW_BIN."""
    if given := os.environ.get("LLMGW_BIN"):
        binary = pathlib.Path(given).resolve()
        if not os.access(binary, os.X_OK):
            raise Failed(f"LLMGW_BIN is `{given}`, which can't be executed")
        return binary
    cargo = shutil.which("cargo")
    if cargo is None:
        raise Failed("no `cargo` here: install Rust, or set LLMGW_BIN to a built llmgw")
    say(f"{step} building llmgw (a first build compiles everything and takes minutes)")
    messages = WORK / "logs" / "build.json"
    messages.parent.mkdir(parents=True, exist_ok=True)
    command = [cargo, "build", "--release", "--bin", "llmgw", "--message-format", "json-render-diagnostics"]
    status = running.run("cargo", command, out=messages, cwd=ROOT)
    if status != 0:
        raise Failed(f"cargo build failed with {children.describe(status)}")
    built = [json.loads(line).get("executable") for line in messages.read_text(encoding="utf-8").splitlines()]
    return pathlib.Path(next(path for path in reversed(built) if path))


def prepare_engine(running, step):
    say(f"{step} preparing the engine (a first time downloads 130 MB from PyPI)")
    if running.run("engine", [sys.executable, str(HERE / "engine")]) != 0:
        raise Failed("the engine could not be prepared")


def free_ports(wished):
    """The documented ports where they are free, any others where not; all different."""
    held, ports = [], {}
    for name, port in wished.items():
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            listener.bind(("127.0.0.1", 0))
        held.append(listener)
        ports[name] = listener.getsockname()[1]
    for listener in held:
        listener.close()
    return ports


def start_llmgw(running, name, command, log):
    """Starts an llmgw that stops in order, its engines with it, also when this script is killed."""
    running.start(name, command, log=log, cwd=ROOT, stop_max_seconds=STOP_MAX_SECONDS, asks_to_end=True)


def wait(running, what, holds):
    """Waits for a condition, showing that it does; a refused connection means not yet."""
    began = time.monotonic()
    while True:
        running.check()
        try:
            if holds():
                say(f"    {what} ({time.monotonic() - began:.1f} s)")
                return
        except (OSError, http.client.HTTPException):
            pass
        if time.monotonic() - began > READY_MAX_SECONDS:
            raise Failed(f"waited {READY_MAX_SECONDS} s in vain for: {what}; the logs are in {WORK / 'logs'}")
        time.sleep(POLL_SECONDS)


def wait_for_replicas(running, binary, admin, model, count):
    """Waits until so many replicas serve; an engine that fails is told at once, with its last words."""
    def serve():
        _, page = get(admin, f"/v1/explain?model={model}")
        if json.loads(page).get("explanation", {}).get("waits_ms", 0) > 0:
            raise Failed("the engine does not start:\n" + ctl(binary, admin, "explain", model))
        _, page = get(admin, "/v1/replicas")
        ready = [row for row in json.loads(page)["replicas"] if row["state"] == "ready"]
        return len(ready) >= count
    what = "llama.cpp has loaded the model" if count == 1 else f"{count} llama.cpp have loaded the model"
    wait(running, what, serve)


def ctl_line(binary, admin, *words):
    """`llmgw ctl` as somebody would type it."""
    address = [] if admin == 8081 else ["--admin", f"http://127.0.0.1:{admin}"]
    return " ".join([str(binary), "ctl", *address, *words])


def ctl(binary, admin, *words):
    """What `llmgw ctl` prints. It has to succeed."""
    command = [str(binary), "ctl", "--admin", f"http://127.0.0.1:{admin}", *words]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise Failed(f"`llmgw ctl {' '.join(words)}` ended with status {ran.returncode}: {ran.stderr.strip()}")
    return ran.stdout


def get(port, path):
    """Status and body of a GET on loopback, past any configured proxy."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", "replace")
    finally:
        connection.close()


def ask(running, port, model):
    """Sends one streamed chat through the gateway and prints the words as they arrive."""
    began, first, pieces = time.monotonic(), None, 0
    body = json.dumps({"model": model, "stream": True, "max_tokens": ANSWER_MAX_TOKENS, "temperature": 0,
                       "messages": [{"role": "user", "content": QUESTION}]})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_MAX_SECONDS)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise Failed(f"the gateway answered {response.status}: {response.read().decode('utf-8', 'replace')}")
        for word in words(response):
            first = first or time.monotonic()
            pieces += 1
            print(word, end="", flush=True)
    except (OSError, http.client.HTTPException) as error:
        running.check()
        raise Failed(f"the answer broke off: {error}") from error
    finally:
        connection.close()
    if first is None:
        raise Failed("the answer was empty")
    say(f"\n\n    first word after {first - began:.2f} s, {pieces} pieces in {time.monotonic() - began:.2f} s")


def words(response):
    """The text of each event of a streamed chat, until the engine's own end."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:"):].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise Failed(f"the answer ended in an error: {event['error']}")
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                yield text
    raise Failed("the answer ended without [DONE]")


def stay(running):
    """Until somebody ends it, or something that was to stay ended."""
    say("ctrl-C ends all of it")
    while True:
        running.check()
        time.sleep(0.2)
