"""Rules of the operators' backends."""

from __future__ import annotations

from megakit.config.cures import Broken, broken_alone
from megakit.config.derived import head_dim
from megakit.config.keys import show
from megakit.config.schema import Config

FP8_UNIT = 16
"""Features of an fp8 product, in and out, are a multiple of this: cuBLAS takes no others."""


def check(cfg: Config) -> None:
    """Raise Broken for a backend that the run would never use, or sizes that fp8 products don't have."""
    if cfg.ops.attention == "te":
        for name, value, beside in (
            ("parallel.cp", cfg.parallel.cp > 1, f"parallel.cp = {cfg.parallel.cp}, whose attention is of blocks"),
            ("data.isolate_documents", cfg.data.isolate_documents, "data.isolate_documents = true"),
        ):
            if value:
                raise broken_alone("ops.attention", "te", beside, None, [{name: 1 if name == "parallel.cp" else False}])
    ops, precision = cfg.ops, cfg.train.precision
    if ops.fp8 is not None and precision != "fp8":
        raise broken_alone("ops.fp8", ops.fp8, f"train.precision = {precision}", None, [{"train.precision": "fp8"}])
    if ops.fp8_recipe is not None and ops.fp8 != "te":
        raise broken_alone("ops.fp8_recipe", ops.fp8_recipe, f"ops.fp8 = {show(ops.fp8)}", None, [{"ops.fp8": "te"}])
    if precision == "fp8":
        _check_fp8(cfg)


def _check_fp8(cfg: Config) -> None:
    m, p, tp = cfg.model, cfg.parallel, cfg.parallel.tp
    if cfg.ops.fp8 in ("te", "torchao") and p.schedule in ("zb_h1", "zb_v"):
        raise Broken(
            f"ops.fp8 = {cfg.ops.fp8} makes weight gradients at once, parallel.schedule = {p.schedule} puts them off",
            [{"ops.fp8": "torch"}],
            [{"parallel.schedule": "1f1b"}],
        )
    if cfg.ops.fp8_recipe == "delayed" and p.recompute == "full":
        raise Broken(
            "ops.fp8_recipe = delayed would count what parallel.recompute = full computes again",
            [{"ops.fp8_recipe": "current"}],
            [{"parallel.recompute": "selective"}],
        )
    width = head_dim(m)
    sizes = {
        "model.hidden_size": m.hidden_size,
        f"the query heads of a rank, {m.num_attention_heads // tp} of width {width},": m.num_attention_heads // tp * width,
        "queries, keys and values of a rank together": (m.num_attention_heads + 2 * m.num_query_groups) // tp * width,
        "model.ffn_hidden_size / parallel.tp": m.ffn_hidden_size // tp,
    }
    for name, size in sizes.items():
        if size % FP8_UNIT:
            raise Broken(
                f"{name} = {size} is not a multiple of {FP8_UNIT}, which products in fp8 need", [{"train.precision": "bf16"}]
            )
