"""nano-vllm's `BlockManager` on `kvarena.Engine`: call `install()` before `nanovllm.LLM(...)`."""

from collections import deque

import kvarena

# Rows of sequences and steps that an engine gets at most.
MOST = 1 << 15


class BlockManager:
    """The block manager of nano-vllm's scheduler. The engine finds cached blocks, assigns pages and evicts.

    The scheduler wants all blocks of a prompt at once, and computes them in chunks. So `allocate` plans a step for each
    block, and `hash_blocks` commits those that are computed.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        rows = min(num_blocks + 1024, MOST)
        self.engine = kvarena.Engine(num_blocks, block_size, max_sequences=rows, max_steps=rows,
                                     max_tokens=max(num_blocks * block_size, 1 << 22), prefault=False)
        self.keys = {}  # the engine's sequence of each seq_id
        self.open = deque()  # (step, seq_id, tokens of the sequence that are then computed), in the order of planning
        self.computed = {}  # tokens that are computed, by seq_id

    def can_allocate(self, seq) -> int:
        cost = self.engine.admission(seq.token_ids)
        return cost.cached_len // self.block_size if cost.fits else -1

    def allocate(self, seq, num_cached_blocks: int):
        assert not seq.block_table
        key = self.keys[seq.seq_id] = self.engine.admit(seq.token_ids)
        seq.num_cached_tokens = end = self.engine.cached_len(key)
        self.computed[seq.seq_id] = end
        while end < seq.num_tokens:
            end = self.plan(seq, min(self.block_size, seq.num_tokens - end), end)
        self.read_table(seq)

    def plan(self, seq, count: int, start: int) -> int:
        step = self.engine.plan([(self.keys[seq.seq_id], count)]).step
        self.open.append((step, seq.seq_id, start + count))
        return start + count

    def read_table(self, seq):
        seq.block_table[:] = self.engine.page_table(self.keys[seq.seq_id])

    def deallocate(self, seq):
        self.engine.finish(self.keys.pop(seq.seq_id))
        self.computed.pop(seq.seq_id)
        self.commit()
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def can_append(self, seq) -> bool:
        return self.engine.available >= (len(seq) % self.block_size == 1)

    def may_append(self, seq):
        self.engine.append(self.keys[seq.seq_id], [seq.last_token])
        self.plan(seq, 1, len(seq) - 1)
        self.read_table(seq)

    def hash_blocks(self, seq):
        self.computed[seq.seq_id] = seq.num_cached_tokens + seq.num_scheduled_tokens
        self.commit()
        # If another sequence has published equal blocks, the sequence uses these from now on.
        self.read_table(seq)

    def commit(self):
        """Commits the steps that are computed, in order. A step of a sequence that has ended commits nothing."""
        last = None
        while self.open:
            step, seq_id, end = self.open[0]
            if self.computed.get(seq_id, end) < end:
                break
            self.engine.commit(step)
            last = self.open.popleft()[0]
        if last is not None:
            self.engine.complete(last)


def install():
    """Makes nano-vllm's schedulers use this block manager."""
    from nanovllm.engine import scheduler

    scheduler.BlockManager = BlockManager
