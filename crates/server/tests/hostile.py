#!/usr/bin/env python3
"""Plays hostile clients against `kvarena-server --serve`, each in bounded time, and prints the outcomes.

    hostile.py PROGRAM [NAME ..]        NAME: cases to play; the default is all

Each row has a measurement, its bound, and whether the bound holds. The exit code is 1 if a row misses its bound. Rows
in ms depend on other work on the machine, so they count only with STRICT=1. The script sets the server's time limits to
a few seconds where the server has flags for them. Needs only Python's standard library.
"""

import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "openai"))
from server import Server  # noqa: E402

PROGRAM = sys.argv[1]
HELP = subprocess.run([PROGRAM, "--help"], capture_output=True, text=True, check=True).stdout
HEADER, BODY, IDLE = 2, 3, 4  # time limits of the script's servers, in seconds
STRICT = os.environ.get("STRICT") == "1"
PROMPTS = random.Random(1)
PATIENCE = 15  # seconds after which a client gives up


def flags(*pairs):
    """Returns the flags that this program has, with their values."""
    return [word for flag, value in pairs if flag + " " in HELP for word in (flag, str(value))]


TIMES = flags(("--header-timeout", HEADER), ("--body-timeout", BODY), ("--idle-timeout", IDLE))


def address(server):
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def connect(server):
    connection = socket.create_connection(address(server))
    connection.settimeout(PATIENCE)
    return connection


def request(path, body, method="POST", more=""):
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def fields(server, **more):
    return json.dumps({"model": server.model, "prompt": "a page", "temperature": 0, **more}).encode()


def answer(server, data, seconds=60):
    """Returns status, head and body of an answer. The status is 0 if no answer arrives in time."""
    try:
        with connect(server) as connection:
            connection.settimeout(seconds)
            try:
                connection.sendall(data)
            except OSError:
                pass  # The server may answer before the client has sent the whole request.
            read = b""
            while part := connection.recv(1 << 16):
                read += part
    except OSError:
        read = locals().get("read", b"")
    head, _, body = read.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/") else 0
    return status, head, body


def complete(server, seconds=60, **more):
    return answer(server, request("/v1/completions", fields(server, **more)), seconds)


def first_token(server, length=1):
    """Returns the seconds to the first event of a stream. The prompt is random, so none of it is cached."""
    body = fields(server, prompt=PROMPTS.choices(range(5, 95), k=length), stream=True, max_tokens=2)
    begun = time.monotonic()
    with connect(server) as connection:
        connection.settimeout(120)
        connection.sendall(request("/v1/completions", body))
        read = b""
        while b"data: " not in read:
            part = connection.recv(4096)
            if not part:
                return float("inf")
            read += part
    return time.monotonic() - begun


def median_first_token(server, length=1):
    return statistics.median(first_token(server, length) for _ in range(9))


def memory(server):
    """Returns the current and the maximum resident memory in MiB."""
    with open(f"/proc/{server.process.pid}/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return [int(lines[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")]


def together(count, play):
    """Calls `play(i)` for each i in a thread of its own, and returns the results."""
    results = [None] * count

    def one(i):
        results[i] = play(i)

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return results


def long_bodies(server):
    """Six requests of 14 MB at once."""
    text = "a page is room for keys and values. " * (14 * 1024 * 1024 // 36)
    data = request("/v1/completions", fields(server, prompt=text))
    alone, idle, seconds = median_first_token(server, 900), memory(server)[0], []

    def play(i):
        begun = time.monotonic()
        status = answer(server, data, 240)[0]
        seconds.append(time.monotonic() - begun)
        return status

    statuses, waits, begun = set(), [], time.monotonic()
    while len(waits) < 9 and time.monotonic() - begun < PATIENCE:
        playing = threading.Thread(target=lambda: statuses.update(together(6, play)))
        playing.start()
        # At least one measurement: a fast server may answer all six requests before a second one begins.
        waits.append(first_token(server, 900))
        while playing.is_alive():
            waits.append(first_token(server, 900))
    yield "status", sorted(statuses), "[413]", statuses == {413}
    yield "MB above idle at most", round(memory(server)[1] - idle), "200", memory(server)[1] - idle <= 200
    yield "seconds until answered", round(max(seconds), 2), "10", max(seconds) <= 10
    loaded = statistics.median(waits)
    row = f"{1e3 * alone:.0f} alone, {1e3 * loaded:.0f} under load, {1e3 * max(waits):.0f} worst"
    yield "ms to another's first token", row, "twice", loaded <= 2 * alone


def great_bodies(server):
    """Six requests of the maximum length, of numbers and of text."""
    length = 4 * 1024 * 1024 - 200
    numbers = b'{"model":"%s","prompt":[%s1]}' % (server.model.encode(), b"1," * (length // 2))
    lists = b'{"model":"%s","messages":[%s0]}' % (server.model.encode(), b"0," * (length // 2))
    words = fields(server, prompt="page " * (length // 5))
    idle = memory(server)[0]
    for path, body in (("/v1/completions", numbers), ("/v1/chat/completions", lists), ("/v1/completions", words)):
        statuses = set(together(6, lambda i: answer(server, request(path, body), 240)[0]))
        yield f"status, {body[20:40].decode()}..", sorted(statuses), "[400]", statuses <= {400, 429}
    above = memory(server)[1] - idle
    yield "MB above idle at most", round(above), "200", above <= 200


def waiting_tokens(server):
    """Requests with more prompt tokens than may wait; each request alone fits."""
    body = fields(server, prompt=[[5 + i % 90 for i in range(900)]] * 64, max_tokens=64, ignore_eos=True)
    answers = together(12, lambda i: answer(server, request("/v1/completions", body), 240))
    statuses = sorted({status for status, *_ in answers})
    late = [b"retry-after" in head.lower() for status, head, _ in answers if status == 429]
    yield "statuses", statuses, "[200, 429]", statuses == [200, 429]
    yield "429 with Retry-After", f"{sum(late)} of {len(late)}", "all", all(late)


def until_closed(connections, begun):
    """Returns the number of connections that the server has closed, and the time of the last close."""
    closed, last = 0, 0
    for connection in connections:
        connection.settimeout(max(0.01, begun + PATIENCE - time.monotonic()))
        try:
            while connection.recv(4096):
                pass
            closed += 1
        except ConnectionError:
            closed += 1
        except OSError:
            continue
        last = max(last, time.monotonic() - begun)
    for connection in connections:
        connection.close()
    return closed, last


def slow(server, what, limit, send):
    begun = time.monotonic()
    connections = [connect(server) for _ in range(50)]
    for connection in connections:
        send(connection)
    time.sleep(1)
    for connection in connections:
        try:
            connection.sendall(b"x" if what in ("headers", "bodies") else b"")
        except OSError:
            pass
    closed, last = until_closed(connections, begun)
    yield f"50 {what}: closed", f"{closed} after {last:.1f} s", f"50 after {limit} s", closed == 50 and last < limit + 3


def slow_clients(server):
    """50 clients of each kind: slow headers, slow bodies, no request, and no second request."""
    yield from slow(server, "headers", HEADER, lambda c: c.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-"))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
    yield from slow(server, "bodies", BODY, lambda c: c.sendall(head))
    yield from slow(server, "silent ones", HEADER, lambda c: None)
    yield from slow(server, "idle ones", IDLE, lambda c: c.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))


def readers_that_stop(server):
    """Streams whose clients send a request and never read."""
    body = fields(server, prompt=[[5]] * 16, n=8, max_tokens=1000, ignore_eos=True,
                  stream=True, logprobs=20)
    connections = []
    for _ in range(4):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address(server))
        connection.sendall(request("/v1/completions", body))
        connections.append(connection)
    begun = time.monotonic()
    while time.monotonic() - begun < 40:
        now = server.metrics()
        if streams(server) == 0 and now["kvarena_server_new_tokens_total"]:
            break
        time.sleep(0.2)
    seconds = time.monotonic() - begun
    yield "s until their streams end", round(seconds, 1), f"{IDLE + 10}", seconds < IDLE + 10
    for connection in connections:
        connection.close()


def few_descriptors():
    """150 connections stay open, while the server has 128 descriptors."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    for what, hello in (("silent", b""), ("slow", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")):
        with Server(PROGRAM, "--quiet", *flags(("--header-timeout", 60), ("--body-timeout", 60)), preexec_fn=limit) as server:
            held = []
            for _ in range(150):
                held.append(connect(server))
                held[-1].sendall(hello)
            begun = time.monotonic()
            status, *_ = answer(server, request("/health", b"", "GET"), 5)
            yield f"/health with 150 {what} connections", status, "200", status == 200
            yield "ms until its answer", round(1e3 * (time.monotonic() - begun)), "1000", time.monotonic() - begun < 1
            for connection in held:
                connection.close()
            time.sleep(0.5)


def draining():
    """A monitor reads /health while the server drains."""
    with Server(PROGRAM, "--quiet") as server:
        holding = threading.Thread(target=lambda: complete(server, max_tokens=1000, ignore_eos=True, n=16))
        holding.start()
        time.sleep(0.1)
        server.ask_to_end()
        time.sleep(0.1)
        status, *_ = answer(server, request("/health", b"", "GET"), 5)
        yield "/health while it ends", status, "503", status == 503
        holding.join()


# Each field changes the answer, or is unknown to the server.
ODD_FIELDS = [
    ("guided_json", {"type": "object"}), ("structured_outputs", {"regex": "a+"}), ("regex", "a+"),
    ("truncate_prompt_tokens", 1), ("use_beam_search", True), ("lora_path", "other"), ("continue_final_message", True),
    ("tool_choice", "required"), ("best_of", 3), ("suffix", "x"), ("unheard_of", 1),
]


def ignored_fields(server):
    """The server rejects fields that it does not serve; the fields that it serves change the answer."""
    ignored = []
    for name, value in ODD_FIELDS:
        status, _, body = complete(server, **{name: value})
        if status != 400 or json.loads(body)["error"]["param"] != name:
            ignored.append(name)
    yield "ignored with 200", ", ".join(ignored) or "none", "none", not ignored
    text = lambda **more: json.loads(complete(server, max_tokens=8, **more)[2]).get("choices", [{}])[0].get("text")
    plain = text()
    shaping = [
        ("allowed_token_ids", [9]), ("logit_bias", {"9": 100}), ("repetition_penalty", 2.0),
        ("bad_words", plain.split()[:1]),
    ]
    same = [name for name, value in shaping if text(**{name: value}) == plain]
    text = lambda **more: json.loads(complete(server, max_tokens=200, ignore_eos=True, **more)[2])["choices"][0]["text"]
    same += ["frequency_penalty"] if text(frequency_penalty=2.0) == text() else []
    yield "served without effect", ", ".join(same) or "none", "none", not same
    prompt = [7] * 64
    cached = lambda **more: json.loads(complete(server, prompt=prompt, **more)[2]).get("usage", {}).get(
        "prompt_tokens_details", {}).get("cached_tokens")
    cached(cache_salt="one")
    row = cached(cache_salt="one"), cached(cache_salt="two")
    yield "cached with the same salt, another", row, "(48, 0)", row == (48, 0)


def streams(server):
    now = server.metrics()
    return sum(now[f'kvarena_server_streams{{state="{state}"}}'] for state in ("running", "waiting"))


def steps(server):
    """Returns the number of steps, and the seconds of all steps together."""
    now = server.metrics()
    return now["kvarena_server_step_seconds_count"], now["kvarena_server_step_seconds_sum"]


def many_choices():
    """Another client sends a short and then a long prompt during a request with n=128."""
    with Server(PROGRAM, "--quiet", *flags(("--max-n", 128))) as server:
        # A short prompt also waits for the step in flight, which takes longer than the prompt.
        for length, more, bound in ((16, 1, "twice and a step"), (1000, 0, "twice")):
            alone = median_first_token(server, length)
            body = fields(server, n=128, max_tokens=600, ignore_eos=True, temperature=1)
            with connect(server) as stream:
                stream.sendall(request("/v1/completions", body))
                time.sleep(0.5)
                waits, (count, seconds) = [], steps(server)
                while len(waits) < 9 and streams(server) > 16:
                    waits.append(first_token(server, length))
                later = steps(server)
            step = (later[1] - seconds) / max(1, later[0] - count)
            loaded = statistics.median(waits or [float("inf")])
            row = f"{1e3 * alone:.1f} alone, {1e3 * loaded:.1f} under load, {1e3 * step:.1f} a step"
            yield f"ms to another's token after {length}", row, bound, loaded <= 2 * alone + more * step
            while streams(server):
                time.sleep(0.05)
        cached = server.metrics()["kvarena_server_cached_tokens_total"]
        yield "cached tokens of all prompts", round(cached), "0", cached == 0
    with Server(PROGRAM, "--quiet") as server:
        status, *_ = complete(server, n=17, max_tokens=1)
        yield "n=17 without a flag", status, "400", status == 400


def no_http(server):
    """Bytes that are not HTTP, and clients that disconnect in the middle of a request."""
    for data in (b"\x16\x03\x01\x02\x00", b"\0" * 100_000, b"GET / HTTP/9.9\r\n\r\n", b"A" * 1_000_000, b"GET"):
        with connect(server) as connection:
            try:
                connection.sendall(data)
            except OSError:
                pass
    for body in (b"[" * 200_000, b"{" * 200_000, b'{"a":' * 200_000, b"\xff" * 1000):
        answer(server, request("/v1/completions", body))
    status, *_ = complete(server, max_tokens=1)
    yield "a request after them", status, "200", status == 200


CASES = [long_bodies, great_bodies, waiting_tokens, slow_clients, readers_that_stop, few_descriptors, draining,
         ignored_fields, many_choices, no_http]  # fmt: skip


def play(case):
    rows = []
    try:
        if case.__code__.co_argcount:
            waiting = flags(("--max-waiting-tokens", 200_000)) if case is waiting_tokens else []
            with Server(PROGRAM, "--quiet", *TIMES, *waiting) as server:
                rows.extend(case(server))
        else:
            rows.extend(case())
    except Exception as error:  # A case that raises misses its bound.
        rows.append(("broke off", repr(error)[:44], "", False))
    return rows


def main():
    wanted = sys.argv[2:]
    missed = 0
    print(f"{'case':<20} {'measured':<36} {'':<44} {'bound':<16}")
    for case in CASES:
        if wanted and case.__name__ not in wanted:
            continue
        begun = time.monotonic()
        for what, measured, bound, holds in play(case):
            missed += not holds and (STRICT or not what.startswith("ms "))
            print(f"{case.__name__:<20} {what:<36} {measured!s:<44} {bound:<16} {'holds' if holds else 'MISSED'}")
        print(f"{'':<20} {time.monotonic() - begun:.1f} s", flush=True)
    sys.exit(1 if missed else 0)


main()
