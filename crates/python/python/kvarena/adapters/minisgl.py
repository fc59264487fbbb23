"""A prefix cache for mini-sglang: import this module, then `--cache-type kvarena`."""

from dataclasses import dataclass

import torch
from minisgl.core import get_global_ctx
from minisgl.kvcache import SUPPORTED_CACHE_MANAGER
from minisgl.kvcache.base import BaseCacheHandle, BasePrefixCache, InsertResult, MatchResult, SizeInfo

import kvarena

# The number of pages where no pool exists, as in tests. The tree takes address space for them, but little memory.
PAGES = 1 << 20


@dataclass(frozen=True)
class Handle(BaseCacheHandle):
    """A cached prefix: a handle of the tree, and its cache."""

    node: int
    cache: "PrefixCache"

    def get_matched_indices(self) -> torch.Tensor:
        return self.cache.tensor(self.cache.tree.slots(self.node))


class PrefixCache(BasePrefixCache):
    """mini-sglang's prefix cache on a `kvarena.Tree`. Evicts exactly as many pages as are asked for.

    On a GPU, `insert_prefix` copies the indices to the host, because the tree is there.
    """

    def __init__(self, device: torch.device, pages: int | None = None):
        context = get_global_ctx()
        if pages is None:
            pages = len(context.kv_cache.k_cache(0)) if hasattr(context, "kv_cache") else PAGES
        self.device = device
        self.page_size = context.page_size
        self.tree = kvarena.Tree(pages, self.page_size, prefault=False)

    def tensor(self, slots: kvarena.Array) -> torch.Tensor:
        """Slots as indices on the device."""
        # `from_dlpack` takes longer, and `frombuffer` rejects an empty buffer.
        dtype = torch.int64 if slots.dtype == "int64" else torch.int32
        indices = torch.frombuffer(slots, dtype=dtype) if len(slots) else torch.empty(0, dtype=dtype)
        return indices.to(self.device, torch.int32)

    def match_prefix(self, input_ids: torch.Tensor) -> MatchResult:
        node, length = self.tree.match(input_ids.numpy())
        return MatchResult(Handle(length, node, self))

    def insert_prefix(self, input_ids: torch.Tensor, indices: torch.Tensor) -> InsertResult:
        length = len(input_ids) // self.page_size * self.page_size
        node, known = self.tree.insert(input_ids[:length].numpy(), indices[:length].cpu().numpy())
        return InsertResult(known, Handle(length, node, self))

    def lock_handle(self, handle: BaseCacheHandle, unlock: bool = False) -> None:
        if unlock:
            self.tree.unlock(handle.node)
        else:
            self.tree.lock(handle.node)

    def evict(self, size: int) -> torch.Tensor:
        return self.tensor(self.tree.evict(size))

    def reset(self) -> None:
        """Drops all prefixes. The caller also makes all pages free, so none may be locked."""
        if self.tree.protected:
            raise RuntimeError(f"{self.tree.protected} tokens are locked")
        self.tree.reset()

    @property
    def size_info(self) -> SizeInfo:
        return SizeInfo(self.tree.evictable, self.tree.protected)

    def check_integrity(self) -> None:
        self.tree.verify()


SUPPORTED_CACHE_MANAGER.register("kvarena")(PrefixCache)
