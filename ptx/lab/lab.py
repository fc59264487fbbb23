#!/usr/bin/env python3
"""Runs the committed PTX on a GPU: checks against float64, and times the listed shapes with graph replay.

  lab.py --split libsplit.so [--ptx DIR] check [--count N] [--seed S] [--small] | decode | extend | layouts | big

Needs torch with CUDA. The plans come from the crate's own planner (split_ffi.rs). Timing: calls rotate over R sets of
pages inside one CUDA graph, so that the L2 cache does not serve them; the median of 7 replays.
"""
import argparse, ctypes, json, math, os, random, sys, time
import numpy as np
import torch

ap = argparse.ArgumentParser()
ap.add_argument("--split", required=True)
ap.add_argument("--ptx", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
ap.add_argument("--config", default="{}", help='JSON: {"entry": {"block": .., "smem": .., "ctas": ..}} for variants')
ap.add_argument("--count", type=int, default=100)
ap.add_argument("--seed", type=int, default=0)
ap.add_argument("--small", action="store_true")
ap.add_argument("--only", default="")
ap.add_argument("--json", default="")
ap.add_argument("--no-hopper", action="store_true", help="leave the sm_90a kernels out")
ap.add_argument("--plain", action="store_true", help="launch as for compute capability 8: no programmatic dependent launch")
ap.add_argument("what", nargs="+")
A = ap.parse_args()
sys.path[:0] = [A.ptx, ap.get_default("ptx")]
import chain
dev = torch.device("cuda")
torch.zeros(1, device=dev)
SMS = torch.cuda.get_device_properties(0).multi_processor_count
cu = ctypes.CDLL("libcuda.so.1")
split = ctypes.CDLL(os.path.abspath(A.split))
split.split_plan.restype = ctypes.c_uint64
CONFIG = json.loads(A.config)
# Block and dynamic shared memory of each kernel, as its header says.
LAUNCH = {}
for t in ("bf16", "f16"):
    for d, r, warps, stages in ((64, 8, 4, 4), (128, 8, 4, 2), (256, 8, 2, 2), (64, 16, 4, 4), (128, 16, 4, 2), (256, 16, 2, 2)):
        LAUNCH[f"attend_decode_{t}_d{d}_r{r}"] = (warps * 32, warps * stages * 64 * d + (warps - 1) * r * d * 4)
    LAUNCH |= {f"attend_extend_{t}_d64": (128, 49152), f"attend_extend_{t}_d128": (128, 98304), f"attend_extend_{t}_d256": (128, 98304)}
    LAUNCH[f"attend_extend_{t}_d128_sm90a"] = (384, 204800)
LAUNCH["attend_f32"] = (128, 0)
HOPPER = torch.cuda.get_device_capability() == (9, 0) and not A.no_hopper
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


def ok(code, what):
    if code:
        sys.exit(f"{what}: CUDA error {code}")


KERNELS, WAITING = {}, {}
def kernel(entry):
    """(function, block, dynamic shared memory, resident CTAs of the device) of the file's one entry; WAITING by the function's address"""
    if entry not in KERNELS:
        module, start = ctypes.c_void_p(), time.time()
        text = open(f"{A.ptx}/{entry}.ptx").read()
        if torch.cuda.get_device_capability() >= (9, 0) and not A.plain: text = chain.chained(text)
        ok(cu.cuModuleLoadData(ctypes.byref(module), text.encode() + b"\0"), f"load {entry}")
        print(f"# {entry} loaded in {time.time() - start:.2f} s", flush=True)
        f = ctypes.c_void_p()
        ok(cu.cuModuleGetFunction(ctypes.byref(f), module, entry.encode()), entry)
        config = CONFIG.get(entry, {})
        block, smem = config.get("block", LAUNCH[entry][0]), config.get("smem", LAUNCH[entry][1])
        ok(cu.cuFuncSetAttribute(f, 8, smem), "shared memory of " + entry)
        n, local, regs = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        ok(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(n), f, block, ctypes.c_size_t(smem)), "occupancy")
        cu.cuFuncGetAttribute(ctypes.byref(local), 3, f)
        cu.cuFuncGetAttribute(ctypes.byref(regs), 4, f)
        print(f"# {entry}: {n.value} CTAs a multiprocessor, {regs.value} registers, {local.value} bytes local", flush=True)
        KERNELS[entry] = (f, block, smem, config.get("ctas", max(1, n.value)) * SMS)
        WAITING[f.value] = "griddepcontrol.wait" in text
    return KERNELS[entry]


class Params(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint64) for n in ("q out lse k v page_stride slot_stride head_stride q_stride out_stride table "
                "batch_rows plan partial counters page_magic chunk_magic").split()] + \
               [(n, ctypes.c_uint32) for n in "page_size chunk_pages chunks_per_row chunk_base q_heads kv_heads group batch window".split()] + \
               [("scale", ctypes.c_float), ("soft_cap", ctypes.c_float), ("turn_q", ctypes.c_uint32), ("lanes", ctypes.c_uint32), ("reserved", ctypes.c_uint32)]
assert ctypes.sizeof(Params) == 192


class LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32), ("stream", ctypes.c_void_p),
                ("attributes", ctypes.c_void_p), ("attribute_count", ctypes.c_uint32)]


def launch(fn, grid, params):
    f, block, smem, _ = fn
    arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(params), ctypes.c_void_p))
    attribute = LaunchAttribute(6)  # programmatic stream serialization
    attribute.value[0] = 1
    stream, count = torch.cuda.current_stream().cuda_stream, 1 if WAITING[f.value] else 0
    config = LaunchConfig((grid, 1, 1), (block, 1, 1), smem, stream, ctypes.addressof(attribute), count)
    ok(cu.cuLaunchKernelEx(ctypes.byref(config), f, arguments, None), "launch")


def table_shape(page_size, rows, len_max):
    chunk_pages = max(1, 1024 // page_size)
    return chunk_pages, max(1, -(-len_max // (chunk_pages * page_size)))


def make_table(pages_of, page_size, rows, len_max, poison=0xFFFFFFF0, rng=np.random.default_rng(0)):
    """Two-level tables for rows of pages; chunks and rows in random order. Returns (words, row of each sequence, ...)."""
    chunk_pages, per_row = table_shape(page_size, rows, len_max)
    need = [-(-len(p) // chunk_pages) for p in pages_of]
    order = rng.permutation(sum(need) + 3)
    row_of = rng.permutation(rows)[: len(pages_of)]
    base = rows * per_row
    words = np.full(base + len(order) * chunk_pages, poison, np.uint32)
    used = 0
    for row, pages, n in zip(row_of, pages_of, need):
        for i in range(n):
            chunk = order[used]; used += 1
            words[row * per_row + i] = chunk
            part = pages[i * chunk_pages: (i + 1) * chunk_pages]
            words[base + chunk * chunk_pages: base + chunk * chunk_pages + len(part)] = part
    return torch.from_numpy(words.view(np.int32)).to(dev), row_of, chunk_pages, per_row, base


class Step:
    """Everything a step's launches need; `launch()` runs both kernels that have work."""
    def __init__(self, dtype, D, heads, kv_heads, page_size, rows, table, pool, q, out, lse=None, window=0, scale=None, cap=0.0, both=True):
        words, chunk_pages, per_row, base = table
        k_at, v_at, page_stride, slot_stride, head_stride = pool
        group = heads // kv_heads
        name = NAMES[dtype]
        self.keep = (words, q, out, lse)
        p = Params(q=q.data_ptr(), out=out.data_ptr(), lse=lse.data_ptr() if lse is not None else 0, k=k_at, v=v_at,
                   page_stride=page_stride, slot_stride=slot_stride, head_stride=head_stride,
                   q_stride=q.stride(0) * q.element_size(), out_stride=out.stride(0) * out.element_size(), table=words.data_ptr(),
                   page_magic=-(-2**32 // page_size), chunk_magic=-(-2**32 // chunk_pages), page_size=page_size, chunk_pages=chunk_pages,
                   chunks_per_row=per_row, chunk_base=base, q_heads=heads, kv_heads=kv_heads, group=group, batch=len(rows), window=window,
                   scale=1 / math.sqrt(D) if scale is None else scale, soft_cap=cap, turn_q=0)
        rows = np.ascontiguousarray(np.asarray(rows, np.uint32))
        self.rows = torch.from_numpy(rows.view(np.int32)).to(dev)
        p.batch_rows = self.rows.data_ptr()
        self.p = p
        if dtype == torch.float32:
            self.calls = [(kernel("attend_f32"), 256, p)]
            return
        self.decode = kernel(f"attend_decode_{name}_d{D}_r{8 if group <= 8 else 16}")
        late = "_sm90a" if HOPPER and D == 128 else ""
        self.extend = kernel(f"attend_extend_{name}_d{D}{late}")
        shape = (ctypes.c_uint32 * 8)(kv_heads, group, D, window, self.decode[3], self.extend[3], len(rows), max(1, int(rows[:, 2].sum())))
        sizes = (ctypes.c_uint64 * 7)()
        split.split_plan(shape, None, ctypes.c_size_t(0), None, None, sizes)
        dw, ew = np.zeros(sizes[0], np.uint32), np.zeros(sizes[1], np.uint32)
        self.plan_ns = split.split_plan(shape, ctypes.c_void_p(rows.ctypes.data), ctypes.c_size_t(len(rows)), ctypes.c_void_p(dw.ctypes.data),
                                        ctypes.c_void_p(ew.ctypes.data), sizes)
        self.dw, self.ew = (torch.from_numpy(w.view(np.int32)).to(dev) for w in (dw, ew))
        self.works = int(ew[0])
        self.partial = torch.full((max(sizes[2], sizes[3]) // 4,), float("nan"), device=dev)
        self.counters = torch.zeros((sizes[4] + sizes[5]) // 4, dtype=torch.int32, device=dev)
        d, e = Params.from_buffer_copy(p), Params.from_buffer_copy(p)
        e.turn_q, e.scale = int(p.scale < 0), abs(p.scale)
        d.lanes = sizes[6]
        d.plan, e.plan = self.dw.data_ptr(), self.ew.data_ptr()
        d.partial = e.partial = self.partial.data_ptr()
        d.counters, e.counters = self.counters.data_ptr(), self.counters.data_ptr() + sizes[4]
        self.calls = []
        has_decode, has_extend = bool((dw.reshape(-1, 8)[:, 1] > 0).any()), ew[0] > 0
        if has_decode or both: self.calls.append((self.decode, self.decode[3], d))
        if has_extend or both: self.calls.append((self.extend, self.extend[3], e))

    def launch(self):
        for f, grid, p in self.calls: launch(f, grid, p)


def reference(q, k, v, kv_len, scale, window, cap):
    """float64 attention of one sequence: q [n, H, D], k and v [kv_len, h, D]."""
    n, H, D = q.shape
    if kv_len == 0: return torch.zeros(n, H, D, dtype=torch.float64, device=dev), torch.full((n, H), -math.inf, dtype=torch.float64, device=dev)
    g = H // k.shape[1]
    s = torch.einsum("nhgd,lhd->nhgl", q.double().view(n, -1, g, D), k.double()) * scale
    if cap: s = cap * torch.tanh(s / cap)
    pos = torch.arange(kv_len - n, kv_len, device=dev)[:, None]
    t = torch.arange(kv_len, device=dev)[None]
    s.masked_fill_(~((t <= pos) & ((t > pos - window) if window else True))[:, None, None], -math.inf)
    return torch.einsum("nhgl,lhd->nhgd", torch.softmax(s, -1), v.double()).reshape(n, H, D), torch.logsumexp(s, -1).reshape(n, H)


def make_pool(dtype, pages, page_size, h, D, layout, layers=2, layer=1, fill=float("nan")):
    """A poisoned pool; (storage, K view, V view [page, slot, head, dim], (addresses and strides))."""
    shape = (2, layers, pages, page_size, h, D) if layout == "layer" else (pages, 2, layers, page_size, h, D)
    pool = torch.full(shape, fill, dtype=dtype, device=dev)
    K, V = (pool[0, layer], pool[1, layer]) if layout == "layer" else (pool[:, 0, layer], pool[:, 1, layer])
    e = pool.element_size()
    return pool, K, V, (K.data_ptr(), V.data_ptr(), K.stride(0) * e, K.stride(1) * e, K.stride(2) * e)


def check_one(r, small=False, force=None):
    dtype = r.choice([torch.bfloat16] * 4 + [torch.float16] * 3 + [torch.float32])
    D = r.choice([64, 128, 128, 256])
    kv_heads = r.choice([1, 2, 3, 8])
    group = r.choice([1, 2, 3, 4, 5, 7, 8, 12, 16])
    page_size = r.choice([1, 1, 2, 3, 8, 16, 16, 48, 64, 100, 128, 255, 256, 257, 341, 512, 1024])
    layout = r.choice(["layer", "page"])
    window = r.choice([0, 0, 1, 17, 100, 1000])
    cap = r.choice([0.0, 0.0, 30.0, 5.0])
    scale = r.choice([1 / math.sqrt(D), 1 / math.sqrt(D), 0.3, -0.2])
    far = 300 if small else r.choice([300, 3000, 20000])
    edge = lambda: max(1, page_size * r.randint(1, max(1, min(far, 3000) // page_size)) + r.choice([-1, 0, 1]))
    lens = []
    for _ in range(r.choice([1, 2, 5, 9] if small else [1, 2, 5, 17, 40])):
        ext = r.choice([1, 1, 1, r.randint(1, 6), r.randint(1, 80 if small else 600)])
        cached = r.choice([0, r.randint(0, far), max(0, edge() - ext)])
        lens.append((ext, 0 if r.random() < 0.08 else ext + cached))
    if force: dtype, D, kv_heads, group, page_size, layout, window, cap, lens = force
    heads = kv_heads * group
    pages_of, at = [], 0
    total = sum(-(-kv // page_size) for _, kv in lens)
    ids = np.random.default_rng(r.randint(0, 2**31)).permutation(total + 5)
    for _, kv in lens:
        n = -(-kv // page_size); pages_of.append(ids[at: at + n]); at += n
    pool, K, V, strides = make_pool(dtype, total + 5, page_size, kv_heads, D, layout)
    words, row_of, *table = make_table(pages_of, page_size, len(lens) + 3, max(kv for _, kv in lens) + 5000)
    tokens = sum(e for e, _ in lens) + 4
    wide = r.random() < 0.5
    store = torch.randn(tokens, heads * (3 if wide else 1), D, device=dev).to(dtype)
    q = store[:, heads: 2 * heads] if wide else store
    out_store = torch.full((tokens, heads * (2 if wide else 1), D), float("nan"), dtype=dtype, device=dev)
    out = out_store[:, :heads]
    lse = torch.full((tokens, heads), float("nan"), device=dev) if r.random() < 0.7 else None
    rows, qo, refs = [], 0, []
    for i, (ext, kv) in enumerate(lens):
        rows.append((row_of[i], qo, ext, kv))
        k, v = (torch.randn(kv, kv_heads, D, device=dev).to(dtype) for _ in range(2))
        if kv:
            pos = torch.arange(kv, device=dev); pg = torch.from_numpy(pages_of[i].astype(np.int64)).to(dev)[pos // page_size]
            K[pg, pos % page_size] = k; V[pg, pos % page_size] = v
        # The reference by slices of queries, to bound its memory.
        o, l = [], []
        stepq = max(1, int(3e7 // (heads * max(kv, 1))))
        for a in range(0, ext, stepq):
            b = min(ext, a + stepq)
            seen = kv - ext + b if kv else 0
            x, y = reference(q[qo + a: qo + b], k[:seen], v[:seen], seen, scale, window, cap); o.append(x); l.append(y)
        refs.append((qo, ext, torch.cat(o), torch.cat(l))); qo += ext
    step = Step(dtype, D, heads, kv_heads, page_size, rows, (words, *table), strides, q, out, lse, window, scale, cap)
    problems = []
    bound = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 5e-5}[dtype]
    worst = 0.0
    for turn in range(2):  # the second finds the counters as the first left them
        out.fill_(float("nan"))
        if lse is not None: lse.fill_(float("nan"))
        step.launch(); torch.cuda.synchronize()
        for qo, ext, o, l in refs:
            got = out[qo: qo + ext].double()
            err = float((got - o).norm() / o.norm().clamp_min(1e-9)) if torch.isfinite(got).all() else float("nan")
            # each row alone, against the size of what was averaged
            rowerr = float(((got - o).norm(dim=-1) / (o.norm(dim=-1) + 0.05 * math.sqrt(D))).max()) if ext else 0.0
            worst = max(worst, err) if err == err else float("nan")
            if not err < bound or not rowerr < 4 * bound: problems.append(f"turn {turn} rows {qo}+{ext}: error {err:.2e}, row {rowerr:.2e}")
            if lse is not None:
                d = (lse[qo: qo + ext].double() - l); d[l == lse[qo: qo + ext].double()] = 0
                le = float(d.abs().max()) if torch.isfinite(d).all() else float("nan")
                if not le < (2e-5 if dtype == torch.float32 else 1e-4) * max(1.0, float(l[torch.isfinite(l)].abs().max()) if torch.isfinite(l).any() else 1.0):
                    problems.append(f"turn {turn} rows {qo}+{ext}: lse error {le:.2e}")
        tail = out[sum(e for e, _ in lens):]
        if not torch.isnan(tail).all(): problems.append("rows past the last were written")
        if wide and not torch.isnan(out_store[:, heads:]).all(): problems.append("columns beside out were written")
        if dtype != torch.float32 and int(step.counters.abs().sum()): problems.append("counters are not zero")
    label = f"{NAMES[dtype]} D{D} {heads}/{kv_heads} page {page_size} {layout} window {window} cap {cap} lens {lens[:6]}{'..' if len(lens) > 6 else ''}"
    return label, problems, worst


def check():
    r = random.Random(A.seed); bad = 0; worst = {}; start = time.time()
    forced = [] if A.small else [
        (torch.bfloat16, 128, 8, 4, 1, "page", 0, 0.0, [(1, 131072), (1, 1), (1, 0)]),
        (torch.float16, 128, 2, 8, 16, "layer", 0, 0.0, [(600, 131072), (1, 64), (1, 65)]),
        (torch.bfloat16, 128, 8, 4, 16, "layer", 0, 0.0, [(512, 8192)]),
        (torch.bfloat16, 256, 4, 4, 16, "page", 4096, 30.0, [(1, 8192), (700, 9000)]),
        (torch.bfloat16, 64, 8, 8, 16, "page", 0, 0.0, [(1, 5000), (2, 777), (300, 2000)]),
        (torch.bfloat16, 128, 8, 16, 1, "layer", 0, 0.0, [(1, 1000 + 64 * i) for i in range(64)])]
    for i in range(A.count + len(forced)):
        torch.manual_seed(A.seed * 100003 + i)
        label, problems, err = check_one(r, A.small, forced[i] if i < len(forced) else None)
        key = label.split()[0]; worst[key] = max(worst.get(key, 0), err if err == err else 9e9)
        if problems:
            bad += 1
            if bad <= 12: print("BAD", i, label, *problems[:3], sep="\n   ", flush=True)
        if i % 50 == 49: torch.cuda.empty_cache()
    print(f"check: {A.count + len(forced)} steps, {bad} bad, worst relative error {({k: float(f'{v:.2e}') for k, v in worst.items()})}, {time.time() - start:.0f} s", flush=True)
    return bad


# ---- timing ------------------------------------------------------------------------------------------------------------

def time_graph(fns, target_ms=10.0, reps=7):
    s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for f in fns: f()
        s.synchronize(); a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record(s)
        for f in fns: f()
        b.record(s); s.synchronize()
        est = max(a.elapsed_time(b) / len(fns), 1e-3)
        n = max(1, math.ceil(min(2000, max(len(fns), math.ceil(target_ms / est))) / len(fns))) * len(fns)
        g = torch.cuda.CUDAGraph(); s.synchronize(); g.capture_begin()
        for i in range(n): fns[i % len(fns)]()
        g.capture_end()
        g.replay(); s.synchronize(); ts = []
        for _ in range(reps):
            a.record(s); g.replay(); b.record(s); s.synchronize(); ts.append(a.elapsed_time(b) * 1e3 / n)
    torch.cuda.current_stream().wait_stream(s)
    ts.sort(); return ts[len(ts) // 2], ts[0]


POOLS = {}
def bench_pool(h):
    """K and V of one layer, [slots, h, 128] bf16, random."""
    if h not in POOLS:
        POOLS.clear(); torch.cuda.empty_cache()
        POOLS[h] = tuple(torch.empty((1 << 20) if h == 8 else (1 << 19), h, 128, device=dev, dtype=torch.bfloat16).normal_() for _ in range(2))
    return POOLS[h]


def bench_set(lens, ps, slots, seed):
    g = torch.Generator(device=dev); g.manual_seed(seed)
    ids = torch.randperm(slots // ps, device=dev, generator=g)[: sum(-(-n // ps) for n in lens)].cpu().numpy()
    out, at = [], 0
    for n in lens: m = -(-n // ps); out.append(ids[at: at + m]); at += m
    return out


ROWS = []
def row(section, case, **kw):
    ROWS.append(dict(section=section, case=case, **kw))
    print(f"{section:8}{case:34}" + "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in kw.items()), flush=True)
    if A.json: json.dump(ROWS, open(A.json, "w"), indent=0)


def bench_case(section, case, heads, h, lens, ps, R, target, flops=0, bytes_=0, layout="layer"):
    K, V = bench_pool(h); slots = K.shape[0]
    e = h * 256
    pool = (K.data_ptr(), V.data_ptr(), ps * e, e, 256)
    if layout == "page":  # the same memory seen as [page, 2, 1 layer, slot, head, dim]
        POOLS.setdefault("page", torch.empty(2 * K.numel(), device=dev, dtype=K.dtype).normal_())
        P = POOLS["page"]; pool = (P.data_ptr(), P.data_ptr() + ps * e, 2 * ps * e, e, 256)
    steps, first = [], None
    for i in range(R):
        pages = bench_set([kv for _, kv in lens], ps, slots, 100 + i)
        words, row_of, *table = make_table(pages, ps, len(lens), max(kv for _, kv in lens))
        tokens = sum(n for n, _ in lens)
        if section == "extend" or i == 0: q = torch.randn(tokens, heads, 128, device=dev, dtype=K.dtype); out = torch.empty_like(q)
        qo = np.concatenate([[0], np.cumsum([n for n, _ in lens])])
        rows = [(row_of[j], qo[j], *lens[j]) for j in range(len(lens))]
        steps.append(Step(K.dtype, 128, heads, h, ps, rows, (words, *table), pool, q, out, both=False))
        if i == 0: first = (pages, q, out)
    pages, q, out = first
    out.fill_(float("nan")); steps[0].launch(); torch.cuda.synchronize()
    errs = []
    for b in sorted({0, len(lens) // 2, len(lens) - 1}):
        n, kv = lens[b]; qo = sum(x for x, _ in lens[:b])
        pos = torch.arange(kv, device=dev); pg = torch.from_numpy(pages[b].astype(np.int64)).to(dev)[pos // ps]
        if layout == "page":
            X = P.view(-1, 2, ps, h, 128); k, v = X[pg, 0, pos % ps], X[pg, 1, pos % ps]
        else: k, v = K[pg * ps + pos % ps], V[pg * ps + pos % ps]
        for i in sorted({0, n // 3, n - 1}):
            o, _ = reference(q[qo + i: qo + i + 1], k[: kv - n + i + 1], v[: kv - n + i + 1], kv - n + i + 1, 1 / math.sqrt(128), 0, 0)
            got = out[qo + i: qo + i + 1].double(); errs.append(float((got - o).norm() / o.norm()))
    us, least = time_graph([s.launch for s in steps], target)
    err = max(errs) if all(e == e for e in errs) else float("nan")
    kw = dict(gbs=bytes_ / us / 1e3) if bytes_ else dict(tflops=flops / us / 1e6)
    row(section, case, us=round(us, 2), least=round(least, 2), **kw, err=err, works=steps[0].works, plan_us=steps[0].plan_ns / 1e3, **({} if err < 1e-2 else {"BAD": 1}))


HEADS = [("32q/8kv", 32, 8), ("64q/8kv", 64, 8), ("32q/32kv", 32, 32)]
def shapes():
    z = np.maximum(128, np.round(32768 / np.arange(1, 65) ** (math.log(256) / math.log(64)))).astype(int)
    np.random.default_rng(0).shuffle(z)
    return [("b1 L8192", [8192]), ("b1 L131072", [131072]), ("b16 L4096", [4096] * 16), ("b64 L4096", [4096] * 64), ("b128 L2048", [2048] * 128),
            ("b256 L1024", [1024] * 256), ("b64 zipf128-32768", [int(x) for x in z])]


def decode(layout="layer", pages=(1, 16)):
    for hn, hq, hk in HEADS:
        for sn, lens in shapes():
            by = sum(lens) * hk * 512; R = int(min(12, max(2, math.ceil(400e6 / by))))
            for ps in pages:
                if A.only and f"{sn} {hn} page{ps}" not in A.only.split(","): continue
                bench_case("decode" if layout == "layer" else "decodeP", f"{sn} {hn} page{ps}", hq, hk, [(1, n) for n in lens], ps, R, 8, bytes_=by, layout=layout)


def extend():
    for B in (1, 8):
        for ql, pl in ((512, 0), (2048, 0), (8192, 0), (512, 7680), (2048, 30720)):
            L = ql + pl; fl = B * 4 * 128 * 32 * (ql * pl + ql * (ql + 1) / 2); R = int(min(8, max(1, math.ceil(256e6 / (B * (L * 4096 + ql * 16384))))))
            for ps in (16, 1):
                if A.only and f"B{B} q{ql} prefix{pl} page{ps}" not in A.only.split(","): continue
                bench_case("extend", f"B{B} q{ql} prefix{pl} page{ps}", 32, 8, [(ql, L)] * B, ps, R, 15, flops=fl)


def layouts():
    global HEADS
    HEADS = HEADS[:1]
    decode("layer", (16,)); decode("page", (16, 1))


def big():
    """Offsets beyond 4 GiB in a pool above 100 GB: three sequences on pages from all over it."""
    POOLS.clear(); torch.cuda.empty_cache()
    page_size, h, D, layers = 16, 8, 128, 4
    page_bytes = 2 * layers * page_size * h * D * 2
    for layout in ("page", "layer"):
        n = 104_000_000_000 // page_bytes
        pool = torch.empty(n * page_bytes // 2, dtype=torch.bfloat16, device=dev)
        view = pool.view(n, 2, layers, page_size, h, D) if layout == "page" else pool.view(2, layers, n, page_size, h, D)
        K, V = (view[:, 0, 3], view[:, 1, 3]) if layout == "page" else (view[0, 3], view[1, 3])
        strides = (K.data_ptr(), V.data_ptr(), K.stride(0) * 2, K.stride(1) * 2, K.stride(2) * 2)
        lens = [(1, 4000), (200, 3000), (1, 17)]
        rng = np.random.default_rng(1); ids = np.concatenate([[n - 1, 0], rng.choice(n - 1, 600, replace=False) + 0]); at = 0; pages = []
        ids = np.unique(ids); rng.shuffle(ids)
        for _, kv in lens: m = -(-kv // page_size); pages.append(ids[at: at + m]); at += m
        pages[0][0] = n - 1 if n - 1 not in np.concatenate(pages) else pages[0][0]
        words, row_of, *table = make_table(pages, page_size, 3, 4096)
        q = torch.randn(202, 32, D, device=dev, dtype=torch.bfloat16); out = torch.full_like(q, float("nan")); qo = 0; rows = []; refs = []
        for i, (ext, kv) in enumerate(lens):
            k, v = (torch.randn(kv, h, D, device=dev, dtype=torch.bfloat16) for _ in range(2))
            pos = torch.arange(kv, device=dev); pg = torch.from_numpy(pages[i].astype(np.int64)).to(dev)[pos // page_size]
            K[pg, pos % page_size] = k; V[pg, pos % page_size] = v
            refs.append((qo, ext, reference(q[qo: qo + ext], k, v, kv, 1 / math.sqrt(D), 0, 0)[0])); rows.append((row_of[i], qo, ext, kv)); qo += ext
        Step(torch.bfloat16, D, 32, h, page_size, rows, (words, *table), strides, q, out).launch(); torch.cuda.synchronize()
        err = max(float((out[a: a + e].double() - o).norm() / o.norm()) for a, e, o in refs)
        print(f"big: {layout} first, {pool.numel() * 2 / 1e9:.1f} GB, page stride {strides[2]}, error {err:.2e} {'ok' if err < 6e-3 else 'BAD'}", flush=True)
        del pool, view, K, V; torch.cuda.empty_cache()


def trace():
    """Where a decode launch's time goes; needs kernels that write the clock to lse: eight u64 a CTA."""
    for sn, lens in shapes():
        if A.only and sn not in A.only: continue
        K, V = bench_pool(8); e = 2048; ps = 16
        steps = []
        for i in range(3):
            pages = bench_set(lens, ps, K.shape[0], 100 + i)
            words, row_of, *table = make_table(pages, ps, len(lens), max(lens))
            q = torch.randn(len(lens), 32, 128, device=dev, dtype=K.dtype); out = torch.empty_like(q); clock = torch.zeros(4096, dtype=torch.int64, device=dev)
            steps.append(Step(K.dtype, 128, 32, 8, ps, [(row_of[j], j, 1, lens[j]) for j in range(len(lens))], (words, *table),
                              (K.data_ptr(), V.data_ptr(), ps * e, e, 256), q, out, clock, both=False))
        for _ in range(4):
            for x in steps: x.launch()
        torch.cuda.synchronize()
        for x in steps[:2]:
            n = x.decode[3]; t = x.keep[3][: n * 8].view(n, 8).cpu().numpy()[:, :5]; t = t[t[:, 4] > 0]; t = (t - t[:, 0].min()) / 1e3
            print(f"trace {sn}: {len(t)} CTAs; " + "; ".join(f"{name} {t[:, i].min():.1f}..{np.median(t[:, i]):.1f}..{t[:, i].max():.1f}" for i, name in enumerate(("start", "first data", "stream end", "arrived", "end"))), flush=True)


failed = [what for what in A.what if dict(check=check, decode=decode, extend=extend, layouts=layouts, big=big, trace=trace)[what]()]
sys.exit(1 if failed else 0)
