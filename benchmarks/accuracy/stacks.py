"""The programs that published runs were made with, as far as the time of a step depends on them; as data.

Traits are from each program's documentation and recipes. `factor` is fitted (stacks.json): how much longer all it does takes
than the constants of the GPU say.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from megakit.planner.workload import Stack

FACTORS = Path(__file__).with_name("stacks.json")


@dataclass(frozen=True)
class Source:
    """Runs from one publisher."""

    begins: str
    """How `source` begins."""
    stack: Stack
    network_gb_s: float | None = None
    """Per GPU, where it isn't that of the GPU's reference machine."""
    gpus_per_node: int | None = None
    gradient_bytes: int = 4
    group: str = ""
    """What errors are reported under."""
    spread: float = 0.08
    """Standard deviation of the logarithm of its stack's factor before it is fitted."""
    fitted: bool = True
    """Its runs take part in a fit; else they are only judged."""
    by_cost: bool = False
    """Its pipeline stages are cut by the FLOPs of layers and head, not by the number of layers."""
    models: str = ""
    """Only models whose name begins so."""
    note: str = ""
    """Only rows whose note or precision contains this."""
    defaults: dict[str, str] = field(default_factory=dict)
    """What its rows leave out."""
    why: str = ""


MEGATRON_CORE = Stack("megatron-core", loss_bytes=24, tp_overlap=True, dp_inside=True)
MEGATRON_PLAIN = replace(MEGATRON_CORE, name="megatron-core, no overlap of tp", tp_overlap=False)
MEGATRON_2021 = Stack(
    "megatron-lm 2021", flash=False, loss_bytes=40, dp_overlap=False, pp_overlap=False, pp_scatter=True, dp_inside=True
)
MEGATRON_DEEPSPEED = replace(MEGATRON_2021, name="megatron-deepspeed", checkpoint_s=1e-3)
BIGSCIENCE = replace(MEGATRON_DEEPSPEED, name="bigscience", host_s=1e-3)
"""With CUDA_LAUNCH_BLOCKING=1 against hangs on 20 nodes and more: some 40 kernels of a layer, each about 25 us late."""
EARLY = replace(BIGSCIENCE, name="bigscience until 02-24")
"""On 25 February 2022 its machine's PCIe and NUMA settings were mended: "all TFLOPs have changed for the better"."""
DAYS = ("02-20", "02-21", "02-23", "02-24")
FSDP = Stack("llm-foundry", fused=False, loss_bytes=40, flash_version=1, stops_early=True, accumulates=False)
COMPILED = Stack("fsdp, compiled", loss_bytes=32, flash_version=2, stops_early=True, accumulates=False)
EAGER = Stack("fsdp, eager", fused=False, loss_bytes=40, flash_version=2, stops_early=True, accumulates=False)
SEQUENCE = {"seq_parallel": "yes"}

SOURCES = (
    Source("vTrain", replace(MEGATRON_DEEPSPEED, name="vtrain"), network_gb_s=12.5, gradient_bytes=2, group="vTrain"),
    Source("MosaicML llm-foundry", FSDP, spread=0.16, group="llm-foundry"),
    *(Source("BigScience 176B", EARLY, network_gb_s=6.25, group="BigScience", note=day) for day in DAYS),
    *(
        Source("BigScience 176B", replace(EARLY, host_s=0.0), network_gb_s=6.25, group="BigScience", models=model, why="one node")
        for model in ("gpt-18b", "gpt-20b")
    ),
    Source("BigScience 176B", BIGSCIENCE, network_gb_s=6.25, group="BigScience"),
    Source("BLOOM", BIGSCIENCE, network_gb_s=6.25, group="BigScience"),
    Source("Megatron PTD-P", MEGATRON_2021, gradient_bytes=2, group="SC21"),
    Source("MT-NLG", replace(MEGATRON_2021, name="mt-nlg"), spread=0.16, gradient_bytes=2, group="SC21"),
    Source(
        "InternEvo",
        replace(COMPILED, name="internevo", broadcasts=True, stops_early=False),
        spread=0.16,
        network_gb_s=6.25,
        gradient_bytes=2,
        group="InternEvo",
    ),
    Source("IBM fms-fsdp", replace(COMPILED, name="fms-fsdp"), spread=0.16, gradient_bytes=2, group="fms-fsdp"),
    Source(
        "NVIDIA dgxc",
        replace(COMPILED, name="maxtext", flash_version=99),
        spread=0.16,
        gradient_bytes=4,
        group="NVIDIA",
        models="llama2-70b",
        defaults={"recompute": "full"},
        why="JAX/MaxText, with full recomputation",
    ),
    Source("NVIDIA dgxc", replace(MEGATRON_CORE, name="nemo dgxc"), gradient_bytes=2, group="NVIDIA", defaults=SEQUENCE),
    Source(
        "NeMo long",
        replace(MEGATRON_CORE, name="nemo long"),
        gradient_bytes=2,
        group="NVIDIA",
        defaults={**SEQUENCE, "micro_batch": "1"},
    ),
    Source("NeMo 24", replace(MEGATRON_CORE, name="nemo 24"), gradient_bytes=2, group="NVIDIA", defaults=SEQUENCE),
    Source("NeMo", replace(MEGATRON_CORE, name="nemo 25"), gradient_bytes=2, group="NVIDIA", defaults=SEQUENCE),
    Source(
        "Megatron-Bridge", replace(MEGATRON_CORE, name="megatron-bridge"), gradient_bytes=2, group="NVIDIA", defaults=SEQUENCE
    ),
    Source("SimuMax", replace(MEGATRON_PLAIN, name="simumax"), spread=0.16, group="SimuMax"),
    Source("torchtitan", replace(COMPILED, name="torchtitan"), spread=0.16, group="torchtitan"),
    Source("torchtitan", replace(EAGER, name="torchtitan, eager"), spread=0.16, group="torchtitan", note="no compile"),
    Source(
        "torchtitan",
        replace(COMPILED, name="torchtitan, async tp", tp_overlap=True),
        spread=0.16,
        group="torchtitan",
        note="async TP",
    ),
    Source("torchtitan", replace(COMPILED, name="torchtitan, rowwise"), spread=0.16, group="torchtitan", note="rowwise"),
    Source("KempnerInstitute", replace(EAGER, name="kempnerforge"), gpus_per_node=4, group="KempnerForge", fitted=False),
    Source("huggingface/nanotron", replace(EAGER, name="nanotron"), group="nanotron", fitted=False, by_cost=True),
    Source(
        "BigScience Jean-Zay V100",
        replace(MEGATRON_DEEPSPEED, name="jean-zay"),
        gpus_per_node=4,
        gradient_bytes=2,
        group="V100",
        fitted=False,
    ),
)
UNKNOWN = Source("", Stack("unknown", loss_bytes=32), group="other", fitted=False)


def source_of(row: dict[str, str]) -> Source:
    """The entry of a row, with its fitted factor; UNKNOWN for a publisher that isn't here."""
    text = f"{row.get('note', '')} {row.get('precision', '')}"
    fits = [
        s
        for s in SOURCES
        if row.get("source", "").startswith(s.begins) and row.get("model", "").startswith(s.models) and s.note in text
    ]
    if not fits:
        return UNKNOWN
    found = max(fits, key=lambda s: (len(s.begins), len(s.models), len(s.note)))
    return found


def names_of(source: Source, row: dict[str, str]) -> tuple[str, ...]:
    """Of the factors that make up a row's: its program, and its release (24.11, ...) where the source has one."""
    release = re.search(r"\b(?:v?)(2\d\.\d\d)\b", row.get("source", ""))
    return (source.stack.name, *([f"{source.stack.name} {release.group(1)}"] if release else []))


def factor(names: tuple[str, ...], chip: str) -> float:
    """The product of the fitted factors on a chip; a program's of other chips where it has none, and 1 for what is unknown."""
    known = json.loads(FACTORS.read_text()) if FACTORS.exists() else {}
    others = [value for name, value in known.items() if name.startswith(f"{names[0]} on ")]
    program = known.get(f"{names[0]} on {chip}", sum(others) / len(others) if others else 1.0)
    return program * math.prod(known.get(f"{name} on {chip}", 1.0) for name in names[1:])
