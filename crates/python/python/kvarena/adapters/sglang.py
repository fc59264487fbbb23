"""A tree core for SGLang's unified radix cache, for models of full attention without host tiers.

The wheel's entry point registers it in each process of SGLang. Choose it by the environment variable
`SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=kvarena`. A call that only host tiers, sliding windows, Mamba or external stores
need raises NotImplementedError.
"""

import torch
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefResult, IncLockRefResult, InsertResult, MatchResult
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    EvictDeviceNextNodeResult,
    InsertStepResult,
    UnifiedTreeCoreInterface,
)

import kvarena

FULL = ComponentType.FULL
# The number of tokens where there is no allocator, as in tests.
TOKENS = 1 << 20
ROOT = 0


class TreeCore:
    """The methods that the cache of such a model calls. A node is a handle of the tree; the root is the empty prefix.

    Slots are on the host, because the tree is. So on a GPU each insert copies its new slots to the host, and waits.
    """

    enable_hicache = enable_storage = enable_external_cache_linker = False
    is_write_back = has_swa_host_pool = is_host_memory_buffer_only = False
    write_through_threshold = 256

    def __init__(self, params, components):
        for name in ("is_eagle", "enable_kv_cache_events", "enable_session_radix_cache"):
            if getattr(params, name):
                raise NotImplementedError(f"kvarena's tree core does not support {name}")
        if set(components) != {FULL} or params.eviction_policy.lower() != "lru":
            raise NotImplementedError("kvarena's tree core is for models of full attention, with policy lru")
        allocator = params.token_to_kv_pool_allocator
        self.page_size, self.is_eagle = params.page_size, False
        self.device = torch.device(allocator.device if allocator else "cpu")
        # Allocators keep slot 0, or the page that has it, for padding.
        self.pages = (allocator.size if allocator else TOKENS) // self.page_size + 1
        self.kv_events = KVCacheEventRecorder(enabled=False, page_size=self.page_size)
        self.reset()

    def reset(self):
        self.tree = kvarena.Tree(self.pages, self.page_size, wide_slots=True)
        self.namespaces = {}
        self.quota = 0
        self.empty_match_result = self.matched(ROOT, 0)

    # Keys and slots.

    def namespace(self, key):
        if key.extra_key is None and key.cache_salt is None:
            return 0
        return self.namespaces.setdefault((key.extra_key, key.cache_salt), len(self.namespaces) + 1)

    def tensor(self, slots):
        # `from_dlpack` takes longer, and `frombuffer` rejects an empty buffer.
        indices = torch.frombuffer(slots, dtype=torch.int64) if len(slots) else torch.empty(0, dtype=torch.int64)
        return indices.to(self.device)

    # Matches.

    def matched(self, node, length):
        return MatchResult(length, node, node, node, full_kv_hit_length=length, cache_actions=[],
                           last_visited_node_id=node or None)

    def match_prefix(self, params):
        key = params.key
        return self.matched(*self.tree.match(key.raw_token_ids(), self.namespace(key)))

    def match_full_device_prefix(self, key):
        node, length = self.tree.match(key.raw_token_ids(), self.namespace(key))
        return length, node, length

    def supports_fast_match_prefix(self):
        return True

    def collect_full_device_indices(self, from_node_id, until_node_id):
        skipped = len(self.tree.slots(until_node_id)) if until_node_id != ROOT else 0
        return self.tensor(self.tree.slots(from_node_id))[skipped:]

    def is_full_device_evicted(self, node_id):
        self.tree.slots(node_id)  # an evicted prefix is gone
        return False

    def root_node_handle(self, extra_key=None):
        return ROOT

    def is_root(self, node_id):
        return node_id == ROOT

    def is_backuped(self, node_id):
        return False

    def dfs_weight_order(self, node_ids):
        paths = [self.tree.slots(node).tolist()[:: self.page_size] for node in node_ids]
        return depth_first(list(range(len(paths))), paths, 0)

    # Inserts run in one step.

    def begin_insert(self, params):
        key, value = params.key, params.value
        tokens = key.raw_token_ids()
        length = len(tokens) // self.page_size * self.page_size
        tokens = memoryview(tokens)[:length]
        slots = torch.tensor(tokens, dtype=torch.int64) if value is None else value[:length].cpu()
        node, known = self.tree.insert(tokens, slots.numpy(), self.namespace(key))
        # The cache frees the request's own slots of tokens that another request has inserted.
        start = params.prev_prefix_len
        actions = [FreeDeviceKV([value[start:known]])] if value is not None and start < known else []
        ranges = None
        if params.track_adopted_ranges:
            ranges = {FULL: [(known, length)]} if known < length else {}
        result = InsertResult(prefix_len=known, last_device_node=node, mamba_exist=length == 0, adopted_ranges=ranges)
        return InsertStepResult(actions=actions, result=result)

    def resume_insert(self):
        raise RuntimeError("no in-flight insert")

    def has_ongoing_insert(self):
        return False

    def end_insert(self):
        return []

    # Locks.

    def inc_lock_ref(self, node_id, skip_lock_components=()):
        if FULL not in skip_lock_components:
            self.tree.lock(node_id)
        return IncLockRefResult(node_id=node_id, skipped_lock_components=tuple(skip_lock_components))

    def dec_lock_ref(self, node_id, params, skip_swa=False):
        assert params.node_id == node_id, f"the receipt of node {params.node_id} is not for node {node_id}"
        if FULL not in params.skipped_lock_components:
            self.tree.unlock(node_id)
        return DecLockRefResult()

    def inc_full_pin(self, node_id):
        self.tree.lock(node_id)

    def dec_full_pin(self, node_id):
        self.tree.unlock(node_id)

    # Eviction. A step frees slots without a leaf for the cache to evict.

    def evict_device_start(self, component_type, request_cnt):
        self.quota = request_cnt

    def evict_device_next_node(self, component_type, tracker):
        result = EvictDeviceNextNodeResult()
        wanted, evictable = self.quota - tracker.get(FULL, 0), self.tree.evictable
        if wanted <= 0 or evictable == 0:
            return result
        # A quota of all that is evictable has a target, which the cache checks after each step.
        slots = self.tree.evict(wanted) if wanted < evictable else self.tree.evict_node()[1]
        result.device_frees[FULL].append(self.tensor(slots))
        result.tracker[FULL] = len(slots)
        result.made_progress = True
        return result

    def evict_device_end(self, component_type):
        self.quota = 0

    # Sizes, in tokens.

    def evictable_size(self):
        return self.tree.evictable

    def protected_size(self):
        return self.tree.protected

    full_evictable_size, full_protected_size = evictable_size, protected_size

    def component_evictable_size(self, component_type):
        return self.tree.evictable if component_type == FULL else 0

    def component_protected_size(self, component_type):
        return self.tree.protected if component_type == FULL else 0

    def swa_evictable_size(self):
        return 0

    mamba_evictable_size = swa_protected_size = mamba_protected_size = swa_evictable_size

    def total_size(self):
        return self.tree.evictable + self.tree.protected, 0

    def sanity_check(self, ongoing_write_through, ongoing_load_back):
        assert not ongoing_write_through and not ongoing_load_back
        self.tree.verify()

    def pretty_print(self):
        print(self.tree)


def depth_first(indices, paths, depth):
    """The requests below each branch together, the branch with most requests first."""
    if len(indices) < 2:
        return indices
    branches = {}
    for index in indices:
        path = paths[index]
        branches.setdefault(path[depth] if depth < len(path) else None, []).append(index)
    if len(branches) == 1 and None not in branches:
        return depth_first(indices, paths, shared(indices, paths, depth))
    here = branches.pop(None, [])
    heaviest = sorted(branches.values(), key=len, reverse=True)
    return [index for branch in heaviest for index in depth_first(branch, paths, depth + 1)] + here


def shared(indices, paths, depth):
    """The length of the path that all requests share."""
    least, most = min(paths[index] for index in indices), max(paths[index] for index in indices)
    while depth < len(least) and least[depth] == most[depth]:
        depth += 1
    return depth


def unsupported(name):
    def method(self, *arguments, **keywords):
        raise NotImplementedError(f"kvarena's tree core has no {name}")

    return method


# The interface also has the methods of host tiers, windows, Mamba and external stores.
MISSING = {name: unsupported(name) for name in UnifiedTreeCoreInterface.__abstractmethods__ - set(vars(TreeCore))}
KvarenaTreeCore = type("KvarenaTreeCore", (TreeCore, UnifiedTreeCoreInterface), {**MISSING, "empty_match_result": None})


def register():
    """Registers the tree core "kvarena". SGLang calls it by the wheel's entry point."""
    register_tree_core_backend("kvarena", KvarenaTreeCore)
