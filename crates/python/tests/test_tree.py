"""The calls of `kvarena.Tree`. `driver.py` compares random calls with a naive tree."""

import os
import pickle
import threading

import driver
import pytest

import kvarena
from kvarena import Tree

TOKENS = list(range(100, 112))


def test_match_lock_and_evict():
    tree = Tree(pages=8, page_size=4)
    handle, known = tree.insert(TOKENS, list(range(4, 16)))
    assert known == 0
    assert tree.match(TOKENS[:-1]) == (tree.match(TOKENS[:8])[0], 8)
    assert tree.match(TOKENS) == (handle, 12)
    assert tree.slots(handle).tolist() == list(range(4, 16))
    tree.lock(handle)
    assert (tree.evictable, tree.protected) == (0, 12)
    with pytest.raises(kvarena.OutOfPages) as error:
        tree.evict(1)
    assert (error.value.wanted, error.value.available, error.value.after) == (1, 0, None)
    assert tree.unlock(handle) is None
    assert sorted(tree.evict(5)) == list(range(8, 16))
    with pytest.raises(kvarena.Gone, match="names no cached prefix"):
        tree.lock(handle)
    assert tree.find(TOKENS) == 4
    tree.verify()


def test_insert_takes_only_new_pages():
    tree = Tree(pages=16)
    first, _ = tree.insert([1, 2, 3], [0, 1, 2])
    handle, known = tree.insert([1, 2, 9], [5, 6, 7])
    assert known == 2
    assert tree.slots(handle).tolist() == [0, 1, 7]
    assert tree.slots(first).tolist() == [0, 1, 2]
    assert str(tree).startswith("4 pages evictable, 0 protected")


def test_extend_moves_the_lock():
    tree = Tree(pages=16)
    handle, _ = tree.insert([1, 2], [0, 1])
    tree.lock(handle)
    longer, known = tree.extend(handle, [3], [2])
    assert known == 0 and tree.protected == 3
    with pytest.raises(kvarena.Gone):
        tree.slots(handle)
    with pytest.raises(kvarena.NotLocked):
        tree.extend(tree.match([1])[0], [3], [4])
    tree.unlock(longer)
    with pytest.raises(kvarena.NotLocked):
        tree.unlock(longer)
    with pytest.raises(kvarena.NotLocked):
        tree.extend(0, [3], [4])


def test_reset_returns_idle_slots_now_and_locked_ones_at_the_unlock():
    tree = Tree(pages=16, page_size=2)
    locked, _ = tree.insert([1, 2], [0, 1])
    tree.lock(locked)
    tree.insert([3, 4], [2, 3])
    assert tree.reset().tolist() == [2, 3]
    assert tree.find([1, 2]) == 0
    assert tree.unlock(locked).tolist() == [0, 1]


def test_evict_node_names_what_it_evicts():
    tree = Tree(pages=16)
    short, _ = tree.insert([1, 2], [0, 1])
    long, _ = tree.insert([1, 2, 3, 4], [9, 9, 2, 3])
    handle, slots = tree.evict_node()
    assert (handle, slots.tolist()) == (long, [2, 3])
    assert tree.slots(short).tolist() == [0, 1]
    tree.evict_node()
    assert tree.evict_node() is None


def test_handles_are_ordered_integers():
    tree = Tree(pages=16)
    first, _ = tree.insert([1], [0])
    second, _ = tree.insert([2], [1])
    assert type(first) is int and 0 < first < second < 1 << 128
    assert pickle.loads(pickle.dumps({first: second})) == {first: second}
    assert tree.match([5]) == (0, 0)
    tree.lock(0)
    assert tree.unlock(0) is None


def test_namespaces_share_nothing():
    tree = Tree(pages=16)
    tree.insert([1, 2], [0, 1], namespace=7)
    assert tree.find([1, 2], 7) == 2
    assert tree.find([1, 2]) == 0


@pytest.mark.parametrize("recipe", ["dynamo", "nano_vllm", "minivllm", "vllm_sha256_cbor", "sglang_sha256"])
def test_events_and_hashes(recipe):
    tree = Tree(pages=16, page_size=2, hashing=recipe, event_pages=8)
    tree.insert([1, 2, 3, 4], [0, 1, 2, 3])
    (event,) = tree.drain_events()
    kind, medium, namespace, parent, hashes, tokens = event
    assert (kind, medium, namespace, parent, tokens.tolist()) == ("stored", "device", 0, None, [1, 2, 3, 4])
    assert tree.find_hashes(hashes) == 4
    assert tree.find_hashes(hashes[1:]) == 0
    tree.evict(2)
    assert tree.drain_events() == [("removed", "device", hashes[1:])]
    tree.restate_events()
    assert [event[0] for event in tree.drain_events()] == ["cleared", "stored"]


def test_names_of_namespaces():
    tree = Tree(pages=16, hashing="sglang_sha256")
    with pytest.raises(ValueError, match="has no names"):
        tree.insert([1], [0], namespace=3)
    tree.name_namespace(3, lora="adapter", salt="tenant")
    tree.insert([1], [0], namespace=3)
    with pytest.raises(ValueError, match="other names"):
        tree.name_namespace(3, lora="another")
    tree.forget_namespace(3)
    with pytest.raises(ValueError):
        tree.insert([2], [1], namespace=3)


def test_wide_slots():
    assert Tree(4, wide_slots=True).reset().dtype == "int64"
    assert Tree(4).reset().dtype == "int32"
    tree = Tree(1 << 22, 1024, prefault=False)
    last = range((1 << 32) - 1024, 1 << 32)
    handle, _ = tree.insert(range(1024), last)
    assert tree.slots(handle).tolist() == list(last)


@pytest.mark.parametrize(
    "arguments",
    [dict(pages=0), dict(pages=2**32 - 1), dict(pages=4, page_size=0), dict(pages=4, page_size=1025),
     dict(pages=4, hashing="md5"), dict(pages=4, event_pages=1), dict(pages=-1), dict(pages=2**32)],
)
def test_wrong_configs(arguments):
    with pytest.raises(ValueError):
        Tree(**arguments)


def test_too_much_memory_is_an_error():
    with pytest.raises(MemoryError, match="bytes"):
        Tree(2**32 - 2, 1024)


def test_one_thread_at_a_time():
    tree = Tree(pages=1 << 20)
    begun, errors = threading.Event(), []

    def audit():
        begun.set()
        tree.verify()

    thread = threading.Thread(target=audit)
    thread.start()
    begun.wait()
    while thread.is_alive():
        try:
            tree.insert([1], [0])
        except RuntimeError as error:
            errors.append(str(error))
    thread.join()
    assert errors and set(errors) == {"Already borrowed"}
    tree.verify()


def test_a_fork_has_a_copy():
    tree = Tree(pages=16)
    tree.insert([1, 2], [0, 1])
    child = os.fork()
    if child == 0:
        tree.evict(2)
        os._exit(0 if tree.find([1, 2]) == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert tree.find([1, 2]) == 2


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_beside_a_naive_tree(seed):
    driver.run(5_000, seed)


def test_the_driver_notices_another_order_of_eviction(monkeypatch):
    def touch(self, nodes):
        self.clock -= 1
        for node in nodes:
            node.used = self.clock

    monkeypatch.setattr(driver.Driver, "touch", touch)
    with pytest.raises(AssertionError, match="recently used"):
        driver.run(5_000)
