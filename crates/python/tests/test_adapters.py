"""The public calls of each seam on stand-ins, so that a break shows without a checkout of the engine."""

import array
import random
from types import SimpleNamespace

import numpy as np
import pytest
import stand_ins
from stand_ins import ComponentType, Tensor

import kvarena


@pytest.fixture
def minisgl(monkeypatch):
    stand_ins.torch(monkeypatch)
    context = SimpleNamespace(page_size=4)
    registry = stand_ins.minisgl(monkeypatch, context)
    module = stand_ins.adapter(monkeypatch, "minisgl")
    return SimpleNamespace(module=module, registry=registry, context=context)


def ints(values):
    return Tensor(np.array(values, np.int32))


def test_minisgl_serves_requests(minisgl):
    cache = minisgl.registry["kvarena"]("cpu")
    inserted = cache.insert_prefix(ints(range(10)), ints(range(8, 18)))
    assert (inserted.cached_len, inserted.handle.cached_len) == (0, 8)
    match = cache.match_prefix(ints(range(9))).cuda_handle
    assert match.cached_len == 8
    indices = match.get_matched_indices()
    assert indices.tolist() == list(range(8, 16)) and indices.array.dtype == np.int32
    cache.lock_handle(match)
    assert cache.size_info == (0, 8)
    with pytest.raises(RuntimeError):
        cache.evict(4)
    with pytest.raises(RuntimeError, match="locked"):
        cache.reset()
    cache.lock_handle(match, unlock=True)
    assert cache.insert_prefix(ints(range(8)), ints(range(20, 28))).cached_len == 8
    assert cache.evict(0).tolist() == []
    assert len(cache.evict(4)) == 4
    assert cache.match_prefix(ints([77])).cuda_handle.get_matched_indices().tolist() == []
    cache.reset()
    cache.check_integrity()
    assert cache.size_info == (0, 0)


def test_minisgl_takes_the_size_of_the_pool(minisgl):
    minisgl.context.kv_cache = SimpleNamespace(k_cache=lambda layer: np.zeros((6, 4)))
    cache = minisgl.registry["kvarena"]("cpu")
    cache.insert_prefix(ints(range(4)), ints(range(20, 24)))
    with pytest.raises(ValueError, match="page 6"):
        cache.insert_prefix(ints(range(10, 14)), ints(range(24, 28)))


def request(manager, seq, chunk):
    """Computes a prompt in chunks; returns the blocks that were cached."""
    cached = manager.can_allocate(seq)
    assert cached >= 0
    manager.allocate(seq, cached)
    assert seq.num_cached_tokens == cached * manager.block_size
    assert len(seq.block_table) == -(-len(seq) // manager.block_size)
    while seq.num_cached_tokens < len(seq):
        seq.num_scheduled_tokens = min(chunk, len(seq) - seq.num_cached_tokens)
        manager.hash_blocks(seq)
        seq.num_cached_tokens += seq.num_scheduled_tokens
    return cached


def decode(manager, seq, token):
    """Appends a sampled token, and computes it."""
    seq.token_ids.append(token)
    if not manager.can_append(seq):
        return False
    manager.may_append(seq)
    seq.num_scheduled_tokens = 1
    manager.hash_blocks(seq)
    seq.num_cached_tokens += 1
    return True


def test_nanovllm_caches_chunks_and_decodes():
    from kvarena.adapters.nanovllm import BlockManager

    manager = BlockManager(8, 4)
    first = stand_ins.Sequence(1, range(14))
    assert request(manager, first, 6) == 0
    second = stand_ins.Sequence(2, list(range(12)) + [99])
    assert request(manager, second, 5) == 3
    assert second.block_table[:3] == first.block_table[:3]
    assert manager.can_allocate(stand_ins.Sequence(3, range(50, 70))) == -1
    grown = 0
    while decode(manager, first, grown):
        grown += 1
    assert len(first) == 4 * 7 + 1, "seven blocks, of which three are shared, and one of the second prompt"
    manager.deallocate(second)
    assert second.block_table == [] and second.num_cached_tokens == 0
    manager.deallocate(first)
    assert not manager.open and manager.engine.available == 8
    manager.engine.verify()


def test_nanovllm_ends_a_prompt_between_its_chunks():
    from kvarena.adapters.nanovllm import BlockManager

    manager = BlockManager(8, 4)
    one, two = stand_ins.Sequence(1, range(14)), stand_ins.Sequence(2, range(20, 30))
    manager.allocate(one, manager.can_allocate(one))
    manager.allocate(two, manager.can_allocate(two))
    one.num_scheduled_tokens = 6
    manager.hash_blocks(one)
    manager.deallocate(one)
    two.num_scheduled_tokens = 10
    manager.hash_blocks(two)
    manager.deallocate(two)
    assert not manager.open
    assert manager.can_allocate(stand_ins.Sequence(3, range(14))) == 1
    manager.engine.verify()


def test_nanovllm_installs_itself(monkeypatch):
    from kvarena.adapters import nanovllm

    scheduler = stand_ins.install(monkeypatch, "nanovllm.engine.scheduler", BlockManager=None)
    stand_ins.install(monkeypatch, "nanovllm")
    stand_ins.install(monkeypatch, "nanovllm.engine", scheduler=scheduler)
    nanovllm.install()
    assert scheduler.BlockManager is nanovllm.BlockManager


class Key(SimpleNamespace):
    def __init__(self, tokens, extra_key=None, cache_salt=None):
        super().__init__(tokens=array.array("q", tokens), extra_key=extra_key, cache_salt=cache_salt)

    def raw_token_ids(self):
        return self.tokens


def insertion(key, slots, prev=0, track=False):
    return SimpleNamespace(key=key, value=None if slots is None else Tensor(np.array(slots, np.int64)),
                           prev_prefix_len=prev, track_adopted_ranges=track)


@pytest.fixture
def sglang(monkeypatch):
    stand_ins.torch(monkeypatch)
    registry = stand_ins.sglang(monkeypatch)
    stand_ins.adapter(monkeypatch, "sglang").register()

    def create(page_size=2, components=(ComponentType.FULL,), **changed):
        params = dict(page_size=page_size, is_eagle=False, enable_kv_cache_events=False, eviction_policy="lru",
                      enable_session_radix_cache=False,
                      token_to_kv_pool_allocator=SimpleNamespace(size=64, device="cpu"))
        return registry["kvarena"](SimpleNamespace(**{**params, **changed}), dict.fromkeys(components))

    return create


def match(core, tokens, *names):
    return core.match_prefix(SimpleNamespace(key=Key(tokens, *names)))


def test_sglang_inserts_and_frees_what_it_has(sglang):
    core = sglang()
    step = core.begin_insert(insertion(Key(range(5)), range(2, 7), track=True))
    assert (step.result.prefix_len, step.actions) == (0, [])
    assert step.result.adopted_ranges == {ComponentType.FULL: [(0, 4)]}
    step = core.begin_insert(insertion(Key(range(8)), range(10, 18), prev=2))
    assert step.result.prefix_len == 4
    assert [free.tolist() for free in step.actions[0].indices] == [[12, 13]]
    found = match(core, range(9))
    assert (found.device_prefix_len, found.full_kv_hit_length) == (8, 8)
    node = found.last_device_node
    assert node == found.best_match_node == found.last_host_node == step.result.last_device_node
    slots = core.collect_full_device_indices(node, core.root_node_handle())
    assert slots.tolist() == [2, 3, 4, 5, 14, 15, 16, 17] and slots.array.dtype == np.int64
    middle = match(core, range(4)).last_device_node
    assert core.collect_full_device_indices(node, middle).tolist() == [14, 15, 16, 17]
    assert core.total_size() == (8, 0)
    assert not core.has_ongoing_insert() and core.end_insert() == []
    core.sanity_check([], [])


def test_sglang_locks_by_receipt(sglang):
    core = sglang()
    node = core.begin_insert(insertion(Key(range(4)), range(2, 6))).result.last_device_node
    receipt = core.inc_lock_ref(node)
    assert (core.evictable_size(), core.full_protected_size()) == (0, 4)
    skipped = core.inc_lock_ref(node, (ComponentType.FULL,))
    core.dec_lock_ref(node, skipped)
    with pytest.raises(AssertionError, match="receipt"):
        core.dec_lock_ref(node, core.inc_lock_ref(0))
    core.inc_full_pin(node)
    core.dec_lock_ref(node, receipt)
    assert core.component_protected_size(ComponentType.FULL) == 4
    core.dec_full_pin(node)
    with pytest.raises(kvarena.NotLocked):
        core.dec_lock_ref(node, receipt)
    assert core.evictable_size() == 4 and core.swa_evictable_size() == 0


def evict(core, count):
    """The loop of the cache."""
    core.evict_device_start(ComponentType.FULL, count)
    tracker, freed = {}, []
    while True:
        step = core.evict_device_next_node(ComponentType.FULL, tracker)
        assert step.node_id is None
        if not step.made_progress:
            break
        freed += [slot for slots in step.device_frees[ComponentType.FULL] for slot in slots.tolist()]
        tracker[ComponentType.FULL] = tracker.get(ComponentType.FULL, 0) + step.tracker[ComponentType.FULL]
    core.evict_device_end(ComponentType.FULL)
    assert tracker.get(ComponentType.FULL, 0) == len(freed)
    return freed


def test_sglang_evicts(sglang):
    core = sglang()
    old = core.begin_insert(insertion(Key(range(6)), range(2, 8))).result.last_device_node
    core.begin_insert(insertion(Key(range(20, 24)), range(8, 12)))
    assert evict(core, 0) == []
    assert sorted(evict(core, 3)) == [4, 5, 6, 7]
    with pytest.raises(KeyError):
        core.is_full_device_evicted(old)
    assert sorted(evict(core, 1000)) == [2, 3, 8, 9, 10, 11]
    assert core.total_size() == (0, 0)


def test_sglang_namespaces(sglang):
    core = sglang()
    core.begin_insert(insertion(Key(range(4), "lora"), range(2, 6)))
    core.begin_insert(insertion(Key(range(4), None, "salt"), range(6, 10)))
    assert [match(core, range(4), *names).device_prefix_len for names in
            [(), ("lora",), ("lora", "salt"), (None, "salt")]] == [0, 4, 0, 4]
    core.reset()
    assert match(core, range(4), "lora") == core.empty_match_result


def test_sglang_orders_by_weight(sglang):
    core = sglang(page_size=1)
    rng, nodes = random.Random(0), []
    for i, tokens in enumerate([[1, 2, 3], [9, 9], [1, 2, 4], [1, 2], [1, 5], [9, 9]]):
        slots = range(10 * i + 1, 10 * i + 1 + len(tokens))
        nodes.append(core.begin_insert(insertion(Key(tokens), slots)).result.last_device_node)
    assert core.dfs_weight_order(nodes) == [0, 2, 3, 4, 1, 5]
    for _ in range(20):
        chosen = [rng.choice([0, *nodes]) for _ in range(rng.randrange(10))]
        assert sorted(core.dfs_weight_order(chosen)) == list(range(len(chosen)))


def test_sglang_rejects_what_it_lacks(sglang):
    for changed in (dict(is_eagle=True), dict(enable_kv_cache_events=True), dict(eviction_policy="lfu"),
                    dict(components=(ComponentType.FULL, ComponentType.SWA))):
        with pytest.raises(NotImplementedError):
            sglang(**changed)
    with pytest.raises(NotImplementedError, match="demote"):
        sglang().demote(0)
