"""llama.cpp's own HTTP server out of the `xllamacpp` wheel, with the flags of `llama-server`.

The wheel ships the server but no executable. Its library exports llama.cpp's parser of the command
line, which fills the C++ parameters that stand behind the Python object's header: so every flag
means what it means to `llama-server`. That layout is the pinned version's and is checked below.
"""

import ctypes
import os
import signal
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "site"))

import xllamacpp
import xllamacpp.xllamacpp as library

EXAMPLE_SERVER = 12  # `LLAMA_EXAMPLE_SERVER` in llama.cpp's `common/common.h`.
FIRST_FIELDS = [-1, 0, 2048, 512]  # n_predict, n_ctx, n_batch, n_ubatch, as they are by default.
STOP_MAX_SECONDS = 2  # With requests in flight the server's destructor may never return.


def parse(arguments):
    """The server's parameters from the command line; None when llama.cpp refused it and said why."""
    params = xllamacpp.CommonParams()
    address = id(params) + object.__basicsize__
    found = list((ctypes.c_int32 * len(FIRST_FIELDS)).from_address(address))
    assert found == FIRST_FIELDS, f"xllamacpp's layout is not the pinned version's: {found}"
    parser = ctypes.CDLL(library.__file__)._Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E
    parser.restype = ctypes.c_bool
    parser.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p), ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    argv = [b"llama-server", *map(os.fsencode, arguments)]
    if not parser(len(argv), (ctypes.c_char_p * (len(argv) + 1))(*argv, None), address, EXAMPLE_SERVER, None):
        return None
    if params.n_parallel < 0:  # What `llama-server` does when no --parallel is given.
        params.n_parallel, params.kv_unified = 4, True
    return params


def stop_with_parent(stop):
    """Ends the server when standard input does, that is, when whoever started it is gone."""
    while os.read(0, 4096):
        pass
    stop.set()


def main(arguments):
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if os.environ.get("LLAMA_SERVER_STOP_ON_EOF") == "1":
        threading.Thread(target=stop_with_parent, args=(stop,), daemon=True).start()
    params = parse(arguments)
    if params is None:
        return 1
    try:
        server = xllamacpp.Server(params)  # Listens, loads the model (503 meanwhile), then returns.
    except RuntimeError:
        return 1  # The server has said why; a traceback would be the last of its lines.
    stop.wait()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(STOP_MAX_SECONDS)
    del server
    os._exit(0)  # The interpreter's own teardown would wait for the server's threads.


sys.exit(main(sys.argv[1:]))
