"""Boxes of one layout, saved, are bit for bit those of any other, loaded."""

from __future__ import annotations

import pytest
import torch

from megakit.checkpoint.dcp_files import lazy_tensors
from megakit.modeling.layout import parameter_count
from megakit.parallel.grid import Grid
from tests.checkpoint import workers
from tests.checkpoint.layouts import full, gpt2, llama, rank_boxes

TP2 = Grid(tp=2)


def check(pools, tmp_path, cfg, saved, loads):
    """Save on `saved`, load on each of `loads`, all (grid, ZeRO stage)."""
    grid, zero = saved
    pools(grid.world).run(workers.save_layout, cfg, grid, zero, tmp_path)
    for grid, zero in loads:
        found = pools(grid.world).run(workers.load_layout, cfg, grid, zero, tmp_path / "step_00000005")
        assert found == [[]] * grid.world, f"{grid}, zero {zero}"


def test_another_tp_or_pp(pools, tmp_path):
    """RS2: weights and both moments, fused rows and columns, to every layout and back."""
    layouts = [(Grid(), 0), (Grid(pp=2), 0), (TP2, 0), (Grid(dp=2), 1)]
    for i, saved in enumerate(layouts):
        check(pools, tmp_path / str(i), llama(), saved, layouts)


def test_another_dp(pools, tmp_path):
    """RS1: flat shards that end inside rows, of a parameter count that neither 2 nor 3 divides."""
    cfg = gpt2()
    assert parameter_count(cfg) % 2 and parameter_count(cfg) % 3
    check(pools, tmp_path, cfg, (Grid(dp=2), 1), [(Grid(), 1), (Grid(dp=2), 1), (Grid(dp=3), 1), (Grid(dp=3), 0)])


def test_every_axis_at_once(pools, tmp_path):
    """M11: TP2 PP2 DP2 to TP1 PP4 DP1, tied embeddings saved once and loaded into both copies."""
    cfg = llama(tie_embeddings=True)
    check(pools, tmp_path, cfg, (Grid(dp=2, pp=2, tp=2), 1), [(Grid(pp=4), 0), (Grid(dp=2, tp=2), 1), (Grid(), 0)])


def test_vocabulary_padding_is_not_saved(pools, tmp_path):
    """M4: 151,669 rows over TP 4 are padded in every rank's memory and nowhere in the checkpoint."""
    cfg = llama(vocab_size=151_669, hidden_size=8, ffn_hidden_size=8, num_layers=1, num_query_groups=8)
    assert parameter_count(cfg) == 2 * 151_669 * 8 + 2 * 8 + 4 * 64 + 3 * 64 + 8
    check(pools, tmp_path, cfg, (Grid(tp=4), 0), [(TP2, 0), (Grid(), 0)])
    written = sum(p.stat().st_size for p in (tmp_path / "step_00000005").glob("*.distcp"))
    assert 1 <= written / (3 * 4 * parameter_count(cfg)) < 1.01  # and of the flat buffers, no more than the boxes
    name = "master.embedding.word.weight"
    assert torch.equal(lazy_tensors(tmp_path / "step_00000005")[name].read(), full(name, (151_669, 8)))


def test_more_ranks_than_rows(pools, tmp_path):
    """Ranks without any element of a tensor, or of all."""
    cfg = llama(vocab_size=3, num_layers=1, make_vocab_size_divisible_by=2)
    last = rank_boxes(cfg, Grid(tp=4), 3, 0, saving=True)
    assert last["master.output.weight"][1] == []
    check(pools, tmp_path, cfg, (Grid(tp=4), 0), [(TP2, 0)])
    check(pools, tmp_path / "b", cfg, (Grid(dp=3), 0), [(Grid(dp=3), 1)])  # two ranks save nothing at all


def test_whole_tensors_without_a_process_group(pools, tmp_path):
    pools(2).run(workers.save_layout, llama(), TP2, 0, tmp_path)
    path = tmp_path / "step_00000005"
    names = ["master.layers.3.attention.qkv.weight", "exp_avg_sq.final_norm.weight"]
    got = lazy_tensors(path)
    assert torch.equal(got[names[0]].read(), full(names[0], (96, 64)))
    assert torch.equal(got[names[1]].read(), full(names[1], (64,)))
    assert lazy_tensors(path, lambda name: "final" in name).keys() == {n for n in got if "final" in n}


def test_torch_reads_the_folder(pools, tmp_path):
    """It is an ordinary DCP folder."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    pools(2).run(workers.save_layout, llama(num_layers=1), TP2, 0, tmp_path)
    dcp_to_torch_save(tmp_path / "step_00000005", tmp_path / "all.pt")
    name = "master.layers.0.mlp.up.weight"
    assert torch.equal(torch.load(tmp_path / "all.pt")[name], full(name, (352, 64)))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("missing", "ValueError: master.a [6, 5] has 30 elements, the boxes of all ranks together 15"),
        ("twice", "ValueError: master.b [7] has 7 elements, the boxes of all ranks together 14"),
        ("shape", "ValueError: master.a is [6, 5] on one rank and [7, 5] on rank 1"),
        ("same start", "StorageFailed: the checkpoint of step 1 was not written"),
        ("overlap", "StorageFailed: the checkpoint of step 1 was not written"),
    ],
)
def test_every_element_is_saved_once(pools, tmp_path, kind, said):
    answers = pools(2).run(workers.bad_boxes, tmp_path, kind)
    assert answers[0] == answers[1] and answers[0].startswith(said)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_does_not_fit(pools, tmp_path):
    pools(2).run(workers.save_steps, tmp_path, [1])
    path = tmp_path / "step_00000001"
    answers = pools(2).run(workers.load_other, path, "master.a", (7, 5))
    assert answers == [f"can't load {path}: master.a is [6, 5] in the checkpoint and [7, 5] in the model"] * 2
    answers = pools(2).run(workers.load_other, path, "master.c", (7, 5))
    assert answers == [f"can't load {path}: it has no tensor master.c"] * 2
