"""One address for a prefill and a decode server of vLLM; `python examples/vllm/proxy.py PORT PREFILL_URL DECODE_URL`.

A request goes to the prefill server first, which computes its prompt and answers with `kv_transfer_params`: these tell
the decode server where the prompt's cache is. Its answer is passed on as it comes, streamed or not.
"""

import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

PATHS = ("/v1/completions", "/v1/chat/completions")
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


async def body_of(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except (ValueError, LookupError, RecursionError) as error:
        # The bytes are no JSON, the charset is unknown, or brackets are nested too deeply.
        raise web.HTTPBadRequest(text=f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="expected a JSON object")
    return body


async def complete(request: web.Request) -> web.StreamResponse:
    session, (prefill, decode) = request.app["session"], request.app["servers"]
    body = await body_of(request)
    # One token, and none of what belongs to the decode server's answer.
    first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL}
    first.pop("stream_options", None)
    if "max_completion_tokens" in body:
        first["max_completion_tokens"] = 1
    async with session.post(prefill + request.path, json=first) as answer:
        if answer.status != 200:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)
        told = await answer.json()
    if not isinstance(told, dict) or "kv_transfer_params" not in told:
        raise web.HTTPBadGateway(text="the prefill server did not say where the prompt's cache is")
    body["kv_transfer_params"] = told["kv_transfer_params"]
    async with session.post(decode + request.path, json=body) as answer:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


async def ask_decode(request: web.Request) -> web.Response:
    async with request.app["session"].get(request.app["servers"][1] + request.path) as answer:
        return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)


async def session(app: web.Application) -> AsyncIterator[None]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as app["session"]:
        yield


def main(port: int, *servers: str) -> None:
    app = web.Application()
    app["servers"] = servers
    app.cleanup_ctx.append(session)
    app.add_routes([web.post(path, complete) for path in PATHS] + [web.get("/v1/models", ask_decode)])
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
