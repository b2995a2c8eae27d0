"""OpenAI's API: what clients of it ask the router for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import web
from front import Completion, Front, TakeOf, all_of
from openai_answers import Answers, Text, bytes_of, event
from openai_requests import MODEL, ChatBody, CompletionBody
from sampling import Token
from web import Answer, Calls, Emit, Refused

MOST_CALLS = 1024
MOST_ANSWERS = 4096
CARD = {"id": MODEL, "object": "model", "created": 0, "owned_by": "aiote"}


class Choice:
    """One answer while it is made: its text so far, its tokens, and where each begins in the text.

    What is repeated of the prompt comes first: one text, and its tokens, `echoed` of them.
    """

    def __init__(self, body: CompletionBody | ChatBody, wanted: Completion) -> None:
        self.parts: list[str] = []
        self.tokens: list[Token] = []
        self.offsets: list[int] = []
        self.text = Text(body.stops)
        self.finish = ""
        self.begun = False
        self.echoed = 0
        self._prompt = Text(())
        if isinstance(body, CompletionBody) and body.echo:
            for token in wanted.prompt:
                self.tokens.append(Token(token))
                self.offsets.append(self._prompt.length)
                self.parts.append(self._prompt.add(bytes_of(token)))
            self.parts = ["".join([*self.parts, self._prompt.add(b"", True)])]
            self.echoed = len(self.tokens)

    def echo(self, tokens: list[Token]) -> None:
        """Take the log-probabilities of the prompt's tokens."""
        self.tokens[: self.echoed] = tokens

    def take(self, token: Token) -> str:
        """Add a token, and return what may be given out of the text."""
        self.tokens.append(token)
        self.offsets.append(self._prompt.length + self.text.length)
        self.parts.append(self.text.add(bytes_of(token.id)))
        return self.parts[-1]

    def end(self, finish: str) -> str:
        """Take note why there are no more tokens, and return the rest of the text."""
        self.parts.append(self.text.add(b"", True))
        self.finish = "stop" if self.text.stopped else finish
        return self.parts[-1]


class Job:
    """A request: its answers, and what they have in common."""

    def __init__(self, front: Front, body: CompletionBody | ChatBody, wanted: Sequence[Completion]) -> None:
        self._front, self._wanted = front, wanted
        self._answers = Answers(wanted, isinstance(body, ChatBody), body.include_usage)
        self._include_usage = body.include_usage
        self._choices = [Choice(body, one) for one in wanted]
        self._prompts = sum(len(one.prompt) for one in wanted[:: body.n or 1])

    @property
    def _generated(self) -> int:
        return sum(len(choice.tokens) - choice.echoed for choice in self._choices)

    async def whole(self, emit: Emit) -> None:
        """Answer at once, when all is there."""

        async def take(index: int, token: Token) -> bool:
            self._choices[index].take(token)
            return self._choices[index].text.stopped

        for choice, finish in zip(self._choices, await self._counted(take), strict=True):
            choice.end(finish)
        found = [("".join(one.parts), one.tokens, one.offsets, one.finish) for one in self._choices]
        await emit(json.dumps(self._answers.whole(found, self._generated, self._prompts)).encode())

    async def stream(self, emit: Emit) -> None:
        """Answer token by token. A failure before the first one is an answer with its status, later it is an event."""
        begun = False

        async def take(index: int, token: Token) -> bool:
            nonlocal begun
            begun = True
            choice = self._choices[index]
            await self._begin(emit, index)
            text = choice.take(token)
            await emit(event(self._answers.chunk(index, text, [token], choice.offsets[-1:])))
            return choice.text.stopped

        try:
            finishes = await self._counted(take)
        except Refused as error:
            if not begun:
                raise
            await emit(event(error.body))
            return
        for index, (choice, finish) in enumerate(zip(self._choices, finishes, strict=True)):
            await self._begin(emit, index)
            await emit(event(self._answers.chunk(index, choice.end(finish), [], [], choice.finish)))
        if self._include_usage:
            await emit(event(self._answers.usage_chunk(self._generated, self._prompts)))
        await emit(b"data: [DONE]\n\n")

    async def _begin(self, emit: Emit, index: int) -> None:
        """Say once who speaks in a chat, or what was asked, if it is to be repeated."""
        choice = self._choices[index]
        if choice.begun:
            return
        choice.begun = True
        if self._answers.chat:
            await emit(event(self._answers.begin(index)))
        elif choice.echoed:
            await emit(event(self._answers.chunk(index, choice.parts[0], choice.tokens, choice.offsets)))

    def _echo(self, index: int, tokens: list[Token]) -> None:
        self._choices[index].echo(tokens)

    async def _counted(self, take: TakeOf) -> list[str]:
        front = self._front
        try:
            finishes = await all_of(front, self._wanted, take, self._echo)
        except Refused:
            front.failed += 1
            raise
        except anyio.get_cancelled_exc_class():
            front.left += 1
            raise
        front.done += 1
        return finishes


class Api:
    """The routes of the API."""

    def __init__(self, front: Front, calls: Calls, context: int) -> None:
        self._front, self._calls, self._context = front, calls, context

    def routes(self) -> list[Route]:
        """Return them."""
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{name}", self.model),
            Route("/v1/completions", partial(self._serve, CompletionBody), methods=["POST"]),
            Route("/v1/chat/completions", partial(self._serve, ChatBody), methods=["POST"]),
        ]

    async def models(self, _: Request) -> Response:
        """Serve the list of models, which is one."""
        return JSONResponse({"object": "list", "data": [CARD]})

    async def model(self, request: Request) -> Response:
        """Serve the one model."""
        if request.path_params["name"] != MODEL:
            message = f"The model `{request.path_params['name']}` does not exist"
            raise Refused(404, message, param="model", code="model_not_found")
        return JSONResponse(CARD)

    async def _serve(self, kind: type[CompletionBody | ChatBody], request: Request) -> Response:
        body = await web.body_of(request, kind)
        wanted = body.wanted(self._context)
        if len(self._calls) >= MOST_CALLS or len(self._front.tries) + len(wanted) > MOST_ANSWERS:
            raise Refused(
                429,
                f"{len(self._calls)} requests are being served, which is the limit; try again later",
                code="rate_limit_exceeded",
            )
        job = Job(self._front, body, wanted)
        if body.stream:
            return Answer(self._calls, job.stream, "text/event-stream")
        return Answer(self._calls, job.whole, "application/json")
