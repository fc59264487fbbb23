"""Times each call beside an empty one: medians of 9 runs, in microseconds of the processor. `python bench.py`."""

import array
import statistics
import sys
import time
import timeit

from kvarena import Engine, Tree

COUNT, PAGE = 2000, 16
# Goals of calls, and of the sum of an engine's five.
GOALS = {"match, int32 buffer": 0.9, "match, list": 50, "lock": 0.3, "unlock": 0.3, "admit to finish": 6}


def measure(name, call, number, setup="pass"):
    runs = timeit.repeat(call, setup, time.process_time, 9, number)
    once = 1e6 * statistics.median(runs) / number
    goal = f"at most {GOALS[name]}" if name in GOALS else ""
    print(f"{name:<34}{once:>9.2f}   {goal}")


def tree(buffers):
    one = Tree(1024, PAGE)
    handle, _ = one.insert(range(COUNT), range(COUNT))
    measure("empty call", one.restate_events, 100_000)
    for name, tokens in buffers.items():
        measure(f"match, {name}", lambda: one.match(tokens), 20_000 if name != "list" else 2_000)
    measure("slots", lambda: one.slots(handle), 10_000)
    measure("slots to a list", lambda: one.slots(handle).tolist(), 1_000)

    one.lock(handle)  # the times are those of further locks
    timer, locks, unlocks = time.process_time, [], []
    for _ in range(9):
        begun = timer()
        for _ in range(20_000):
            one.lock(handle)
        locks.append(timer() - begun)
        begun = timer()
        for _ in range(20_000):
            one.unlock(handle)
        unlocks.append(timer() - begun)
    one.unlock(handle)
    for name, runs in (("lock", locks), ("unlock", unlocks)):
        print(f"{name:<34}{1e6 * statistics.median(runs) / 20_000:>9.2f}   at most {GOALS[name]}")

    def pair():
        one.lock(handle)
        one.unlock(handle)

    measure("lock and unlock of an idle prefix", pair, 20_000)
    slots = array.array("i", range(COUNT))

    def evict():
        one.evict(COUNT)
        one.insert(buffers["int32 buffer"], slots)

    measure("evict and insert", evict, 2_000)


def engine(tokens):
    one = Engine(1024, PAGE)

    def request():
        seq = one.admit(tokens)
        step = one.plan([(seq, one.extend_max(seq))]).step
        one.commit(step)
        one.complete(step)
        one.finish(seq)

    request()
    measure("admit to finish", request, 10_000)


if __name__ == "__main__":
    print(f"{sys.version.split()[0]}, {COUNT:,} tokens, all cached, pages of {PAGE}; us")
    forms = {"int32 buffer": array.array("i", range(COUNT)), "int64 buffer": array.array("q", range(COUNT)),
             "list": list(range(COUNT))}
    try:
        import numpy

        forms["numpy int32"] = numpy.arange(COUNT, dtype=numpy.int32)
    except ImportError:
        pass
    tree(forms)
    engine(forms["int32 buffer"])
