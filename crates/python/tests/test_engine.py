"""The calls of `kvarena.Engine`, with and without a pool."""

import array
import os
import random

import numpy as np
import pytest

import kvarena
from kvarena import Engine

PROMPT = list(range(100, 110))


def step(engine, items):
    """Plans, commits and completes a step without bytes."""
    plan = engine.plan(items)
    engine.drain()
    engine.commit(plan.step)
    engine.complete(plan.step)
    return plan


def test_a_request_and_a_hit():
    engine = Engine(pages=32, page_size=4)
    for hit in (0, 8):
        seq = engine.admit(PROMPT)
        assert engine.cached_len(seq) == hit == engine.find(PROMPT)
        plan = engine.plan([(seq, engine.extend_max(seq))])
        assert plan.tokens.tolist() == PROMPT[hit:]
        assert plan.positions.tolist() == list(range(hit, 10))
        table = engine.page_table(seq).tolist()
        slots = [4 * table[i // 4] + i % 4 for i in range(hit, 10)]
        assert plan.slot_mapping.tolist() == slots
        assert [row[1:] for row in plan.rows.tolist()] == [[0, 10 - hit, 10]]
        assert engine.tables([seq], 5).tolist() == [table + [-1, -1]]
        packed = engine.packed([(seq, 10 - hit)])
        assert [part.tolist() for part in packed] == [[0, 10 - hit], [0, 3], table, [2]]
        engine.append(seq, [7])
        engine.commit(plan.step)
        engine.complete(plan.step)
        assert engine.tokens(seq).tolist() == PROMPT + [7]
        assert (engine.cached_len(seq), engine.token_count(seq), engine.planned_len(seq)) == (10, 11, 10)
        engine.finish(seq)
    assert engine.stats["hit_tokens"] == 8
    assert engine.newest_step == 2
    engine.verify()


def test_admission_and_shortage():
    engine = Engine(pages=4, page_size=4)
    cost = engine.admission(PROMPT)
    assert (cost.cached_len, cost.lacking_pages, cost.available_pages, cost.fits, cost.after) == (0, 3, 4, True, None)
    first = engine.admit(PROMPT)
    with pytest.raises(kvarena.OutOfPages) as error:
        engine.admit(list(range(8)))
    assert (error.value.wanted, error.value.available, error.value.after) == (2, 1, None)
    assert isinstance(error.value, kvarena.Shortage) and isinstance(error.value, RuntimeError)
    assert engine.admission(list(range(8))).fits is False
    engine.promise(first, 4)
    second = engine.admit(list(range(8)), promise=0)
    assert engine.available == 3
    engine.finish(first)
    engine.finish(second)
    with pytest.raises(kvarena.Gone, match="unknown or finished"):
        engine.finish(second)
    alone = Engine(pages=4, max_sequences=1)
    seq = alone.admit([1])
    for call in (lambda: alone.admit([1]), lambda: alone.fork(seq)):
        with pytest.raises(kvarena.Shortage, match="one sequence row"):
            call()


def test_preempt_and_resume():
    engine = Engine(pages=8, page_size=4)
    seq = engine.admit(PROMPT)
    step(engine, [(seq, 10)])
    engine.preempt(seq)
    with pytest.raises(ValueError, match="preempted"):
        engine.plan([(seq, 1)])
    engine.resume(seq)
    assert engine.cached_len(seq) == 8
    engine.preempt(seq, publish=False)
    engine.reset()
    engine.resume(seq, at_most=0)
    assert engine.cached_len(seq) == 0
    assert engine.available_after(engine.newest_step) == engine.available == 5


def test_a_fork_copies_the_last_page():
    engine = Engine(pages=16, page_size=4)
    seq = engine.admit(PROMPT)
    step(engine, [(seq, 10)])
    children, copies = engine.fork(seq, 2)
    assert len(children) == 2
    ((kind, pairs),) = engine.drain()
    assert kind == "copy"
    last = [engine.page_table(child)[-1] for child in children]
    assert pairs == [(engine.page_table(seq)[-1], page) for page in last]
    engine.complete(copies)
    for one in [seq, *children]:
        engine.append(one, [one % 100])
    plan = step(engine, [(one, 1) for one in [seq, *children]])
    assert len(plan.rows.tolist()) == 3
    engine.rollback(seq, 10)
    engine.verify()


def test_work_that_waits_is_an_error():
    engine = Engine(pages=16, page_size=4)
    seq = engine.admit(PROMPT)
    step(engine, [(seq, 10)])
    (child,), copies = engine.fork(seq)
    engine.complete(copies)
    engine.append(seq, [1, 2])
    engine.plan([(seq, 1)])
    with pytest.raises(RuntimeError, match="drain"):
        engine.plan([(seq, 1)])


def test_swap_memory_as_work():
    engine = Engine(pages=8, page_size=4, swap_pages=8)
    seq = engine.admit(PROMPT)
    step(engine, [(seq, 10)])
    engine.finish(seq)
    assert engine.save_ahead(8) == 2
    ((kind, move, pairs),) = engine.drain()
    assert kind == "save" and len(pairs) == 2
    engine.saved(move)
    other = engine.admit(range(500, 532))
    step(engine, [(other, 32)])
    engine.finish(other, publish=False)
    engine.complete(engine.newest_step)
    again = engine.admit(PROMPT)
    engine.load([again])
    assert engine.is_loading(again)
    work = engine.drain()
    assert work[-1][0] == "load" and [swap for _, swap in work[-1][2]] == [swap for _, swap in pairs]
    engine.loaded(work[-1][1])
    assert not engine.is_loading(again) and engine.cached_len(again) == 8


def test_abort_and_order_of_steps():
    engine = Engine(pages=16, page_size=4)
    seq = engine.admit(PROMPT)
    first = engine.plan([(seq, 4)]).step
    second = engine.plan([(seq, 6)]).step
    with pytest.raises(ValueError, match="before step"):
        engine.commit(second)
    engine.abort(second)
    engine.commit(first)
    engine.complete(first)
    assert engine.cached_len(seq) == 4
    for call in (engine.commit, engine.abort):
        with pytest.raises(ValueError, match="not open"):
            call(99)


def test_events():
    engine = Engine(pages=16, page_size=4, hashing="sglang_sha256", event_pages=8)
    engine.name_namespace(5, salt="tenant")
    seq = engine.admit(PROMPT, namespace=5)
    step(engine, [(seq, 10)])
    ((kind, medium, namespace, parent, hashes, tokens),) = engine.drain_events()
    assert (kind, medium, namespace, parent, tokens.tolist()) == ("stored", "device", 5, None, PROMPT[:8])
    assert engine.find_hashes(hashes) == 8
    engine.restate_events()
    engine.forget_namespace(5)
    assert engine.drain_events()[0] == ("cleared",)


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_pools_are_lent_without_copies(layout, dtype):
    engine = Engine(pages=8, page_size=4, pool="cpu", layers=3, kv_heads=2, head_dim=16, dtype=dtype, layout=layout)
    planes = [plane(layer) for layer in range(3) for plane in (engine.k_cache, engine.v_cache)]
    views = [np.asarray(plane) for plane in planes]
    for i, view in enumerate(views):
        assert view.shape == (8, 4, 2, 16) and view.dtype == dtype
        assert view.flags.c_contiguous == (layout == "layer_first")
        view[:] = i
    for i, plane in enumerate(planes):
        assert (np.from_dlpack(plane) == i).all()
    again = [np.asarray(plane(layer)) for layer in range(3) for plane in (engine.k_cache, engine.v_cache)]
    assert all((view == i).all() for i, view in enumerate(again))


def test_a_pool_outlives_its_engine():
    view = np.from_dlpack(Engine(pages=64, pool="cpu").k_cache(0))
    view[:] = 5
    others = [Engine(pages=64, pool="cpu") for _ in range(4)]
    assert (view == 5).all() and len(others) == 4


def test_forks_copy_the_bytes_of_a_pool():
    engine = Engine(pages=16, page_size=4, pool="cpu", layers=2, kv_heads=1, head_dim=8)
    seq = engine.admit(PROMPT)
    plan = engine.plan([(seq, 10)])
    slots = plan.slot_mapping.tolist()
    for layer in range(2):
        k = np.asarray(engine.k_cache(layer)).reshape(64, 8)
        k[slots] = np.arange(10)[:, None] + 100 * layer
    engine.commit(plan.step)
    engine.complete(plan.step)
    (child,), copies = engine.fork(seq)
    engine.complete(copies)
    assert engine.drain() == []
    table = engine.page_table(child).tolist()
    assert table != engine.page_table(seq).tolist()
    for layer in range(2):
        k = np.asarray(engine.k_cache(layer)).reshape(64, 8)
        read = [k[4 * table[i // 4] + i % 4, 0] for i in range(10)]
        assert read == [i + 100 * layer for i in range(10)]


def test_types_that_the_buffer_protocol_lacks():
    half = Engine(pages=4, pool="cpu", dtype="bfloat16").k_cache(0)
    assert (half.dtype, memoryview(half).format) == ("bfloat16", "H")
    quarter = Engine(pages=4, pool="cpu", dtype="float8_e4m3fn").k_cache(0)
    assert (quarter.dtype, memoryview(quarter).format) == ("float8_e4m3fn", "B")
    with pytest.raises(BufferError, match="1.1"):
        quarter.__dlpack__()
    assert "versioned" in repr(quarter.__dlpack__(max_version=(1, 1)))


def test_a_strided_pool_is_not_given_as_contiguous():
    plane = Engine(pages=4, pool="cpu", layers=2, layout="page_first").k_cache(0)
    assert not memoryview(plane).c_contiguous
    with pytest.raises(BufferError):
        array.array("f").frombytes(plane)


def test_an_engine_with_a_pool_does_not_outlive_a_fork():
    engine, outbox = Engine(pages=8, pool="cpu"), Engine(pages=8)
    seqs = engine.admit(PROMPT), outbox.admit(PROMPT)
    child = os.fork()
    if child == 0:
        wrong = 0
        calls = [lambda: engine.plan([(seqs[0], 1)]), lambda: engine.finish(seqs[0]), lambda: engine.admit(PROMPT),
                 lambda: engine.k_cache(0), lambda: engine.cached_len(seqs[0])]
        for call in calls:
            try:
                call()
                wrong += 1
            except RuntimeError as error:
                wrong += "forked" not in str(error)
        outbox.finish(seqs[1])
        Engine(pages=8, pool="cpu").admit(PROMPT)
        os._exit(wrong)
    assert os.waitpid(child, 0)[1] == 0
    engine.finish(seqs[0])
    outbox.finish(seqs[1])


@pytest.mark.parametrize(
    "error, arguments",
    [(ValueError, dict(pool="cuda")), (ValueError, dict(dtype="int8")), (ValueError, dict(layout="hnd")),
     (ValueError, dict(pages=0)), (ValueError, dict(page_size=0)), (ValueError, dict(head_dim=-1)),
     (ValueError, dict(reserved_pages=8)), (ValueError, dict(max_steps=0)), (ValueError, dict(hashing="md5")),
     (TypeError, dict(pages=float("nan"))), (TypeError, dict(unknown=1)),
     (MemoryError, dict(pool="cpu", pages=2**31, head_dim=1024, kv_heads=1024))],
)
def test_wrong_configs(error, arguments):
    with pytest.raises(error):
        Engine(**{"pages": 8, **arguments})


def test_wrong_arguments():
    engine = Engine(pages=8, page_size=4)
    seq = engine.admit(PROMPT)
    for error, call in [
        (ValueError, lambda: engine.admit([])),
        (ValueError, lambda: engine.admit([-1])),
        (ValueError, lambda: engine.admit(range(100))),
        (ValueError, lambda: engine.append(seq, [2**32 - 1])),
        (kvarena.Gone, lambda: engine.cached_len(0)),
        (kvarena.Gone, lambda: engine.append(seq + 1, [1])),
        (kvarena.Gone, lambda: engine.append(seq ^ 1 << 32, [1])),
        (ValueError, lambda: engine.cached_len(-1)),
        (ValueError, lambda: engine.cached_len(1 << 64)),
        (TypeError, lambda: engine.cached_len(float("nan"))),
        (ValueError, lambda: engine.plan([])),
        (ValueError, lambda: engine.plan([(seq, 0)])),
        (ValueError, lambda: engine.plan([(seq, 11)])),
        (ValueError, lambda: engine.plan([(seq, 1), (seq, 1)])),
        (ValueError, lambda: engine.plan([(seq, -1)])),
        (TypeError, lambda: engine.plan([seq])),
        (TypeError, lambda: engine.plan(seq)),
        (ValueError, lambda: engine.tables([seq], 1 << 32)),
        (kvarena.Gone, lambda: engine.tables([1], 4)),
        (ValueError, lambda: engine.packed([(seq, 1)])),
        (ValueError, lambda: engine.k_cache(0)),
        (ValueError, lambda: Engine(pages=8, pool="cpu").k_cache(1)),
        (ValueError, lambda: engine.rollback(seq, 0)),
        (ValueError, lambda: engine.resume(seq)),
        (TypeError, lambda: engine.find_hashes(["x"])),
    ]:
        with pytest.raises(error):
            call()
    step(engine, [(seq, 10)])
    with pytest.raises(ValueError, match="3 pages"):
        engine.tables([seq], 2)
    engine.verify()


@pytest.mark.parametrize("pool", ["outbox", "cpu"])
def test_random_requests_read_their_own_tokens(pool):
    """A tensor of tokens stands for K and V: each sequence reads its own tokens through its page table."""
    rng = random.Random(1)
    engine = Engine(pages=24, page_size=4, pool=pool, head_dim=4, wide_slots=True)
    own = np.zeros(24 * 4, np.float32)
    running = {}
    preempted = []
    for _ in range(3000):
        store = own if pool == "outbox" else np.asarray(engine.k_cache(0)).reshape(96, 4)[:, 0]
        if len(running) < 4 and rng.random() < 0.4:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
            try:
                running[engine.admit(tokens)] = tokens
            except kvarena.OutOfPages:
                pass
        for seq in [seq for seq in running if rng.random() < 0.05]:
            engine.preempt(seq)
            preempted.append((seq, running.pop(seq)))
        if preempted and rng.random() < 0.2:
            seq, tokens = preempted[0]
            try:
                engine.resume(seq)
                running[seq] = tokens
                preempted.pop(0)
            except kvarena.OutOfPages:
                pass
        items = [(seq, rng.randrange(1, most + 1)) for seq in running if (most := engine.extend_max(seq))]
        if not items:
            continue
        try:
            plan = engine.plan(items)
        except kvarena.OutOfPages:
            engine.finish(*running.popitem()[:1])
            continue
        store[np.asarray(plan.slot_mapping)] = np.asarray(plan.tokens)
        engine.drain()
        engine.commit(plan.step)
        engine.complete(plan.step)
        for seq in list(running):
            table, count = engine.page_table(seq).tolist(), engine.cached_len(seq)
            assert [store[4 * table[i // 4] + i % 4] for i in range(count)] == running[seq][:count]
            if not engine.extend_max(seq):
                if len(running[seq]) > 30 or rng.random() < 0.1:
                    engine.finish(seq)
                    del running[seq]
                else:
                    engine.append(seq, [rng.randrange(2)])
                    running[seq] = engine.tokens(seq).tolist()
    assert engine.stats["hit_tokens"] > 500 and engine.stats["evicted_pages"] > 100
    engine.verify()
