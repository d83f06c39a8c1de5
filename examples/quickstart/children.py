"""Child processes that never outlive this script, however it ends."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

STOP_MAX_SECONDS = 3  # Between asking a child to stop and killing it.
PR_SET_PDEATHSIG = 1  # Linux: the signal a process gets when its parent is gone.
LOG_TAIL_LINES = 15
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):
    """Somebody asked this script to end: ctrl-C, `kill`, or a closed terminal."""

    def __init__(self, number):
        super().__init__(signal.Signals(number).name)
        self.number = number


class Died(Exception):
    """A child ended that was to stay."""


class Children:
    """The running children, newest last. Leaving the `with` block stops them all, newest first."""

    def __init__(self):
        self.running = []

    def __enter__(self):
        for number in ENDING_SIGNALS:
            signal.signal(number, raise_stopped)
        return self

    def __exit__(self, *_):
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # The stop itself is bounded: let it finish.
        for child in reversed(self.running):
            stop(child)
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def start(self, name, command, out=None, log=None, stop_max_seconds=STOP_MAX_SECONDS, asks_to_end=False, **options):
        """Starts a child in its own session, so that ctrl-C reaches only this script.

        `log` takes all that it writes, `out` only its standard output; the rest is on the screen. When this script is
        killed, so is the child, or it `asks_to_end`: one that has children of its own ends them first.
        """
        parent, last = os.getpid(), signal.SIGTERM if asks_to_end else signal.SIGKILL
        with contextlib.ExitStack() as files:
            stdout = files.enter_context(open(out or log, "wb")) if out or log else None
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stdout if log else None,
                                     start_new_session=True, preexec_fn=lambda: die_with(parent, last), **options)
        child.name, child.log, child.stop_max_seconds = name, log, stop_max_seconds
        self.running.append(child)
        return child

    def run(self, name, command, **options):
        """Runs a command to its end, with its output on the screen; its exit status."""
        child = self.start(name, command, **options)
        status = child.wait()
        self.running.remove(child)
        return status

    def check(self):
        """Raises `Died` when a child has ended, with the last lines that it wrote."""
        for child in self.running:
            if child.poll() is not None:
                raise Died(f"{child.name} ended with {describe(child.returncode)}{tail(child.log)}")


def raise_stopped(number, _frame):
    raise Stopped(number)


def die_with(parent, number):
    """In the child, before its program starts: have the kernel signal it when this script is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def stop(child):
    """Asks the child and its descendants to end, then kills what is left of them."""
    signal_group(child, signal.SIGTERM)
    deadline = time.monotonic() + child.stop_max_seconds
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(max(0.0, deadline - time.monotonic()))
    signal_group(child, signal.SIGKILL)
    child.wait()


def signal_group(child, number):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def describe(status):
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def tail(log):
    """The end of a log, indented, to follow a message."""
    if log is None:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return f"; the end of {log}:" + "".join(f"\n    {line}" for line in lines)
