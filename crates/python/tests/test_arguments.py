"""Arguments of every form, and wrong ones: each raises an error that names the value and changes nothing."""

import array
import ctypes
import math

import numpy as np
import pytest

from kvarena import Gone, Tree


@pytest.fixture
def tree():
    tree = Tree(pages=64)
    tree.insert(list(range(10)), list(range(10)))
    return tree


def unaligned(dtype):
    bytes = np.zeros(np.dtype(dtype).itemsize * 10 + 1, np.uint8)
    view = bytes[1:].view(dtype)
    view[:] = range(10)
    return view


def read_only():
    ints = np.arange(10, dtype=np.int32)
    ints.flags.writeable = False
    return ints


FORMS = {
    "list": list(range(10)),
    "tuple": tuple(range(10)),
    "range": range(10),
    "int32": array.array("i", range(10)),
    "uint32": array.array("I", range(10)),
    "int64": array.array("q", range(10)),
    "uint64": np.arange(10, dtype=np.uint64),
    "long": array.array("l", range(10)),
    "ctypes": (ctypes.c_int32 * 10)(*range(10)),
    "read-only": read_only(),
    "strided": np.arange(20, dtype=np.int32)[::2] // 2,
    "reversed": np.arange(10, dtype=np.int64)[::-1][::-1],
    "every other": np.repeat(np.arange(10, dtype=np.int32), 2)[::2],
    "every other int64": np.repeat(np.arange(10), 2)[::2],
    "unaligned int32": unaligned(np.int32),
    "unaligned int64": unaligned(np.int64),
    "numpy integers": [np.int64(i) for i in range(10)],
    "memoryview": memoryview(array.array("i", range(20)))[:10],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_integers(tree, form):
    assert tree.find(FORMS[form]) == 10
    other = Tree(pages=64)
    handle, _ = other.insert(FORMS[form], FORMS[form])
    assert other.slots(handle).tolist() == list(range(10))
    paged = Tree(pages=5, page_size=2)
    handle, _ = paged.insert(FORMS[form], FORMS[form])
    assert paged.slots(handle).tolist() == list(range(10))


def test_empty_forms(tree):
    for empty in ([], (), array.array("i"), array.array("q"), np.zeros(0, np.int32), np.zeros(8, np.int32)[8:]):
        assert tree.match(empty) == (0, 0)
        assert tree.insert(empty, empty) == (0, 0)


WRONG = [
    (TypeError, "'float'", [1.0]),
    (TypeError, "'float'", [math.nan]),
    (TypeError, "'str'", ["1"]),
    (TypeError, "'NoneType'", [None]),
    (TypeError, "format", array.array("f", [1])),
    (TypeError, "format", array.array("h", [1])),
    (TypeError, "format", b"1234"),
    (TypeError, "format", np.array([True])),
    (TypeError, "format", np.arange(3, dtype=">i4")),
    (TypeError, "format", np.zeros(3, np.complex64)),
    (TypeError, "int", 5),
    (TypeError, "NoneType", None),
    (TypeError, "dict", {1: 2}),
    (TypeError, "set", {1}),
    (TypeError, "'str'", "12"),
    (ValueError, "2 dimensions", np.zeros((2, 2), np.int32)),
    (TypeError, "ndarray", np.array(5, np.int32)),
    (ValueError, "-1 at index 1", [5, -1]),
    (ValueError, "-1 at index 1", array.array("i", [5, -1])),
    (ValueError, "-1 at index 1", array.array("q", [5, -1])),
    (ValueError, "-3 at index 0", np.array([-3, 0, 5, 0], np.int32)[::2]),
    (ValueError, "4294967296 at index 0", [1 << 32]),
    (ValueError, "4294967296 at index 2", array.array("q", [0, 0, 1 << 32])),
    (ValueError, "18446744073709551615 at index 0", np.array([2**64 - 1], np.uint64)),
    (ValueError, "18446744073709551616", [1 << 64]),
    (ValueError, "-9223372036854775809", [-(1 << 63) - 1]),
]


@pytest.mark.parametrize("error, text, tokens", WRONG)
def test_wrong_integers(tree, error, text, tokens):
    before = str(tree)
    calls = [tree.find, tree.match, lambda x: tree.insert(x, x), lambda x: tree.insert([1], x)]
    for call in calls:
        with pytest.raises(error, match=text):
            call(tokens)
    assert str(tree) == before


def test_an_exception_in_a_callback_passes_through(tree):
    class Raises:
        def __index__(self):
            raise LookupError("of the caller")

    class Calls:
        def __index__(self):
            tree.insert([77], [20])
            return 5

    with pytest.raises(LookupError, match="of the caller"):
        tree.match([1, Raises()])
    # A call inside a call is a second user of the tree.
    with pytest.raises(RuntimeError, match="Already borrowed"):
        tree.match([Calls()])
    assert tree.find([77]) == 0

    class Shrinks:
        def __index__(self):
            shrinking.clear()
            return 0

    shrinking = [Shrinks(), 1, 2, 3]
    assert tree.find(shrinking) == 1


@pytest.mark.parametrize("handle", [-1, 1 << 128, -(1 << 200)])
def test_handles_out_of_range(tree, handle):
    for call in (tree.lock, tree.unlock, tree.slots, lambda x: tree.extend(x, [1], [20])):
        with pytest.raises(ValueError, match=str(handle)):
            call(handle)


@pytest.mark.parametrize("handle", [1, 1 << 64, (1 << 64) + 1, (1 << 128) - 1])
def test_foreign_handles(tree, handle):
    other = Tree(pages=64)
    foreign = [other.insert([token], [token])[0] for token in range(8)][-1]
    alias = tree.match([0])[0] ^ 1 << 32  # its low 64 bits are the number of no key
    for handle in (handle, foreign, alias):
        for call in (tree.lock, tree.unlock, tree.slots, lambda x: tree.extend(x, [1], [20])):
            with pytest.raises(Gone):
                call(handle)


@pytest.mark.parametrize("handle", [None, "5", 5.0, math.nan, [5]])
def test_handles_of_another_type(tree, handle):
    for call in (tree.lock, tree.unlock, tree.slots):
        with pytest.raises(TypeError):
            call(handle)


@pytest.mark.parametrize("count, error", [(-1, ValueError), (1 << 32, ValueError), (math.nan, TypeError),
                                          (1.5, TypeError), ("1", TypeError), (None, TypeError)])
def test_wrong_counts(tree, count, error):
    with pytest.raises(error):
        tree.evict(count)
    with pytest.raises(error):
        Tree(count)
    with pytest.raises(error):
        tree.find([1], count if count != 1 << 32 else 1 << 64)


def test_slots_of_whole_pages():
    tree = Tree(pages=4, page_size=4)
    for slots in ([0, 1, 2], [1, 2, 3, 4], [0, 1, 3, 2], [0, 1, 2, 7], [3, 2, 1, 0], [0, 0, 0, 0]):
        with pytest.raises(ValueError, match="slots"):
            tree.insert([1, 2, 3, 4], slots)
    for slots in ([16, 17, 18, 19], [0, 1, 2, 3, 0, 1, 2, 3]):
        with pytest.raises(ValueError, match="page"):
            tree.insert(list(range(len(slots))), slots)
    with pytest.raises(ValueError, match="cannot fill"):
        tree.insert([1, 2, 3], [0, 1, 2, 3])
    with pytest.raises(ValueError, match="cannot fill"):
        tree.insert([1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3])
    with pytest.raises(ValueError, match="is not from 0"):
        tree.insert([1, 2, 3, 4], [1 << 40, (1 << 40) + 1, (1 << 40) + 2, (1 << 40) + 3])
    with pytest.raises(ValueError, match="placeholder"):
        tree.insert([1, 2, 3, 2**32 - 1], [0, 1, 2, 3])
    tree.insert([1, 2, 3, 4], [0, 1, 2, 3])
    with pytest.raises(ValueError, match="already cached"):
        tree.insert([5, 6, 7, 8], [0, 1, 2, 3])
    assert tree.evictable == 4
