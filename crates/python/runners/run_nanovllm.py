"""Judges the adapter by nano-vllm's scheduler: `python run_nanovllm.py CHECKOUT [REQUESTS]`.

Random requests run through the checkout's Scheduler with its own BlockManager and with kvarena's. The model is a chain
of hashes in place of K and V: each step checks that every block that it reads has the prefix of its sequence, and each
request must get the tokens that it gets alone, without any scheduler. Needs numpy and xxhash, but no GPU and no torch.
"""

import os
import random
import sys
import time
import types

VOCABULARY = 3


def load(checkout):
    """Imports the scheduler without the packages of the model."""
    for name in ("nanovllm", "nanovllm.engine"):
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(checkout, *name.split("."))]
        sys.modules[name] = package
    for name, attribute in (("transformers", "AutoConfig"), ("nanovllm.sampling_params", "SamplingParams")):
        sys.modules.setdefault(name, types.ModuleType(name))
        setattr(sys.modules[name], attribute, types.SimpleNamespace)
    sys.modules["nanovllm.sampling_params"].SamplingParams = lambda: types.SimpleNamespace(
        temperature=1.0, max_tokens=0, ignore_eos=True)
    from nanovllm.engine import scheduler, sequence

    return scheduler, sequence.Sequence


def extend(chain, token):
    return hash((chain, token))


def alone(prompt, count):
    """The tokens that a request gets without a scheduler, and the chain after each token."""
    chains, tokens = [0], list(prompt)
    for token in tokens:
        chains.append(extend(chains[-1], token))
    for _ in range(count):
        tokens.append(chains[-1] % VOCABULARY)
        chains.append(extend(chains[-1], tokens[-1]))
    return tokens, chains[1:]


class Run:
    """One scheduler and the memory of its blocks."""

    def __init__(self, scheduler, sequence_type, config):
        self.scheduler = scheduler.Scheduler(config)
        self.sequence_type = sequence_type
        self.size = config.kvcache_block_size
        self.memory = [None] * (config.num_kvcache_blocks * self.size)
        self.expected = {}
        self.hits = self.reads = self.steps = self.preemptions = 0
        manager = self.scheduler.block_manager
        allocate, preempt = manager.allocate, self.scheduler.preempt

        def counted_allocate(seq, blocks):
            allocate(seq, blocks)
            self.hits += seq.num_cached_tokens

        def counted_preempt(seq):
            self.preemptions += 1
            preempt(seq)

        manager.allocate, self.scheduler.preempt = counted_allocate, counted_preempt

    def add(self, prompt, count):
        seq = self.sequence_type(prompt, types.SimpleNamespace(temperature=1.0, max_tokens=count, ignore_eos=True))
        self.expected[seq.seq_id] = alone(prompt, count)
        self.scheduler.add(seq)

    def compute(self, seq):
        """Stores the chain of each scheduled token, reads all blocks, and returns the next token."""
        tokens, chains = self.expected[seq.seq_id]
        start, end = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens
        assert seq.token_ids[start:end] == tokens[start:end]
        slots = [block * self.size + offset for block in seq.block_table for offset in range(self.size)]
        assert len(set(seq.block_table)) == len(seq.block_table) and end <= len(slots)
        for position in range(start, end):
            self.memory[slots[position]] = chains[position]
        assert [self.memory[slot] for slot in slots[:end]] == chains[:end], "a block has another prefix"
        self.reads += -(-end // self.size)
        return chains[end - 1] % VOCABULARY

    def step(self):
        seqs, is_prefill = self.scheduler.schedule()
        tokens = [self.compute(seq) for seq in seqs]
        self.scheduler.postprocess(seqs, tokens, is_prefill)
        self.steps += 1
        for seq in seqs:
            if seq.is_finished:
                assert seq.token_ids == self.expected.pop(seq.seq_id)[0]


def prompts(rng, count):
    """Prompts that share beginnings, and numbers of output tokens."""
    heads = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(4, 25))] for _ in range(12)]
    for _ in range(count):
        head = rng.choice(heads) if rng.random() < 0.7 else []
        tail = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 16))]
        yield (head[: rng.randrange(len(head) + 1)] if rng.random() < 0.2 else head) + tail, rng.randrange(1, 12)


def run(scheduler, sequence_type, requests, seed=0):
    rng = random.Random(seed)
    sequence_type.block_size = 4
    config = types.SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=40, eos=-1, kvcache_block_size=4,
                                   num_kvcache_blocks=30)
    one, begun = Run(scheduler, sequence_type, config), time.perf_counter()
    for prompt, count in prompts(rng, requests):
        one.add(prompt, count)
        while len(one.expected) > 12:
            one.step()
    while not one.scheduler.is_finished():
        one.step()
    assert not one.expected
    name = type(one.scheduler.block_manager).__module__
    print(f"{name}: {requests:,} requests, {one.steps:,} steps, {one.preemptions:,} preemptions, {one.reads:,} blocks "
          f"read, {one.hits:,} hit tokens, {time.perf_counter() - begun:.0f} s")
    return one


if __name__ == "__main__":
    loaded = load(os.path.abspath(sys.argv[1]))
    requests = int(sys.argv[2]) if len(sys.argv) > 2 else 100_000
    theirs = run(*loaded, requests)
    from kvarena.adapters import nanovllm

    nanovllm.install()
    ours = run(*loaded, requests)
    ours.scheduler.block_manager.engine.verify()
    assert ours.hits >= theirs.hits, (ours.hits, theirs.hits)
    print(f"hits: {ours.hits / theirs.hits:.3f} of nano-vllm's own")
