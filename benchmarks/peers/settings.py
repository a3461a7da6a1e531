"""The jobs that peers are compared in, and the settings that each peer tries, the likely best first."""

from typing import Any, NamedTuple


class Job(NamedTuple):
    words: tuple[str, ...]
    """Overrides of graphmoe that give the model."""
    seq_len: int
    sequences: int
    """Of each GPU in a step."""
    gpus: tuple[int, ...]
    """Numbers of GPUs that the job is for."""


LITE, QWEN = "model=deepseek_v2_lite", "model=qwen3_30b_a3b"
JOBS = {
    "A": Job((LITE, "model.num_layers=6"), 4096, 16, (1, 2)),
    "B": Job((QWEN, "model.num_layers=6"), 4096, 16, (1, 2)),
    "C": Job((QWEN,), 8192, 8, (4,)),
}
TINY = Job(
    (
        "model.vocab_size=256", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=2",
        "model.num_experts=4", "model.top_k=2", "model.expert_ffn_size=16", "model.dense_ffn_size=32",
    ), 32, 4, (1,),
)  # fmt: skip
OF_TINY = {
    LITE: (
        "model.shared_ffn_size=32", "model.kv_lora_rank=16", "model.qk_nope_head_dim=16",
        "model.qk_rope_head_dim=8", "model.v_head_dim=16",
    ),
    QWEN: ("model.num_kv_heads=1", "model.head_dim=16"),
}  # fmt: skip

HF = {"experts": "grouped_mm", "compile": True, "recompute": False, "liger": True, "state": "fp32"}
CUTE = HF | {"experts": "liger_cute", "compile": False}
TITAN = {"ep": "none", "recompute": False, "compile": True, "graph": True, "state": "fp32"}
ASYNC = TITAN | {"ep": "minimal_async_ep", "recompute": True}
ALL_TO_ALL = TITAN | {"ep": "standard", "graph": False}
LESS = {"state": "bf16", "recompute": True}
SMALL, PAIR, WHOLE = "one GPU", "two GPUs", "job C"
SETTINGS: dict[str, dict[str, list[dict[str, Any]]]] = {
    "graphmoe": dict.fromkeys((SMALL, PAIR, WHOLE, "tiny"), [{}]),
    "transformers": {
        SMALL: (small := [
            HF | {"micro": 8}, HF | {"micro": 4}, HF | {"micro": 8, "state": "bf16"}, HF | {"micro": 16},
            HF | {"micro": 8, "compile": False}, HF | {"micro": 16, "recompute": True},
            HF | {"micro": 4, "liger": False}, HF | {"micro": 8, "experts": "sonicmoe"},
            HF | {"micro": 8, "experts": "deepgemm"},
        ]),
        PAIR: small[:6],
        WHOLE: [HF | LESS | {"micro": 2}, HF | LESS | {"micro": 4}, HF | {"micro": 1, "state": "bf16"}],
        "tiny": (tiny := [
            HF | {"micro": 2, "liger": False, "compile": False},
            HF | {"micro": 2, "liger": False, "compile": False, "experts": "no_such"},
        ]),
    },
    "liger": {
        SMALL: [CUTE | {"micro": 2}, CUTE | {"micro": 4}, CUTE | {"micro": 1}],
        PAIR: [CUTE | {"micro": 2}], WHOLE: [CUTE | LESS | {"micro": 1}], "tiny": tiny,
    },
    "torchtitan": {
        SMALL: [
            TITAN | {"micro": 4}, TITAN | {"micro": 8}, TITAN | {"micro": 16, "recompute": True},
            TITAN | {"micro": 4, "graph": False}, TITAN | {"micro": 4, "compile": False},
        ],
        PAIR: [
            ASYNC | {"micro": 8}, ASYNC | {"micro": 4}, ALL_TO_ALL | {"micro": 4}, TITAN | {"micro": 4},
            ALL_TO_ALL | {"micro": 8, "recompute": True},
        ],
        WHOLE: [ASYNC | LESS | {"micro": 2}, ASYNC | LESS | {"micro": 4}, ALL_TO_ALL | LESS | {"micro": 2}],
        "tiny": [],
    },
}  # fmt: skip
MODULES = {"transformers": "hf", "liger": "hf", "torchtitan": "titan"}
"""Files of peers in this folder, whose names are not those of packages that they import."""


def settings_of(peer: str, job: str, gpus: int, *, tiny: bool) -> list[dict[str, Any]]:
    return SETTINGS[peer]["tiny" if tiny else WHOLE if job == "C" else (SMALL, PAIR)[gpus - 1]]
