# SPDX-License-Identifier: Apache-2.0
"""Fills the table of ``afd_runtime/protocol.py`` into the model: ``python models/generate.py > exchange.pml``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
SHORT = {"attention": "att", "ffn": "ffn"}


def load_protocol() -> ModuleType:
    """``afd_runtime.protocol`` from this checkout, without the packages around it."""
    spec = importlib.util.spec_from_file_location("afd_protocol_table", HERE.parent / "afd_runtime" / "protocol.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def states(protocol: ModuleType) -> str:
    """One constant a state, the predicates IN_STEP, and CONFLICT of two states from the slot access."""
    lines = [f"#define {state.name} {number}" for number, state in enumerate(protocol.State)]
    for side, states in protocol.IN_STEP.items():
        name = f"{SHORT[side.value].upper()}_IN_STEP(x)"
        lines.append(f"#define {name} (" + " || ".join(f"(x) == {state.name}" for state in states) + ")")
    pairs = [
        f"((a) == {attention.name} && (f) == {ffn.name})"
        for attention in protocol.STATES[protocol.Side.ATTENTION]
        for ffn in protocol.STATES[protocol.Side.FFN]
        if protocol.conflict(attention, ffn)
    ]
    lines.append("#define CONFLICT(a, f) (" + " || ".join(pairs) + ")")
    return "\n".join(lines)


def transitions(protocol: ModuleType) -> str:
    """One inline a (side, event): the rows of the table; anything else is a violation."""
    lines = []
    for side in protocol.Side:
        for event in protocol.Event:
            rows = [t for t in protocol.TABLE if t.side is side and t.event is event]
            if not rows:
                continue
            short = SHORT[side.value]
            lines += [f"inline {short}_{event.value}(p) {{", "  if"]
            lines += [f"  :: {short}[p] == {row.source.name} -> {short}[p] = {row.target.name}" for row in rows]
            lines += ["  :: else -> assert(false) /* not in the table */", "  fi;", "  check_access(p)", "}"]
    return "\n".join(lines)


def generate() -> str:
    """The whole model."""
    protocol = load_protocol()
    parts = {
        "@STATES@": states(protocol),
        "@TRANSITIONS@": transitions(protocol),
        "@ATTENTION@": (HERE / "attention.pml.in").read_text(),
        "@FFN@": (HERE / "ffn.pml.in").read_text(),
    }
    model = (HERE / "exchange.pml.in").read_text()
    for mark, text in parts.items():
        model = model.replace(mark, text)
    return model


if __name__ == "__main__":
    print(generate(), end="")
