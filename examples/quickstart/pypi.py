"""Puts packages of PyPI into a directory, whole or not at all, with whichever pip this machine has.

Everything goes through pip and its own configuration, so mirrors, proxies and caches apply.
Packages are installed with `--target`, which needs no virtual environment: Debian's Python comes
without that module.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import subprocess
import sys

from children import Children

# `--target` refuses what a user's configuration may ask for; the rest is noise for a reader.
PIP_ENVIRONMENT = {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1",
                   "PIP_ROOT_USER_ACTION": "ignore"}
STAMP = "STAMP"  # Names what a directory holds; written last, before the directory gets its name.


class Unavailable(Exception):
    """What is missing on this machine, as a sentence for the person who is asked to add it."""


def repository():
    """The root of the checkout that this file is in, from wherever it is called."""
    return pathlib.Path(__file__).resolve().parent.parent.parent


@contextlib.contextmanager
def locked(directory):
    """One preparation at a time; a killed one gives its lock back."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another preparation is running: waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prepare(target, stamp, build):
    """Has `build(directory)` fill `target`, unless it holds `stamp` already; True if it was built.

    What is built gets its name only when complete, so a killed run leaves nothing that looks ready.
    """
    with locked(target.parent):
        with contextlib.suppress(FileNotFoundError):
            if (target / STAMP).read_text(encoding="utf-8") == stamp:
                return False
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        build(partial)
        (partial / STAMP).write_text(stamp, encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        return True


def python_tag():
    """What compiled packages depend on: interpreter and machine."""
    return f"python{sys.version_info[0]}.{sys.version_info[1]} {os.uname().machine}"


def pip(scratch):
    """The command for pip: this interpreter's own, or that of a virtual environment made in `scratch`."""
    if answers([sys.executable, "-m", "pip", "--version"]):
        return [sys.executable, "-m", "pip"]
    environment = scratch / "pip"
    if answers([sys.executable, "-m", "venv", str(environment)]):
        return [str(environment / "bin" / "python"), "-m", "pip"]
    raise Unavailable(f"{sys.executable} has neither pip nor a working venv module: "
                      "install one of them (on Debian and Ubuntu: apt-get install python3-pip)")


def answers(command):
    """Whether the command can be run and says yes."""
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def run_pip(scratch, *arguments):
    """Runs pip with its progress on the screen."""
    with Children() as running:
        status = running.run("pip", [*pip(scratch), *arguments], env={**os.environ, **PIP_ENVIRONMENT})
    shutil.rmtree(scratch / "pip", ignore_errors=True)
    if status != 0:
        raise Unavailable(f"pip {arguments[0]} failed with status {status} (what it said is above): is PyPI reachable?")


def install(directory, *packages, scratch):
    """Installs the pinned packages, and what they need, so that `directory` can be put on `sys.path`."""
    run_pip(scratch, "install", "--only-binary", ":all:", "--target", str(directory), *packages)


def download(directory, package, scratch):
    """Fetches the one wheel of a pinned package without installing it; its path."""
    run_pip(scratch, "download", "--only-binary", ":all:", "--no-deps", "--dest", str(directory), package)
    return next(directory.glob("*.whl"))
