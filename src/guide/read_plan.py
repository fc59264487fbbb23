"""Reads a file of plans in their byte form, and prints each plan as a line of JSON."""
import json
import struct
import sys


def read_plan(data, start):
    """Returns the plan at `start`, and the start of the next plan."""
    magic, step, rows, tokens, writes, slots, spans, members, masks = struct.unpack_from("<8s8Q", data, start)
    slot_bytes, tracks = slots % 2**32, slots // 2**32  # tracks after the first: 0 if there is one group of layers
    assert magic == b"kvplan03" and slot_bytes in (4, 8), "not a plan of this version"
    at = start + 72

    def array(count, item):
        nonlocal at
        size = struct.calcsize("<" + item)
        assert at + count * size <= len(data), "cut off"
        items = list(struct.iter_unpack("<" + item, data[at:at + count * size]))
        at += -(-count * size // 8) * 8  # arrays are padded to 8 bytes
        return items

    plan = {"step": step, "rows": array(rows, "4I")}  # row, qo_start, extend_len, kv_len
    plan["tokens"] = [token for token, in array(tokens, "I")]  # 4294967295: not known yet
    plan["positions"] = [position for position, in array(tokens, "I")]
    slot_type = "i" if slot_bytes == 4 else "q"
    plan["slot_mapping"] = [slot for slot, in array(tokens, slot_type)]
    plan["table_writes"] = array(writes, "2I")  # index, value
    plan["spans"] = array(spans, "4I")  # member_start, member_count, begin, end
    plan["members"] = [row for row, in array(members, "I")]
    plan["masks"] = [mask for mask, in array(masks, "Q")]  # one for each token, or none at all
    plan["track_slots"] = [slot for slot, in array(tracks * tokens, slot_type)]
    return plan, at


data, start = open(sys.argv[1], "rb").read(), 0
while start < len(data):
    plan, start = read_plan(data, start)
    print(json.dumps(plan))
