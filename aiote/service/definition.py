"""Define a service: a class with marked methods, whose annotations determine the types of the messages."""

from __future__ import annotations

import inspect
import weakref
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar, get_args, get_origin, get_type_hints, overload

import msgspec
import numpy

from ..aio import Condition, run_shielded
from ..errors import UsageError
from .codec import decoder
from .frames import OutSpec

__all__ = ["DirectCall", "Method", "Out", "Service", "method", "methods_of"]

T = TypeVar("T", bound=numpy.generic)
F = TypeVar("F", bound=Callable[..., Any])
STREAMS = (AsyncIterator, AsyncGenerator, AsyncIterable)
MAX_NAME = 200
_OUT = "aiote.Out"
_MARK = "_aiote_method"

Out: TypeAlias = Annotated[numpy.ndarray[Any, numpy.dtype[T]], _OUT]
"""A caller's array that the method fills: `Out[numpy.float32]` is contiguous, writable and of that type.

The method receives zeros of the same shape and type. When the call returns, the caller's array holds what the method
has written. A call that fails or is cancelled leaves the caller's array unchanged or partly written. After the await
has ended, the call writes no more bytes into it.
"""


class DirectCall(AsyncIterator[None]):
    """A call that a `direct` method has returned: it goes on in callbacks, and no task of its own awaits it.

    `end_may_wait`: a caller that does not wait for the end of a call that succeeds. The end may then be sent up to 5 ms
    later, in one message with others.
    """

    end_may_wait = False

    @abstractmethod
    def begin(self, end: Callable[[Exception | None], None]) -> None:
        """Start. `end` is to be called once, when the call is over: with None, or with the error that it ended with."""

    @abstractmethod
    def cancel(self) -> None:
        """Ask the call to end; `end` is called when it is over, soon or later. Idempotent."""

    async def __anext__(self) -> None:
        """Run the call in a task, as interceptors need it. If the wait is cancelled, it still waits for the end."""
        over, ended = Condition(), list[Exception | None]()

        def end(error: Exception | None) -> None:
            ended.append(error)
            over.wake_all()

        self.begin(end)
        try:
            await over.until(lambda: ended)
        except BaseException:
            self.cancel()
            await run_shielded(lambda: over.until(lambda: ended))
            raise
        if ended[0] is not None:
            raise ended[0]
        raise StopAsyncIteration


class Service:
    """Base class of a service: other engines can call its methods that `method` marks.

    The service's name on the wire is `name`, or the name of the class if `name` is empty. `version` is part of it, so
    two versions of a service are two services, and one engine may serve both side by side.
    """

    name: ClassVar[str] = ""
    version: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class _Mark:
    idempotent: bool
    raises: tuple[type[Exception], ...]
    direct: bool


@overload
def method(function: F, /) -> F: ...
@overload
def method(
    *, idempotent: bool = ..., raises: Sequence[type[Exception]] = ..., direct: bool = ...
) -> Callable[[F], F]: ...
def method(
    function: F | None = None,
    /,
    *,
    idempotent: bool = False,
    raises: Sequence[type[Exception]] = (),
    direct: bool = False,
) -> F | Callable[[F], F]:
    """Mark a method of a Service, so that other engines can call it.

    Annotate every parameter and the result with types that msgspec knows; they may contain numpy arrays anywhere
    (`numpy.typing.NDArray[numpy.float32]`). A parameter `Out[...]` is a caller's array that the method fills. A method
    that returns an `AsyncIterator` is a stream. `idempotent` allows the client to repeat a call when the client cannot
    know whether the method ran. If the method raises an exception of a class in `raises`, the caller gets an exception
    of that class, made from its text; any other exception arrives as RemoteError. A `direct` method is an ordinary
    function that returns a `DirectCall`, a stream without items: it runs in a callback of the loop, without a task.
    """

    def mark(function: F) -> F:
        setattr(function, _MARK, _Mark(idempotent, tuple(raises), direct))
        return function

    return mark if function is None else mark(function)


class Method:
    """A method as both sides see it: its name on the wire, and the decoders of its messages."""

    def __init__(self, service: type[Service], attribute: str, function: Callable[..., Any], mark: _Mark) -> None:
        self.attribute = attribute
        self.name = f"{service.name or service.__name__}/{service.version}.{attribute}"
        if len(self.name) > MAX_NAME:
            raise UsageError(
                f"{self.name}: expected a name of at most {MAX_NAME} characters for service, version and "
                "method together"
            )
        self.idempotent, self.direct = mark.idempotent, mark.direct
        self.raises = {kind.__name__: kind for kind in mark.raises}
        try:
            hints = get_type_hints(function, include_extras=True)
        except NameError as error:
            raise UsageError(f"{self.name}: an annotation cannot be resolved: {error}") from error
        self.arguments, self.outs = self._arguments(function, hints)
        result = self._hint(hints, "return", "its result")
        self.stream = get_origin(result) in STREAMS
        if self.stream:
            result = get_args(result)[0]
        # In the End frame, the result is followed by the filled arrays that were too small to lend memory for.
        kind = tuple[result, list[numpy.ndarray[Any, Any]]] if self.outs else result  # type: ignore[valid-type]
        if self.stream and self.outs:
            raise UsageError(
                f"{self.name}: a stream cannot fill arrays of its caller: yield arrays instead of an Out parameter"
            )
        try:
            self.read_arguments = decoder(self.arguments)
            self.read_result = decoder(kind)
        except TypeError as error:
            raise UsageError(f"{self.name}: {error}") from error

    def _hint(self, hints: dict[str, Any], name: str, what: str) -> Any:
        if name not in hints:
            raise UsageError(f"{self.name}: {what} has no annotation; add one, because messages are checked against it")
        return hints[name]

    def _arguments(
        self, function: Callable[..., Any], hints: dict[str, Any]
    ) -> tuple[type[msgspec.Struct], dict[str, Any]]:
        """Return a struct of the parameters, and the annotations of the `Out` parameters by their names."""
        fields: list[Any] = []
        outs: dict[str, Any] = {}
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            name = parameter.name
            if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                raise UsageError(
                    f"{self.name}: {parameter} is positional-only, keyword-only or variadic: expected an "
                    "ordinary parameter"
                )
            hint = self._hint(hints, name, f"parameter {name}")
            if get_origin(hint) is Annotated and _OUT in get_args(hint):
                outs[name] = get_args(hint)[0]
                fields.append((name, OutSpec))
            elif parameter.default is parameter.empty:
                fields.append((name, hint))
            else:
                fields.append((name, hint, parameter.default))
        try:
            return msgspec.defstruct(self.attribute, fields, array_like=True), outs
        except TypeError as error:
            raise UsageError(f"{self.name}: {error}") from error

    def __repr__(self) -> str:
        return f"<Method {self.name}>"


_known: weakref.WeakKeyDictionary[type, tuple[Method, ...]] = weakref.WeakKeyDictionary()


def methods_of(service: type[Service]) -> tuple[Method, ...]:
    """Return the marked methods of a service.

    Raises UsageError if `service` is not a Service, marks no method, or marks a method that cannot be called remotely.
    """
    if service in _known:
        return _known[service]
    if not isinstance(service, type) or not issubclass(service, Service):
        raise UsageError(f"expected a subclass of aiote.service.Service, got {service!r}")
    found = []
    for attribute in dir(service):
        function = inspect.getattr_static(service, attribute)
        mark = getattr(function, _MARK, None)
        if mark is not None:
            found.append(Method(service, attribute, function, mark))
    if not found:
        raise UsageError(f"{service.__name__} has no remote method: mark its methods with @aiote.service.method")
    _known[service] = tuple(found)
    return _known[service]
