"""PTX with the instructions of pdl.cuh in place of their marks, as src/backend/cuda/pdl.rs makes it."""
INSTRUCTIONS = {".target sm_80": ".target sm_90", "// pdl: wait": "griddepcontrol.wait;", "// pdl: launch dependents": "griddepcontrol.launch_dependents;"}


def with_pdl(text):
    if "// pdl: wait" in text:
        for mark, instruction in INSTRUCTIONS.items():
            text = text.replace(mark, instruction)
    return text
