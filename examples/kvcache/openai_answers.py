"""Answers in OpenAI's forms, whole or as the chunks of a stream, for completions and for chats."""

from __future__ import annotations

import codecs
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from aiote.demo import tokens as vocabulary
from front import Completion
from openai_requests import MODEL
from sampling import Token


class Text:
    """The text of an answer as its tokens come: whole characters, and nothing that could belong to a stop.

    `stopped` once it has one of `stops`, with which, and after which, nothing more is given out. `length` counts the
    characters so far, given out or not.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stopped = False
        self.length = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._stops = stops
        self._held = ""

    def add(self, data: bytes, last: bool = False) -> str:
        """Take bytes, and return what may be given out."""
        if self.stopped:
            return ""
        more = self._decode(data, last)
        self.length += len(more)
        self._held += more
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped, out = True, self._held[: min(found)]
            return out
        keep = 0 if last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out


def _overlap(text: str, stop: str) -> int:
    """Return how much of a text's end is the beginning of a stop."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:count]):
            return count
    return 0


def name_of(token: int) -> str:
    """Return a token as text; a byte that is no character of its own as OpenAI shows such."""
    if token >= vocabulary.BEGIN:
        return "<|begin|>" if token == vocabulary.BEGIN else "<|end|>"
    return chr(token) if token < 128 else f"bytes:\\x{token:02x}"


def bytes_of(token: int) -> bytes:
    """Return what a token stands for."""
    return vocabulary.decode([token])


class Answers:
    """What every answer to one request has in common. `chat` says in which of the two forms."""

    def __init__(self, wanted: Sequence[Completion], chat: bool, include_usage: bool) -> None:
        self.chat = chat
        self._wanted = wanted
        self._include_usage = include_usage
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def chunk(
        self, index: int, text: str, tokens: Sequence[Token], offsets: Sequence[int], finish: str | None = None
    ) -> dict[str, Any]:
        """Return a part of a stream. offsets: for each token the characters of the answer before it."""
        choice = {"index": index, "finish_reason": finish, "logprobs": self._logprobs(index, tokens, offsets)}
        if self.chat:
            choice["delta"] = {"content": text} if text or not finish else {}
        else:
            choice["text"] = text
        choice["token_ids"] = [token.id for token in tokens]
        return self._made("chat.completion.chunk", [choice], **({"usage": None} if self._include_usage else {}))

    def begin(self, index: int) -> dict[str, Any]:
        """Return what a chat's stream begins with."""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return self._made("chat.completion.chunk", [choice], **({"usage": None} if self._include_usage else {}))

    def usage_chunk(self, generated: int, prompts: int) -> dict[str, Any]:
        """Return the last part of a stream that is to say what it has cost."""
        return self._made("chat.completion.chunk", [], usage=_usage(generated, prompts))

    def whole(
        self, found: Sequence[tuple[str, list[Token], list[int], str]], generated: int, prompts: int
    ) -> dict[str, Any]:
        """Return an answer as a whole: of each choice the text, the tokens and where they begin, and its end."""
        choices = []
        for index, (text, tokens, offsets, finish) in enumerate(found):
            choice = {"index": index, "finish_reason": finish, "logprobs": self._logprobs(index, tokens, offsets)}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choice["token_ids"] = [token.id for token in tokens]
            choices.append(choice)
        return self._made("chat.completion", choices, usage=_usage(generated, prompts))

    def _made(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = kind if self.chat else "text_completion"
        head = {"id": self._id, "object": kind, "created": self._created, "model": MODEL, "system_fingerprint": None}
        return {**head, "choices": choices, **more}

    def _logprobs(self, index: int, tokens: Sequence[Token], offsets: Sequence[int]) -> dict[str, Any] | None:
        if self._wanted[index].sampling.logprobs is None or not tokens:
            return None
        if self.chat:
            content = [
                {**_chat_logprob(token.id, token.logprob), "top_logprobs": [_chat_logprob(*one) for one in token.top]}
                for token in tokens
            ]
            return {"content": content, "refusal": None}
        # The likeliest ones, and the one that was chosen, if it is none of them.
        # A prompt's first token follows nothing.
        tops = [
            None
            if token.logprob is None
            else {name_of(one): value for one, value in (*token.top, (token.id, token.logprob))}
            for token in tokens
        ]
        return {
            "tokens": [name_of(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops,
            "text_offset": list(offsets),
        }


def _chat_logprob(token: int, logprob: float | None) -> dict[str, Any]:
    return {"token": name_of(token), "logprob": logprob, "bytes": list(bytes_of(token))}


def _usage(generated: int, prompts: int) -> dict[str, int]:
    return {"prompt_tokens": prompts, "completion_tokens": generated, "total_tokens": prompts + generated}


def event(data: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"
