#!/usr/bin/env python3
"""Times a server whose K and V are also in a store, beside one without it.

    store_times.py PROGRAM FOLDER TOKENS [OPTION ..]    OPTION: of the server, such as --random-model qwen3-8b

FOLDER is for the store; on a tmpfs its disk takes no part. The first table has the time to the first token of a prompt
of TOKENS tokens, in ms: computed, cached on the device, and read from the store after a restart (medians of ROUNDS
prompts). The second has it for two servers on one device that share the store: one computes the prompt with
`--role prefill`, the other one generates. The third has the mean step of STREAMS streams without a cache behind the
pool, with swap memory, and with swap memory and the store, which gets all new K and V meanwhile. Needs only Python's
standard library.
"""

import json
import os
import random
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "openai"))
from server import Server  # noqa: E402

ROUNDS, STREAMS, CONTEXT, NEW = 5, 64, 128, 384
VOCABULARY = 10_000


def complete(server, prompts, new):
    """Sends prompts of token ids in one request, and returns its seconds."""
    fields = {"model": server.model, "prompt": prompts, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    body = json.dumps(fields).encode()
    request = urllib.request.Request(server.url + "/v1/completions", body, {"Content-Type": "application/json"})
    begun = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        answer.read()
    return time.perf_counter() - begun


def prompts_of(seed, count, length):
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(length)] for _ in range(count)]


def ms(seconds):
    return f"{1e3 * statistics.median(seconds):9.1f}"


def first_tokens(program, options, store, tokens):
    prompts = prompts_of(1, ROUNDS, tokens)
    with Server(program, *options, *store) as server:
        complete(server, prompts_of(2, 1, tokens), 1)
        print("computed          ", ms(complete(server, [prompt], 1) for prompt in prompts))
        print("on the device     ", ms(complete(server, [prompt], 1) for prompt in prompts))
    begun = time.perf_counter()
    with Server(program, *options, *store) as server:
        print(f"restarted in {time.perf_counter() - begun:.1f} s")
        # The first prompts capture graphs and touch swap memory; these are computed.
        complete(server, prompts_of(3, 1, tokens), 1)
        print("from the store    ", ms(complete(server, [prompt], 1) for prompt in prompts))
        print("on the device     ", ms(complete(server, [prompt], 1) for prompt in prompts))
    print(server.report, end="")


def apart(program, options, store, tokens):
    """Prints the times of both answers, if the second server is asked when the first has answered, and if both are
    asked at once. The time from the last step of the prompt to the first token is the time of the whole, less that of
    computing the prompt on one server."""
    halves = [*options, "--pages", str(3 * tokens // 16), *store]
    prefill, decode = (Server(program, *halves, *own) for own in (["--role", "prefill"], ["--cache-wait", "10"]))
    with prefill as first, decode as second:
        for server in (first, second):
            complete(server, prompts_of(4, 1, tokens), 1)
        for seed, name, ask in ((5, "then", in_turn), (6, "at once", at_once)):
            warm, *prompts = prompts_of(seed, 1 + ROUNDS, tokens)
            ask(first, second, warm)
            times = [ask(first, second, prompt) for prompt in prompts]
            print(f"prefill, {name:<9}", ms(prefill for prefill, _ in times))
            print(f"decode, {name:<10}", ms(decode for _, decode in times))
    print(second.report, end="")


def in_turn(first, second, prompt):
    return complete(first, [prompt], 1), complete(second, [prompt], 1)


def at_once(first, second, prompt):
    with ThreadPoolExecutor(2) as threads:
        return [*threads.map(lambda server: complete(server, [prompt], 1), (first, second))]


def steps(program, options, forms):
    for turn in range(2):
        for name, more in forms.items():
            with Server(program, *options, "--concurrency", str(STREAMS), *more) as server:
                complete(server, prompts_of(10 + turn, STREAMS, CONTEXT), 8)
                before = server.metrics()
                complete(server, prompts_of(20 + turn, STREAMS, CONTEXT), NEW)
                after = server.metrics()
                count, seconds = (after[key] - before[key] for key in
                                  ("kvarena_server_step_seconds_count", "kvarena_server_step_seconds_sum"))
                parts = {key: after[key] - before[key] for key in after if "busy_seconds" in key}
            names = [key.split('"')[1] for key in parts]
            parts = ", ".join(f"{part} {1e6 * value / count:.0f}" for part, value in zip(names, parts.values()))
            print(f"{name:<18}{1e3 * seconds / count:9.3f} ms a step; us: {parts}")


def main(program, folder, tokens, *options):
    swap = ["--swap-space", "16"]
    store = [*swap, "--cache-dir", os.path.join(folder, "records"), "--flush-seconds", "120"]
    print(f"first token of {tokens} tokens, ms")
    first_tokens(program, options, store, int(tokens))
    print("prefill and decode apart, ms")
    apart(program, options, store, int(tokens))
    print(f"steps of {STREAMS} streams")
    steps(program, options, {"pool alone": [], "swap memory": swap, "swap and store": store})


if __name__ == "__main__":
    main(*sys.argv[1:])
