"""Published runs: a row of the file -> a Workload on a GPU and the measured tokens/s, or the reason why it can't be judged."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.accuracy.stacks import Source, factor, names_of, source_of
from megakit.config.schema import ModelConfig
from megakit.errors import Refused
from megakit.modeling.layout import split_layers
from megakit.planner.hardware import Gpu, find
from megakit.planner.workload import Workload

Row = dict[str, str]

LEFT_OUT: tuple[tuple[dict[str, str], str], ...] = (
    (
        {"source": "BigScience 176B", "n_gpus": "384", "tp": "8", "pp": "6", "global_batch": "1568"},
        "its step took 113.0 s, that of 2,048 samples on the same grid and day 114.1 s",
    ),
    ({"source": "NVIDIA dgxc-benchmarking v25.04.02", "model": "gpt3-175b"}, "copies of the v25.02 rows; virtual stages unclear"),
    ({"source": "NeMo long", "gpu": "B200"}, "layout contradicts the number of GPUs"),
    ({"source": "MosaicML", "model": "mpt-30b", "seq": "8192"}, "far below its neighbours at other lengths"),
    ({"source": "MosaicML", "model": "mpt-70b", "gpu": "a100_40gb", "n_gpus": "64"}, "far below 128 GPUs: at its memory limit"),
    ({"note": "OUTLIER"}, "marked as an outlier by who collected it"),
    ({"source": "vTrain", "model": "gpt-3.6b", "tp": "8", "micro_batch": "2"}, "unexplained, up to 35% slow"),
    ({"source": "vTrain", "model": "gpt-3.6b", "tp": "8", "micro_batch": "64"}, "unexplained, half the speed of micro-batch 32"),
    ({"source": "vTrain", "model": "gpt-3.6b", "tp": "4", "micro_batch": "2"}, "unexplained, up to 35% slow"),
    ({"source": "vTrain", "model": "gpt-39.1b", "tp": "2"}, "unexplained, up to 35% slow"),
    ({"source": "Megatron PTD-P SC21 Table 2", "zero": "3"}, "ZeRO 3 rows: one network card shared by the node"),
    ({"source": "Llama 3 405B"}, "virtual stages, schedule and the convention of its FLOP/s are not printed"),
    ({"source": "BigScience Jean-Zay V100"}, "its authors give +/- 40% (noise of the network)"),
)
"""Rows that are not judged: (what their columns begin with, `note` contains; the reason)."""

CORRECTED: tuple[tuple[dict[str, str], dict[str, str], str], ...] = (
    (
        {"source": "BigScience 176B", "hidden": "14336", "heads": "96"},
        {"heads": "64"},
        "its log says so of these runs later; 96 leave no whole width of a head",
    ),
    ({"source": "KempnerInstitute", "model": "llama3-7B"}, {"ffn": "14336"}, "3.5 x hidden, as its printed MFU implies"),
    ({"source": "KempnerInstitute", "model": "llama3-13B"}, {"ffn": "17920"}, "3.5 x hidden, as its printed MFU implies"),
)
"""Columns that are filled in or replaced: (rows, new values, why)."""

SHARES = {
    ("IBM", "llama2-13b", "A100-80G"): 0.39,
    ("IBM", "llama2-13b", "H100"): 0.21,
    ("IBM", "llama2-34b", "A100-80G"): 1.0,
    ("IBM", "llama2-34b", "H100"): 0.87,
    ("IBM", "llama2-70b", "A100-80G"): 1.0,
    ("IBM", "llama2-70b", "H100"): 0.71,
}
"""Share of the layers that is recomputed, from the printed HFU / MFU - 1 times 3."""

GPUS = {"a100": {"40": "a100_40g", "": "a100_80g"}, "a800": {"": "a100_80g"}}
PRECISION = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "fp8": "fp8", "float8": "fp8", "mxfp8": "fp8"}


class Unjudged(Exception):
    """Why a row has no prediction."""


@dataclass(frozen=True)
class Run:
    """A row that can be judged."""

    row: Row
    source: Source
    workload: Workload
    gpu: Gpu
    tokens_per_s: float
    """Measured, per GPU."""

    @property
    def stack(self) -> str:
        return self.workload.stack.name

    @property
    def names(self) -> tuple[str, ...]:
        """Of what its factor is made: its program, and the release where the source has one."""
        return names_of(self.source, self.row)

    @property
    def group(self) -> str:
        """What its error is reported under."""
        return f"{self.source.group}, {self.gpu.name}, {self.workload.precision}"

    @property
    def model(self) -> str:
        """A proxy with fewer layers counts as its model."""
        return re.sub(r"[^a-z0-9.]", "", self.row.get("model", "").lower())


NEEDED = ("gpu", "layers", "hidden", "seq")
"""Columns without which no row can be judged."""


def read(path: Path) -> list[Row]:
    """All rows; columns that are missing are empty. Raises Refused for what is no table of runs."""
    if not path.is_file():
        raise Refused(f"there is no file {path}: give one with --rows")
    try:
        with path.open(newline="", encoding="utf-8-sig") as f:
            table = csv.DictReader(f)
            names = [name.strip().lower() for name in table.fieldnames or ()]
            missing = [name for name in NEEDED if name not in names]
            if missing:
                raise Refused(
                    f"{path} has no column {', '.join(missing)}: give it a first line with the names of columns, separated by"
                    " commas, as measured_runs.csv has"
                )
            table.fieldnames = names
            return [{k: (v or "").strip() for k, v in row.items() if k} for row in table]
    except (OSError, UnicodeError, csv.Error) as fault:
        raise Refused(f"{path} can't be read: {fault}: use a CSV file in UTF-8") from None


def runs(rows: list[Row]) -> tuple[list[Run], list[tuple[Row, str]]]:
    """(those that can be judged, those that can't with the reason)."""
    good, bad, seen = [], [], set()
    for row in rows:
        try:
            key = tuple(v for k, v in row.items() if k != "note")
            if key in seen:
                raise Unjudged("printed before")
            seen.add(key)
            good.append(run_of(row))
        except (Unjudged, Refused, ValueError, ArithmeticError) as fault:
            bad.append((row, str(fault)))
    return good, bad


def run_of(row: Row) -> Run:
    """Raises Unjudged with the reason."""
    for pattern, why in LEFT_OUT:
        if _matches(row, pattern):
            raise Unjudged(why)
    row, source = prepared(row)
    gpu = gpu_of(row.get("gpu", ""))
    if source.network_gb_s:
        gpu = replace(gpu, network_gb_s=source.network_gb_s)
    if source.gpus_per_node:
        gpu = replace(gpu, gpus_per_node=source.gpus_per_node, nvlink_domain=source.gpus_per_node)
    workload = workload_of(row, source)
    workload = replace(workload, stack=replace(source.stack, factor=factor(names_of(source, row), gpu.fitted_on)))
    measured = tokens_per_s(row, workload, gpu)
    if not 0 < measured < math.inf:
        raise Unjudged(f"throughput {measured:g}")
    return Run(row, source, workload, gpu, measured)


def prepared(row: Row) -> tuple[Row, Source]:
    """The row with what its source leaves out and with corrections, and its source."""
    source, row = source_of(row), dict(row)
    for name, value in source.defaults.items():
        if row.get(name, "") in ("", "?", "n/a") or row[name].startswith("? ("):
            row[name] = value
    for pattern, new, _ in CORRECTED:
        if _matches(row, pattern):
            row.update(new)
    return row, source


def _matches(row: Row, pattern: dict[str, str]) -> bool:
    exact = ("model", "hidden", "heads", "tp", "pp", "micro_batch", "global_batch", "seq", "n_gpus")
    for key, value in pattern.items():
        there = row.get(key, "")
        if not (there == value if key in exact else value in there if key == "note" else there.startswith(value)):
            return False
    return True


def gpu_of(text: str) -> Gpu:
    """The shipped GPU of a printed name."""
    low = text.lower()
    for name in ("gb300", "gb200", "b200", "h200", "h100", "v100"):
        if low.startswith(name):
            gpu = find(name)
            return replace(gpu, memory_tb_s=2.4) if "hbm2e" in low else gpu
    for name, kinds in GPUS.items():
        if low.startswith(name):
            gpu = find(next(v for k, v in kinds.items() if re.search(rf"\b_?{k}", low[len(name) :]) or not k))
            return replace(gpu, nvlink_gb_s=200) if name == "a800" else gpu
    raise Unjudged(f"GPU {text or 'not given'}: no constants for it")


LARGEST = {"layers": 2000, "hidden": 10**6, "heads": 10**5, "ffn": 10**7, "vocab": 10**8, "seq": 10**9, "vpp": 2000}
"""What a column may be at most, else 10^7: beyond it something was misread."""


def _int(row: Row, name: str, default: int | None = None) -> int:
    text = row.get(name, "")
    found = re.match(r"(\d+)(\.0+)?(?![\d.,e])", text)  # 32.0 is what tables with empty cells make of 32
    if found:
        if not 0 < (value := int(found.group(1))) <= LARGEST.get(name, 10**7):
            raise Unjudged(f"{name} {value} can't be")
        return value
    if default is None:
        raise Unjudged(f"{name} {'not given' if text in ('', '?') else text}")
    return default


def model_of(row: Row) -> ModelConfig:
    """Of a row's sizes; GPT's MLP is 4 x hidden where it isn't printed."""
    gpt = not row.get("model", "").lower().startswith(("llama", "internlm", "smollm", "qwen", "mistral", "deepseek"))
    hidden = _int(row, "hidden")
    heads = _int(row, "heads", hidden // 128 if hidden % 128 == 0 else None)
    seq = _int(row, "seq")
    squared = row.get("model", "").lower().startswith("nemotron")
    if hidden % heads:
        raise Unjudged(f"hidden {hidden} isn't a multiple of heads {heads}")
    return ModelConfig(
        family="gpt2" if gpt else "llama",
        num_layers=_int(row, "layers"),
        hidden_size=hidden,
        ffn_hidden_size=_int(row, "ffn", 4 * hidden if gpt else None),
        num_attention_heads=heads,
        num_query_groups=_int(row, "kv_heads", heads),
        vocab_size=_int(row, "vocab"),
        max_position_embeddings=seq,
        normalization="layernorm" if gpt else "rmsnorm",
        activation="gelu" if gpt else "swiglu",
        position_embedding="learned" if gpt and not squared else "rope",
        add_bias_linear=gpt and not squared and not row.get("model", "").startswith("mpt"),
        tie_embeddings=gpt and not squared,
    )


def workload_of(row: Row, source: Source) -> Workload:
    model = model_of(row)
    tp, pp, cp = _int(row, "tp"), _int(row, "pp"), _int(row, "cp", 1)
    v, n = _int(row, "vpp", 1), _int(row, "n_gpus")
    dp = _int(row, "dp", n // (tp * pp * cp))
    if tp * pp * cp * dp != n:
        raise Unjudged(f"tp x pp x cp x dp = {tp} x {pp} x {cp} x {dp} = {tp * pp * cp * dp} != n_gpus = {n}")
    if model.num_attention_heads % tp:
        raise Unjudged(f"heads {model.num_attention_heads} aren't a multiple of tp {tp}")
    micro, batch = _int(row, "micro_batch"), _int(row, "global_batch")
    m = math.ceil(batch / (micro * dp))
    zero, group = zero_of(row.get("zero", ""), dp * cp)
    precision = precision_of(row.get("precision", ""))
    recompute, layers = recompute_of(row, model.num_layers, pp * v)
    pure = row.get("precision", "").endswith("PURE") or "fp16 grads" in row.get("precision", "")
    return Workload.of_model(
        model,
        seq=_int(row, "seq"),
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        micro_batch_size=micro,
        micro_batches=m,
        stage_layers=stages_by_cost(model, pp * v) if source.by_cost else stages_of(model.num_layers, pp * v),
        virtual_stages=v,
        schedule="interleaved_1f1b" if v > 1 else "1f1b",
        zero=zero,
        zero_group=group,
        sequence_parallel=tp > 1 and row.get("seq_parallel", "").lower() in ("yes", "true", "1"),
        precision=precision,
        gradient_bytes=2 if pure else source.gradient_bytes,
        bucket_size=max(40_000_000, 1_000_000 * group),  # as Megatron-Core sizes them
        recompute=recompute,
        recompute_layers=layers,
        stack=source.stack,
    )


def stages_of(layers: int, stages: int) -> tuple[int, ...]:
    """As Megatron cuts them: evenly; or evenly with the embedding and the head counted as layers."""
    if layers % stages and (layers + 2) % stages == 0 and stages > 1:
        each = (layers + 2) // stages
        return (each - 1, *(each,) * (stages - 2), each - 1)
    return tuple(len(stage.layers) for stage in split_layers(layers, stages))


def stages_by_cost(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """As nanotron cuts them: a stage ends where the share of all FLOPs that its blocks have reached is full; the head is one."""
    matrices = 2 * model.hidden_size + 2 * model.hidden_size * model.num_query_groups // model.num_attention_heads
    layer = matrices + model.ffn_hidden_size * (3 if model.activation == "swiglu" else 2)
    total = model.num_layers * layer + model.vocab_size
    ends = [min(model.num_layers, round(total * (s + 1) / stages / layer)) for s in range(stages - 1)] + [model.num_layers]
    return tuple(end - start for start, end in zip([0, *ends], ends))


def zero_of(text: str, replicas: int) -> tuple[int, int]:
    """(level, ranks that share one copy). As 1, ZeRO-1, 1(group 8), 3(FSDP), FSDP or HSDP. Raises Unjudged."""
    if "HSDP" in text:
        return 3, min(8, replicas)
    found = re.match(r"(?:zero|stage)?[- ]?([0-3])|(fsdp)|(?:none|no|n/a|\?|)$", text.lower())
    if not found:
        raise Unjudged(f"zero {text}")
    level = int(found.group(1) or (3 if found.group(2) else 0))
    group = re.search(r"group (\d+)", text)
    return level, min(int(group.group(1)), replicas) if group else replicas


def precision_of(text: str) -> str:
    word = re.split(r"[/,\s-]", text.lower().removeprefix("amp_"))[0]
    if word not in PRECISION:
        raise Unjudged(f"precision {text or 'not given'}: not modelled")
    return PRECISION[word]


def recompute_of(row: Row, layers: int, stages: int) -> tuple[str, int | None]:
    """(mode, layers of each stage); NVIDIA's tables don't say, none fits."""
    text = row.get("recompute", "").lower()
    share = next((s for (src, m, g), s in SHARES.items() if _matches(row, {"source": src, "model": m, "gpu": g})), None)
    if share is not None:
        return "full", round(share * layers / stages)
    for mode in ("full", "selective-op", "selective"):
        if text.startswith(mode):
            return {"selective-op": "alternate"}.get(mode, mode), None
    return "none", None


def tokens_per_s(row: Row, w: Workload, gpu: Gpu) -> float:
    """As printed, or from the printed FLOP/s or MFU by the convention that it was counted with."""
    if row.get("tokens_per_s_per_gpu"):
        return number(row, "tokens_per_s_per_gpu")
    convention = row.get("flops_convention", "")
    each = w.causal_flops_per_token if "causal" in convention else w.flops_per_token
    if "4x" in convention:  # Narayanan et al. 2021, eq. 3: with the recomputed forward pass
        vocab = _int(row, "vocab")
        each = 96 * w.layers * w.hidden**2 * (1 + w.seq / (6 * w.hidden) + vocab / (16 * w.layers * w.hidden))
    if row.get("tflops_per_gpu"):
        return number(row, "tflops_per_gpu") * 1e12 / each
    share = re.match(r"(?:MFU )?([\d.]+)(?![\d,-]| ?- ?\d)", row.get("mfu", ""))
    if not share:
        raise Unjudged("ran out of memory" if row.get("mem_gb") == "OOM" else "no throughput printed")
    peak = gpu.fp8_tflops if w.precision == "fp8" else gpu.bf16_tflops
    percent = float(share.group(1))
    return (percent if percent < 1 and "%" not in row["mfu"] else percent / 100) * peak * 1e12 / each


def number(row: Row, name: str) -> float:
    """Raises Unjudged for a range, or separators that may mean two things."""
    try:
        return float(row[name])
    except ValueError:
        raise Unjudged(f"{name} {row[name]} is no number") from None
