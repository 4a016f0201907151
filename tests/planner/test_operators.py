"""What a plan takes for granted of csrc's kernels: their bytes are the ledger's, and a step with them is faster."""

from __future__ import annotations

import re

import pytest

from megakit.config import rules
from megakit.config.compose import compose
from megakit.ops.folder import SOURCES
from megakit.planner import hardware
from megakit.planner.estimate import estimate
from megakit.planner.kernels import Kernels
from megakit.planner.links import Links
from megakit.planner.operators import ADAMW_BYTES, PASSES, assumed, by_kernels
from megakit.planner.plan import make_plan
from megakit.planner.search import search
from megakit.planner.workload import Workload

H100 = hardware.find("h100")
CALLS = {
    "RMSNorm": "norm",
    "LayerNorm": "norm",
    "RMSNorm of a sum": "add_norm",
    "LayerNorm of a sum": "add_norm",
    "rotary, in place": "rope",
    "SwiGLU": "swiglu",
    "GELU": "gelu",
    "cross entropy": "loss",
    "dropout and add": "dropout",
}
"""Rows of the ledger by the kernel whose passes they are."""


def ledger() -> dict[str, tuple[int, float]]:
    """By call: elements of its result, bytes that cross the bus."""
    rows = re.findall(r"^\| ([^|`]+) \| ([\d,x of]+) \| ([\d,]+) \| ([\d.]+) \|", (SOURCES / "LEDGER.md").read_text(), re.M)
    out = {}
    for name, shape, least, over in rows:
        a, *b = (int(n.replace(",", "")) for n in re.findall(r"[\d,]+", shape))
        elements = a * b[0] * (b[2] if name.startswith("rotary") else 1) if b else a  # tokens x heads of all heads x width
        out[name] = elements, int(least.replace(",", "")) * float(over)
    return out


def test_the_passes_are_the_ledgers():
    """In bf16; what the least has besides, weights, tables and statistics, is under 3%."""
    there, met = ledger(), set()
    for call, kernel in CALLS.items():
        for way, passes in zip(("forward", "backward"), PASSES[kernel]):
            name = next((n for n in (f"{call}, {way}", f"{call}, {way} in place", call) if n in there), None)
            if name is None or (name == call and way == "backward"):  # one kernel serves both, or it has no backward pass
                continue
            elements, moved = there[name]
            assert moved / (2 * elements) == pytest.approx(passes, rel=0.03), name
            met.add(name)
    elements, moved = there["AdamW"]
    assert moved == ADAMW_BYTES * elements
    assert met | {"AdamW", "squared norm", "softmax, forward", "softmax, backward"} == set(there), "a call that no plan knows"


def resolved(*overrides):
    cfg = compose(["+recipe=llama70b", *overrides])
    return rules.resolve(cfg, rules.planned_world(cfg))


def step(*overrides):
    return estimate(Workload.of(resolved(*overrides)), H100)


def test_a_step_with_kernels_is_faster_by_each_of_them():
    torchs = step("ops.backend=torch")
    assert step("ops.backend=auto") == torchs, "whether they are built isn't known"
    kernels = step("ops.backend=csrc")
    assert kernels.seconds < torchs.seconds and kernels.memory < 0.7 * torchs.memory
    assert (kernels.gemm, kernels.attention, kernels.optimizer) == (torchs.gemm, torchs.attention, torchs.optimizer)
    for name in ("norm", "rope", "activation", "loss"):
        one = step("ops.backend=torch", f"ops.{name}=csrc")
        assert kernels.seconds < one.seconds < torchs.seconds or one.seconds == torchs.seconds, name
        if name != "loss":  # which is the last stage's, and that is not always the busiest
            assert one.memory < torchs.memory, name


def test_bytes_of_a_layer_and_of_the_head_are_the_passes():
    """Without launches: 2 sums with a norm, rotation and SwiGLU; the logits."""
    w = Workload.of(resolved("ops.backend=csrc"))
    k = Kernels(w, H100, Links(w, H100))
    second = k.bandwidth / k.f.elementwise  # bytes
    h, heads, ffn = w.hidden / w.tp, (w.heads + w.kv_heads) * w.head_dim / w.tp, w.ffn / w.tp
    layer, head = k.layer(), k.head()
    assert layer.forward.memory == pytest.approx(2 * k.rows * (8 * h + 2 * heads + 3 * ffn) / second + 8 * 4e-6)
    assert layer.input_gradient.memory == pytest.approx(2 * k.rows * (8 * h + 2 * heads + 5 * ffn) / second + 8 * 4e-6)
    logits = k.rows * w.vocab / w.tp
    assert head.forward.memory == pytest.approx(2 * logits / second + 16e-6)
    assert head.input_gradient.memory == pytest.approx(4 * logits / second + 16e-6)


def test_a_chunked_loss_makes_the_logits_again():
    whole, parts = (Workload.of(resolved("ops.backend=csrc", f"ops.loss_chunk={n}")) for n in ("null", 1024))
    a, b = (Kernels(w, H100, Links(w, H100)).head() for w in (whole, parts))
    assert b.input_gradient.gemm == pytest.approx(a.input_gradient.gemm + a.forward.gemm)
    assert b.weight_gradient == a.weight_gradient and b.forward.gemm == a.forward.gemm
    late = Workload.of(resolved("ops.backend=csrc", "ops.loss_chunk=1024", "parallel.schedule=zb_h1"))
    assert Kernels(late, H100, Links(late, H100)).head().weight_gradient.gemm > a.weight_gradient.gemm


def test_the_plan_says_which_operators_it_assumes():
    plan = make_plan(compose(["+recipe=llama70b", "ops.backend=csrc", "ops.loss=torch"]))
    assert plan.operators == "csrc's kernels: norm, rope, activation, dropout_add, adamw; torch's: loss, attention"
    cfg = resolved("ops.backend=auto")
    assert by_kernels(cfg) == () and assumed(cfg) == "torch's; by auto a run takes csrc's kernels where they are built"
    assert assumed(resolved("ops.backend=torch")) == "torch's"
    te = assumed(resolved("ops.backend=te", "ops.rope=csrc"))
    assert te == "csrc's kernels: rope; te's (counted as torch's): norm, attention; torch's: activation, loss, dropout_add, adamw"


def test_a_search_counts_with_them():
    recipes = [compose(["+recipe=llama7b", "cluster=h100", "cluster.nodes=1", f"ops.backend={b}"]) for b in ("torch", "csrc")]
    torchs, kernels = (search(cfg, H100).best[0].step.seconds for cfg in recipes)
    assert kernels < torchs
