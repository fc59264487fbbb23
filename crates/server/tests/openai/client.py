"""Tests `kvarena-server --serve` with OpenAI's own client. run.sh runs the tests, which have no time limit."""

import asyncio
import json
import math
import socket
import sys
import threading
import time
import urllib.error
import urllib.request

import openai
from server import Server

PROGRAM = sys.argv[1]
PAGE = "a page is room for the keys and values of a few tokens in all layers. it is the unit of memory."
FORK = "a fork is a second sequence with the same past. whole pages are shared and the last one is copied."
WORDS = ["page", "slot", "token", "prefix", "pool", "sequence", "plan", "step", "batch", "commit", "fence", "lock", "fork"]
LONG = 900  # tokens of a long answer: the model has 1,024 positions


def client(server, retries=0):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=retries)


def async_client(server):
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def question(word):
    return [{"role": "user", "content": f"What is a {word}?"}]


def until(condition):
    while not condition():
        time.sleep(0.01)


def at_rest(server):
    """Returns whether no stream runs and every page is free or cached."""
    now = server.metrics()
    held = ("sequences", "private_pages", "fenced_pages", "protected_pages", "outstanding_pages", "steps")
    return all(now["kvarena_" + name] == 0 for name in held)


def refused(kind, ask, status, param=None, words=""):
    try:
        ask()
    except kind as error:
        assert error.status_code == status, error
        body = error.response.json()["error"]
        assert body["param"] == param and words in body["message"] and body["type"], body
        return body
    raise AssertionError(f"{status} was expected")


def test_chats(server):
    ai = client(server)
    answer = ai.chat.completions.create(model=server.model, messages=question("page"), temperature=0)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content.strip(), choice.finish_reason) == ("assistant", PAGE, "stop")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    again = ai.chat.completions.create(model=server.model, messages=question("page"), temperature=0).usage
    assert again.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16, again
    # A conversation reuses its earlier turns.
    turns = question("page") + [{"role": "assistant", "content": PAGE}] + question("fork")
    answer = ai.chat.completions.create(model=server.model, messages=turns, temperature=0)
    assert answer.choices[0].message.content.strip() == FORK
    assert answer.usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens // 16 * 16
    short = ai.chat.completions.create(model=server.model, messages=question("page"), temperature=0, max_tokens=3)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)


def test_streams_have_the_same_text(server):
    ai = client(server)
    stream = ai.chat.completions.create(
        model=server.model, messages=question("fork"), temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len(chunks) > 15, "tokens come one by one"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.strip() == FORK
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[0].choices[0].delta.role == "assistant" and not chunks[-1].choices
    assert len({chunk.id for chunk in chunks}) == 1
    whole = ai.chat.completions.create(model=server.model, messages=question("fork"), temperature=0)
    assert whole.choices[0].message.content == text
    assert (chunks[-1].usage.completion_tokens, chunks[-1].usage.prompt_tokens) == (
        whole.usage.completion_tokens,
        whole.usage.prompt_tokens,
    )
    stream = ai.completions.create(model=server.model, prompt="<user> what is a page?", temperature=0, stream=True)
    text = "".join(chunk.choices[0].text for chunk in stream)
    whole = ai.completions.create(model=server.model, prompt="<user> what is a page?", temperature=0)
    assert text == whole.choices[0].text and whole.usage.completion_tokens <= 16


def test_samples_and_seeds(server):
    ai = client(server)

    def texts(**more):
        made = ai.completions.create(model=server.model, prompt="a page", n=4, temperature=1.5, max_tokens=12, **more)
        assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
        return [choice.text for choice in made.choices]

    first = texts(seed=5)
    assert texts(seed=5) == first and texts(seed=-6) != first and len(set(first)) > 1
    assert texts() != texts(), "without a seed draws differ"
    stream = ai.completions.create(
        model=server.model, prompt="a page", n=4, temperature=1.5, max_tokens=12, seed=5, stream=True
    )
    streamed = [""] * 4
    for chunk in stream:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == first
    # Several prompts, as texts and as tokens, with two choices each.
    made = ai.completions.create(model=server.model, prompt=["a page", "a fork"], n=2, temperature=0, max_tokens=5)
    each = [ai.completions.create(model=server.model, prompt=p, temperature=0, max_tokens=5) for p in ("a page", "a fork")]
    assert [c.text for c in made.choices] == [each[0].choices[0].text] * 2 + [each[1].choices[0].text] * 2
    # Equal prompts draw different texts, unless they have a seed.
    ask = dict(model=server.model, prompt=["a page"] * 6, temperature=1.5, max_tokens=12)
    assert len({c.text for c in ai.completions.create(**ask).choices}) > 1
    assert len({c.text for c in ai.completions.create(seed=7, **ask).choices}) == 1
    made = ai.completions.create(model=server.model, prompt=[[5, 6, 7], [8, 9]], temperature=0, max_tokens=2)
    assert (len(made.choices), made.usage.prompt_tokens) == (2, 5)


def test_stops(server):
    ai = client(server)

    def generate(**more):
        made = ai.chat.completions.create(model=server.model, messages=question("page"), temperature=0, **more)
        return made.choices[0].message.content, made.choices[0].finish_reason, made.usage.completion_tokens

    whole, _, tokens = generate()
    # Stop strings inside a token, over several tokens, the first of several, and one that never occurs.
    for stop in ("valu", "keys and values of", ["unit of", "few tokens", "zebra"]):
        found = min(whole.find(one) for one in ([stop] if isinstance(stop, str) else stop) if one in whole)
        text, reason, length = generate(stop=stop)
        assert (text, reason) == (whole[:found], "stop") and length < tokens, (stop, text)
    assert generate(stop="zebra")[0] == whole
    stream = ai.chat.completions.create(
        model=server.model, messages=question("page"), temperature=0, stop=" of a few", stream=True
    )
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole[: whole.find(" of a few")]
    assert chunks[-1].finish_reason == "stop"
    until(lambda: at_rest(server))


def test_logprobs(server):
    ai = client(server)
    made = ai.chat.completions.create(
        model=server.model, messages=question("page"), temperature=0, logprobs=True, top_logprobs=3
    )
    entries = made.choices[0].logprobs.content
    assert len(entries) == made.usage.completion_tokens - 1, "all but the stop token"
    for entry in entries:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        best = [top.logprob for top in entry.top_logprobs]
        assert best == sorted(best, reverse=True) and best[0] == entry.logprob, "greedy takes the best"
        assert bytes(entry.bytes).decode() == entry.token
        assert sum(math.exp(logprob) for logprob in best) <= 1.0001
    assert "".join(entry.token for entry in entries) == made.choices[0].message.content, "tokens keep their spaces"
    made = ai.completions.create(model=server.model, prompt="a page is", temperature=0, logprobs=2, max_tokens=6)
    choice = made.choices[0]
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == len(choice.logprobs.text_offset)
    assert choice.logprobs.text_offset[0] == 0
    stream = ai.completions.create(
        model=server.model, prompt="a page is", temperature=0, logprobs=2, max_tokens=6, stream=True
    )
    streamed = [chunk.choices[0].logprobs for chunk in stream]
    assert sum((one.tokens for one in streamed if one), []) == choice.logprobs.tokens


def test_echoes(server):
    """A token has the same log-probability in an echoed prompt and in an answer, also if the request is repeated. All
    ways to read a text give the same one."""
    ai = client(server)
    prompt = "<user> what is a page?"
    made = ai.completions.create(model=server.model, prompt=prompt, temperature=0, max_tokens=6, logprobs=2)
    whole = ai.completions.create(model=server.model, prompt=prompt, temperature=0, max_tokens=6, logprobs=2, echo=True)
    count, echoed = whole.usage.prompt_tokens, whole.choices[0]
    assert echoed.text == prompt + made.choices[0].text and len(echoed.logprobs.tokens) == count + 6
    assert echoed.logprobs.token_logprobs[0] is None and all(p <= 0 for p in echoed.logprobs.token_logprobs[1:])
    assert "".join(echoed.logprobs.tokens) == echoed.text, echoed
    assert echoed.text[echoed.logprobs.text_offset[count] :] == made.choices[0].text
    assert all(token in best for token, best in zip(echoed.logprobs.tokens[1:], echoed.logprobs.top_logprobs[1:]))
    near = lambda a, b: all(abs(x - y) < 1e-4 for x, y in zip(a, b, strict=True))
    assert near(echoed.logprobs.token_logprobs[count:], made.choices[0].logprobs.token_logprobs)
    ids = lambda text: json.loads(post(server, "/tokenize", {"model": server.model, "prompt": text}))["tokens"]
    tokens = ids(prompt) + ids(made.choices[0].text)
    for _ in range(2):
        again = ai.completions.create(model=server.model, prompt=tokens, max_tokens=0, logprobs=0, echo=True).choices[0]
        assert again.text == echoed.text and near(again.logprobs.token_logprobs[1:], echoed.logprobs.token_logprobs[1:])
        assert again.finish_reason == "length"
    streamed = list(ai.completions.create(model=server.model, prompt=prompt, temperature=0, max_tokens=6, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == echoed.text
    assert json.loads(post(server, "/detokenize", {"model": server.model, "tokens": tokens}))["prompt"] == echoed.text


def post(server, path, fields):
    request = urllib.request.Request(server.url + path, data=json.dumps(fields).encode(), method="POST")
    with urllib.request.urlopen(request) as answer:
        return answer.read().decode()


def test_shaped_answers(server):
    ai = client(server)

    def generate(**more):
        extra = {"ignore_eos": True, **more.pop("extra_body", {})}
        made = ai.completions.create(
            model=server.model, prompt="a page", max_tokens=40, extra_body=extra, logprobs=0, **{"temperature": 0, **more})
        return made.choices[0]

    plain = generate().logprobs.tokens
    ids = lambda text: json.loads(post(server, "/tokenize", {"model": server.model, "prompt": text}))["tokens"]
    first = ids(plain[0].strip())[-1]
    assert plain[0] not in generate(logit_bias={first: -100}).logprobs.tokens[:1]
    allowed = generate(extra_body={"allowed_token_ids": [first, 9]}).logprobs.tokens
    assert len({token.strip() for token in allowed}) <= 2, allowed
    word = plain[1].strip()
    assert word not in generate(extra_body={"bad_words": [word]}).text.split()
    repeats = lambda one: len(one.logprobs.tokens) - len(set(one.logprobs.tokens))
    assert repeats(generate(extra_body={"repetition_penalty": 3.0})) < repeats(generate())
    assert generate(temperature=1, extra_body={"min_p": 1.0}).text == generate().text, "only the best token is left"
    ended = lambda **more: ai.chat.completions.create(
        model=server.model, messages=question("page"), temperature=0, extra_body=more).usage.completion_tokens
    usual = ended()
    # A stop string ends an answer only after `min_tokens`, and so does an answer to which no token is left.
    assert ended(stop=" ") < 3 and 9 < ended(stop=" ", min_tokens=9) < 12
    word = plain[0].strip()
    end = {"allowed_token_ids": [first], "bad_words": [f"{word} {word}"]}
    made = ai.completions.create(model=server.model, prompt="a page", max_tokens=9, extra_body=end)
    assert (made.usage.completion_tokens, made.choices[0].finish_reason) == (1, "stop")
    for none in ({"bad_words": [word]}, {"min_tokens": 2, "stop_token_ids": [first]}):
        none = {"allowed_token_ids": [first], **none}
        ask = lambda: ai.completions.create(model=server.model, prompt="a page", extra_body=none)
        refused(openai.BadRequestError, ask, 400, "allowed_token_ids", "allow no token")
    assert ended(min_tokens=usual - 1) == usual and ended(min_tokens=usual + 5) > usual + 4


def test_salts_separate_the_cache(server):
    ai = client(server)

    def cached(salt):
        made = ai.completions.create(model=server.model, prompt=[17] * 64, max_tokens=1, extra_body={"cache_salt": salt})
        return made.usage.prompt_tokens_details.cached_tokens

    assert [cached("a"), cached("a"), cached("b"), cached("b")] == [0, 48, 0, 48]


def test_a_key():
    with Server(PROGRAM, "--api-key", "sesame", "--log", "json", "--cors-origin", "https://a.example") as server:
        assert json.loads(server.get("/health")) == {"status": "ok"} and server.metrics()
        assert json.loads(server.get("/version"))["version"]
        body = json.dumps({"model": server.model, "prompt": "a page", "max_tokens": 2}).encode()
        for key in (None, "sesam", "sesamee"):
            status, error = raw(server, body, headers={"Authorization": f"Bearer {key}"} if key else {})
            assert (status, error["code"]) == (401, "invalid_api_key") and "sesam" not in error["message"]
        ai = openai.OpenAI(base_url=server.url + "/v1", api_key="sesame")
        ai.completions.create(model=server.model, prompt="a page", max_tokens=2)
        preflight = urllib.request.Request(server.url + "/v1/completions", method="OPTIONS", headers={
            "Origin": "https://a.example", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"})
        with urllib.request.urlopen(preflight) as answer:
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
    lines = [json.loads(line) for line in server.report.splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line.get("outcome") == "done"]
    assert (line["new_tokens"], line["status"], line["path"]) == (2, 200, "/v1/completions") and line["first_token_ms"] > 0
    assert "sesam" not in server.report and "a page" not in server.report


def test_models_and_monitors(server):
    ai = client(server)
    assert [model.id for model in ai.models.list()] == [server.model]
    assert ai.models.retrieve(server.model).id == server.model
    refused(openai.NotFoundError, lambda: ai.models.retrieve("gpt-4"), 404, "model", "gpt-4")
    assert json.loads(server.get("/health")) == {"status": "ok"}
    before = server.metrics()
    usage = ai.completions.create(model=server.model, prompt="a page", max_tokens=7, temperature=0).usage
    after = server.metrics()
    gain = {name: after[name] - before.get(name, 0) for name in after}
    assert gain['kvarena_server_answers_total{path="/v1/completions",status="200"}'] == 1
    assert gain["kvarena_server_prompt_tokens_total"] == usage.prompt_tokens
    assert gain["kvarena_server_new_tokens_total"] == usage.completion_tokens
    assert gain["kvarena_server_first_token_seconds_count"] == 1
    assert gain["kvarena_server_step_seconds_count"] >= usage.completion_tokens
    pages = after["kvarena_free_pages"] + after["kvarena_cached_pages"]
    assert at_rest(server) and pages == before["kvarena_free_pages"] + before["kvarena_cached_pages"]


def raw(server, body, path="/v1/completions", method="POST", headers=None):
    """Returns an answer's status and error, without a client library."""
    request = urllib.request.Request(server.url + path, data=body, method=method, headers=headers or {})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, None
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]
    except (urllib.error.URLError, ConnectionError):
        return None, None  # the server answered and disconnected while the client still sent


def test_bad_input(server):
    ai = client(server)
    wrong = openai.BadRequestError
    for body in (b"", b"{", b"null", b"[]", b"\xff\xfe\x00", b'{"model": "glossary"', b"[" * 200_000):
        status, error = raw(server, body)
        assert status == 400 and error["type"] == "invalid_request_error" and error["message"], (body[:20], error)
    for name, value in [
        ("n", 0), ("n", "many"), ("n", 1.5), ("n", 1000), ("max_tokens", -1), ("max_tokens", 0), ("max_tokens", "9"),
        ("temperature", "hot"), ("temperature", 3), ("temperature", -1), ("top_p", 0), ("top_p", "x"), ("seed", "x"),
        ("stop", 7), ("stop", [""]), ("stop", [1]), ("stream", "yes"), ("logprobs", "x"), ("logprobs", 99),
        ("prompt", {}), ("prompt", [["a"]]), ("prompt", [1.5]), ("prompt", [10**9]), ("prompt", []), ("prompt", ""),
        ("logit_bias", {"5": 101}), ("frequency_penalty", 3), ("best_of", 5), ("suffix", "x"), ("unheard_of", 1),
        ("guided_json", {"type": "object"}), ("use_beam_search", True), ("tool_choice", "required"), ("n", 17),
    ]:
        fields = {"model": server.model, "prompt": "a page", name: value}
        status, error = raw(server, json.dumps(fields).encode())
        assert (status, error["param"]) == (400, name), (name, value, status, error)
    for messages in ("hello", [], ["hello"], [{"role": "user"}], [{"role": 7, "content": "x"}], [{"content": "x"}],
                     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]):
        ask = lambda: ai.chat.completions.create(model=server.model, messages=messages)
        refused(wrong, ask, 400, "messages")
    tools = [{"type": "function", "function": {"name": "f"}}]
    ask = lambda: ai.chat.completions.create(model=server.model, messages=question("page"), tools=tools)
    refused(wrong, ask, 400, "tools", "not served")
    ask = lambda: ai.completions.create(model="gpt-4", prompt="x")
    assert refused(openai.NotFoundError, ask, 404, "model", "gpt-4")["code"] == "model_not_found"
    ask = lambda: ai.completions.create(model=server.model, prompt=[5] * 1025)
    assert refused(wrong, ask, 400, "prompt", "1024 positions")["code"] == "context_length_exceeded"
    ask = lambda: ai.completions.create(model=server.model, prompt=[5] * 1000, max_tokens=26)
    refused(wrong, ask, 400, "prompt", "1024 positions")
    ask = lambda: ai.chat.completions.create(model=server.model, messages=question("page " * 2000))
    assert refused(wrong, ask, 400, "messages")["code"] == "context_length_exceeded"
    status, error = raw(server, b" " * ((4 << 20) + 1))
    assert (status, error["code"]) == (413, "body_too_long")
    assert raw(server, None, "/v1/nothing", "GET")[0] == 404
    assert raw(server, None, "/v1/completions", "GET")[0] == 405
    # Bytes that are not HTTP, and clients that disconnect in the middle of a request.
    host, port = server.url.removeprefix("http://").split(":")
    for words in (b"\x16\x03\x01 no HTTP\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 999\r\n\r\n{", b"GET"):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(words)
    assert ai.completions.create(model=server.model, prompt=[5] * 1024, max_tokens=1).usage.prompt_tokens == 1024
    assert at_rest(server)


async def many(server, count, at_a_time, ask):
    """Returns the results of `ask(ai, i)` for each i, a limited number at a time."""
    slots = asyncio.Semaphore(at_a_time)
    async with async_client(server) as ai:

        async def one(i):
            async with slots:
                return await ask(ai, i)

        return await asyncio.gather(*(one(i) for i in range(count)))


def test_thirty_two_at_a_time(server):
    """Answers do not depend on concurrent requests; half of the answers are streamed."""
    alone = {
        word: client(server)
        .chat.completions.create(model=server.model, messages=question(word), temperature=0)
        .choices[0]
        .message.content
        for word in WORDS
    }

    async def ask(ai, i):
        word = WORDS[i % len(WORDS)]
        make = lambda **more: ai.chat.completions.create(
            model=server.model, messages=question(word), temperature=0, **more
        )
        if i % 2:
            chunks = [chunk async for chunk in await make(stream=True)]
            return word, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return word, (await make()).choices[0].message.content

    for word, text in asyncio.run(many(server, 160, 32, ask)):
        assert text == alone[word], (word, text)
    assert at_rest(server)


def test_clients_that_go_away(server):
    """Clients disconnect half-way: in a stream, before a whole answer, with several choices. Only their streams end."""
    before = server.metrics()

    async def ask(ai, i):
        make = lambda **more: ai.completions.create(
            model=server.model, prompt=[5 + i % 50] * 20, max_tokens=LONG, extra_body={"ignore_eos": True}, **more
        )
        if i % 4 == 3:  # runs to its end
            made = await ai.completions.create(model=server.model, prompt=f"a page {i}", max_tokens=30, temperature=0)
            return made.usage.completion_tokens
        if i % 4 == 2:
            waiting = asyncio.ensure_future(make())
            await asyncio.sleep(0.2)
            waiting.cancel()
            return None
        stream = await make(stream=True, n=1 + i % 2 * 2)
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 5:
                break
        await stream.close()
        return None

    asyncio.run(many(server, 32, 32, ask))
    until(lambda: at_rest(server))
    after = server.metrics()
    gain = lambda name: after[name] - before.get(name, 0)
    cancelled = gain('kvarena_server_streams_ended_total{why="cancelled"}')
    assert cancelled >= 24 and gain("kvarena_server_new_tokens_total") < 24 * LONG, cancelled


def test_load_of_2000_requests(server):
    """All kinds of requests run at once, and some clients disconnect. No page stays in use, and the audit succeeds."""
    count = 2000

    async def ask(ai, i):
        kind = i % 10
        chat = dict(model=server.model, messages=question(WORDS[i % len(WORDS)]), seed=i, max_tokens=5 + i % 12)
        if kind == 0:
            try:
                await ai.completions.create(model=server.model, prompt=[5] * 2000)
            except openai.BadRequestError:
                return "refused"
        if kind in (1, 2):
            stream = await ai.chat.completions.create(stream=True, **chat)
            async for _ in stream:
                if kind == 2:
                    await stream.close()
                    return "gone"
            return "streamed"
        if kind == 3:
            chat["n"] = 3
        if kind == 4:
            chat["stop"] = ["is a", "of"]
        made = await ai.chat.completions.create(**chat)
        assert len(made.choices) == chat.get("n", 1)
        return "whole"

    before = server.metrics()
    begun = time.monotonic()
    answers = asyncio.run(many(server, count, 32, ask))
    seconds = time.monotonic() - begun
    assert (answers.count("refused"), answers.count("gone"), answers.count("streamed")) == (200, 200, 200)
    until(lambda: at_rest(server))
    after = server.metrics()
    ended = sum(after[name] - before.get(name, 0) for name in after if name.startswith("kvarena_server_streams_ended"))
    assert ended == 1800 + 2 * 200, ended
    tokens = after["kvarena_server_new_tokens_total"] - before["kvarena_server_new_tokens_total"]
    print(f"  {count} requests in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s, 32 at a time;", end=" ")


def test_a_full_queue():
    """One request runs, two wait, one more gets 429; a client that retries is served."""
    with Server(PROGRAM, "--concurrency", "1", "--queue", "2") as server:
        ai = client(server)
        endless = dict(model=server.model, prompt="a page", max_tokens=LONG, stream=True, extra_body={"ignore_eos": True})
        state = lambda: [server.metrics()[f'kvarena_server_streams{{state="{name}"}}'] for name in ("running", "waiting")]
        streams = []
        for expected in ([1, 0], [1, 1], [1, 2]):
            # The headers arrive at once, before the first token.
            streams.append(ai.completions.create(**endless))
            until(lambda: state() == expected)
        ask = lambda: ai.completions.create(model=server.model, prompt="a fork", max_tokens=2)
        body = refused(openai.RateLimitError, ask, 429, None, "wait already")
        assert body["code"] == "queue_full"
        # The client retries after Retry-After, so its request is accepted once the other streams have closed.
        threading.Timer(0.5, lambda: [stream.close() for stream in streams]).start()
        made = client(server, retries=100).completions.create(model=server.model, prompt="a fork", max_tokens=2)
        assert made.usage.completion_tokens == 2
        until(lambda: at_rest(server))


def test_sigterm_finishes_accepted_requests():
    with Server(PROGRAM, "--concurrency", "2") as server:
        ai = client(server)
        make = lambda i: ai.completions.create(
            model=server.model, prompt=f"a page {i}", max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
        )
        # Two run and two wait.
        streams = [make(i) for i in range(4)]
        firsts = [next(iter(stream)) for stream in streams[:2]]
        assert len(firsts) == 2
        server.ask_to_end()
        reasons = []
        for stream in streams:
            reasons.append([chunk.choices[0].finish_reason for chunk in stream][-1])
        assert reasons == ["length"] * 4, reasons
        audit = server.end()
        assert "verified" in audit, audit
        try:
            make(5)
            raise AssertionError("the server is closed")
        except openai.APIConnectionError:
            pass


def test_a_pool_too_small_for_all():
    """Preemption, failed steps and retries do not change the answers."""
    arguments = ["--pages", "66", "--concurrency", "8", "--fail-every", "7", "--overlap", "on", "--chunk", "32"]
    with Server(PROGRAM) as server:
        ask = dict(model=server.model, prompt="a page", max_tokens=300, temperature=0.5, extra_body={"ignore_eos": True})
        alone = [client(server).completions.create(seed=i, **ask).choices[0].text for i in range(8)]
    with Server(PROGRAM, *arguments) as server:

        async def one(ai, i):
            return (await ai.completions.create(seed=i, **ask)).choices[0].text

        assert asyncio.run(many(server, 8, 8, one)) == alone
        now = server.metrics()
        assert now["kvarena_preemptions_total"] > 0 and now["kvarena_server_aborted_steps_total"] > 0


def test_drafts_change_no_answer():
    """Drafts change no answer, and all their pages are released."""
    asks = [dict(messages=question(word), temperature=0) for word in WORDS]
    asks += [dict(messages=question(word), temperature=0.9, seed=5, n=2, max_tokens=60) for word in WORDS]
    asks += [dict(messages=question("page"), temperature=0, stop=["values", "memory"])]
    outputs = []
    for arguments in [(), ("--draft", "4"), ("--draft", "9", "--draft-tree")]:
        with Server(PROGRAM, *arguments) as server:
            ai = client(server)
            answers = [ai.chat.completions.create(model=server.model, **ask) for ask in asks]
            outputs.append([[(c.message.content, c.finish_reason) for c in answer.choices] for answer in answers])
            until(lambda: at_rest(server))
            now = server.metrics()
            drafted, accepted = (now[f"kvarena_server_{name}_tokens_total"] for name in ("drafted", "accepted"))
            assert (0 < accepted <= drafted) == bool(arguments), (arguments, drafted, accepted)
            assert accepted <= now["kvarena_accepted_tokens_total"] <= now["kvarena_draft_tokens_total"], now
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_prediction_is_drafted_from():
    """A prediction changes no answer, and its accepted tokens are counted. Without `--draft` none are."""
    prediction = {"type": "content", "content": PAGE.replace("tokens", "words")}
    for arguments in [(), ("--draft", "6"), ("--draft", "9", "--draft-tree")]:
        with Server(PROGRAM, *arguments) as server:
            ask = dict(model=server.model, messages=question("page"), temperature=0, prediction=prediction)
            answer = client(server).chat.completions.create(**ask)
            assert answer.choices[0].message.content == PAGE, answer
            details = answer.usage.completion_tokens_details
            accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
            assert (accepted > 0 and rejected > 0) if arguments else (accepted, rejected) == (0, 0), details
            assert accepted < answer.usage.completion_tokens
            options = dict(stream=True, stream_options={"include_usage": True})
            *_, last = client(server).chat.completions.create(**ask, **options)
            assert last.usage.completion_tokens_details == details, last
            wrong = dict(ask, prediction={"type": "text", "content": PAGE})
            refused(openai.BadRequestError, lambda: client(server).chat.completions.create(**wrong), 400, "prediction")


def main():
    tests = {name: test for name, test in globals().items() if name.startswith("test_")}
    wanted = sys.argv[2:] or list(tests)
    shared = [name for name in wanted if tests[name].__code__.co_argcount]
    alone = [name for name in wanted if name not in shared]

    def run(name, *arguments):
        begun = time.monotonic()
        print(f"{name}:", end=" ", flush=True)
        tests[name](*arguments)
        print(f"ok, {time.monotonic() - begun:.1f} s", flush=True)

    if shared:
        with Server(PROGRAM) as server:
            for name in shared:
                run(name, server)
        print(server.audit)
    for name in alone:
        run(name)


main()
