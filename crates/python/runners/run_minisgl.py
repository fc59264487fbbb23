"""Judges the adapter by mini-sglang: `python run_minisgl.py CHECKOUT [PROGRAMS]`.

Runs the checkout's tests/core/test_cache_allocate.py, unmodified, on kvarena's tree. Then runs random programs beside
mini-sglang's own radix cache. Needs its requirements and torch, but no GPU. The checkout's kernel of key comparison is
compiled at its first use.
"""

import os
import random
import subprocess
import sys
import time

TESTS = "tests/core/test_cache_allocate.py"


def pytest_configure(config):
    """This file is also the pytest plugin. The tests ask for the cache "radix", so the registry's entry is replaced."""
    from kvarena.adapters import minisgl

    config.made = 0

    def create(device):
        config.made += 1
        return minisgl.PrefixCache(device)

    minisgl.SUPPORTED_CACHE_MANAGER._registry["radix"] = create


def pytest_unconfigure(config):
    print(f"prefix caches of kvarena that the tests made: {config.made}")


def run_tests(checkout):
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join([os.path.join(checkout, "python"), here, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "run_minisgl", "-o", "addopts=", TESTS]
    return subprocess.run(command, cwd=checkout, env={**os.environ, "PYTHONPATH": path}).returncode


class Program:
    """One random program on both caches. Each has its own handles; pages are shared."""

    def __init__(self, seed, caches, page_size, pages):
        self.random = random.Random(seed)
        self.ours, self.theirs = caches
        self.page_size, self.pages = page_size, pages
        self.free = list(range(pages))
        self.handles = []  # (ours, theirs) of cached prefixes, without a lock
        self.locked = []
        self.checks = 0

    def ids(self):
        import torch

        return torch.tensor([self.random.randrange(2) for _ in range(self.random.randrange(6 * self.page_size))],
                            dtype=torch.int32)

    def both(self, call):
        return call(self.ours), call(self.theirs)

    def check(self):
        ours, theirs = self.both(lambda cache: cache.size_info)
        assert tuple(ours) == tuple(theirs), (ours, theirs)
        assert ours.total_size // self.page_size + len(self.free) == self.pages
        self.ours.check_integrity()
        self.theirs.check_integrity()
        self.checks += 1

    def slots(self, pages):
        import torch

        slots = [page * self.page_size + offset for page in pages for offset in range(self.page_size)]
        return torch.tensor(slots, dtype=torch.int32)

    def match(self):
        ids = self.ids()
        ours, theirs = (one.cuda_handle for one in self.both(lambda cache: cache.match_prefix(ids)))
        assert ours.cached_len == theirs.cached_len
        if ours.cached_len:
            assert ours.get_matched_indices().equal(theirs.get_matched_indices())
            self.handles.append((ours, theirs))

    def insert(self):
        ids = self.ids()
        count = len(ids) // self.page_size
        if count > len(self.free):
            return
        pages = [self.free.pop() for _ in range(count)]
        slots = self.slots(pages)
        # Both get the indices that a request has: those of its match, then its own.
        tail = self.slots([0])[: len(ids) - len(slots)]
        ours, theirs = self.both(lambda cache: cache.insert_prefix(ids, slots.new_tensor([*slots, *tail])))
        assert ours.cached_len == theirs.cached_len
        assert ours.handle.cached_len == theirs.handle.cached_len
        self.free += pages[: ours.cached_len // self.page_size]
        if count:
            self.handles.append((ours.handle, theirs.handle))

    def lock(self):
        if self.handles:
            pair = self.random.choice(self.handles)
            self.ours.lock_handle(pair[0])
            self.theirs.lock_handle(pair[1])
            self.locked.append(pair)

    def unlock(self):
        if self.locked:
            pair = self.locked.pop(self.random.randrange(len(self.locked)))
            self.ours.lock_handle(pair[0], unlock=True)
            self.theirs.lock_handle(pair[1], unlock=True)

    def in_use(self):
        return {slot for ours, _ in self.locked for slot in ours.get_matched_indices().tolist()}

    def evicted(self, indices):
        """Checks evicted indices, and returns their pages."""
        indices = indices.tolist()
        pages = [index // self.page_size for index in indices[:: self.page_size]]
        assert indices == self.slots(pages).tolist(), "whole pages"
        assert len(set(pages)) == len(pages), "distinct pages"
        assert not set(pages) & set(self.free) and not set(indices) & self.in_use(), "cached and not locked"
        return pages

    def evict_all(self):
        size = self.ours.size_info.evictable_size
        ours, theirs = self.both(lambda cache: self.evicted(cache.evict(size)))
        assert set(ours) == set(theirs) and len(ours) * self.page_size == size
        self.free += ours
        self.handles = [pair for pair in self.handles if self.is_cached(pair)]

    def is_cached(self, pair):
        import kvarena

        try:
            pair[0].get_matched_indices()
        except kvarena.Gone:
            return False
        return True

    def evict_some(self):
        """The last call: the caches choose other victims, and theirs evicts whole nodes."""
        size = self.random.randrange(self.ours.size_info.evictable_size // self.page_size + 1) * self.page_size
        protected = self.ours.size_info.protected_size
        ours, theirs = self.both(lambda cache: self.evicted(cache.evict(size)))
        assert len(ours) * self.page_size == size <= len(theirs) * self.page_size
        assert self.ours.size_info.protected_size == self.theirs.size_info.protected_size == protected
        self.ours.check_integrity()
        for cache in (self.ours, self.theirs):
            try:
                cache.evict(cache.size_info.evictable_size + self.page_size)
            except (RuntimeError, AssertionError):
                continue
            raise AssertionError("more than is evictable was evicted")

    def run(self):
        calls = [self.match] * 3 + [self.insert] * 3 + [self.lock, self.unlock, self.evict_all]
        for _ in range(self.random.randrange(4, 20)):
            self.random.choice(calls)()
            self.check()
        self.evict_some()


def run_programs(checkout, programs):
    sys.path.insert(0, os.path.join(checkout, "python"))
    import torch
    from minisgl import core
    from minisgl.kvcache.radix_cache import RadixPrefixCache

    from kvarena.adapters import minisgl

    torch.set_num_threads(1)
    begun, checks, pages = time.perf_counter(), 0, 24
    for seed in range(programs):
        page_size = (1, 2, 4)[seed % 3]
        core._GLOBAL_CTX = core.Context(page_size=page_size)
        device = torch.device("cpu")
        program = Program(seed, (minisgl.PrefixCache(device, pages), RadixPrefixCache(device)), page_size, pages)
        try:
            program.run()
        except BaseException:
            print(f"failed with seed {seed}", file=sys.stderr)
            raise
        checks += program.checks
    print(f"{programs:,} random programs, {checks:,} calls: equal hits, sizes and indices "
          f"in {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    folder = os.path.abspath(sys.argv[1])
    failed = run_tests(folder)
    run_programs(folder, int(sys.argv[2]) if len(sys.argv) > 2 else 100_000)
    sys.exit(failed)
