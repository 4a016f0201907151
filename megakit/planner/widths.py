"""Bytes of an element, by what it is and the precision of the run. No torch here."""

GIB, MIB = 2**30, 2**20


def unit_of(most: int) -> tuple[str, int]:
    """(its name, its bytes) for a table whose largest size is `most` bytes."""
    return ("GiB", GIB) if most >= GIB else ("MiB", MIB)


WEIGHT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2}
"""Also of activations. fp8 is used inside of matrix products only: what is kept is bf16."""
GRADIENT_BYTES = {"fp32": 4, "bf16": 2}
"""By the type that gradients are accumulated in."""
MASTER_BYTES = {"bf16": 4, "fp16": 4, "fp32": 0, "fp8": 4}
"""A fp32 master where the weights aren't fp32 themselves; under ZeRO 3 always, as its weights are gathered from them."""
STATE_BYTES = 4
"""Of each thing that an optimizer keeps, as a moment."""


def kept_as(precision: str) -> str:
    """The type of weights and activations."""
    return "bf16" if precision == "fp8" else precision
