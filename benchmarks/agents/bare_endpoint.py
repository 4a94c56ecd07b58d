"""A route of starlette that reads a body and answers at once; prints its address."""

from __future__ import annotations

import socket

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

SAID = {"role": "assistant", "content": "table index read file line data"}


async def answer(request: Request) -> JSONResponse:
    """Read the body as JSON, and answer."""
    fields = await request.json()
    usage = {"prompt_tokens": len(fields), "completion_tokens": 16}
    return JSONResponse({"choices": [{"index": 0, "message": SAID}], "usage": usage})


def main() -> None:
    """Serve on a free port of this machine until ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions", flush=True)
        app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
        config = uvicorn.Config(app, http="h11", lifespan="off", log_config=None, access_log=False)
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
