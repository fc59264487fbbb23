"""Results and pools by the buffer protocol and DLPack."""

import ctypes
import gc

import numpy as np
import pytest

import kvarena


@pytest.fixture
def slots():
    tree = kvarena.Tree(pages=8)
    handle, _ = tree.insert([1, 2, 3], [5, 6, 7])
    return tree.slots(handle)


def test_a_sequence(slots):
    assert (len(slots), slots.shape, slots.strides, slots.dtype) == (3, (3,), (4,), "int32")
    assert (slots[0], slots[-1], list(slots[1:]), list(slots)) == (5, 7, [6, 7], [5, 6, 7])
    assert slots.tolist() == [5, 6, 7]
    assert repr(slots) == "<kvarena.Array int32 (3,)>"
    with pytest.raises(IndexError):
        slots[3]


def test_the_buffer_protocol(slots):
    view = memoryview(slots)
    assert (view.format, view.itemsize, view.nbytes, view.readonly, view.c_contiguous) == ("i", 4, 12, False, True)
    array = np.asarray(slots)
    array[0] = 4
    assert slots.tolist() == [4, 6, 7]
    assert bytes(slots) == array.tobytes()


def test_views_outlive_the_result():
    def view(make):
        tree = kvarena.Tree(pages=1000)
        handle, _ = tree.insert(list(range(1000)), list(range(1000)))
        return make(tree.slots(handle))

    for make in (memoryview, np.asarray, np.from_dlpack):
        kept = view(make)
        gc.collect()
        assert list(kept) == list(range(1000))


def test_dlpack(slots):
    assert slots.__dlpack_device__() == (1, 0)
    array = np.from_dlpack(slots)
    assert array.dtype == np.int32 and array.tolist() == [5, 6, 7]
    assert "dltensor_versioned" not in repr(slots.__dlpack__())
    assert "dltensor_versioned" not in repr(slots.__dlpack__(max_version=(0, 8)))
    assert "dltensor_versioned" in repr(slots.__dlpack__(max_version=(1, 0)))
    slots.__dlpack__(stream=-1, dl_device=(1, 0), copy=False)
    for wrong in (dict(stream=3), dict(dl_device=(2, 0)), dict(copy=True)):
        with pytest.raises(BufferError):
            slots.__dlpack__(**wrong)
    for wrong in (dict(stream="x"), dict(max_version=5), dict(max_version=(1, 2, 3)), dict(unknown=1)):
        with pytest.raises((TypeError, ValueError)):
            slots.__dlpack__(**wrong)


def test_a_capsule_that_no_consumer_takes_frees_its_memory():
    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    tree = kvarena.Tree(pages=1 << 20)
    handle, _ = tree.insert(range(1 << 20), range(1 << 20))
    for version in (None, (1, 0)):
        for _ in range(8):
            tree.slots(handle).__dlpack__(max_version=version)
        before = resident()
        for _ in range(64):
            tree.slots(handle).__dlpack__(max_version=version)
        assert resident() - before < 64 << 20  # 64 arrays take 256 MiB


class Tensor(ctypes.Structure):
    """DLTensor, from the specification."""

    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned, from the specification."""

    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", Tensor)]


def versioned(array):
    """The fields of an array's versioned capsule, and the capsule, which owns them."""
    capsule = array.__dlpack__(max_version=(1, 1))
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return Versioned.from_address(pointer(capsule, b"dltensor_versioned")), capsule


def test_the_fields_of_a_versioned_capsule(slots):
    managed, _capsule = versioned(slots)
    tensor = managed.tensor
    assert (managed.major, managed.minor, managed.flags) == (1, 1, 0)
    assert (list(tensor.device), tensor.ndim, tensor.byte_offset) == ([1, 0], 1, 0)
    assert (tensor.code, tensor.bits, tensor.lanes) == (0, 32, 1)
    assert (tensor.shape[0], tensor.strides[0]) == (3, 1)
    assert list((ctypes.c_int32 * 3).from_address(tensor.data)) == [5, 6, 7]
