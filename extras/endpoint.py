"""A user played by a language model behind any server that speaks OpenAI's chat-completions API (vLLM,
llama.cpp, Ollama, OpenAI): a prompted simulator or, with a stronger model, the stand-in for people that the
paper calls the oracle.

A call fails in one of three ways, and none of them is a reward of 0:

1. *Worth another try* (`Busy`, `Unusable`): no connection, no answer in time, a busy server, an answer that
   is no reply. Pauses between tries double; an unusable reply is asked for again with another seed.
2. *Lost for its dialogue* (`Failed`): all tries are used up, or the server will not take this dialogue, too
   long perhaps. The dialogue is "failed", and the caller drops it and counts it.
3. *Lost for all* (`EndpointError`): the key is refused, model or address are unknown. It ends the run.

Temperature, top-p and penalties are sent, whatever a server's defaults are. It may have more than OpenAI's
API has: vLLM takes top-k and the like from the checkpoint unless started with `--generation-config vllm`.

Run `python -m extras.endpoint http://127.0.0.1:8000/v1#model` to check a server and read how its model opens
a dialogue. The key is taken from OPENAI_API_KEY, if set.
"""

import io
import json
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from config import Parser, UserError, command
from extras.readers import check_text
from sampling import draw_key
from simulator import Reply, goal_prompt, simulator_messages, split_leave
from tasks import LEAVE, Dialogue, find_task, generate_problems

BUSY = (408, 409, 425, 429)                             # statuses worth another try, like all from 500 on
REFUSED = (401, 403, 404)                               # statuses that every other dialogue would get too
LARGEST = 4 * 2 ** 20                                   # bytes of an answer
LONGEST_PAUSE = 30.0                                    # seconds between two tries, whatever the server asks


class EndpointError(UserError):
    """The run cannot go on: a call would fail in every dialogue, or too many dialogues failed."""


class Failed(Exception):
    """A call that fails its dialogue."""


class Busy(Failed):
    """A call that may succeed after some seconds, at least `wait`."""

    def __init__(self, reason: str, wait: float = 0.0):
        super().__init__(reason)
        self.wait = wait


class Unusable(Busy):
    """An answer without a reply in it; another seed may give one."""


def is_endpoint(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def parse_endpoint(address: str) -> tuple[str, str]:
    """Split "http://host:port/v1#model" at the first # into base address and model.

    Raises: UserError with an example if it is anything else.
    """
    url, _, model = address.partition("#")
    try:
        good = urlsplit(url).hostname and urlsplit(url).port != 0           # a port that is no number raises
    except ValueError:
        good = False
    # printable, without @ or ?: no password, no query
    if not good or not re.fullmatch(r"https?://[!->A-~]+", url) or not model.strip():
        raise UserError(f"an endpoint looks like http://127.0.0.1:8000/v1#model, got {address!r}")
    return url.rstrip("/"), model.strip()


# One call ---------------------------------------------------------------------------------------------------

class HurriedSocket(io.RawIOBase):
    """What a socket receives until a deadline: its own timeout would start anew with every byte."""

    def __init__(self, sock: socket.socket, deadline: float):
        self.sock, self.file, self.deadline = sock, sock.makefile("rb", buffering=0), deadline

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.sock.settimeout(left)
        return self.file.readinto(buffer)


def post(url: str, headers: dict, request: dict, timeout: float) -> tuple[int, str, bytes]:
    """Return status, Retry-After and body, at most a byte more than `LARGEST`; no redirect is followed.

    Raises: TimeoutError after `timeout` seconds; OSError, HTTPException or ValueError if there is no answer.
    """
    deadline, parts = time.monotonic() + timeout, urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.netloc, timeout=timeout)
    connection.response_class = lambda sock, **options: HTTPResponse(HurriedSocket(sock, deadline), **options)
    try:
        connection.request("POST", parts.path, json.dumps(request).encode(), headers)
        response = connection.getresponse()
        return response.status, response.getheader("Retry-After", ""), response.read(LARGEST + 1)
    finally:
        connection.close()


def read_reply(answer) -> str:
    """Return what a chat completion says, without the thoughts before it.

    Raises: Unusable if that is not a finished text.
    """
    try:
        choice = answer["choices"][0]
        if choice.get("finish_reason") in ("length", "content_filter"):
            raise Unusable(f"the reply was cut: finish_reason is {choice['finish_reason']}")
        text = choice["message"]["content"].strip()
        check_text(text)
    except (UserError, LookupError, TypeError, AttributeError):
        raise Unusable("the answer is not a chat completion with a text") from None
    thought, end, said = text.partition("</think>")
    if end and "<think>" not in thought.removeprefix("<think>"):        # the prompt may hold the opening tag
        text = said.strip()
    if "<think>" in text or "</think>" in text:
        raise Unusable("the reply has thoughts in it that do not end")
    if not text:
        raise Unusable("the reply is empty")
    return text


def backoff(pause: float, tries: int, key: int, wait: float) -> float:
    """Return the seconds to pause after a failed try: doubling, up to a quarter longer so that dialogues
    do not all come back at once, and at least what the server asked for.
    """
    jitter = random.Random(draw_key(key, "pause", tries)).random() / 4
    return min(LONGEST_PAUSE, max(wait, pause * 2 ** tries * (1 + jitter)))


# The user ---------------------------------------------------------------------------------------------------

class EndpointUser:
    """A model behind an endpoint that plays the user; every call carries its whole dialogue and no other."""

    def __init__(self, address: str, instruction: str, *, max_new_tokens: int = 256, concurrency: int = 16,
                 timeout: float = 60.0, retries: int = 4, pause: float = 1.0):
        """Raises: UserError for an address or a key that cannot be used."""
        self.url, self.model = parse_endpoint(address)
        self.instruction, self.max_new_tokens, self.concurrency = instruction, max_new_tokens, concurrency
        self.timeout, self.retries, self.pause = timeout, retries, pause
        self.api_key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not re.fullmatch(r"[!-~]*", self.api_key):
            raise UserError("OPENAI_API_KEY has characters in it that cannot be sent")
        self.last_failure = ""
        self.stop = threading.Event()

    def begin(self, goals: list[str], draw_keys: list[int]) -> None:
        self.goals, self.draw_keys = goals, draw_keys

    def reply(self, rows: list[int], dialogues: list[Dialogue]) -> list[Reply]:
        """As `ScriptedUser.reply`; a dialogue that gets no reply is "failed", and `last_failure` says why.

        Raises: EndpointError.
        """
        self.stop.clear()
        with ThreadPoolExecutor(self.concurrency) as pool:
            try:
                return list(pool.map(lambda row: self.speak(row, dialogues[row]), rows))
            except BaseException:                              # an interrupt too: nobody needs to try again
                self.stop.set()
                raise

    def check(self) -> None:
        """Make one cheap call, and a second one if that fails.

        Raises: EndpointError if the server is down, refuses the key or does not know the model.
        """
        hello = [{"role": "user", "content": "Hello!"}]
        try:
            self.insist(lambda seed: self.call(hello, seed, 1), key=0, retries=min(1, self.retries))
        except Failed as failure:
            raise EndpointError(f"{self.url}: {failure}") from None

    def speak(self, row: int, dialogue: Dialogue) -> Reply:
        """Return the user's next message in one dialogue and why the dialogue ends with it."""
        goal = f"{self.instruction}\n\n{goal_prompt(self.goals[row])}"
        messages = simulator_messages({"goal": goal, "messages": dialogue})
        try:
            text = self.insist(lambda seed: read_reply(self.call(messages, seed, self.max_new_tokens)),
                               draw_key(self.draw_keys[row], len(dialogue)), self.retries)
        except Failed as failure:
            self.last_failure = f"{self.url}: {failure}"
            return "", "failed"
        return split_leave(text)

    def insist(self, attempt: Callable, key: int, retries: int):
        """Return what `attempt(seed)` returns; while it fails, pause and try again.

        Raises: Failed, as the last try did; EndpointError.
        """
        unusable = 0
        for tries in range(retries + 1):
            try:
                return attempt(draw_key(key, unusable) >> 32)                # 31 bits
            except Busy as failure:
                unusable += isinstance(failure, Unusable)
                pause = backoff(self.pause, tries, key, failure.wait)
                if tries == retries or self.stop.wait(pause):
                    raise

    def call(self, messages: list[dict], seed: int, max_tokens: int):
        """Return a successful answer, whatever JSON it is.

        Raises: Failed; EndpointError if key, model or address are refused.
        """
        request = {"model": self.model, "messages": messages, "max_tokens": max_tokens, "seed": seed, "n": 1,
                   "temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0,
                   "stream": False}
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            status, retry_after, body = post(f"{self.url}/chat/completions", headers, request, self.timeout)
        except TimeoutError:
            raise Busy(f"no answer within {self.timeout:g} seconds") from None
        except (OSError, HTTPException, ValueError) as error:
            raise Busy(self.one_line(getattr(error, "strerror", None) or repr(error))) from None
        if 200 <= status < 300:
            try:
                return json.loads(body if len(body) <= LARGEST else b"")
            except (ValueError, RecursionError):
                raise Unusable(f"the answer is not JSON of at most {LARGEST:,} bytes") from None
        reason = f"answered {status}: {self.one_line(body.decode(errors='replace'))}"
        if status in BUSY or status >= 500:
            asked = re.fullmatch(r"\d{1,9}(\.\d+)?", retry_after)               # a date is left aside
            raise Busy(reason, float(retry_after) if asked else 0.0)
        if status < 400:
            reason += " (redirects are not followed)"
        if status in REFUSED or status < 400:
            raise EndpointError(f"{self.url}: {reason}")
        raise Failed(reason)

    def one_line(self, text: str) -> str:
        """Return the first 200 characters of a text for a message, without the key."""
        text = text.replace(self.api_key, "[key]") if self.api_key else text
        return "".join(c if c.isprintable() else "?" for c in " ".join(text.split())[:200])


@command
def main() -> None:
    parser = Parser("Check an endpoint and read how its model opens a dialogue.")
    parser.add_argument("address", help="of the server and its model: http://127.0.0.1:8000/v1#model")
    parser.add_fields("task")
    args = parser.parse_args()
    task = find_task(args.task)
    goal = generate_problems(task, "test", 1)[0].goal
    EndpointUser(args.address, task.simulator_instruction).check()
    print(f"goal:  {goal}")
    for name, instruction in (("naive", task.simulator_instruction), ("human", task.human_instruction)):
        user = EndpointUser(args.address, instruction)
        user.begin([goal], [draw_key(0, "show", name)])
        [(text, outcome)] = user.reply([0], [[]])
        if outcome == "failed":
            raise EndpointError(user.last_failure)
        print(f"{name}: {text or LEAVE}")


if __name__ == "__main__":
    main()
