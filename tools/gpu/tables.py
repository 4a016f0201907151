"""What the check found, on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Report = dict[str, Any]


def render(report: Report) -> RenderableType:
    """Tables of the parts, at most 100 columns wide."""
    versions = ", ".join(f"{name} {v or 'absent'}" for name, v in report["versions"].items())
    parts: list[RenderableType] = [Text(f"{report['device']}, {report['date']}", style="bold"), Text(versions)]
    if report["small"]:
        parts.append(Text("Tiny sizes: times mean nothing.", style="yellow"))
    make = {"numerics": _numerics, "sanitizer": _sanitizer, "speed": _speed, "step": _step}
    for name, part in report["parts"].items():
        parts += [Text(f"\n{name}, {part['seconds']:.0f} of {part['budget_s']} s", style="bold")]
        parts += make[name](part["results"], report["goals"])
        parts += [Text(f"Missing: {words}", style="yellow") for words in part["missing"]]
    parts.append(Text(""))
    parts += [Text(f"WRONG: {words}", style="red") for words in report["wrong"]] or [Text("Nothing is wrong.", style="green")]
    return Group(*parts)


def _numerics(rows: list[Report], goals: Report) -> list[RenderableType]:
    """The largest error of each kernel, by dtype."""
    table = _table("kernel", "bf16", "fp16", "fp32")
    worst: dict[str, dict[str, float]] = {}
    for r in rows:
        of = worst.setdefault(r["name"], {})
        of[r["dtype"]] = max(of.get(r["dtype"], 0.0), r["error"])
    for name, of in worst.items():
        table.add_row(name, *(f"{of[t]:.1e}" if t in of else "" for t in ("bfloat16", "float16", "float32")))
    return [table] if rows else []


def _sanitizer(rows: list[Report], goals: Report) -> list[RenderableType]:
    return [Text(f"{r['tool']}: {'clean' if r['clean'] else r['words']}") for r in rows]


def _speed(rows: list[Report], goals: Report) -> list[RenderableType]:
    """GB/s; a row that torch.compile's comes later for is joined."""
    table = _table("kernel, GB/s", "csrc", "of a copy", "eager", "compile", "Liger")
    by_name: dict[str, Report] = {}
    for r in rows:
        if "gb_s" in r:
            known = by_name.setdefault(r["name"], {"gb_s": {}})
            known["gb_s"].update(r["gb_s"])
            known.update({k: v for k, v in r.items() if k == "share_of_copy"})
    for name, r in by_name.items():
        share = r.get("share_of_copy")
        table.add_row(
            name,
            _number(r["gb_s"].get("csrc")),
            "" if share is None else f"{share:.0%}",
            *(_number(r["gb_s"].get(who)) for who in ("eager", "compile", "liger")),
            style="green" if share is not None and share >= goals["share_of_copy"] else None,
        )
    copy = next((r["copy_gb_s"] for r in rows if "copy_gb_s" in r), None)
    shares = [r["share_of_copy"] for r in by_name.values() if "share_of_copy" in r]
    reached = sum(share >= goals["share_of_copy"] for share in shares)
    lines: list[RenderableType] = [table] if by_name else []
    if copy is not None:
        lines.append(Text(f"A copy: {copy:.4g} GB/s. Goal {goals['share_of_copy']:.0%} of it: {reached} of {len(shares)}."))
    words = {"failed": "Failed", "left_out": "Left out"}
    return lines + [Text(f"{words[k]}: {r[k]}", style="yellow") for r in rows for k in words if k in r]


def _step(rows: list[Report], goals: Report) -> list[RenderableType]:
    table = _table("program", "step, s", "tokens/s", "TFLOP/s", "MFU, causal", "peak, GiB", "loss")
    for r in rows:
        mfu = "" if r["mfu"] is None else f"{r['mfu']:.1%}"
        peak = "" if r["peak_gib"] is None else f"{r['peak_gib']:.1f}"
        cells = f"{r['step_s']:.4g}", f"{r['tokens_per_s']:,.0f}", f"{r['tflops']:,.4g}", mfu, peak, f"{r['loss']:.3f}"
        table.add_row(r["program"], *cells, style="green" if (r["mfu"] or 0) >= goals["mfu"] else None)
    notes = [Text(f"{r['program']}: {r['note']}", style="yellow") for r in rows if r["note"]]
    return [*([table] if rows else []), *notes]


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.4g}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left")
    return table
