"""What clients of OpenAI's API ask for, as this router reads it: what is not done here is refused and never ignored.

Each parameter is in one of three places: a field that is used; the table `NEUTRAL`, of values that change nothing; or
nowhere, and then it is refused by its name. Parameters that are null count as not given, but for `max_tokens`: without
it a completion has 16 tokens, and with null as many as the context leaves.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from aiote.demo import tokens as vocabulary
from front import Completion
from sampling import SEEDS, Sampling
from web import Refused

MODEL = "aiote-demo"
MOST_CHOICES = 128
MOST_STOPS = 4
DEFAULT_TOKENS = 16

# Of what is not done: the values that ask for nothing. null is always one.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # of no tools
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}

Stop = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How a stream is to be."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None

    def __post_init__(self) -> None:
        """Refuse padding, which hides the lengths of tokens. msgspec before 0.22 has no literals of bool."""
        if self.include_obfuscation:
            raise ValueError("include_obfuscation: streams have no padding here; leave it out or set it to false")


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of requests have. `user` says who asks, and changes nothing."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    user: str | None = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    service_tier: Any = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with what it has cost."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Raise Refused for what is not done here."""
        if self.model not in (None, MODEL):
            raise Refused(404, f"The model `{self.model}` does not exist", param="model", code="model_not_found")
        for name, neutral in NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise Refused(400, f"{name} is not supported; omit it", param=name, code="unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise Refused(400, "stream_options needs stream to be true", param="stream_options", code="invalid_value")

    def choices(
        self, prompt: tuple[int, ...], most: int | None, logprobs: int | None, context: int, echo: bool = False
    ) -> list[Completion]:
        """Return what is to be generated for a prompt, `n` times. Raises Refused where that is too long."""
        room = context - len(prompt)
        wanted = room if most is None else most
        if room < max(wanted, 1):
            raise Refused(
                400,
                f"max_tokens: This model's maximum context length is {context} tokens. However, you requested "
                f"{len(prompt)} in the prompt and {max(wanted, 1)} for the answer.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        seed = secrets.randbelow(SEEDS) if self.seed is None else self.seed
        temperature = 1.0 if self.temperature is None else self.temperature
        how = Sampling(temperature, 1.0 if self.top_p is None else self.top_p, 0, logprobs)
        return [
            Completion(prompt, wanted, msgspec.structs.replace(how, seed=(seed + number) % SEEDS), echo)
            for number in range(self.n or 1)
        ]


class CompletionBody(Body, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, Meta(ge=0)] | UnsetType | None = UNSET
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: Any = None
    suffix: Any = None

    def prompts(self) -> list[tuple[int, ...]]:
        """Return the prompts, in tokens. Raises Refused."""
        given: list[Any]
        if isinstance(self.prompt, str) or (self.prompt and all(type(one) is int for one in self.prompt)):
            given = [self.prompt]
        else:
            given = list(self.prompt)
        kinds = {type(one) for one in given}
        if kinds not in ({str}, {list}) or not all(given if kinds == {list} else (True,)):
            raise Refused(400, "prompt: expected a text, texts, tokens or lists of tokens", param="prompt")
        out = [tuple(vocabulary.encode(one.encode()) if isinstance(one, str) else one) for one in given]
        if not all(0 <= token < vocabulary.VOCABULARY for one in out for token in one):
            raise Refused(400, f"prompt: expected tokens from 0 to {vocabulary.VOCABULARY - 1}", param="prompt")
        return out

    def wanted(self, context: int) -> list[Completion]:
        """Return what is to be generated: for each prompt, `n` times. Raises Refused."""
        self.check()
        if self.max_tokens == 0 and not self.echo:
            message = "max_tokens: without echo an answer has one token at least"
            raise Refused(400, message, param="max_tokens", code="invalid_value")
        most = DEFAULT_TOKENS if self.max_tokens is UNSET else self.max_tokens
        scored = bool(self.echo) and self.logprobs is not None
        prompts = self.prompts()
        if (count := len(prompts) * (self.n or 1)) > MOST_CHOICES:
            raise Refused(
                400, f"prompt: {count} answers were asked for, expected at most {MOST_CHOICES}", param="prompt"
            )
        return [one for prompt in prompts for one in self.choices(prompt, most, self.logprobs, context, scored)]


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message."""

    text: str
    type: Literal["text"]


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a chat. What an answer has besides may come back with it, if it is null."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    annotations: None = None
    audio: None = None
    function_call: None = None
    refusal: None = None
    tool_calls: None = None

    @property
    def text(self) -> str:
        """What it says."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Body, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    metadata: Any = None
    modalities: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    store: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def wanted(self, context: int) -> list[Completion]:
        """Return what is to be generated, `n` times. Raises Refused."""
        self.check()
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused(400, "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise Refused(
                400, "max_tokens and max_completion_tokens are the same setting: give one", param="max_tokens"
            )
        most = self.max_tokens or self.max_completion_tokens
        text = "".join(f"{message.role}: {message.text}\n" for message in self.messages) + "assistant: "
        prompt = tuple(vocabulary.encode(text.encode()))
        return self.choices(prompt, most, (self.top_logprobs or 0) if self.logprobs else None, context)
