"""``suite=replicas``: simulation, without a GPU, of the planner that replicates hot experts.

Counts are drawn, times are arithmetic. Suffixes: R ranks, E experts, S slots of a rank.
"""

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from graphmoe.bench import BenchArgs
from graphmoe.bench.cases import FLOPS_PER_S, Case, Measured, Row, Suite, run_cases
from graphmoe.bench.dispatch_suite import LINK_BYTES_PER_S
from graphmoe.command.hydra import compose_config
from graphmoe.model.sizes import attention_weights
from graphmoe.ops import replicas
from graphmoe.plan.costs.layer_parts import attention_scores, swiglu_weights
from graphmoe.plan.experts import slack_of
from graphmoe.plan.forced_loads import BURST_STEPS, LOADS, UNIT, ends, fitted, load

RANKS, EXPERTS = (8, 16, 64), (64, 128, 256, 384)
TOKENS, TOP_K, SEQ_LEN = 8192, 8, 4096
IMBALANCES = (1.5, 2.0, 3.0)
"""Rows of the busiest rank over the mean, in loads like trained routers' (UltraEP published such)."""
TRAINED = "trained_"
SHARE_OF_RATE = 0.7
MODELS = ("deepseek_v3", "deepseek_v2_lite")
PULLS, GRADIENT = (2, 2), 4
"""Bytes of a weight that a replica takes in the forward and in the backward, and of its gradient in fp32."""


class Sizes(NamedTuple):
    expert: int  # weights
    attention: int  # FLOPs of a token's forward


def simulate(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    cases, sizes = list[Case](), dict[str, Sizes]()
    for name in MODELS:
        model = compose_config(f"model={name}").model
        attention = 2 * attention_weights(model) + attention_scores(model, SEQ_LEN)
        sizes[name] = Sizes(swiglu_weights(model, model.expert_ffn_size), attention)
    for R, E, which in itertools.product(RANKS, EXPERTS, (*LOADS, *(f"{TRAINED}{i}" for i in IMBALANCES))):
        about = {"case": (name := f"ep{R}/e{E}/{which}"), "ranks": R, "experts": E, "load": which}
        cases.append(Case(name, about, functools.partial(_rows, which, E, R, sizes)))
    rows = run_cases(cases, lambda row: f"{row['before']:.2f} -> {row['after']:.4f}", args.out, args.only)
    method = {
        "repeats": 1, "shapes": "full", "warning": "a simulation: no kernel ran, and no time was measured",
        "tokens": TOKENS, "top_k": TOP_K, "seq_len": SEQ_LEN, "share_of_rate": SHARE_OF_RATE,
        "link_bytes_per_s": LINK_BYTES_PER_S, "models": {name: sizes[name]._asdict() for name in sizes},
    }  # fmt: skip
    return rows, [], method


def _rows(which: str, E: int, R: int, sizes: dict[str, Sizes]) -> list[Row]:
    if which.startswith(TRAINED):
        share = trained_load(float(which.removeprefix(TRAINED)), E, R)
    else:
        share = load(which, BURST_STEPS, 0, E, TOP_K, R)
    counts_RE = drawn_counts(share, R)
    return [planned(counts_RE, slack, sizes) for slack in (0, slack_of(TOKENS * TOP_K))]


def trained_load(imbalance: float, E: int, R: int) -> list[float]:
    """Return expert loads like a trained router's, log-normal; ``imbalance``: busiest rank over the mean."""
    generator = torch.Generator().manual_seed(E * R)
    of_experts, of_ranks = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (E, R))
    logs_E = of_experts + of_ranks.repeat_interleave(E // R)

    def spread(sigma: float) -> list[float]:
        return fitted((sigma * (logs_E - logs_E.max())).exp().tolist(), TOP_K)

    low, high = 0.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        most = torch.tensor(spread(middle)).view(R, -1).sum(1).max() * R / TOP_K
        low, high = (middle, high) if most < imbalance else (low, middle)
    return spread(high)


def drawn_counts(share: list[float], R: int) -> Tensor:
    """Draw the number of rows [R, E] from each rank to each expert; tokens choose experts independently."""
    generator, end_E = torch.Generator().manual_seed(len(share) * R), torch.tensor(ends(share))
    counts = []
    for _ in range(R):
        first_T1 = torch.randint(UNIT, (TOKENS, 1), generator=generator)
        expert_TK = torch.searchsorted(end_E, first_T1 + UNIT * torch.arange(TOP_K), right=True)
        counts.append(torch.bincount(expert_TK.flatten(), minlength=len(share)))
    return torch.stack(counts).int()


def planned(counts_RE: Tensor, slack: int, sizes: dict[str, Sizes]) -> Row:
    R, E = counts_RE.shape
    home_E, expert_RS, rows_RS = replicas.plan(counts_RE, E // R, slack)
    owner_E = torch.arange(E) // (E // R)
    before_R, after_R = (each.view(R, -1).sum(1) for each in (counts_RE.sum(0), home_E))
    after_R = after_R + rows_RS.sum(1)
    total, is_used = int(counts_RE.sum()), expert_RS >= 0
    copies_RE = torch.zeros_like(counts_RE).scatter_add_(1, expert_RS.clamp(min=0).long(), rows_RS)
    copies_RE[owner_E, torch.arange(E)] += home_E
    # A row stays on its rank as far as there is a copy that takes it (`ops.replicas.reference.split`).
    stayed = int(counts_RE[owner_E, torch.arange(E)].sum())
    stays = int(torch.minimum(counts_RE, copies_RE).sum())
    sent_R = torch.bincount(owner_E[expert_RS[is_used].long()], minlength=R)
    busiest = int(torch.maximum(sent_R, is_used.sum(1)).max())
    after = int(after_R.max()) * R / total
    moved = {name: int(is_used.sum()) * (sum(PULLS) + GRADIENT) * each.expert for name, each in sizes.items()}
    return {
        "slack": slack,
        "before": int(before_R.max()) * R / total,
        "after": after,
        "replicas": int(is_used.sum()),
        "replica_rows": int(rows_RS.sum()) / total,
        "more_sent_rows": (stayed - stays) / total,
        "busiest_link": busiest,
        "moved_bytes": moved,
        **_times(after, busiest, total / R, sizes),
    }


def _times(after: float, busiest: int, rows: float, sizes: dict[str, Sizes]) -> Row:
    exposed, hidden = {}, {}
    for name, each in sizes.items():
        rate = SHARE_OF_RATE * FLOPS_PER_S
        balanced_s, attention_s = 6 * each.expert * rows / rate, each.attention * TOKENS / rate
        of_passes = (PULLS[0], attention_s), (PULLS[1] + GRADIENT, 2 * attention_s)
        taken = [(busiest * size * each.expert / LINK_BYTES_PER_S, beside) for size, beside in of_passes]
        exposed[name] = after + sum(seconds for seconds, _ in taken) / balanced_s
        hidden[name] = after + sum(max(seconds - beside, 0.0) for seconds, beside in taken) / balanced_s
    return {"time_exposed": exposed, "time_beside_attention": hidden}


REPLICAS = Suite(
    simulate,
    "case: {case} | slack: {slack:,} | busiest before: {before:.3f} | after: {after:.3f} | "
    "replicas: {replicas} | rows there %: {replica_rows:%*.1f} | "
    "more rows sent %: {more_sent_rows:%*+.1f} | GB V3: {moved_bytes[deepseek_v3]:G*.2f} | "
    "GB V2-Lite: {moved_bytes[deepseek_v2_lite]:G*.2f} | busiest link: {busiest_link} | "
    "time: {time_exposed[deepseek_v3]:.3f} | "
    "beside attention V3: {time_beside_attention[deepseek_v3]:.3f} | "
    "V2-Lite: {time_beside_attention[deepseek_v2_lite]:.3f}",
    "One layer and micro-batch, {method[tokens]:,} tokens of each rank to {method[top_k]} experts, chosen "
    "independently. Busiest: rows of the busiest rank over the mean. Shares of all rows: on replicas, and "
    "sent between ranks beyond those without replicas.\n"
    "GB: weights in bf16 for forward and backward, and gradients in fp32, of all replicas, with experts of "
    "DeepSeek-V3 and V2-Lite. Busiest link: replicas that one rank sends or gets.\n"
    "Time: of the experts and the busiest link over that of experts in exact balance; beside attention: only "
    "what takes longer than attention in sequences of {method[seq_len]}. Products at "
    "{method[share_of_rate]} of {method[floor_flops_per_s]:T*.0f} TFLOP/s, links at "
    "{method[link_bytes_per_s]:G*.0f} GB/s of each GPU.",
)
