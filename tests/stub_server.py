"""vLLM's completions endpoint in small, over a tiny model: what of its protocol is relied on, its traps, and faults on demand."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from draftsmith.specdec import Sampling, to_probs
from draftsmith.specdec.sampling import draw


class Reply(NamedTuple):
    """What goes out: `cut` sends that many bytes of it and then resets the connection."""

    status: int
    body: Any
    headers: dict[str, str] = {}  # noqa: RUF012
    cut: int | None = None


class Stub:
    """`with Stub(model, tokenizer) as stub`: a server at `stub.url` that keeps every request in `stub.asked`.

    `fault(number, body)` may give a Reply in place of the answer to completion `number`, counted from 0.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, eos: int = 2, token_ids: bool = True, prompt_logprobs: bool = True, max_logprobs: int = 20,
        context: int = 512, key: str = "", generation_config: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.eos, self.token_ids, self.prompt_logprobs = (
            model,
            tokenizer,
            eos,
            token_ids,
            prompt_logprobs,
        )
        self.max_logprobs, self.context, self.key, self.generation_config = max_logprobs, context, key, generation_config or {}
        self.asked: list[dict[str, Any]] = []  # {path, headers, body} of each request
        self.fault: Callable[[int, dict[str, Any]], Reply | None] = lambda number, body: None
        self.hold: Callable[[], object] = lambda: None  # called as a completion comes in, outside any lock
        self.sent = 0  # bytes of completions
        self._lock = threading.Lock()
        self._server = _Quiet(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Stub:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def completions(self) -> list[dict[str, Any]]:
        return [one["body"] for one in self.asked if one["path"].endswith("/completions")]

    def reply(self, path: str, headers: dict[str, str], body: dict[str, Any] | None) -> Reply:
        with self._lock:
            number = len(self.completions())
            self.asked.append({"path": path, "headers": headers, "body": body})
            if self.key and headers.get("Authorization") != f"Bearer {self.key}":
                return Reply(401, {"error": {"message": f"Unauthorized: {headers.get('Authorization')} is not the key"}})
            if path == "/v1/models":
                return Reply(
                    200, {"object": "list", "data": [{"id": "tiny", "root": "/models/tiny", "max_model_len": self.context}]}
                )
            if path != "/v1/completions" or body is None:
                return Reply(404, {"detail": "Not Found"})
            return self.fault(number, body) or self.complete(body)

    @torch.inference_mode()
    def complete(self, body: dict[str, Any]) -> Reply:
        prompt, k = body["prompt"], body.get("prompt_logprobs")
        if body["model"] != "tiny":
            return _refusal(404, f"The model `{body['model']}` does not exist.")
        if isinstance(prompt, str):
            prompt = self.tokenizer(prompt, add_special_tokens=body.get("add_special_tokens", True)).input_ids
        if len(prompt) + body["max_tokens"] > self.context:
            return _refusal(400, f"This model's maximum context length is {self.context} tokens.")
        if k is not None and self.prompt_logprobs and k > self.max_logprobs:
            return _refusal(400, f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.max_logprobs}")
        ids, reason = self.write(prompt, {**self.generation_config, **body})
        choice = {
            "index": 0,
            "text": self.tokenizer.decode(ids, skip_special_tokens=True),
            "logprobs": None,
            "finish_reason": reason,
        }
        if self.token_ids and body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        if k is not None and self.prompt_logprobs:
            choice["prompt_logprobs"] = self.laws(prompt, k)
        return Reply(200, {"id": "cmpl-0", "object": "text_completion", "model": "tiny", "choices": [choice]})

    def write(self, prompt: list[int], asked: dict[str, Any]) -> tuple[list[int], str]:
        """Older versions look at the length first: an end at the last allowed token is "length"."""
        how = Sampling(asked.get("temperature", 1.0), max(asked.get("top_k", 0), 0), asked.get("top_p", 1.0))
        penalty = RepetitionPenaltyLogitsProcessor(asked.get("repetition_penalty", 1.0))
        generator = torch.Generator().manual_seed(asked.get("seed") or 0)
        out: list[int] = []
        while True:
            ids = torch.tensor([prompt + out])
            out.append(int(draw(to_probs(penalty(ids, self.model(input_ids=ids).logits[:, -1]), how), generator)))
            if len(out) == asked["max_tokens"]:
                return out, "length"
            if out[-1] in {self.eos, *asked.get("stop_token_ids", [])}:
                return out, "stop"

    def laws(self, ids: list[int], k: int) -> list[dict[str, dict[str, Any]] | None]:
        """The first entry is null; each other holds the text's own token first, and the k likeliest."""
        laws = self.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
        found: list[dict[str, dict[str, Any]] | None] = [None]
        for law, own in zip(laws, ids[1:], strict=False):
            entry = {str(own): {"logprob": float(law[own]), "rank": int((law >= law[own]).sum()), "decoded_token": "?"}}
            for rank, one in enumerate(law.topk(k).indices.tolist(), 1):
                entry[str(one)] = {"logprob": float(law[one]), "rank": rank, "decoded_token": "?"}
            found.append(entry)
        return found


def _refusal(status: int, message: str) -> Reply:
    return Reply(status, {"error": {"message": message, "type": "BadRequestError", "code": status}})


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A client that hangs up is no news."""


class _Handler(BaseHTTPRequestHandler):
    stub: Stub

    def do_GET(self) -> None:
        self._send(self.stub.reply(self.path, dict(self.headers), None))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.stub.hold()
        self._send(self.stub.reply(self.path, dict(self.headers), body))

    def _send(self, reply: Reply) -> None:
        raw = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(raw)), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw[: reply.cut])
        if self.path.endswith("/completions"):
            self.stub.sent += len(raw)
        if reply.cut is not None:  # closing with this set sends a reset in place of an orderly end
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def log_message(self, *_: Any) -> None:
        """Quiet."""
