"""The core of a KV cache for LLM engines.

`Tree` has the cached prefixes of an engine that owns its pages. `Engine` also assigns pages, plans steps and forks.
`python -m kvarena.replay TRACE --pages N` replays a trace. `kvarena.adapters` has mini-sglang, SGLang and nano-vllm.
"""

from kvarena._kvarena import (
    Admission,
    Array,
    Engine,
    Gone,
    NotLocked,
    OutOfPages,
    Plan,
    Shortage,
    Tree,
)

__all__ = ["Admission", "Array", "Engine", "Gone", "NotLocked", "OutOfPages", "Plan", "Shortage", "Tree"]
