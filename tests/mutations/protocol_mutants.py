"""Bugs in `runtime/protocol/`."""

from mutant import Mutant

TESTS = "tests/runtime/protocol"
CODEC, FRAMING, ERRORS = (f"runtime/protocol/{name}.py" for name in ("codec", "framing", "wire_errors"))
FRAMES = "runtime/protocol/frames.py"
ADDRESS = "runtime/net/address.py"

MUTANTS = [
    Mutant(
        CODEC,
        "    walker.feed(payload)\n    walker.skip()",
        "    walker.feed(payload)",
        "arrays are allocated before a frame is complete: 3 KB from a client take 80 MB",
    ),
    Mutant(
        CODEC,
        "        if len(payload) > UNCHECKED_BYTES:",
        "        if len(payload) > UNCHECKED_BYTES << 10:",
        "frames of a few KB allocate arrays before they are known to be complete",
    ),
    Mutant(
        CODEC,
        "        self._arrays += 1\n",
        "        self._arrays = 1\n",
        "a frame may hold millions of arrays, and one frame stalls the server",
    ),
    Mutant(
        CODEC,
        "        self._entries += 1 + len(pairs)",
        "        self._entries = 1 + len(pairs)",
        "the maps of one frame are limited one by one, not together",
    ),
    Mutant(
        CODEC,
        "            if key in entries:\n",
        "            if False:\n",
        "a map with a key twice is read, and the last value wins in silence",
    ),
    Mutant(
        CODEC,
        "if len(payload) > MAX_ARRAYS else None,",
        "if len(payload) > 2 * MAX_ARRAYS else None,",
        "frames below twice the limit are not counted",
    ),
    Mutant(
        CODEC,
        "            _check_contents(item, levels - 1)",
        "            _check_contents(item, levels)",
        "frames nest without a limit",
    ),
    Mutant(
        CODEC,
        "    if len(payload) > max_frame_bytes:\n        raise InvalidRequest",
        "    if len(payload) > MAX_FRAME_BYTES:\n        raise InvalidRequest",
        "the peer's frame limit is ignored in sending",
    ),
    Mutant(
        CODEC,
        "    if len(message) > 1 and type(message[1]) is int and message[1] >= 0:",
        "    if len(message) > 1 and isinstance(message[1], int):",
        "a GENERATE with id true or -1 is answered with an id that no client can have used",
    ),
    Mutant(
        CODEC,
        "        if frame_type in (Generate, AskVectors, AskScores) and (request_id",
        "        if (request_id",
        "a malformed RESUME ends a request of that id instead of the connection",
    ),
    Mutant(
        CODEC,
        '        raise ProtocolError(f"a frame must be a msgpack array, not {type(message).__name__}")',
        "        return ()",
        "a frame that is no array is reported as an unknown type",
    ),
    Mutant(
        CODEC,
        "InvalidRequest(reason[:MAX_ERROR_CHARACTERS])",
        "InvalidRequest(reason)",
        "an error frame quotes the whole of the client's input",
    ),
    Mutant(
        FRAMING,
        "    if length > max_bytes:",
        "    if length > max_bytes + PREFIX_BYTES:",
        "a frame of a few bytes above the limit is accepted",
    ),
    Mutant(
        FRAMING,
        "    if length > max_bytes:",
        "    if length >= max_bytes:",
        "a frame of exactly the limit is refused",
    ),
    Mutant(
        FRAMING,
        "    del received[:end]\n",
        "    received.clear()\n",
        "frames that arrive together are lost but the first",
    ),
    Mutant(
        ERRORS,
        "error.retryable, error.retry_after_ms)",
        "error.retryable)",
        "clients no longer learn when to retry",
    ),
    Mutant(
        ERRORS,
        "    error.retry_after_ms = frame.retry_after_ms\n",
        "",
        "the client drops the server's advice when to retry",
    ),
    Mutant(
        ERRORS,
        "str(error)[:MAX_MESSAGE_CHARACTERS]",
        "str(error)",
        "an error that quotes a long prompt exceeds the client's frame limit",
    ),
    Mutant(
        ERRORS,
        "_CLASS_BY_CODE.get((frame.code, frame.retryable))",
        "_CLASS_BY_CODE.get((frame.code, not frame.retryable)) or _CLASS_BY_CODE.get((frame.code, frame.retryable))",
        "an error that may be retried becomes one that may not, where two classes share a code",
    ),
    Mutant(
        ERRORS,
        "RetryableError if frame.retryable else QuireError",
        "QuireError",
        "an unknown retryable error is not retried",
    ),
    Mutant(
        ADDRESS,
        'f"[{self.host}]:{self.port}" if ":" in self.host else',
        "",
        "the printed address of an IPv6 server cannot be parsed",
    ),
    Mutant(
        ADDRESS,
        "lowest <= int(text) <= MAX_PORT",
        "0 <= int(text) <= MAX_PORT",
        "port 0 is accepted in a client's address",
    ),
    Mutant(
        FRAMES,
        "    credit: NumTokens | None = None  # tokens that may be sent before CREDIT; None: no limit\n",
        "    credit: int | None = None  # tokens that may be sent before CREDIT; None: no limit\n",
        "a negative credit is accepted",
        "tests/runtime/protocol tests/system/test_flow_control.py",
    ),
    Mutant(
        FRAMES,
        "    tokens: Annotated[int, msgspec.Meta(ge=1)]  # added to the credit\n",
        "    tokens: int  # added to the credit\n",
        "a negative CREDIT takes credit away",
        "tests/runtime/protocol tests/system/test_flow_control.py",
    ),
    Mutant(
        "runtime/protocol/codec.py",
        "if self._arrays > MAX_ARRAYS:",
        "if self._arrays >= MAX_ARRAYS:",
        "a frame with exactly the allowed number of arrays is refused",
    ),
    Mutant(
        "runtime/protocol/codec.py",
        "if self._entries > MAX_MAP_ENTRIES:",
        "if self._entries >= MAX_MAP_ENTRIES:",
        "maps with exactly the allowed number of entries are refused",
    ),
    Mutant(
        "runtime/protocol/codec.py",
        "    if levels == 0:",
        "    if levels < 0:",
        "a frame may nest one level deeper than documented",
    ),
    Mutant(
        "runtime/net/address.py",
        'return bool(text.encode("idna")) and "\\0" not in text',
        'return bool(text) and "\\0" not in text',
        "a name that cannot be looked up is a traceback",
        "tests/runtime/net/test_address.py",
    ),
    Mutant(
        "runtime/client/received.py",
        "        if answer.first_index > self._num_tokens(answer.choice):",
        "        if False:",
        "tokens that a server leaves out are not missed",
        "tests/system/test_failover.py",
    ),
]
