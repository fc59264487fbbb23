"""Replaces the marks of pdl.cuh and e4m3.cuh in PTX by instructions, as src/backend/cuda/kernels/marks.rs does."""
INSTRUCTIONS = {"// pdl: wait": "griddepcontrol.wait;", "// pdl: launch dependents": "griddepcontrol.launch_dependents;"}
NEWER, OLDER = "// sm_90: ", "// sm_80"


def with_pdl(text):
    if "// pdl: wait" not in text and NEWER not in text:
        return text
    lines = (line for line in text.replace(".target sm_80", ".target sm_90").split("\n") if not line.endswith(OLDER))
    text = "\n".join(lines).replace(NEWER, "")
    for mark, instruction in INSTRUCTIONS.items():
        text = text.replace(mark, instruction)
    return text
