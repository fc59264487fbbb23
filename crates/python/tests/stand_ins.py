"""Small stand-ins for the modules that the adapters import: the names and calls of each seam, without its code."""

import sys
import types
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np


class Tensor:
    """The calls of a CPU tensor that the adapters use."""

    def __init__(self, array):
        self.array = np.asarray(array)

    def __len__(self):
        return len(self.array)

    def __getitem__(self, key):
        return Tensor(self.array[key])

    def numpy(self):
        return self.array

    def cpu(self):
        return self

    def to(self, device, dtype=None):
        return self if dtype is None else Tensor(self.array.astype(dtype))

    def tolist(self):
        return self.array.tolist()


def install(monkeypatch, name, **contents):
    module = types.ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def torch(monkeypatch):
    install(monkeypatch, "torch", Tensor=Tensor, int32=np.int32, int64=np.int64, device=str,
            frombuffer=lambda buffer, dtype: Tensor(np.frombuffer(buffer, dtype)),
            empty=lambda count, dtype: Tensor(np.empty(count, dtype)),
            tensor=lambda values, dtype: Tensor(np.array(values, dtype)))


def adapter(monkeypatch, name):
    """Imports an adapter anew, on the stand-ins."""
    import importlib

    import kvarena.adapters as adapters

    monkeypatch.delitem(sys.modules, f"kvarena.adapters.{name}", raising=False)
    monkeypatch.delattr(adapters, name, raising=False)
    module = importlib.import_module(f"kvarena.adapters.{name}")
    monkeypatch.delitem(sys.modules, f"kvarena.adapters.{name}")
    return module


# mini-sglang.


@dataclass(frozen=True)
class BaseCacheHandle(ABC):
    cached_len: int

    @abstractmethod
    def get_matched_indices(self): ...


class BasePrefixCache(ABC):
    @abstractmethod
    def lock_handle(self, handle, unlock=False): ...

    @abstractmethod
    def match_prefix(self, input_ids): ...

    @abstractmethod
    def insert_prefix(self, input_ids, indices): ...

    @abstractmethod
    def evict(self, size): ...

    @abstractmethod
    def reset(self): ...

    @property
    @abstractmethod
    def size_info(self): ...

    @abstractmethod
    def check_integrity(self): ...


class SizeInfo(NamedTuple):
    evictable_size: int
    protected_size: int


class InsertResult(NamedTuple):
    cached_len: int
    handle: BaseCacheHandle


class CudaMatch(NamedTuple):
    cuda_handle: BaseCacheHandle


class Registry(dict):
    def register(self, name):
        return lambda create: self.setdefault(name, create)


def minisgl(monkeypatch, context):
    registry = Registry()
    install(monkeypatch, "minisgl")
    install(monkeypatch, "minisgl.core", get_global_ctx=lambda: context)
    install(monkeypatch, "minisgl.kvcache", SUPPORTED_CACHE_MANAGER=registry)
    install(monkeypatch, "minisgl.kvcache.base", BaseCacheHandle=BaseCacheHandle, BasePrefixCache=BasePrefixCache,
            InsertResult=InsertResult, MatchResult=CudaMatch, SizeInfo=SizeInfo)
    return registry


# nano-vllm.


class Sequence:
    def __init__(self, seq_id, token_ids):
        self.seq_id, self.token_ids, self.block_table = seq_id, list(token_ids), []
        self.num_cached_tokens = self.num_scheduled_tokens = 0

    def __len__(self):
        return len(self.token_ids)

    num_tokens = property(__len__)
    last_token = property(lambda self: self.token_ids[-1])


# SGLang.


class ComponentType(Enum):
    FULL = 0
    SWA = 1


class Recorder:
    def __init__(self, enabled, page_size):
        self.enabled = enabled


class TreeCoreInterface(ABC):
    @abstractmethod
    def match_prefix(self, params): ...

    @abstractmethod
    def begin_insert(self, params): ...

    @abstractmethod
    def evict_device_next_node(self, component_type, tracker): ...

    @property
    @abstractmethod
    def empty_match_result(self): ...

    @abstractmethod
    def demote(self, node_id): ...


class Match(NamedTuple):
    device_prefix_len: int
    last_device_node: int
    last_host_node: int
    best_match_node: int
    full_kv_hit_length: int = 0
    cache_actions: list = ()
    last_visited_node_id: int | None = None


@dataclass
class LockReceipt:
    node_id: int | None = None
    skipped_lock_components: tuple = ()


@dataclass
class DecLockRefResult:
    delta: int | None = None


@dataclass
class Inserted:
    prefix_len: int
    last_device_node: int
    mamba_exist: bool
    adopted_ranges: dict | None


@dataclass
class InsertStep:
    actions: list
    result: Inserted | None = None


@dataclass
class EvictStep:
    node_id: int | None = None
    made_progress: bool = False
    device_frees: dict = field(default_factory=lambda: defaultdict(list))
    tracker: dict = field(default_factory=lambda: defaultdict(int))


@dataclass
class FreeDeviceKV:
    indices: list


def sglang(monkeypatch):
    registry, cache = {}, "sglang.srt.mem_cache"
    for name in ("sglang", "sglang.srt", cache, f"{cache}.unified_cache"):
        install(monkeypatch, name)
    install(monkeypatch, f"{cache}.base_prefix_cache", DecLockRefResult=DecLockRefResult, IncLockRefResult=LockReceipt,
            InsertResult=Inserted, MatchResult=Match)
    install(monkeypatch, f"{cache}.events", KVCacheEventRecorder=Recorder)
    install(monkeypatch, f"{cache}.unified_cache.cache_action", FreeDeviceKV=FreeDeviceKV)
    install(monkeypatch, f"{cache}.unified_cache.component_type", ComponentType=ComponentType)
    install(monkeypatch, f"{cache}.unified_cache.tree_core_registry", register_tree_core_backend=registry.__setitem__)
    install(monkeypatch, f"{cache}.unified_cache.unified_tree_core_interface", EvictDeviceNextNodeResult=EvictStep,
            InsertStepResult=InsertStep, UnifiedTreeCoreInterface=TreeCoreInterface)
    return registry
