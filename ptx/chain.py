"""PTX with the instructions of chain.cuh in place of their marks, as src/backend/cuda/launch.rs loads it."""
CHAINED = {".target sm_80": ".target sm_90", "// chain: wait": "griddepcontrol.wait;", "// chain: next": "griddepcontrol.launch_dependents;"}


def chained(text):
    if "// chain: wait" in text:
        for mark, instruction in CHAINED.items():
            text = text.replace(mark, instruction)
    return text
