"""A model server that says what a script says: `rollyard scripted-llm SCRIPT`.

For tests and demonstrations in which an agent must succeed, be refused, wait, or lose its connection. It speaks the
API of vLLM (/v1/chat/completions, /v1/completions) or of SGLang (/generate, /v1/chat/completions), with real token ids
of a real tokenizer and made-up logprobs, in the fields of those servers; and the endpoints by which a trainer pauses
them and changes their weights. An answer is a function of the request alone: a prompt of ids is read as ChatML, and a
reply in it that was broken off is gone on with.

A script is a JSON file. Only `conversations` and their `turns` are required; unknown keys are errors.

    {
      "models": ["scripted"],         names that are served
      "noncanonical": true,           sample some texts as ids that the tokenizer itself would not choose, as models do:
                                      whoever turns the text back into ids is found out
      "chat_template": "model",       the tokenizer's own, or "chatml_tools" when the conversation has tool calls
      "max_model_len": 32768,         longer prompts are refused, longer replies cut
      "tokens_per_chunk": 1,          in a stream
      "flavour": "vllm",              or "sglang": whose API it speaks
      "conversations": [              the first whose `match` is a part of a user message is played
        {
          "match": "README",          "" matches everything
          "turns": [                  turn = number of assistant messages in the request; the last turn repeats
            {
              "reasoning": "Hm.",     thought before the content, sampled in <think> tags
              "content": "I look.",   {prompt} is the last user message, {last} the last message, {last.id} the string
                                      `id` in it if it is a JSON object, {turn} the number of the turn; filled in
                                      here and in tool arguments
              "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}],
              "finish_reason": null,  else stop, tool_calls; length and abort end without an end-of-turn id;
                                      who goes on with an aborted reply gets that id
              "delay_s": 0.5,         before the first byte
              "chunk_delay_s": 0.01,  before each chunk of a stream
              "fail_status": 503,     answer with this HTTP status,
              "break_after_tokens": 3,    or cut the connection after so many tokens,
              "fail_times": 1         the first so many times that the same request comes
            }
          ]
        }
      ]
    }

"The same request" has the same body, whatever its request id. The journal holds a JSON line for each request, written
before the reply is complete: request_id (from x-request-id), turn, status (ok, failed, broken, aborted), http_status,
prompt_token_ids, token_ids and logprobs as far as they were given out.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from rollyard.gateway.local_model import demo_model_path, print_line
from rollyard.gateway.scripted import chatml
from rollyard.gateway.scripted.journal import Journal, open_journal
from rollyard.gateway.scripted.policy import ScriptedPolicy
from rollyard.gateway.scripted.script import Script, load_script
from rollyard.gateway.scripted.server import ScriptedServer
from rollyard.gateway.scripted.sglang_api import SglangApi
from rollyard.gateway.scripted.vllm_api import VllmApi
from rollyard.gateway.tokens.renderer import Renderer
from rollyard.gateway.tokens.template import ChatTemplate
from rollyard.gateway.tokens.tokenizer import TextTokenizer, load_tokenizer
from rollyard.schemas.errors import ConfigError, RollyardError, SetupError

_MAX_BODY_BYTES = 64 << 20


def build_app(script: Script, tokenizer: TextTokenizer, journal: Journal | None = None) -> web.Application:
    """The server as an application. Raises ConfigError when the tokenizer has no template or no end of turn."""
    source = tokenizer.chat_template if script.chat_template == "model" else chatml.TEMPLATE
    if source is None or not tokenizer.eos_ids:
        raise ConfigError(
            "the tokenizer has no chat template or no end-of-turn token",
            hint='put "chat_template": "chatml_tools" in the script, or give a folder with tokenizer_config.json',
        )
    template = ChatTemplate(source, tokens={"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token})
    server = ScriptedServer(ScriptedPolicy(script, Renderer(tokenizer, template)), journal or Journal())
    api = SglangApi(server) if script.flavour == "sglang" else VllmApi(server)
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    api.add_routes(app.router)
    return app


@asynccontextmanager
async def serve_app(app: web.Application, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve an application and yield its URL; port 0 takes a free one. Raises SetupError when the port is busy."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise SetupError(
                f"cannot listen on {host}:{port}: {error.strerror}", hint="end what uses the port, or choose another"
            ) from error
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _serve_until_signal(app: web.Application, host: str, port: int) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with serve_app(app, port, host) as url:
        print_line(url, sys.stdout)
        await ended.wait()


def main(argv: list[str] | None = None) -> int:
    """Serve a script until SIGTERM or SIGINT. Exit codes: 0 ended so, 2 a wrong argument, 3 something is in the way."""
    parser = argparse.ArgumentParser(
        prog="rollyard scripted-llm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a JSON file")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="TCP port; 0: a free one")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="append a JSON line for each request")
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="tokenizer.json, its folder or a GGUF file")
    options = parser.parse_args(argv)
    try:
        script = load_script(options.script)
        tokenizer = load_tokenizer(options.tokenizer or demo_model_path())
        with open_journal(options.journal) as journal:
            asyncio.run(_serve_until_signal(build_app(script, tokenizer, journal), options.host, options.port))
    except RollyardError as error:
        print_line(f"error: {error}", sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
