"""Drives a Tree with random calls beside a naive tree: `python driver.py OPERATIONS [SEED]`."""

import array
import random
import sys
import time

import kvarena


class Node:
    """One page of a prefix."""

    __slots__ = ("page", "parent", "key", "children", "locks", "own_locks", "used", "handle", "returned", "stale")

    def __init__(self, page, parent, key):
        self.page, self.parent, self.key = page, parent, key
        self.children = {}
        self.locks = self.own_locks = self.used = self.returned = 0
        self.handle = None  # of the prefix that ends here, once a call has returned it
        self.stale = parent is not None and parent.stale

    def path(self):
        node, path = self, []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]


class Driver:
    NAMESPACES = 2

    def __init__(self, seed, pages=48):
        self.random = random.Random(seed)
        self.page_size = self.random.choice([1, 2, 4])
        self.tree = kvarena.Tree(pages, self.page_size, wide_slots=self.random.random() < 0.5)
        self.free = list(range(pages))
        self.roots = [Node(None, None, None) for _ in range(self.NAMESPACES)]
        self.by_page = {}  # the cached pages
        self.by_handle = {}
        self.seen = {0}  # every handle that a call has returned
        self.locked = []  # a handle for each lock
        self.dead = []
        self.clock = 0

    # The naive tree.

    def walk(self, node, keys):
        found = []
        for key in keys:
            node = node.children.get(key)
            if node is None:
                break
            found.append(node)
        return found

    def touch(self, nodes):
        self.clock += 1
        for node in nodes:
            node.used = self.clock

    def attach(self, node, keys, pages):
        for key, page in zip(keys, pages):
            child = Node(page, node, key)
            child.used = self.clock
            node.children[key] = self.by_page[page] = child
            node = child
        return node

    def detach(self, node):
        assert node.locks == 0 and not node.children
        if node.handle is not None:
            self.kill(node)
        del self.by_page[node.page]
        if node.parent.children.get(node.key) is node:
            del node.parent.children[node.key]
        self.free.append(node.page)

    def kill(self, node):
        del self.by_handle[node.handle]
        self.dead.append(node.handle)
        node.handle = None

    def returned(self, handle, node):
        """Checks a handle that a call has returned for the prefix that ends at `node`."""
        if node.parent is None:
            assert handle == 0
            return
        if node.handle is None:
            assert handle not in self.seen, "a handle is used twice"
            self.seen.add(handle)
            node.handle, node.returned = handle, 0
            self.by_handle[handle] = node
        assert node.handle == handle
        node.returned += 1

    def lock_path(self, node, by):
        for one in node.path():
            one.locks += by
            assert one.locks >= 0
        node.own_locks += by

    # Arguments.

    def ints(self, values):
        kind = self.random.randrange(4)
        if kind == 0:
            return list(values)
        if kind == 1:
            return array.array("i", values)
        if kind == 2:
            return array.array("q", values)
        return memoryview(array.array("I", [x for value in values for x in (value, 0)]))[::2]

    def slots(self, pages):
        return [page * self.page_size + offset for page in pages for offset in range(self.page_size)]

    def pages(self, slots):
        slots = slots.tolist()
        pages = [slot // self.page_size for slot in slots[:: self.page_size]]
        assert slots == self.slots(pages)
        return pages

    def keys(self, count):
        return [tuple(self.random.randrange(3) for _ in range(self.page_size)) for _ in range(count)]

    def tokens(self, keys):
        return [token for key in keys for token in key]

    def take(self, count):
        lacking = count - len(self.free)
        if lacking > 0:
            if lacking > sum(node.locks == 0 for node in self.by_page.values()):
                return None
            self.evict(lacking)
        return [self.free.pop() for _ in range(count)]

    # Operations.

    def match(self):
        namespace, keys = self.random.randrange(self.NAMESPACES), self.keys(self.random.randrange(8))
        tokens = self.tokens(keys) + [7] * self.random.randrange(self.page_size)
        found = self.walk(self.roots[namespace], keys)
        assert self.tree.find(self.ints(tokens), namespace) == len(found) * self.page_size
        handle, length = self.tree.match(self.ints(tokens), namespace)
        assert length == len(found) * self.page_size
        self.touch(found)
        self.returned(handle, found[-1] if found else self.roots[namespace])
        assert self.pages(self.tree.slots(handle)) == [node.page for node in found]
        if self.random.random() < 0.3:
            self.lock(handle)

    def insert(self):
        namespace, keys = self.random.randrange(self.NAMESPACES), self.keys(self.random.randrange(1, 7))
        pages = self.take(len(keys))
        if pages is None:
            return
        found = self.walk(self.roots[namespace], keys)
        handle, known = self.tree.insert(self.ints(self.tokens(keys)), self.ints(self.slots(pages)), namespace)
        assert known == len(found) * self.page_size
        self.touch(found)
        end = found[-1] if found else self.roots[namespace]
        end = self.attach(end, keys[len(found):], pages[len(found):])
        self.free += pages[: len(found)]
        self.returned(handle, end)

    def extend(self):
        if not self.locked:
            return
        keys = self.keys(self.random.randrange(1, 5))
        pages = self.take(len(keys))
        if pages is None:
            return
        at = self.random.randrange(len(self.locked))
        old = self.locked[at]
        node = self.by_handle[old]
        grows = node.returned == 1 and node.own_locks == 1 and not node.children
        found = self.walk(node, keys)
        handle, known = self.tree.extend(old, self.ints(self.tokens(keys)), self.ints(self.slots(pages)))
        assert known == len(found) * self.page_size
        end = self.attach(found[-1] if found else node, keys[len(found):], pages[len(found):])
        self.free += pages[: len(found)]
        self.lock_path(end, 1)
        self.lock_path(node, -1)
        if grows:
            self.kill(node)
        self.returned(handle, end)
        self.locked[at] = handle

    def lock(self, handle=None):
        if handle is None:
            if not self.by_handle:
                return
            handle = self.random.choice(list(self.by_handle))
        self.tree.lock(handle)
        if handle:
            self.lock_path(self.by_handle[handle], 1)
            self.locked.append(handle)

    def unlock(self):
        if not self.locked:
            return
        handle = self.locked.pop(self.random.randrange(len(self.locked)))
        node = self.by_handle[handle]
        freed = self.tree.unlock(handle)
        path = node.path()
        self.lock_path(node, -1)
        idle = [one for one in path if one.locks == 0]
        if node.stale:
            assert sorted(self.pages(freed) if freed else []) == sorted(one.page for one in idle)
            for one in reversed(idle):
                self.detach(one)
        else:
            assert freed is None
            self.touch(idle)

    def evict(self, count=None):
        evictable = sum(node.locks == 0 for node in self.by_page.values())
        count = self.random.randrange(evictable + 1) if count is None else count
        evicted = self.pages(self.tree.evict(count * self.page_size))
        assert len(evicted) == count
        leaves = [node for node in self.by_page.values() if node.locks == 0 and not node.children]
        oldest = {node.page: node for node in leaves}
        for page in self.in_order(evicted):
            node = oldest.pop(page)
            assert all(node.used <= other.used for other in oldest.values()), "not the least recently used"
            parent = node.parent
            self.detach(node)
            if parent.parent is not None and parent.locks == 0 and not parent.children:
                oldest[parent.page] = parent

    def in_order(self, evicted):
        """The pages of a run come in the order of the prefix; eviction takes the last one first."""
        nodes = [self.by_page[page] for page in evicted]
        return [node.page for node in sorted(nodes, key=lambda node: (node.used, -len(node.path())))]

    def reset(self):
        if self.random.random() < 0.9:
            return
        idle = {page for page, node in self.by_page.items() if node.locks == 0}
        assert set(self.pages(self.tree.reset())) == idle
        for node in sorted((self.by_page[page] for page in idle), key=lambda node: -len(node.path())):
            self.detach(node)
        for node in self.by_page.values():
            node.stale = True
        for root in self.roots:
            root.stale = True
        self.roots = [Node(None, None, None) for _ in self.roots]

    def wrong(self):
        """Calls that must fail and change nothing."""
        handle = self.random.choice(self.dead) if self.dead else 1 << 100
        idle = [handle for handle, node in self.by_handle.items() if node.own_locks == 0]
        wrong = [
            (kvarena.Gone, lambda: self.tree.lock(handle)),
            (kvarena.Gone, lambda: self.tree.unlock(handle)),
            (kvarena.Gone, lambda: self.tree.slots(handle)),
            (kvarena.Gone, lambda: self.tree.extend(handle, [], [])),
            (kvarena.OutOfPages, lambda: self.tree.evict(self.tree.evictable + 1)),
            (ValueError, lambda: self.tree.insert([1], [])),
        ]
        if idle:
            wrong.append((kvarena.NotLocked, lambda: self.tree.unlock(self.random.choice(idle))))
        if self.by_page:
            taken = self.slots([self.random.choice(list(self.by_page))])
            wrong.append((ValueError, lambda: self.tree.insert([9] * self.page_size, taken)))
        error, call = self.random.choice(wrong)
        try:
            call()
        except error:
            return
        raise AssertionError(f"{error} was not raised")

    def check(self):
        protected = sum(node.locks > 0 for node in self.by_page.values())
        assert self.tree.protected == protected * self.page_size
        assert self.tree.evictable == (len(self.by_page) - protected) * self.page_size

    def run(self, operations):
        calls = [self.match] * 4 + [self.insert] * 3 + [self.extend, self.lock, self.evict, self.reset, self.wrong]
        for i in range(operations):
            # As many locks as leave pages to evict.
            call = self.unlock if len(self.locked) > self.random.randrange(1, 12) else self.random.choice(calls)
            call()
            self.check()
            if i % 64 == 0:
                self.tree.verify()


def run(operations, seed=0, each=20_000):
    """Runs so many operations, each 20,000 with the next seed."""
    for start in range(0, operations, each):
        try:
            Driver(seed).run(min(each, operations - start))
        except BaseException:
            print(f"failed with seed {seed}", file=sys.stderr)
            raise
        seed += 1


if __name__ == "__main__":
    begun = time.perf_counter()
    count = int(float(sys.argv[1]))
    run(count, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(f"{count:,} operations beside the naive tree in {time.perf_counter() - begun:.0f} s")
