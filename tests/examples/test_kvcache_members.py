"""The router beside members that a holder of the cluster key has made up, and servers beside odd bodies."""

from __future__ import annotations

import argparse
import json
import sys
from types import SimpleNamespace

import anyio
import httpx
import msgspec
import pytest

import aiote
from aiote.discovery import Member
from support.process.examples import EXAMPLES, PATIENCE_S

TOKEN, URL, MODEL = "a token", "http://127.0.0.1:7", "m"
ADDRESS = b"an engine"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES / "kvcache"), *sys.path])
    import decode
    import front
    import openai_requests
    import sampling
    import serving
    import watching
    import web

    found = {"decode": decode, "front": front, "requests": openai_requests, "sampling": sampling}
    return SimpleNamespace(serving=serving, watching=watching, web=web, **found)


class Registry:
    def __init__(self, *members):
        self._members = members

    def members(self):
        return self._members


def server(modules, role, *, token=TOKEN, url=URL, name=None):
    args, engine = argparse.Namespace(name=name or role), SimpleNamespace(address=Bytes())
    return modules.serving.member(args, role, engine, url, MODEL, token)


class Bytes:
    def __bytes__(self):
        return ADDRESS


def test_only_who_has_the_token_is_a_member(modules):
    honest = server(modules, "decode")
    forged = [
        server(modules, "decode", token="another"),
        Member("decode", "decode", ADDRESS, 1, {"url": URL, "model": MODEL}),
        Member("decode", "decode", ADDRESS, 1, {**honest.attributes, "url": "http://127.0.0.1:8"}),
        Member("decode", "decode", ADDRESS, 1, {**honest.attributes, "model": "other"}),
        Member("decode", "prefill", ADDRESS, 1, honest.attributes),
        Member("other", "decode", ADDRESS, 1, honest.attributes),
        Member("decode", "decode", b"another engine", 1, honest.attributes),
        Member("decode", "decode", ADDRESS, 1, {**honest.attributes, "proof": 7}),
    ]
    front = modules.front.Front(Registry(*forged, honest), None, 16, TOKEN)
    assert front.proven() == [honest]
    drained = Member("decode", "decode", ADDRESS, 9, {**honest.attributes, "draining": True})
    assert modules.serving.is_proven(TOKEN, drained)


def test_the_token_is_sent_to_nobody(modules):
    member = server(modules, "decode")
    header = modules.front.Front(Registry(member), None, 16, TOKEN).authorization(member)["authorization"]
    assert TOKEN not in header
    assert (
        header
        != modules.front.Front(Registry(), None, 16, TOKEN).authorization(
            server(modules, "decode", url="http://127.0.0.1:8")
        )["authorization"]
    )


def test_a_server_takes_the_secret_of_its_own_url(modules):
    async def main():
        args = argparse.Namespace(host="127.0.0.1", port=0, advertise=None)
        calls = modules.web.Calls()
        app = modules.web.application([])
        with anyio.fail_after(PATIENCE_S):
            async with (
                modules.web.http(app, args, SimpleNamespace(), TOKEN, calls) as url,
                httpx.AsyncClient() as client,
            ):
                found = []
                for secret in (TOKEN, modules.web.url_secret(TOKEN, url), modules.web.url_secret(TOKEN, URL), "x"):
                    answer = await client.get(f"{url}/x", headers={"authorization": f"Bearer {secret}"})
                    found.append(answer.status_code)
                return found

    assert anyio.run(main) == [404, 404, 401, 401]


class Whole(httpx.AsyncByteStream):
    """An answer that is not read before it is asked for."""

    def __init__(self, data):
        self.data = data

    async def __aiter__(self):
        yield self.data


class Endless(httpx.AsyncByteStream):
    """A line without end."""

    def __init__(self):
        self.sent = 0

    async def __aiter__(self):
        while True:
            self.sent += 1 << 16
            yield b"x" * (1 << 16)


ANSWERS = {
    "a list": b"[1]\n",
    "a word": b'"x"\n',
    "no JSON": b"{{{\n",
    "deep": b"[" * 100_000 + b"\n",
    "nothing": b"{}\n",
    "a prefill server that there is not": b'{"round": 99}\n',
    "a token that is none": b'{"token": 5}\n',
    "an end that is none": b'{"finish": {"a": 1}}\n',
    "no end": b'{"token": {"id": 3}}\n',
}


@pytest.mark.parametrize("answer", [*ANSWERS, "a line without end"])
@pytest.mark.parametrize("status", [200, 400, 503, 302])
def test_whatever_a_decode_server_answers_is_that_server_s(modules, answer, status):
    endless = Endless()

    def reply(request):
        if answer in ANSWERS:
            return httpx.Response(status, stream=Whole(ANSWERS[answer]))
        return httpx.Response(status, stream=endless)

    async def main():
        async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as client:
            front = modules.front.Front(Registry(), client, 16, TOKEN, MODEL)
            address = "aiote://127.0.0.1:7/" + "01" * 16 + "." + "0" * 15 + "1"
            places = [server(modules, role) for role in ("prefill", "decode")]
            known = [
                Member(one.name, one.role, bytes(aiote.Address.parse(address)), 1, one.attributes) for one in places
            ]
            front.prefill.see(known)
            front.decode.see(known)
            completion = modules.front.Completion((1, 2, 3), 4, modules.sampling.Sampling())
            with modules.front.Try(front, completion) as one, pytest.raises(modules.web.Refused) as caught:
                await one.run(take, modules.front.Progress([]))
            assert (caught.value.status, caught.value.retry) == (503, "decode")

    anyio.run(main)
    assert endless.sent <= modules.front.LINE_BYTES + (1 << 17)


async def take(_):
    return False


BODIES = {
    "deep": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep where anything goes": b'{"prompt":"a","logit_bias":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "half a character": b'{"prompt":"\\ud800 x"}',
    "no text": b'{"prompt":"\xff"}',
    "a huge seed": b'{"prompt":"a","seed":' + b"9" * 5000 + b"}",
    "a huge number": b'{"prompt":"a","temperature":1e999}',
    "many answers": b'{"prompt":[' + b'"a",' * 10_000 + b'"a"],"n":128}',
    "a token that is none": b'{"prompt":[[99999999999]]}',
    "both kinds": b'{"prompt":["a",[1]]}',
}


@pytest.mark.parametrize("body", BODIES)
def test_an_odd_body_is_a_bad_request(modules, body):
    with pytest.raises(modules.web.Refused) as caught:
        modules.web._decoded(BODIES[body], modules.requests.CompletionBody).wanted(64)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "part",
    [{"seed": -1}, {"seed": 1 << 64}, {"temperature": -1}, {"temperature": 1e300}, {"top_p": 0}, {"logprobs": -1}],
)
def test_a_decode_server_refuses_what_cannot_be_sampled(modules, part):
    asked = {"tokens": [1], "max_tokens": 1, "prefillers": ["x"], "sampling": part}
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps(asked).encode(), type=modules.decode.Asked)


NUMBERS = {"pages": 1, "pages_held": 0, "transfers": 0, "rails": []}
ODD_NUMBERS = {
    "a list": b"[]",
    "no number": b'{"pages": NaN, "pages_held": 0, "transfers": 0, "rails": []}',
    "a word": json.dumps({**NUMBERS, "transfers": "many"}).encode(),
    "a rail that is none": json.dumps({**NUMBERS, "rails": [7]}).encode(),
    "a rail without a count": json.dumps({**NUMBERS, "rails": [{}]}).encode(),
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("numbers", ODD_NUMBERS)
def test_odd_numbers_of_a_server_are_not_shown(modules, numbers, role):
    """They are no failure of the page, which shows the others' numbers."""
    odd, plain = server(modules, role, name="odd"), server(modules, "decode", url="http://127.0.0.1:8", name="plain")

    def reply(request):
        right = json.dumps(NUMBERS).encode()
        return httpx.Response(200, stream=Whole(ODD_NUMBERS[numbers] if request.url.port == 7 else right))

    async def main():
        async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as client:
            front = modules.front.Front(Registry(odd, plain), client, 16, TOKEN, MODEL)
            return await modules.watching.Watcher(front, client).look()

    seen = anyio.run(main)
    assert {row["name"]: row["state"] for row in seen["members"]} == {"odd": "lost", "plain": "ready"}
    assert json.loads(json.dumps(seen, allow_nan=False))["totals"]["pages"] == 1
