"""Shared by all tests: a small untrained model with the embedded tokenizer, dialogues, and a fake server."""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"       # kernels run on the CPU; read when triton is imported

from chat import tiny_chat  # noqa: E402
from model import Transformer, tiny_config  # noqa: E402

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def chat():
    return tiny_chat()


@pytest.fixture
def model(chat):
    """In float64, so that agreement can be asked for to 1e-9."""
    return Transformer(tiny_config(vocab_size=chat.vocab_size, hidden_size=32, intermediate_size=64,
                                   head_dim=8), seed=1).double()


def say(*texts):
    """A dialogue of these messages: the user's, the assistant's, the user's, and so on."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def completion(text, finish="stop"):
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}


class FakeServer(ThreadingHTTPServer):
    """An OpenAI-compatible server. Its `script(request, handler)` returns what to answer: a text, or
    (status, body) or (status, body, headers); None if it has written to the handler itself.
    """
    request_queue_size = 64                    # no caller waits for a second because many come at once

    def __init__(self):
        self.requests, self.headers, self.script = [], [], lambda request, handler: "hello"
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}/v1#org/model:8b"

    def handle_error(self, request, client_address):
        """Callers that hang up are part of these tests."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        self.server.headers.append(dict(self.headers, path=self.path))
        answer = self.server.script(request, self)
        if answer is not None:
            status, body, *headers = (200, completion(answer)) if isinstance(answer, str) else answer
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Length": len(body), **(headers[0] if headers else {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *args):
        pass


@pytest.fixture
def start():
    """Start as many fake servers as a test wants."""
    servers = []

    def start_one():
        servers.append(FakeServer())
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]
    yield start_one
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def server(start):
    return start()


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
