#!/usr/bin/env python3
"""Measures tokens per second and time to first token of `kvarena-server --serve` under load, and of the same work
offline.

    load.py PROGRAM [options] [-- options of kvarena-server]

Needs only Python's standard library. Each client is a process that keeps its share of requests open as streams and
sends the next request when one has ended. The script prints one line of JSON for the served run and one for the
offline run. A warm-up of the same shape, with other prompts, comes first. On a GPU, the warm-up captures CUDA graphs
and selects an implementation for each matrix product. The offline run needs no separate warm-up: on a GPU,
`kvarena-server --bench offline` includes one; on the CPU, `kvarena-server --requests` needs none.

    load.py target/release/kvarena-server                                           # the shipped model, on the CPU
    load.py ./kvarena-server --list offline.json --at-a-time 256 --temperature 0.6 --bench \\
        -- --backend cuda --random-model qwen3-0.6b --concurrency 256                   # as --bench offline, but over HTTP
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import subprocess
import sys
import tempfile
import time

from server import Server


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=50)
    parser.add_argument("--list", help='JSON: [{"prompt_tokens": N, "output_tokens": N}, ..]; replaces the three above')
    parser.add_argument("--at-a-time", type=int, default=16, help="requests that are open at a time")
    parser.add_argument("--processes", type=int, default=None, help="client processes [default: one for 32 open requests]")
    parser.add_argument("--vocab", type=int, default=200, help="prompts contain tokens below this number")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--bench", action="store_true", help="measure offline by `kvarena-server --bench offline`, on a GPU")
    parser.add_argument("--no-offline", action="store_true")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    chosen = parser.parse_args(sys.argv[1:split])
    chosen.server_options = sys.argv[split + 1 :]
    chosen.processes = chosen.processes or max(1, chosen.at_a_time // 32)
    return chosen


def work(chosen, seed):
    """Returns requests in the format of `kvarena-server --requests`."""
    if chosen.list:
        with open(chosen.list) as file:
            sizes = [(item["prompt_tokens"], item["output_tokens"]) for item in json.load(file)]
    else:
        sizes = [(chosen.prompt_tokens, chosen.new_tokens)] * chosen.requests
    draw = random.Random(seed)
    prompt = lambda length: [draw.randrange(chosen.vocab) for _ in range(length)]
    return [
        {"prompt": prompt(length), "max_new_tokens": new, "temperature": chosen.temperature, "seed": number}
        for number, (length, new) in enumerate(sizes)
    ]


async def stream(host, port, model, request):
    """Sends a request. Returns the seconds to the first token and to the end, and the number of tokens."""
    fields = {
        "model": model, "prompt": request["prompt"], "max_tokens": request["max_new_tokens"],
        "temperature": request["temperature"], "seed": request["seed"], "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }
    body = json.dumps(fields).encode()
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    first, last, usage = None, b"", None
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            first = first or time.perf_counter()
            last = line
        elif line.startswith(b"data: [DONE]"):
            usage = json.loads(last[6:])["usage"]
    ended = time.perf_counter()
    writer.close()
    if usage is None or usage["completion_tokens"] != request["max_new_tokens"]:
        raise RuntimeError(f"the stream ended early: {last!r}")
    return first - begun, ended - begun, usage["completion_tokens"]


async def drive(host, port, model, requests, at_a_time):
    waiting, rows = iter(requests), []

    async def worker():
        for request in waiting:
            rows.append(await stream(host, port, model, request))

    await asyncio.gather(*(worker() for _ in range(at_a_time)))
    return rows


def client(share, barrier, results):
    barrier.wait()
    results.put(asyncio.run(drive(*share)))


def load(server, requests, chosen):
    """Returns all clients' rows, and the seconds from their start to the last end."""
    host, port = server.url.removeprefix("http://").split(":")
    barrier, results = multiprocessing.Barrier(chosen.processes + 1), multiprocessing.Queue()
    clients = []
    for i in range(chosen.processes):
        at_a_time = chosen.at_a_time // chosen.processes + (i < chosen.at_a_time % chosen.processes)
        share = (host, int(port), server.model, requests[i :: chosen.processes], at_a_time)
        clients.append(multiprocessing.Process(target=client, args=(share, barrier, results)))
        clients[-1].start()
    barrier.wait()
    begun = time.perf_counter()
    rows = sum((results.get() for _ in clients), [])
    seconds = time.perf_counter() - begun
    for one in clients:
        one.join()
    return rows, seconds


def quantiles(values):
    values = sorted(values)
    at = lambda part: round(1e3 * values[min(int(part * len(values)), len(values) - 1)], 3)
    return {"median": at(0.5), "p90": at(0.9), "p99": at(0.99), "worst": at(1)}


def served(chosen):
    with Server(chosen.program, "--quiet", *chosen.server_options) as server:
        load(server, work(chosen, 1), chosen)
        before = server.metrics()
        rows, seconds = load(server, work(chosen, 2), chosen)
        after = server.metrics()
    gain = lambda name: after[name] - before[name]
    tokens = sum(row[2] for row in rows)
    steps = gain("kvarena_server_step_seconds_count")
    parts = {
        part: round(1e6 * gain(f'kvarena_server_busy_seconds_total{{part="{part}"}}') / steps, 1)
        for part in ("engine", "launching", "waiting")
    }
    return {
        "part": "serve", "requests": len(rows), "at_a_time": chosen.at_a_time, "clients": chosen.processes,
        "tokens_s": round(tokens / seconds, 1), "seconds": round(seconds, 3),
        "first_token_ms": quantiles([row[0] for row in rows]),
        "token_ms": quantiles([(row[1] - row[0]) / max(row[2] - 1, 1) for row in rows]),
        "steps": int(steps), "step_ms": round(1e3 * gain("kvarena_server_step_seconds_sum") / steps, 3), "us_a_step": parts,
        "audit": server.audit,
    }


def offline(chosen):
    command = [chosen.program, *chosen.server_options]
    if chosen.bench:
        run = subprocess.run([*command, "--bench", "offline", "--json"], capture_output=True, text=True, check=True)
        return json.loads(run.stdout.splitlines()[-1])
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for request in work(chosen, 2):
            print(json.dumps(request), file=file)
        file.flush()
        command += ["--requests", file.name, "--json", "--ignore-eos"]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    number = r"([0-9.]+)"
    tokens, seconds, rate = re.search(rf"{number} new tokens in {number} s: {number} tokens/s", run.stderr).groups()
    first = re.search(rf"time to first token: median {number} ms, worst {number} ms", run.stderr).groups()
    return {
        "part": "offline", "requests": len(work(chosen, 2)), "tokens_s": float(rate), "seconds": float(seconds),
        "first_token_ms": {"median": float(first[0]), "worst": float(first[1])}, "new_tokens": int(tokens),
    }


def main():
    chosen = options()
    print(json.dumps(served(chosen)), flush=True)
    if not chosen.no_offline:
        print(json.dumps(offline(chosen)), flush=True)


if __name__ == "__main__":
    main()
