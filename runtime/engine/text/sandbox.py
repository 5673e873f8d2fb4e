"""The environment of chat templates: jinja2's immutable sandbox, with limits on time and on the size of its output.

jinja2 denies a template access to Python's internals, but lets it fill the memory with `"x" * 10**9`. So every
operation that makes text or a list larger is charged before it runs, and every text, list and map that a slice, call,
filter or literal returns is charged too: a template can keep them all. `run` returns within its time limit, and no text
that it returns is longer than MAX_SIZE.

The limits are not complete: operations are recognized by name, and one long call of C code is not interrupted. Its
thread runs until that call returns.
"""

from __future__ import annotations

import ctypes
import re
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import structlog
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SIZE = 16 << 20  # characters of a text, items of a list
MAX_BYTES_PER_RUN = 256 << 20  # approximate bytes of all values that one run makes
ITEM_BYTES = 64  # an item of a list with its object
REFERENCE_BYTES = 8  # a reference to an object that exists
WIDE_CHARACTER_BYTES = 4  # upper bound for a text that is not ASCII
MANY_ITEMS = 32  # items of a literal: shorter ones are not charged
MAX_NUMBER_BITS = 4096
INTERRUPTS = 10
INTERRUPT_INTERVAL_S = 0.02

T = TypeVar("T")

# A width or precision of four digits, or given as an argument.
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-#0 +]*\d*\.?(\d{4}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\d{4}|\{)")
_FORMATS = frozenset({"%", "format", "format_map"})
_MAKES_TEXT = frozenset({"tojson", "string", "pprint", "urlencode", "xmlattr", "escape", "e", "forceescape", "join"})
_TAKES_ANY_NUMBER = frozenset({"default", "d", "int", "float", "sum", *_FORMATS})
_REPEATS_TEXTS = frozenset({"indent", "wordwrap", "urlize"})  # may insert an argument at every character
_MAKES_LISTS = frozenset({"slice", "batch"})
_REFUSED = frozenset({"translate", "expandtabs"})  # the size of the result is not known beforehand

_log = structlog.get_logger("quire.text")


class Sandbox(ImmutableSandboxedEnvironment):
    """A jinja2 environment with transformers' whitespace rules and loop controls. Render only within `run`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], extensions: Sequence[type[Extension]] = ()) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", *extensions],
            optimized=False,  # compute nothing while compiling
            finalize=self._charge_text,
        )
        self.code_generator_class = _CodeGenerator
        self.filters = {name: self._charging(name, function) for name, function in {**self.filters, **filters}.items()}
        del self.globals["lipsum"]
        self._run = threading.local()  # charged_bytes: bytes of the run in this thread

    def run(self, work: Callable[[], T], timeout_s: float) -> T:
        """Run `work` in a new thread and return its result. After `timeout_s`, interrupt it and raise TimeoutError."""
        outcome: list[T] = []
        failure: list[Exception] = []

        def target() -> None:
            self._run.charged_bytes = 0
            try:
                outcome.append(work())
            except Exception as error:
                failure.append(error)
            except SystemExit:  # interrupted
                pass

        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            _interrupt(thread)
            raise TimeoutError
        if failure:
            raise failure.pop()  # popped, because its traceback holds the run's values
        return outcome[0]

    # Charges

    def charge_value(self, value: T, item_bytes: int = ITEM_BYTES) -> T:
        """Charge for `value`, which a template can keep, and return it."""
        if isinstance(value, str):
            self._charge_bytes(len(value) * (1 if value.isascii() else WIDE_CHARACTER_BYTES))
        elif isinstance(value, bytes):
            self._charge_bytes(len(value))
        elif isinstance(value, list | tuple | dict):
            self._charge_bytes(len(value) * item_bytes)
        return value

    def charge_slice(self, value: T) -> T:
        """Charge for a slice, whose items exist already, and return it."""
        return self.charge_value(value, REFERENCE_BYTES)

    def _charge_text(self, value: T) -> T:
        """Charge for the text that `value` is about to become, and return `value`."""
        self._charge_size(_weight(value))
        return value

    def _charge_size(self, size: int) -> None:
        """Charge for a text or list of `size` that is about to be made. Raises SecurityError beyond a limit."""
        if size > MAX_SIZE:
            raise SecurityError("its output is larger than is allowed")
        self._charge_bytes(size)

    def _charge_bytes(self, num_bytes: int) -> None:
        """Add to the bytes of the run. Raises SecurityError beyond MAX_BYTES_PER_RUN."""
        self._run.charged_bytes += num_bytes
        if self._run.charged_bytes > MAX_BYTES_PER_RUN:
            raise SecurityError("its output is larger than is allowed")

    def concat(self, pieces: Iterable[Any], /) -> str:
        """Join the pieces of a block, a macro, `~` or the whole template."""
        size = 0
        texts = []
        for piece in pieces:
            texts.append(piece if isinstance(piece, str) else str(self._charge_text(piece)))
            size += len(texts[-1]) + 16  # empty texts take memory too
            if size > MAX_SIZE:
                break
        self._charge_size(size)
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            self._charge_call("%", left, (right,))
        elif operator == "+" and _is_sequence(left) and _is_sequence(right):
            self._charge_size((len(left) + len(right)) * _size_of_items(left))
        elif operator == "*" and _is_sequence(left) and isinstance(right, int):
            self._charge_size(len(left) * right * _size_of_items(left))
        elif operator == "*" and _is_sequence(right) and isinstance(left, int):
            self._charge_size(len(right) * left * _size_of_items(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_NUMBER_BITS:
                raise SecurityError(f"it computes a number of more than {MAX_NUMBER_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        value = getattr(method, "__self__", None)
        if isinstance(method, types.BuiltinMethodType | types.MethodType) and isinstance(value, str | bytes | int):
            __self._charge_call(method.__name__, value, (*args, *kwargs.values()))
        return __self.charge_value(super().call(__context, __obj, *args, **kwargs))

    def _charging(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that charges for its call before it runs, and for its result."""
        first = int(hasattr(function, "jinja_pass_arg"))  # index of the value: some filters get a context before it

        @wraps(function)
        def charging(*args: Any, **kwargs: Any) -> Any:
            value = args[first]
            rest = args[first + 1 :]
            if name == "join" and not isinstance(value, str | list | tuple | dict):
                value = list(value)
            self._charge_call(name, value, (*rest, *kwargs.values()))
            return self.charge_value(function(*args[:first], value, *rest, **kwargs))

        return charging

    def _charge_call(self, name: str, value: Any, args: tuple[Any, ...]) -> None:
        """Charge for a call of a filter, or a method of a text or number: for value, arguments and their widths."""
        if name in _REFUSED:
            raise SecurityError(f"it calls {name}")
        if name not in _TAKES_ANY_NUMBER:
            lines = value.count("\n") + 1 if isinstance(value, str) else 1
            item_bytes = ITEM_BYTES if name in _MAKES_LISTS else 1
            self._charge_size(lines * item_bytes * sum(arg for arg in args if isinstance(arg, int) and arg > 0))
        if name in _REPEATS_TEXTS:
            self._charge_size(len(str(value)) * sum(len(arg) for arg in args if isinstance(arg, str)))
        if name in _FORMATS and isinstance(value, str):
            if _WIDE_PERCENT.search(value) or (name != "%" and _WIDE_BRACES.search(value)):
                raise SecurityError("it formats with a width that is too large or an argument")
            self._charge_size(_weight((value, args)))
        elif name == "join" and args:
            texts, separator = (args[0], value) if isinstance(value, str) else (value, args[0])
            self._charge_size(_weight(texts) + len(texts) * len(separator))
        elif name == "replace" and len(args) > 1:
            old, new = str(args[0]), str(args[1])
            self._charge_size(_weight(value) + (str(value).count(old) + 1) * len(new))
        elif name in _MAKES_TEXT:
            self._charge_size(_weight(value))


class _CodeGenerator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Compile `a ~ b` into a call of `concat`; `call_binop` does not see this operator."""
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        """Compile a slice so that it is charged; the environment does not see it."""
        if isinstance(node.arg, nodes.Slice):
            self._wrap("charge_slice", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._literal(super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        self._literal(super().visit_Tuple, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._literal(super().visit_Dict, node, frame)

    def _literal(self, visit: Callable[[Any, Frame], None], node: nodes.Literal, frame: Frame) -> None:
        """Compile a long literal so that each of its evaluations is charged."""
        if len(node.items) > MANY_ITEMS and getattr(node, "ctx", "load") == "load":  # type: ignore[attr-defined]
            self._wrap("charge_value", visit, node, frame)
        else:
            visit(node, frame)

    def _wrap(self, function: str, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write(f"environment.{function}(")
        visit(node, frame)
        self.write(")")


def _is_sequence(value: object) -> bool:
    return isinstance(value, str | bytes | list | tuple)


def _size_of_items(value: str | bytes | list[Any] | tuple[Any, ...]) -> int:
    return 1 if isinstance(value, str | bytes) else REFERENCE_BYTES


def _weight(value: object) -> int:
    """Return the characters in `value`, nested values included, and 64 for each item; it stops beyond MAX_SIZE."""
    if isinstance(value, str):  # the most frequent case
        return len(value)
    weight = 0
    unseen = [value]
    while unseen and weight <= MAX_SIZE:
        each = unseen.pop()
        weight += 64  # approximate allocation of an item in Python
        if isinstance(each, str | bytes):
            weight += len(each)
        elif isinstance(each, list | tuple):
            unseen.extend(each)
        elif isinstance(each, dict):
            unseen.extend(each.keys())
            unseen.extend(each.values())
    return weight


def _interrupt(thread: threading.Thread) -> None:
    """Raise SystemExit in the thread at its next instruction, repeatedly in case the template catches it."""
    for _ in range(INTERRUPTS):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        thread.join(INTERRUPT_INTERVAL_S)
        if not thread.is_alive():
            return
    _log.error("a chat template does not stop; its thread runs on")
