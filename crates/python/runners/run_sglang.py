"""Judges the tree core by SGLang's unified radix cache: `python run_sglang.py [--wheel FOLDER] [--suite CHECKOUT]`.

Needs torch, numpy, msgspec, regex, and SGLang's wheel of 0.5.23, installed or unpacked in FOLDER; its other
requirements may lack, except for dill where triton is installed. Random programs on SGLang's Python core and on
kvarena's must have equal answers. A replay of a trace gives the time in the core and in the cache's calls, for each
core that runs here. With a checkout, also runs SGLang's own suite on kvarena's core. The wheel's Rust core needs a
torch of 2.11 to 2.14.
"""

import argparse
import array
import importlib.abc
import importlib.machinery
import os
import random
import subprocess
import sys
import time
import types
from abc import ABCMeta

import torch

from kvarena import replay

SUITE = "test/registered/unit/mem_cache/test_unified_radix_cache_unittest.py"


class Anything(ABCMeta):
    """The type of stand-ins: classes whose attributes, items and results are themselves."""

    def __getattr__(cls, name):
        # SGLang reads this attribute of a class of transformers.
        if name.startswith("__") and name != "__class_validators__":
            raise AttributeError(name)
        return cls

    def __iter__(cls):
        return iter(())

    def __call__(cls, *arguments, **keywords):
        if cls is not STAND_IN:
            return super().__call__()  # of a class that SGLang derives
        is_decorator = len(arguments) == 1 and callable(arguments[0]) and not keywords
        return arguments[0] if is_decorator else cls

    def __getitem__(cls, key):
        return cls

    __or__ = __ror__ = __getitem__

    def register(cls, *arguments, **keywords):
        return cls

    def __setitem__(cls, key, value):
        pass

    def __contains__(cls, key):
        return False

    def __len__(cls):
        return 0

    def __lt__(cls, other):
        return False

    __gt__ = __le__ = __ge__ = __lt__


class STAND_IN(metaclass=Anything):
    def __init_subclass__(cls, **keywords):
        pass


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return STAND_IN


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports stand-ins for what SGLang requires besides torch. The tree cores use none of it."""

    ALWAYS = {"sglang", "torch", "numpy", "msgspec", "kvarena", *sys.stdlib_module_names}
    IF_INSTALLED = {"dill", "triton", "psutil", "zmq", "orjson", "packaging", "regex"}

    def find_spec(self, name, path, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        by_sglang = frame.f_globals.get("__name__", "").startswith("sglang.")
        root = name.split(".")[0]
        if root in self.ALWAYS or not by_sglang:
            return None
        if root in self.IF_INSTALLED and importlib.machinery.PathFinder.find_spec(name, path):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


class Allocator:
    """The calls of an allocator that the cache makes."""

    device = "cpu"

    def __init__(self, pages, page_size):
        self.page_size, self.size = page_size, pages * page_size
        self.free_pages = list(range(pages, 0, -1))  # page 0 is for padding
        self.freed = []

    def alloc(self, count):
        pages = torch.tensor([self.free_pages.pop() for _ in range(count)], dtype=torch.int64)
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()

    def free_segment(self, indices, start_pos=0):
        indices = indices.tolist()
        pages = [index // self.page_size for index in indices[:: self.page_size]]
        assert indices == [page * self.page_size + i for page in pages for i in range(self.page_size)], "whole pages"
        self.free_pages += pages
        self.freed += pages

    def available_size(self):
        return len(self.free_pages) * self.page_size

    def take_freed(self):
        freed, self.freed = self.freed, []
        assert len(set(freed)) == len(freed), "freed once"
        return sorted(freed)


def load(wheel):
    if wheel:
        sys.path.insert(0, os.path.abspath(wheel))
    sys.meta_path.insert(0, Missing())
    from kvarena.adapters import sglang

    sglang.register()


def cache(backend, pages, page_size):
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    return UnifiedRadixCache(CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=Allocator(pages, page_size),
        page_size=page_size, tree_components=(ComponentType.FULL,), tree_core_backend=backend))


def key(tokens, extra_key=None):
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(array.array("q", tokens), extra_key)


def match(one, *of):
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    return one.match_prefix(MatchPrefixParams(key=key(*of)))


def insert(one, tokens, slots, extra_key=None, prev=0):
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    return one.insert(InsertParams(key=key(tokens, extra_key), value=slots, prev_prefix_len=prev))


def evict(one, count):
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    return one.evict(EvictParams(num_tokens=count)).num_tokens_evicted


class Program:
    """One random program on both cores. Their allocators hand out the same pages while all answers are equal."""

    def __init__(self, seed, pages=24):
        self.random = random.Random(seed)
        self.page_size = self.random.choice([1, 2, 4])
        self.caches = [cache(backend, pages, self.page_size) for backend in ("kvarena", "python")]
        self.pages, self.nodes, self.locked, self.calls = pages, [], [], 0

    def equal(self, call):
        ours, theirs = [call(one) for one in self.caches]
        assert ours == theirs, (ours, theirs)
        return ours

    def check(self):
        self.equal(lambda one: (one.evictable_size(), one.protected_size(), tuple(one.total_size())))
        self.equal(lambda one: one.token_to_kv_pool_allocator.take_freed())
        for one in self.caches:
            one.tree_core.sanity_check([], [])
            cached = one.evictable_size() + one.protected_size()
            assert cached + one.token_to_kv_pool_allocator.available_size() == self.pages * self.page_size
            one.token_to_kv_pool_allocator.free_pages.sort()
        self.calls += 1

    def tokens(self):
        tokens = [self.random.randrange(2) for _ in range(self.random.randrange(1, 6 * self.page_size))]
        return tokens, self.random.choice([None, None, "adapter"])

    def match(self):
        tokens, extra_key = self.tokens()
        found = [match(one, tokens, extra_key) for one in self.caches]
        ours, theirs = found
        assert ours.device_prefix_len == theirs.device_prefix_len and ours.host_hit_length == 0
        if ours.device_prefix_len:
            nodes = tuple(one.last_device_node for one in found)
            slots = [one.path_device_indices(node).tolist() for one, node in zip(self.caches, nodes)]
            assert slots[0] == slots[1] and len(slots[0]) == ours.device_prefix_len
            self.nodes.append(nodes)

    def insert(self):
        tokens, extra_key = self.tokens()
        count = len(tokens) // self.page_size
        if count > len(self.caches[0].token_to_kv_pool_allocator.free_pages):
            return
        done = []
        for one in self.caches:
            slots = one.token_to_kv_pool_allocator.alloc(count)
            done.append(insert(one, tokens[: count * self.page_size], slots, extra_key))
        assert done[0].prefix_len == done[1].prefix_len
        if count:
            self.nodes.append(tuple(one.last_device_node for one in done))

    def lock(self):
        if self.nodes:
            nodes = self.random.choice(self.nodes)
            receipts = [one.inc_lock_ref(node) for one, node in zip(self.caches, nodes)]
            self.locked.append((nodes, [receipt.to_dec_params() for receipt in receipts]))

    def unlock(self):
        if self.locked:
            nodes, receipts = self.locked.pop(self.random.randrange(len(self.locked)))
            for one, node, receipt in zip(self.caches, nodes, receipts):
                one.dec_lock_ref(node, receipt)

    def evict_all(self):
        self.equal(lambda one: evict(one, one.evictable_size()))
        self.nodes = [nodes for nodes, _ in self.locked]

    def evict_some(self):
        """The last call: SGLang evicts whole nodes, and unlocking does not refresh them."""
        count = self.random.randrange(self.caches[0].evictable_size() + 1)
        ours, theirs = (evict(one, count) for one in self.caches)
        assert ours == -(-count // self.page_size) * self.page_size <= theirs or count == 0
        self.caches[0].tree_core.sanity_check([], [])
        assert self.equal(lambda one: one.protected_size()) == self.caches[0].protected_size()

    def run(self):
        calls = [self.match] * 3 + [self.insert] * 3 + [self.lock, self.unlock, self.evict_all]
        for _ in range(self.random.randrange(4, 20)):
            self.random.choice(calls)()
            self.check()
        self.evict_some()


def run_programs(count):
    begun, calls = time.perf_counter(), 0
    for seed in range(count):
        program = Program(seed)
        try:
            program.run()
        except BaseException:
            print(f"failed with seed {seed}", file=sys.stderr)
            raise
        calls += program.calls
    print(f"{count:,} random programs, {calls:,} calls: equal answers of the Python core and kvarena's in "
          f"{time.perf_counter() - begun:.0f} s", flush=True)


class Timed:
    """A tree core whose calls are timed, in seconds of the processor."""

    def __init__(self, core):
        object.__setattr__(self, "core", core)
        object.__setattr__(self, "seconds", 0.0)

    def __getattr__(self, name):
        value = getattr(self.core, name)
        if not callable(value):
            return value

        def call(*arguments, **keywords):
            begun = time.process_time()
            try:
                return value(*arguments, **keywords)
            finally:
                object.__setattr__(self, "seconds", self.seconds + time.process_time() - begun)

        return call

    def __setattr__(self, name, value):
        setattr(self.core, name, value)


def serve(one, tokens):
    """One request: match, lock, evict what lacks, insert, unlock. Returns the hit and the seconds of the cache."""
    allocator, size = one.token_to_kv_pool_allocator, one.page_size
    seconds, begun = 0.0, time.process_time()
    found = match(one, tokens[:-1])
    receipt = one.inc_lock_ref(found.last_device_node).to_dec_params()
    seconds += time.process_time() - begun
    count = len(tokens) // size - found.device_prefix_len // size
    lacking = count - len(allocator.free_pages)
    begun = time.process_time()
    if lacking > 0:
        evict(one, lacking * size)
    slots = one.path_device_indices(found.last_device_node)
    seconds += time.process_time() - begun
    fits = count <= len(allocator.free_pages)
    slots = torch.cat([slots, allocator.alloc(count)]) if fits else slots
    begun = time.process_time()
    if fits:
        insert(one, tokens[: len(tokens) // size * size], slots, prev=found.device_prefix_len)
    one.dec_lock_ref(found.last_device_node, receipt)
    return found.device_prefix_len, seconds + time.process_time() - begun


def run_replay(trace, count, pages, page_size, block, cores):
    requests = []
    for length, _, ids in replay.requests(trace):
        tokens = array.array("q", (block * number + i for number in ids for i in range(block)))
        requests.append(tokens[: min(length, len(tokens))])
        if len(requests) == count:
            break
    print(f"{len(requests):,} requests, {sum(map(len, requests)):,} tokens, {pages:,} pages of {page_size} tokens")
    print(f"{'core':<10}{'hit tokens':>14}{'us a request: core':>22}{'cache':>12}")
    least = {}
    for backend in cores * 3:  # the least of three runs
        one = cache(backend, pages, page_size)
        for tokens in requests[:20]:
            serve(one, tokens)
        one.tree_core = timed = Timed(one.tree_core)
        served = [serve(one, tokens) for tokens in requests[20:]]
        core, whole = (1e6 * all / len(served) for all in (timed.seconds, sum(spent for _, spent in served)))
        hits = sum(hit for hit, _ in served)
        before = least.get(backend, (hits, core, whole))
        least[backend] = (hits, min(core, before[1]), min(whole, before[2]))
    for backend, (hits, core, whole) in least.items():
        print(f"{backend:<10}{hits:>14,}{core:>22.1f}{whole:>12.1f}", flush=True)


def run_suite(checkout):
    """Runs the suite on kvarena's core, and lists how each case ends there and on the Python core."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join([os.path.join(checkout, "python"), here, os.environ.get("PYTHONPATH", "")])
    ends = {}
    for backend in ("kvarena", "python"):
        command = [sys.executable, "-m", "pytest", "-rA", "-q", "-p", "run_sglang", "-k", "FULL", SUITE]
        env = {**os.environ, "PYTHONPATH": path, "KVARENA_SUITE_CORE": backend}
        output = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True).stdout
        lines = [line.split(" ", 2) for line in output.splitlines()]
        kinds = ("PASSED", "FAILED", "ERROR", "SKIPPED")
        ends[backend] = {line[1]: line[0] for line in lines if line[0] in kinds and len(line) > 1}
        print(f"{backend}: {output.splitlines()[-1]}")
    for case, end in sorted(ends["kvarena"].items()):
        alike = " (the Python core alike)" if end != "PASSED" and ends["python"].get(case) == end else ""
        print(f"{end:<8}{case}{alike}")


def pytest_collection_modifyitems(items):
    """This file is also the pytest plugin of the suite: it names the core in the suite's variable."""
    from kvarena.adapters import sglang
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import get_tree_core_factory

    if get_tree_core_factory("kvarena") is None:
        sglang.register()
    for module in {item.module for item in items}:
        module._TREE_CORE_TEST_BACKEND = os.environ["KVARENA_SUITE_CORE"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument("--wheel", help="folder of the unpacked wheel, if SGLang is not installed")
    parser.add_argument("--suite", help="a checkout with SGLang's tests")
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--trace", default=replay.SAMPLE, help="in Mooncake's form (default: the sample)")
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--pages", type=int, default=20_000)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--cores", default="python,rust,kvarena", help="cores to replay the trace on")
    parser.add_argument("--block", type=int, default=512, help="tokens of a block of the trace")
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    load(options.wheel)
    torch.set_num_threads(1)
    run_programs(options.programs)
    run_replay(options.trace, options.requests, options.pages, options.page_size, options.block,
               options.cores.split(","))
    if options.suite:
        run_suite(os.path.abspath(options.suite))
