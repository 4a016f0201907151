"""Peak memory by megakit's planner and by its peers, on published runs whose peak of allocated bytes was printed.

    python benchmarks/planner_peers.py [--rows FILE.csv] [--all]

Nothing is fitted by anyone. Megatron-LM's report (its theoretical_memory_utils) and DeepSpeed's ZeRO estimator are written
down here as their documentation has them; llm-analysis is asked itself where it is installed (pip install llm-analysis).
--all also takes runs that printed the memory of the process, which tensors can only bound from below.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the plain command finds this clone from anywhere

from benchmarks.accuracy.memory import EXACT, memories, spread
from benchmarks.accuracy.rows import Row, read
from benchmarks.planner_accuracy import DEFAULT
from megakit.errors import Refused
from megakit.planner.widths import GIB
from megakit.planner.workload import Workload


def parameters(w: Workload) -> tuple[float, float]:
    """Of one layer of the whole model, and of one table."""
    return float(w.layer_elements * w.tp), float(w.table_elements * w.tp)


def megatron_report(w: Workload) -> float:
    """Bytes of the most loaded rank as Megatron-LM's memory report counts them (Korthikanti et al. 2022 for activations, with
    sequence parallelism and attention recomputed or fused)."""
    layer, table = parameters(w)
    held = (w.layers * layer / w.pp + table) / w.tp  # the first stage has the embedding
    held += table / w.tp if w.pp == 1 and not w.tied else 0
    states = held * (18 if w.zero == 0 else 6 + 12 / (w.dp * w.cp))
    rows = w.micro_batch_size * w.seq * w.hidden / w.cp
    activations = rows * (18 + 4 * w.ffn / w.hidden) * w.layers
    activations += 8 * w.seq * w.micro_batch_size * w.pp + rows * w.pp
    if w.virtual_stages > 1:
        activations *= 1 + (w.pp - 1) / (w.pp * w.virtual_stages)
    elif w.pp > 1:
        activations *= min(1.0, w.micro_batches / w.pp)
    if w.pp == 1:
        activations += rows * 4 * (1 + w.vocab / w.hidden)
    return states + activations / w.tp


def deepspeed_estimator(w: Workload) -> float:
    """Bytes of the model states as DeepSpeed's estimate_zero*_model_states_mem_needs count them, nothing offloaded."""
    layer, table = parameters(w)
    held = (w.layers * layer + table * (1 if w.tied else 2)) / (w.tp * w.pp)
    ranks = w.dp * w.cp
    return held * (18 / ranks if w.zero == 3 else 4 + 16 / ranks if w.zero else 20)


def llm_analysis(w: Workload) -> float:
    """Bytes by the package of that name. Raises ImportError where it isn't installed."""
    from llm_analysis import config
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis

    model = config.ModelConfig(
        name="model",
        num_layers=w.layers,
        n_head=w.heads,
        hidden_dim=w.hidden,
        vocab_size=w.vocab,
        max_seq_len=w.seq,
        num_key_value_heads=w.kv_heads,
        ffn_embed_dim=w.ffn,
        expansion_ratio=w.ffn / w.hidden,  # given too, or it insists on a whole number
        model_type="llama" if w.gated else "gpt2",
    )
    gpu = config.GPUConfig("gpu", 1e6, 8000, 900, 1e-5, 2000)
    grid = config.ParallelismConfig(tp_size=w.tp, pp_size=w.pp, dp_size=w.dp * w.cp, sp_size=w.tp if w.sequence_parallel else 1)
    found = LLMAnalysis(model, gpu, parallelism_config=grid, flops_efficiency=0.5).training(
        batch_size_per_gpu=w.micro_batch_size,
        gradient_accumulation_steps=w.micro_batches,
        seq_len=w.seq,
        activation_recomputation=ActivationRecomputation.FULL if w.recompute == "full" else ActivationRecomputation.NONE,
        ds_zero={0: DSZeRO.NONE, 1: DSZeRO.STAGE_1, 2: DSZeRO.STAGE_2, 3: DSZeRO.STAGE_3}[w.zero],
        flash_attn=w.stack.flash,
        mlp_gated_linear_units=w.gated,
    )
    return found["(weight+op_state+grad+act)_memory_per_gpu"]


PEERS: dict[str, Callable[[Workload], float]] = {
    "Megatron's report": megatron_report,
    "DeepSpeed's estimator": deepspeed_estimator,
    "llm-analysis": llm_analysis,
}


@dataclass(frozen=True)
class Run:
    """A published run."""

    group: str
    measured_gib: float
    predicted_gib: dict[str, float]


def runs(rows: list[Row], exact: bool) -> list[Run]:
    """Those that printed their memory and that the planner can plan."""
    out = []
    for ours in memories(rows)[0]:
        if exact and ours.group not in EXACT:
            continue
        found = {"megakit": ours.predicted_gib}
        for name, peer in PEERS.items():
            try:
                found[name] = peer(ours.workload) / GIB
            except ImportError:
                continue
        out.append(Run(ours.group, ours.measured_gib, found))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, default=DEFAULT, help="CSV file of published runs")
    parser.add_argument("--all", action="store_true", help="also runs that printed the memory of the process")
    args = parser.parse_args()
    try:
        found = runs(read(args.rows), not args.all)
    except Refused as why:
        print(why, file=sys.stderr)
        return why.code
    table = Table(title=f"Peak memory of {len(found)} published runs: error in per cent")
    for name in ("group", "rows", "planner", "mean of sizes", "largest", "lowest", "highest"):
        table.add_column(name, justify="left" if name in ("group", "planner") else "right")
    for group in sorted({run.group for run in found}):
        of_group = [run for run in found if run.group == group]
        for planner in ("megakit", *PEERS):
            errors = [100 * (r.predicted_gib[planner] / r.measured_gib - 1) for r in of_group if planner in r.predicted_gib]
            if errors:
                table.add_row(group, str(len(errors)), planner, *(f"{x:.1f}" for x in spread(errors).values()))
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
