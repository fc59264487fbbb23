#!/usr/bin/env python3
"""A child of `kvarena_tiers::child::Child` that keeps records in Mooncake, by its client from PyPI.

usage: mooncake_child.py MASTER LOCAL_HOST PROTOCOL PATH BYTES    (for example 127.0.0.1:50051 127.0.0.1 tcp)

The parent adds PATH and BYTES, the shared memory. `--cache-exec 'mooncake_child.py MASTER HOST tcp'` starts it.
With the master `memory`, records are kept in a dictionary: the tests' double of Mooncake.
"""
import ctypes, mmap, os, struct, sys


class Memory:
    """Keeps records in a dictionary."""
    def __init__(self, ring):
        self.ring, self.records = ring, {}

    def have(self, names):
        return [name in self.records for name in names]

    def put(self, names, at, lens):
        self.records.update((name, self.ring[a:a + n]) for name, a, n in zip(names, at, lens))
        return [True] * len(names)

    def get(self, names, at, lens):
        found = [len(self.records.get(name, b'')) == n for name, n in zip(names, lens)]
        for name, a, n, has in zip(names, at, lens, found):
            if has:
                self.ring[a:a + n] = self.records[name]
        return found

    def remove(self, names):
        return [self.records.pop(name, None) is not None for name in names]

    def forget(self, prefix):
        return bool(self.remove([name for name in self.records if name.startswith(prefix)]))


class Mooncake:
    """Keeps records in Mooncake."""
    def __init__(self, ring, size, master, host, protocol):
        from mooncake.store import MooncakeDistributedStore
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(ring))
        self.store = MooncakeDistributedStore()
        assert self.store.setup(host, 'P2PHANDSHAKE', 0, 64 << 20, protocol, '', master) == 0, 'no master'
        assert self.store.register_buffer(self.base, size) == 0, 'the memory cannot be registered'

    def have(self, names):
        return [found == 1 for found in self.store.batch_is_exist(names)]

    def put(self, names, at, lens):
        # A put would keep the first record of a name.
        return [code == 0 for code in self.store.batch_upsert_from(names, [self.base + a for a in at], lens)]

    def get(self, names, at, lens):
        read = self.store.batch_get_into(names, [self.base + a for a in at], lens)
        return [count == n for count, n in zip(read, lens)]

    def remove(self, names):
        # A record that was read has a lease; `True` removes it all the same.
        return [code == 0 for code in self.store.batch_remove(names, True)]

    def forget(self, prefix):
        return self.store.remove_by_regex('^' + prefix, True) >= 0


def main():
    *options, path, size = sys.argv[1:]
    answers = os.dup(1)
    os.dup2(2, 1)  # the client logs to standard output
    with open(path, 'r+b') as file:
        ring = mmap.mmap(file.fileno(), int(size))
    store = Memory(ring) if options == ['memory'] else Mooncake(ring, int(size), *options)
    read = sys.stdin.buffer.read
    while head := read(5):
        op, count = struct.unpack('<BI', head)
        body = read(144 * count)
        records = [struct.unpack_from('<128sQQ', body, 144 * i) for i in range(count)]
        names = [name.rstrip(b'\0').decode() for name, _, _ in records]
        moved = ([at for _, at, _ in records], [n for _, _, n in records])
        match chr(op):
            case 'h': done = store.have(names)
            case 'p': done = store.put(names, *moved)
            case 'g': done = store.get(names, *moved)
            case 'r': done = store.remove(names)
            case 'f': done = [store.forget(name) for name in names]
        os.write(answers, bytes(done))


main()
