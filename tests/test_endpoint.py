"""A user behind a server: what is sent to it, and what becomes of every way in which a call can fail.

The server is conftest.py's fake one.
"""

import json
import random
import socket
import sys
import threading
import time

import pytest
from conftest import completion

from config import UserError
from extras import endpoint
from extras.endpoint import (LARGEST, EndpointError, EndpointUser, HurriedSocket, Unusable, backoff,
                             is_endpoint, parse_endpoint, read_reply)
from task_math import TASK
from tasks import LEAVE, generate_problems

KEY = "sk-secret-0123456789"


def goals(n):
    return [problem.goal for problem in generate_problems(TASK, "test", n)]


def make_user(server, n=1, **options):
    user = EndpointUser(server.address, "Play a user.", **{"pause": 0.001, "retries": 2, **options})
    user.begin(goals(n), list(range(n)))
    return user


def in_turn(*answers):
    """Return a script that gives one answer after the other."""
    left = list(answers)
    return lambda request, handler: left.pop(0)


# Addresses --------------------------------------------------------------------------------------------------

def test_only_the_first_hash_separates_the_address_from_the_model():
    assert parse_endpoint("http://host:8000/v1#org/model:8b#q4") == ("http://host:8000/v1", "org/model:8b#q4")
    assert parse_endpoint("https://[::1]:80/v1/#m") == ("https://[::1]:80/v1", "m")
    assert is_endpoint("https://host/v1#m") and not is_endpoint("out/simulator_naive")


@pytest.mark.parametrize("address", (
    "", "model", "#m", "http://host/v1", "http://host/v1#", "http://host/v1# ", "ftp://host/v1#m",
    "http://#m", "http:///v1#m", "http://:80/v1#m", "http://host:port/v1#m", "http://host:99999/v1#m",
    "http://[::1/v1#m", "http://ho st/v1#m", "http://me:pass@host/v1#m", "http://host/v1?a=b#m",
    "http://hôst/v1#m", "http://host\n/v1#m"))
def test_an_address_that_cannot_be_one_is_refused_with_an_example(address):
    with pytest.raises(UserError, match="looks like http://127.0.0.1:8000/v1#model") as caught:
        parse_endpoint(address)
    assert "\n" not in str(caught.value)


# What is sent -----------------------------------------------------------------------------------------------

def test_the_instruction_and_the_goal_come_first_and_the_roles_are_flipped(server):
    user = make_user(server)
    problem, = generate_problems(TASK, "test", 1)
    dialogue = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello?"}]
    assert user.reply([0], [dialogue]) == [("hello", None)]
    assert server.headers[0]["path"] == "/v1/chat/completions"
    assert server.requests[0]["messages"] == [
        {"role": "user", "content": f"Play a user.\n\n{problem.goal}"},
        {"role": "assistant", "content": "hi"}, {"role": "user", "content": "Hello?"}]
    sent = json.dumps(server.requests)
    assert problem.solution not in sent and "####" not in sent
    assert dialogue == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello?"}]


def test_every_sampler_field_is_sent_and_none_that_openai_does_not_have(server):
    """An unset field is filled in by the server; a field like top_k is refused by OpenAI's."""
    make_user(server, max_new_tokens=77).reply([0], [[]])
    request = server.requests[0]
    del request["messages"], request["seed"]
    assert request == {"model": "org/model:8b", "max_tokens": 77, "temperature": 1, "top_p": 1, "n": 1,
                       "presence_penalty": 0, "frequency_penalty": 0, "stream": False}


def test_seeds_have_31_bits_differ_by_dialogue_and_turn_and_repeat(server):
    turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello?"}]
    seeds = []
    for _ in range(2):
        server.requests.clear()
        user = make_user(server, n=8, concurrency=1)
        user.reply(range(8), [[]] * 8)
        user.reply(range(8), [turn] * 8)
        seeds.append([request["seed"] for request in server.requests])
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 16
    assert all(0 <= seed < 2 ** 31 for seed in seeds[0])


def test_a_dialogue_is_the_same_alone_and_among_others(server):
    server.script = lambda request, handler: json.dumps([request["seed"], request["messages"]])
    user = make_user(server, n=6)
    assert user.reply([4], [[]] * 6)[0] == user.reply(range(6), [[]] * 6)[4]


def test_no_more_calls_than_allowed_run_at_once_and_results_keep_their_order(server):
    """The first rows are answered last; the server counts who is being answered at a time."""
    lock, now, most = threading.Lock(), [0], [0]

    def script(request, handler):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.1 if "Number 0." in request["messages"][-1]["content"] else 0.02)
        with lock:
            now[0] -= 1
        return f"answer to {request['messages'][-1]['content']}"

    server.script = script
    dialogues = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"Number {i}."}]
                 for i in range(12)]
    replies = make_user(server, n=12, concurrency=3).reply(range(12), dialogues)
    assert replies == [(f"answer to Number {i}.", None) for i in range(12)]
    assert 1 < most[0] <= 3


@pytest.mark.parametrize("instruction", (TASK.simulator_instruction, TASK.human_instruction))
def test_both_instructions_say_how_to_leave_and_end_where_the_goal_follows(instruction):
    assert instruction.count(LEAVE) == 1 and instruction.endswith("The problem:")


# What is said -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("said, reply", [
    (" it's 5.\n", ("it's 5.", None)), (LEAVE, ("", "left")), (f"it's 5. {LEAVE}!", ("it's 5.", "left")),
    ("it's 5. “Never mind, I’ll do it myself.”", ("it's 5.", "left")),
    (f"<think>say {LEAVE}?</think>it's 5.", ("it's 5.", None))])
def test_the_leaving_phrase_is_seen_as_models_write_it_and_what_was_said_before_is_kept(server, said, reply):
    server.script = lambda request, handler: said
    assert make_user(server).reply([0], [[]]) == [reply]


@pytest.mark.parametrize("content", ("<think>hm\nhm</think>\n\nit's 5.", "hm </think>it's 5.", "it's 5.",
                                     "  <think></think> it's 5."))
def test_thoughts_before_a_reply_are_no_part_of_it(content):
    assert read_reply(completion(content)) == "it's 5."


@pytest.mark.parametrize("answer", [
    None, [], {}, "text", 5, {"choices": []}, {"choices": None}, {"choices": [None]}, {"choices": ["text"]},
    {"choices": [{"message": None}]}, {"choices": [{"message": {}}]}, {"error": "overloaded"},
    completion(None), completion(5), completion(["text"]), completion({"text": "hi"}),
    completion(""), completion(" \n"), completion("<think>hm</think> \n"), completion("<think>hm"),
    completion("hi <think>hm</think> there"), completion("<think>a</think>b<think>c"),
    completion("half \ud83d"), completion("it's", "length"), completion("it's", "content_filter")])
def test_what_is_no_finished_text_is_no_reply(answer):
    with pytest.raises(Unusable):
        read_reply(answer)


# Failures ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("status", (408, 409, 425, 429, 500, 502, 503, 529))
def test_a_busy_server_is_asked_again_with_the_same_seed(server, status):
    server.script = in_turn((status, {}), (status, {}), "hello")
    assert make_user(server).reply([0], [[]]) == [("hello", None)]
    assert len(server.requests) == 3 and len({request["seed"] for request in server.requests}) == 1


@pytest.mark.parametrize("answer", [(200, b""), (200, b"<html>"), (200, b"\xff"), (200, b"[" * 100_000), "",
                                    (200, completion("it's", "length")), (200, completion("half \ud83d")),
                                    (200, json.dumps(completion("hi")).encode() + b" " * LARGEST)])
def test_an_answer_without_a_reply_is_asked_for_again_with_another_seed(server, answer):
    """With the same seed an empty reply would be empty again."""
    server.script = in_turn(answer, "hello")
    assert make_user(server).reply([0], [[]]) == [("hello", None)]
    assert len({request["seed"] for request in server.requests}) == 2


def test_a_dialogue_fails_when_all_tries_are_used_up_and_the_others_go_on(server):
    user = make_user(server, n=3)
    goal = user.goals[1]
    server.script = lambda request, handler: (
        (500, {"error": "out of\nmemory"}) if goal in request["messages"][0]["content"] else "hello")
    assert user.reply([0, 1, 2], [[]] * 3) == [("hello", None), ("", "failed"), ("hello", None)]
    assert len(server.requests) == 1 + 3 + 1
    assert user.last_failure == f'{user.url}: answered 500: {{"error": "out of\\nmemory"}}'


@pytest.mark.parametrize("status", (400, 413, 422))
def test_a_dialogue_that_the_server_will_not_take_fails_at_once(server, status):
    server.script = lambda request, handler: (status, b"context\r\n too \x1b[31m long " + b"x" * 1000)
    user = make_user(server)
    assert user.reply([0], [[]]) == [("", "failed")] and len(server.requests) == 1
    excerpt = user.last_failure.split(f"answered {status}: ")[1]
    assert excerpt.startswith("context too ?[31m long xxx") and len(excerpt) == 200


@pytest.mark.parametrize("status", (401, 403, 404))
def test_what_concerns_every_dialogue_ends_the_run(server, status):
    server.script = lambda request, handler: (status, {"error": "no such\nmodel"})
    with pytest.raises(EndpointError, match=f"^http://127.*/v1: answered {status}: .*no such"):
        make_user(server).reply([0], [[]])
    assert len(server.requests) == 1


def test_the_end_of_the_run_does_not_wait_for_dialogues_that_pause(server):
    """One is refused while another is told to come back in half a minute."""
    def script(request, handler):
        if goal not in request["messages"][0]["content"]:
            paused.set()
            return 503, {}, {"Retry-After": "30"}
        paused.wait(5)
        return 401, {}
    server.script, paused, user, start = script, threading.Event(), make_user(server, n=2), time.monotonic()
    goal = user.goals[0]
    with pytest.raises(EndpointError):
        user.reply([0, 1], [[], []])
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("status", (301, 302, 307, 308))
def test_a_redirect_is_not_followed_so_that_the_key_goes_nowhere_else(start, monkeypatch, status):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server, other = start(), start()
    server.script = lambda request, handler: (status, b"", {"Location": other.address.split("#")[0]})
    with pytest.raises(EndpointError, match=f"answered {status}"):
        make_user(server).reply([0], [[]])
    assert len(server.requests) == 1 and not other.requests


def test_nobody_listening_fails_the_dialogue_and_the_check():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))                         # bound but not listening: refuses
        user = EndpointUser(f"http://127.0.0.1:{unused.getsockname()[1]}/v1#m", "", retries=1, pause=0.001)
        user.begin(goals(1), [0])
        assert user.reply([0], [[]]) == [("", "failed")] and "refused" in user.last_failure
        with pytest.raises(EndpointError, match="refused"):
            user.check()


@pytest.mark.parametrize("host", ("a..b", ".a", "x" * 70))
def test_a_host_name_that_cannot_be_one_fails_the_dialogue(host):
    for scheme in ("http", "https"):
        user = EndpointUser(f"{scheme}://{host}/v1#m", "", retries=0)
        user.begin(goals(1), [0])
        assert user.reply([0], [[]]) == [("", "failed")] and user.last_failure


@pytest.mark.parametrize("sent", (
    b"", b"rubbish\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n{}"))
def test_an_answer_that_breaks_off_or_is_no_http_is_tried_again(server, sent):
    def script(request, handler):
        if len(server.requests) > 1:
            return "hello"
        handler.wfile.write(sent)
    server.script = script
    assert make_user(server).reply([0], [[]]) == [("hello", None)]


@pytest.mark.parametrize("head", (b"", b"HTTP/1.1 200 OK\r\nContent-Type: ", b"HTTP/1.1 200 OK\r\n\r\n",
                                  b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"))
def test_a_call_ends_at_its_deadline_even_if_a_byte_trickles_in_now_and_then(server, head):
    """Each byte comes long before a socket's timeout, which would start anew with it."""
    def script(request, handler):
        handler.wfile.write(head)
        for _ in range(200):
            handler.wfile.write(b"1")
            time.sleep(0.05)
    server.script, start = script, time.monotonic()
    user = make_user(server, timeout=0.3, retries=0)
    assert user.reply([0], [[]]) == [("", "failed")] and "no answer within 0.3 seconds" in user.last_failure
    assert time.monotonic() - start < 5


def test_no_read_outlasts_the_deadline():
    """The socket's own timeout of a minute is cut to what is left, and nothing is read when nothing is."""
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(60)
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            HurriedSocket(near, start + 0.05).read(1)
        assert time.monotonic() - start < 10
        far.send(b"1")
        with pytest.raises(TimeoutError):
            HurriedSocket(near, start).read(1)
        assert HurriedSocket(near, time.monotonic() + 60).read(1) == b"1"


def test_an_answer_without_end_is_not_read_to_the_end(server):
    written, hung_up = [], threading.Event()

    def script(request, handler):
        try:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            for _ in range(100):
                handler.wfile.write(b" " * 2 ** 20)
                written.append(1)
        finally:
            hung_up.set()
    server.script = script
    assert make_user(server, retries=0).reply([0], [[]]) == [("", "failed")]
    assert hung_up.wait(5) and len(written) < 30                     # 4 MB are read, some more are under way


def test_a_silent_server_fails_the_dialogue_after_the_timeout(server):
    release = threading.Event()
    server.script = lambda request, handler: "late" if release.wait(5) else None
    user = make_user(server, timeout=0.1, retries=1)
    assert user.reply([0], [[]]) == [("", "failed")] and "no answer within 0.1 seconds" in user.last_failure
    release.set()


# Pauses -----------------------------------------------------------------------------------------------------

def test_pauses_double_up_to_a_limit_with_a_jitter_that_no_other_draw_depends_on():
    state = random.getstate()
    for tries, low in enumerate((1, 2, 4, 8, 16)):
        pauses = {backoff(1.0, tries, key, 0.0) for key in range(20)}
        assert len(pauses) == 20 and all(low <= pause <= 1.25 * low for pause in pauses)
    assert backoff(1.0, 9, 0, 0.0) == 30 == backoff(1.0, 0, 0, 9999.0)
    assert backoff(1.0, 0, 7, 0.0) == backoff(1.0, 0, 7, 0.0) and backoff(1.0, 0, 7, 12.0) == 12
    assert random.getstate() == state


@pytest.mark.parametrize("header, shortest", (("0.3", 0.29), ("Wed, 21 Oct 2015 07:28:00 GMT", 0), ("-5", 0),
                                              ("nan", 0), ("", 0)))
def test_the_wait_that_a_server_asks_for_is_kept(server, header, shortest):
    server.script, start = in_turn((429, {}, {"Retry-After": header}), "hello"), time.monotonic()
    assert make_user(server).reply([0], [[]]) == [("hello", None)]
    assert time.monotonic() - start >= shortest


# The key ----------------------------------------------------------------------------------------------------

def test_the_key_is_sent_if_there_is_one(server, monkeypatch):
    make_user(server).reply([0], [[]])
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")
    make_user(server).reply([0], [[]])
    assert "Authorization" not in server.headers[0]
    assert server.headers[1]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("status", (302, 400, 401, 500))
def test_a_key_that_the_server_echoes_is_in_no_message(server, monkeypatch, status):
    """The second echo begins before the excerpt's end and would be cut in two."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.script = lambda request, handler: (status, (handler.headers["Authorization"] + " ").encode() * 20)
    user = make_user(server)
    for act in (lambda: user.reply([0], [[]]), user.check):
        try:
            act()
            message = user.last_failure
        except EndpointError as error:
            message = str(error)
        assert "Bearer [key] Bearer [key]" in message and "sk-" not in message


def test_a_key_in_a_broken_status_line_is_in_no_message(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    def script(request, handler):
        handler.wfile.write(f"{KEY}\r\n\r\n".encode())
    server.script = script
    user = make_user(server)
    assert user.reply([0], [[]]) == [("", "failed")] and "[key]" in user.last_failure


@pytest.mark.parametrize("key", ("sk-\nsecret", "sk secret", "sk-sécret"))
def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(server, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UserError, match="OPENAI_API_KEY") as caught:
        make_user(server)
    assert "cret" not in str(caught.value)


# Check and script -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("answer", ((200, completion("H", "length")), (200, {}), (200, completion(None))))
def test_the_check_makes_one_call_for_one_token_and_takes_any_json(server, answer):
    server.script = lambda request, handler: answer
    make_user(server).check()
    assert [request["max_tokens"] for request in server.requests] == [1]


def test_the_check_asks_a_busy_server_once_more(server):
    server.script = in_turn((503, {}), (200, {}))
    make_user(server, retries=9).check()


@pytest.mark.parametrize("status, body, named", (
    (401, b"who", "answered 401: who"), (404, b"no model", "answered 404: no model"),
    (400, b"what", "answered 400: what"), (500, b"oops", "answered 500: oops"), (200, b"<html>", "not JSON")))
def test_the_check_names_what_is_wrong(server, status, body, named):
    server.script = lambda request, handler: (status, body)
    with pytest.raises(EndpointError, match=f"^http://127.*/v1: .*{named}"):
        make_user(server).check()


def test_the_script_checks_a_server_and_shows_how_it_opens(server, monkeypatch, capsys):
    server.script = lambda request, handler: (
        "hi" if TASK.simulator_instruction in request["messages"][0]["content"] else "hm")
    monkeypatch.setattr(sys, "argv", ["endpoint.py", server.address])
    endpoint.main()
    assert capsys.readouterr().out.splitlines()[1:] == ["naive: hi", "human: hm"]


@pytest.mark.parametrize("arguments", ([], ["model"], ["http://127.0.0.1/v1"], ["{address}"]))
def test_the_script_says_in_one_line_what_is_wrong(server, monkeypatch, capsys, arguments):
    server.script = lambda request, handler: (401, b"who are\nyou?")
    monkeypatch.setattr(sys, "argv", ["endpoint.py", *(a.format(address=server.address) for a in arguments)])
    with pytest.raises(SystemExit) as caught:
        endpoint.main()
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith("endpoint.py: ") and error.count("\n") == 1
