"""The mechanics of benchmarks/planner_accuracy.py, on made-up rows: what is judged, what isn't and why, fitting, regret."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import planner_accuracy, planner_peers
from benchmarks.accuracy import fit, judge, memory, rows, stacks
from benchmarks.accuracy.stacks import UNKNOWN, source_of
from megakit.planner.hardware import Fitted, find

FILE = Path(__file__).with_name("rows.csv")


@pytest.fixture(scope="module")
def judged() -> tuple[list[rows.Run], list[tuple[rows.Row, str]]]:
    return rows.runs(rows.read(FILE))


def test_each_row_is_judged_or_has_a_reason(judged):
    good, bad = judged
    assert [(r.row["model"], r.gpu.name, r.workload.world) for r in good] == [
        ("llama3-8b", "h100", 8),
        ("llama3-8b", "h100", 8),
        ("gpt3-175b", "h100", 128),
        ("llama3-405b", "h100", 512),
        ("gpt-175b", "a100_80g", 384),
        ("llama3-8b", "h100", 8),
    ]
    reasons = {row["note"]: why for row, why in bad}
    for note, reason in {
        "the same again": "printed before",
        "unknown GPU": "GPU TPUv9: no constants for it",
        "layout contradicts itself": "tp x pp x cp x dp = 2 x 2 x 1 x 8 = 32 != n_gpus = 8",
        "unknown precision": "precision int4: not modelled",
        "out of memory": "ran out of memory",
        "no sizes": "hidden not given",
        "heads don't divide": "hidden 4100 isn't a multiple of heads 33",
    }.items():
        assert reasons[note] == reason
    assert "n/a" in reasons["odd number"] and len(reasons) == 8


def test_layouts_precisions_and_conventions_are_read_as_meant(judged):
    small, _, gpt, big, sc, derived = judged[0]
    assert small.workload.cp == 2 and small.workload.stack.name == "nemo dgxc" and small.workload.zero_group == 8
    assert (
        gpt.workload.stage_layers == (1,) * 96 and gpt.workload.schedule == "interleaved_1f1b" and gpt.workload.sequence_parallel
    )
    assert big.workload.stage_layers == (1, *(2,) * 62, 1) and big.workload.precision == "fp8"
    assert big.tokens_per_s == pytest.approx(0.41 * 1979e12 / big.workload.flops_per_token)
    h, layers, s = 12288, 96, 2048
    each = 96 * layers * h**2 * (1 + s / (6 * h) + 51200 / (16 * layers * h))
    assert sc.source == UNKNOWN and sc.tokens_per_s == pytest.approx(150e12 / each)
    assert derived.workload.dp == 8 and derived.workload.zero == 3 and derived.workload.recompute == "full"
    assert derived.tokens_per_s == pytest.approx(400e12 / derived.workload.flops_per_token)


def test_a_fit_explains_data_that_the_priors_do_not(judged):
    """Runs whose throughput is the model's own with another GEMM efficiency and a slower program."""
    truth = replace(find("h100").fitted, gemm=0.70, elementwise=1.3)
    made = []
    for run in judged[0]:
        if run.gpu.name == "h100" and run.source.fitted:
            for micro in (1, 2, 4):
                w = replace(run.workload, micro_batch_size=micro, stack=replace(run.workload.stack, factor=1.0))
                tokens = fit.predicted(replace(run, workload=w), truth, 1.05)
                made.append(replace(run, workload=w, tokens_per_s=tokens))
    problem = fit.Problem("h100", made)
    found = problem.fit()
    assert max(abs(fit.errors(made, found))) < 0.02  # the priors pull
    wrong = fit.Constants({n: p[0] for n, p in fit.PRIORS["h100"].items()}, {})
    assert max(abs(fit.errors(made, wrong))) > 0.05
    assert set(found.fitted) == set(Fitted.__annotations__) and problem.held_out().shape == (len(made),)


def test_the_null_model_is_a_constant_mfu_times_the_ideal_bubble(judged):
    good = [r for r in judged[0] if r.group == "NVIDIA, h100, bf16"]
    same = [replace(r, tokens_per_s=0.5 * (1 - judge.ideal_bubble(r)) / r.workload.flops_per_token) for r in good]
    assert judge.null_model(same) == pytest.approx([0.0] * len(same))
    assert judge.ideal_bubble(good[2]) == pytest.approx(7 / (12 * 64 + 7))
    alone = judge.null_model(same[:1])
    assert math.isnan(alone[0]) and judge.summary(alone) == {}


def test_regret_is_what_choosing_by_the_prediction_costs(judged):
    first, second = judged[0][:2]
    ahead, behind = judge.Judged(first, 0.0, 0.0), judge.Judged(second, 0.2, 0.0)
    (one,) = judge.regrets([ahead, behind])
    assert one["regret"] == pytest.approx(10.0) and one["grids"] == 2 and one["best"].startswith("tp 1")
    (none,) = judge.regrets([ahead, judge.Judged(second, 0.0, 0.0)])
    assert none["regret"] == 0


def test_memory_is_predicted_where_it_was_printed():
    good, bad = memory.memories(rows.read(FILE))
    assert [m.measured_gib for m in good] == [60.5] and not bad
    assert 10 < good[0].predicted_gib < 100
    assert memory.by_group(good)["other"]["rows"] == 1


def test_the_command_writes_what_it_found(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["planner_accuracy", "--rows", str(FILE), "--json", str(out)])
    assert planner_accuracy.main() == 0
    data = json.loads(out.read_text())
    assert data["groups"]["NVIDIA, h100, bf16"]["rows"] == 3 and len(data["runs"]) == 6
    assert sum(e["rows"] for e in data["not judged"]) == 8
    assert "no constants for it" in capsys.readouterr().out
    assert planner_accuracy.markdown(data).startswith("|group|rows|models|")


def test_a_missing_file_is_refused_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["planner_accuracy", "--rows", "nowhere.csv"])
    assert planner_accuracy.main() == 2
    assert capsys.readouterr().err == "there is no file nowhere.csv: give one with --rows\n"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "has no column gpu, layers, hidden, seq"),
        (b"source;model;gpu;layers;hidden;seq\n", "separated by commas"),
        ("source,gpu\n".encode("utf-16"), "use a CSV file in UTF-8"),
        (b"source,gpu,layers,seq\n", "has no column hidden: "),
    ],
)
@pytest.mark.parametrize("command", [planner_accuracy, planner_peers], ids=["accuracy", "peers"])
def test_what_is_no_table_of_runs_is_refused_in_a_line(command, data, why, tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.csv"
    path.write_bytes(data)
    monkeypatch.setattr("sys.argv", ["command", "--rows", str(path)])
    assert command.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line and why in line


def test_a_byte_order_mark_capitals_spaces_and_whole_numbers_as_floats_change_nothing(judged, tmp_path):
    lines = FILE.read_text().splitlines()
    head = ", ".join(lines[0].upper().split(","))
    same = tmp_path / "same.csv"
    same.write_text("\ufeff" + "\n".join([head, *lines[1:]]).replace(",4096,", ",4096.0,"), encoding="utf-8")
    runs, _ = rows.runs(rows.read(same))
    assert [(r.names, r.workload, r.tokens_per_s) for r in runs] == [(r.names, r.workload, r.tokens_per_s) for r in judged[0]]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hidden": "4,096"}, "hidden 4,096"),
        ({"tokens_per_s_per_gpu": "9,000"}, "tokens_per_s_per_gpu 9,000 is no number"),
        ({"tokens_per_s_per_gpu": "9000-9500"}, "tokens_per_s_per_gpu 9000-9500 is no number"),
        ({"tokens_per_s_per_gpu": "", "tflops_per_gpu": "", "mfu": "45-50"}, "no throughput printed"),
    ],
)
def test_a_number_that_may_mean_two_things_is_not_guessed(judged, change, why):
    _, ((_, reason),) = rows.runs([judged[0][0].row | change])
    assert reason == why


@pytest.mark.parametrize("mfu", ["45.5", "45.5%", "0.455", "MFU 45.5 HFU 50"])
def test_an_mfu_is_a_percentage_or_a_share(judged, mfu: str):
    row = judged[0][0].row | {"tokens_per_s_per_gpu": "", "tflops_per_gpu": "", "mfu": mfu}
    ((run,), _) = rows.runs([row])
    peak = run.gpu.fp8_tflops if run.workload.precision == "fp8" else run.gpu.bf16_tflops
    flops = run.workload.causal_flops_per_token if "causal" in row["flops_convention"] else run.workload.flops_per_token
    assert run.tokens_per_s == pytest.approx(0.455 * peak * 1e12 / flops)


@pytest.mark.parametrize(
    ("text", "level"), [("", 0), ("n/a", 0), ("1", 1), ("ZeRO-1", 1), ("2", 2), ("3(FSDP2)", 3), ("FSDP", 3), ("zero 3", 3)]
)
def test_zero_is_read_as_it_is_written(text: str, level: int):
    assert rows.zero_of(text, 16) == (level, 16)
    with pytest.raises(rows.Unjudged, match="zero distributed"):
        rows.zero_of("distributed", 16)


def test_rows_without_a_name_are_judged(judged):
    runs, _ = rows.runs([{k: v for k, v in r.row.items() if k != "model"} for r in judged[0][:2]])
    assert len(runs) == 2 and judge.by_group(judge.judge(runs, False))


def test_sources_are_told_apart():
    assert source_of({"source": "NVIDIA dgxc-benchmarking v9", "model": "llama2-70b"}).stack.name == "maxtext"
    assert source_of({"source": "NVIDIA dgxc-benchmarking v9", "model": "llama3-70b"}).stack.name == "nemo dgxc"
    assert source_of({"source": "torchtitan benchmarks", "model": "m", "note": "no compile; x"}).stack.name == "torchtitan, eager"


def row(**columns: str) -> dict[str, str]:
    return {"source": "BigScience 176B prequel sweeps (Megatron-DeepSpeed)", "model": "gpt-181b", **columns}


def test_runs_before_and_after_a_repair_of_the_machine_are_programs_of_their_own():
    early, late, node = row(note="02-23; layers as printed"), row(note="02-26; layers as printed"), row(note="x", model="gpt-20b")
    assert source_of(early).stack.name == "bigscience until 02-24" and source_of(early).stack.host_s == 1e-3
    assert source_of(late).stack.name == "bigscience" and source_of(late).stack.host_s == 1e-3
    assert source_of(node).stack.host_s == 0.0


def test_a_factor_is_its_programs_times_its_releases(monkeypatch, tmp_path):
    known = tmp_path / "stacks.json"
    known.write_text('{"nemo dgxc on h100": 0.9, "nemo dgxc 24.11 on h100": 1.1, "nemo dgxc on b200": 0.8}')
    monkeypatch.setattr(stacks, "FACTORS", known)
    source = source_of({"source": "NVIDIA dgxc-benchmarking v24.11.1", "model": "llama3-70b"})
    names = stacks.names_of(source, {"source": "NVIDIA dgxc-benchmarking v24.11.1"})
    assert names == ("nemo dgxc", "nemo dgxc 24.11")
    assert stacks.factor(names, "h100") == pytest.approx(0.99)
    assert stacks.factor(names[:1], "h100") == 0.9 and stacks.factor(("nemo dgxc", "nemo dgxc 25.02"), "h100") == 0.9
    assert stacks.factor(names, "b300") == pytest.approx(0.85)  # of the other chips
    assert stacks.factor(("new",), "h100") == 1.0


def test_stages_by_cost_count_the_head_as_layers():
    """nanotron, Llama 1.34B: 16 layers of 67 M, a head of 268 M parameters: 10 layers, then 6 and the head."""
    sizes = {"layers": "16", "hidden": "2048", "heads": "32", "ffn": "8192", "vocab": "131072", "seq": "4096"}
    model = rows.model_of(row(**sizes, model="llama-1.34B"))
    assert rows.stages_by_cost(model, 2) == (10, 6) and rows.stages_by_cost(model, 1) == (16,)
    assert sum(rows.stages_by_cost(model, 5)) == 16


def test_the_rows_that_no_fit_has_seen_can_all_be_judged():
    good, bad = rows.runs(rows.read(Path(planner_accuracy.__file__).parent / "accuracy" / "unseen.csv"))
    assert len(good) == 56 and not bad
    assert {r.group for r in good} >= {"BigScience, a100_80g, fp16", "NVIDIA, h100, bf16", "NVIDIA, h100, fp8"}


@pytest.mark.skipif(not planner_accuracy.DEFAULT.is_file(), reason="the published runs are not here")
def test_the_page_says_what_the_command_prints():
    """But for what is fitted anew for it, which takes minutes."""
    page = planner_accuracy.DOC.read_text().splitlines()
    printed = planner_accuracy.markdown(planner_accuracy.report(rows.read(planner_accuracy.DEFAULT), False)).splitlines()
    lines = [line for line in printed if line.startswith("|")]
    groups, others = [x for x in lines if x.count("|") > 8], [x for x in lines if x.count("|") <= 8]
    assert len(groups) > 20 and set(others) <= set(page)
    begins = ["|".join(line.split("|")[:5]) + "|" for line in groups]  # group, rows, models, the error as shipped
    assert [b for b in begins if not any(line.startswith(b) for line in page)] == []
