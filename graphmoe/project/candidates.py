"""Candidates of a search: layouts of a number of ranks, schedules, and kinds of recompute."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphmoe.config.ranges import number_of, spelled
from graphmoe.config.schema import (
    ConfigError,
    ContextMethod,
    Fp8Recipe,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    RecomputeConfig,
    RunConfig,
)
from graphmoe.plan.experts import has_experts, num_dense
from graphmoe.plan.layout import Layout, divisors
from graphmoe.plan.pipeline.plan import num_micro_batches
from graphmoe.plan.pipeline.schedules import SCHEDULES, schedule_of
from graphmoe.plan.rules import violations
from graphmoe.plan.rules.auto import AUTO, DISPATCHER, OVERLAP, SCOPE, undecided, value_of, with_values
from graphmoe.plan.rules.model import one_node_rules
from graphmoe.plan.rules.parallel import MOST_MICRO_BATCHES, context_method, rank_batch_rules
from graphmoe.project.arguments import FP8, GLOBAL_BATCH, MICRO_BATCH, ProjectArgs
from graphmoe.segments import lowest_stage
from graphmoe.training.auto import SIZES, decisions, machine_of, overlap_gains

MOST_CP = 8
VIRTUAL_STAGES = (2, 3, 4, 6)
PARTS = 4  # a good candidate's recompute is tried in the first quarter, half and three quarters of its layers


@dataclass(frozen=True)
class Candidate:
    words: str
    config: RunConfig
    layout: Layout
    kind: str = ""


class Candidates:
    """Runs that a search tries; keys in ``fixed`` stay as they are in the configuration."""

    def __init__(self, config: RunConfig, args: ProjectArgs, fixed: frozenset[str]) -> None:
        self.num_ranks, self.fixed = args.num_ranks, fixed
        if config.moe.dispatcher in ("local", "alltoall") and DISPATCHER not in fixed:
            config = with_values(config, {DISPATCHER: AUTO})
        self.config, self._machine = config, machine_of(args.card, args.num_ranks)._replace(memory=math.inf)
        self._per_node, nodes = args.per_node, args.num_ranks // args.per_node
        self._launch = replace(config.launch, nproc=self._per_node, nodes=nodes)
        self.kinds = self._kinds()
        self.micro_batch_sizes = self._micro_batch_sizes()
        batch = f"{GLOBAL_BATCH}={config.train.global_batch_size}"
        self._batch = "" if GLOBAL_BATCH in fixed else batch
        self._known: dict[tuple[object, ...], tuple[dict[str, Any], list[str]]] = {}
        recipes = [Fp8Recipe.none, Fp8Recipe.rowwise] if args.try_fp8 else [config.precision.fp8]
        self.precisions = [replace(config.precision, fp8=recipe) for recipe in recipes]

    def layouts(self) -> Iterator[list[tuple[Candidate, list[str]]]]:
        """Yield each layout's modes, fastest first, with errors if one cannot run. *Raises* ConfigError."""
        count, problem = 0, ""
        for parallel in self._dimensions():
            try:
                layout = Layout.of(parallel, self.num_ranks)
            except ConfigError as error:
                problem = problem or str(error)
                continue
            count += 1
            train = replace(self.config.train, micro_batch_size=self.micro_batch_sizes[0])
            of_layout = replace(self.config, parallel=parallel, train=train)
            for precision in self.precisions:
                changed = precision.fp8 is not self.config.precision.fp8
                in_fp8 = f"{FP8}={precision.fp8.value}" if changed else ""
                ways = []
                for name in self._dispatchers(parallel, precision):
                    made = with_values(replace(of_layout, precision=precision), {DISPATCHER: name})
                    made, words, problems = self._decided(made, layout)
                    own = f"{DISPATCHER}={name}" * (name != self.config.moe.dispatcher)
                    found = Candidate(_joined(self._words(parallel), own, words, in_fp8), made, layout)
                    ways.append((found, problems))
                yield ways
        if not count:
            raise ConfigError(
                f"no layout fits parallel.* on {number_of(self.num_ranks, 'rank')}: {without_advice(problem)}"
            )

    def _dispatchers(self, parallel: ParallelConfig, precision: PrecisionConfig) -> list[str]:
        given, ranks = self.config.moe.dispatcher, parallel.ep * parallel.etp
        known = given != AUTO or ranks == 1 or ranks > self._per_node or not has_experts(self.config.model)
        in_fp8 = precision.fp8 is not Fp8Recipe.none and "experts" in precision.fp8_products
        # fp8 rows need kernels that read peers, which auto takes
        return [given] if known or in_fp8 else [given, "alltoall"]

    def scheduled(self, candidate: Candidate) -> Iterator[Candidate]:
        for name, virtual_stages in self._schedules(candidate.layout.pp, candidate.config.pipeline):
            words = self._schedule_words(candidate.layout.pp, name, virtual_stages)
            pipeline = replace(candidate.config.pipeline, schedule=name, virtual_stages=virtual_stages)
            config = replace(candidate.config, pipeline=pipeline)
            yield replace(candidate, words=_joined(candidate.words, *words), config=config)

    def sized(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield the candidate with each micro-batch size that divides its ranks' batch."""
        for size in self.micro_batch_sizes:
            train = replace(candidate.config.train, micro_batch_size=size)
            if any(rank_batch_rules(train, candidate.layout, self.num_ranks)):
                return
            words = "" if MICRO_BATCH in self.fixed else f"{MICRO_BATCH}={size}"
            config = replace(candidate.config, train=train)
            if self.config.pipeline.ep_overlap == AUTO and num_micro_batches(config, candidate.layout) < 2:
                config = with_values(config, {OVERLAP: False})
            yield replace(candidate, words=_joined(candidate.words, words), config=config)

    def recomputing(self, candidate: Candidate, kind: str) -> Candidate:
        config = replace(candidate.config, recompute=self.kinds[kind])
        return replace(candidate, words=_joined(candidate.words, kind, self._batch), config=config, kind=kind)

    def variants(self, candidate: Candidate) -> Iterator[list[Candidate]]:
        """Yield lists of changes to a good candidate; of each list only the first that fits counts."""
        config, pipeline = candidate.config, candidate.config.pipeline
        is_free = self.config.pipeline.ep_overlap == AUTO and not pipeline.ep_overlap
        pairs = candidate.layout.pp > 1 and schedule_of(pipeline.schedule).build_overlapped
        if is_free and pairs and overlap_gains(config.moe.dispatcher, self._machine.gpu):
            yield [self._with(candidate, OVERLAP, True)]
        if config.graph.scope == "none" and self.config.graph.scope == AUTO:
            yield [self._with(candidate, SCOPE, "partial")]
        if candidate.kind and config.recompute != RecomputeConfig():
            layers = len_of_parts(config.model) - 2
            yield [self._of_layers(candidate, layers * part // PARTS) for part in range(1, PARTS)]

    def _with(self, candidate: Candidate, key: str, value: str | bool) -> Candidate:
        config = with_values(candidate.config, {key: value})
        config = with_values(config, self._stage(config))
        words = [word for word in candidate.words.split() if not word.startswith(f"{key}=")]
        return replace(candidate, config=config, words=_joined(*words, f"{key}={spelled(value)}"))

    def _stage(self, config: RunConfig) -> dict[str, Any]:
        if self.config.moe.sync_free_stage != AUTO or not has_experts(config.model):
            return {}
        return {"moe.sync_free_stage": lowest_stage(config.graph.scope)}

    def _of_layers(self, candidate: Candidate, count: int) -> Candidate:
        wanted, first = candidate.config.recompute, [*range(count)]
        some = RecomputeConfig(layer_ids=first) if wanted.all else replace(wanted, layer_ids=first)
        kind = " ".join(
            [candidate.kind] * (not wanted.all) + [f"recompute.layer_ids={first}".replace(" ", "")]
        )
        if self.config.recompute != RecomputeConfig():
            kind = _all_keys(some)
        words = candidate.words.replace(candidate.kind, kind)
        return replace(candidate, config=replace(candidate.config, recompute=some), words=words, kind=kind)

    def _schedules(self, pp: int, pipeline: PipelineConfig) -> Iterator[tuple[str, int | None]]:
        most = len_of_parts(self.config.model) // pp
        if pp == 1:
            yield pipeline.schedule, pipeline.virtual_stages
            return
        # a schedule that always has pairs (dualpipe_v) is another's overlapped table
        names = [n for n, s in SCHEDULES.items() if not s.keeps_all and s.build is not s.build_overlapped]
        if pipeline.ep_overlap is True:
            names = [name for name in names if SCHEDULES[name].build_overlapped]
        if "pipeline.schedule" in self.fixed:
            names = [pipeline.schedule]
        for name in names:
            fewest, limit = schedule_of(name).virtual_stages
            tried = (fewest,) if limit == fewest else VIRTUAL_STAGES
            if "pipeline.virtual_stages" in self.fixed:
                yield name, pipeline.virtual_stages
            else:
                yield from ((name, count) for count in tried if count <= most)

    def _schedule_words(self, pp: int, name: str, virtual_stages: int | None) -> Iterator[str]:
        if pp > 1 and "pipeline.schedule" not in self.fixed:
            yield f"pipeline.schedule={name}"
        if "pipeline.virtual_stages" not in self.fixed:
            takes_any = schedule_of(name).virtual_stages[1] is None
            if pp > 1 and takes_any and virtual_stages:
                yield f"pipeline.virtual_stages={virtual_stages}"
            elif self.config.pipeline.virtual_stages is not None:  # of a file
                yield "pipeline.virtual_stages=null"

    def _micro_batch_sizes(self) -> list[int]:
        train = self.config.train
        if MICRO_BATCH in self.fixed:
            return [train.micro_batch_size]
        whole = [size for size in SIZES[::-1] if train.global_batch_size % size == 0]
        few = [size for size in whole if train.global_batch_size <= MOST_MICRO_BATCHES * size]
        return few or whole[-1:]

    def _kinds(self) -> dict[str, RecomputeConfig]:
        model = self.config.model
        if any(key.partition(".")[0] == "recompute" for key in self.fixed):
            return {"": self.config.recompute}
        mlps = ["mlp"] if num_dense(model) else []
        if has_experts(model):
            mlps += ["shared_experts"] * bool(model.shared_ffn_size) + ["moe_experts"]
        kinds = {
            "recompute=none": RecomputeConfig(),
            "recompute.ops=[layernorm]": RecomputeConfig(ops=["layernorm"]),
            "recompute.segments=[attn]": RecomputeConfig(segments=["attn"]),
            f"recompute.segments=[{','.join(mlps)}]": RecomputeConfig(segments=mlps),
            "recompute=all": RecomputeConfig(all=True),
        }
        if self.config.recompute == RecomputeConfig():
            return kinds
        return {_all_keys(kind): kind for kind in kinds.values()}

    def _dimensions(self) -> Iterator[ParallelConfig]:
        config, model, ranks = self.config.parallel, self.config.model, self.num_ranks
        shares = divisors(model.num_experts, ranks) if has_experts(model) else [1]
        for pp, tp, cp, ep in itertools.product(
            self._tried("pp", divisors(ranks, len_of_parts(model))),
            self._tried("tp", divisors(ranks, self._per_node)),
            self._tried("cp", divisors(ranks, MOST_CP)),
            self._tried("ep", shares),
        ):
            # etp sends each token to more ranks than the same growth of ep, so it is tried only where
            # ep cannot grow
            parts = [tp] if tp > 1 and has_experts(model) and model.num_experts % (ep * tp) else []
            for etp in self._tried("etp", [1, *parts]):
                sizes = replace(config, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
                yield from (replace(sizes, cp_method=method) for method in self._methods(sizes))

    def _tried(self, name: str, options: Sequence[int]) -> Sequence[int]:
        return [getattr(self.config.parallel, name)] if f"parallel.{name}" in self.fixed else options

    def _methods(self, parallel: ParallelConfig) -> list[ContextMethod]:
        if "parallel.cp_method" in self.fixed:
            return [parallel.cp_method]
        auto = context_method(replace(parallel, cp_method=ContextMethod.auto), self.config.model)
        return list(dict.fromkeys([auto, ContextMethod.ring])) if parallel.cp > 1 else [auto]

    def _decided(self, config: RunConfig, layout: Layout) -> tuple[RunConfig, str, list[str]]:
        like = replace(layout, dp=1, pp=min(layout.pp, 2))
        key = like, config.precision.fp8, config.moe.dispatcher, num_micro_batches(config, layout) > 1
        if key not in self._known:
            found = decisions(replace(config, recompute=RecomputeConfig()), self._machine)[0]
            if layout.pp > 1 and config.graph.scope == AUTO and found.graph.scope == "partial":
                # graphs of micro-batches in flight are large; `variants` tries them
                found = with_values(found, {SCOPE: "none"})
                found = with_values(found, self._stage(found))
            self._known[key] = {key: value_of(found, key) for key in undecided(config)}, violations(found)
        values, problems = self._known[key]
        found = with_values(config, values)
        uncaptured = config.graph.scope == AUTO and found.graph.scope == "none"
        problems = [
            *rank_batch_rules(config.train, layout, self.num_ranks),
            *problems,
            *one_node_rules(replace(found, launch=self._launch)),
        ]
        return found, f"{SCOPE}=none" * uncaptured, problems

    def _words(self, parallel: ParallelConfig) -> str:
        values = {name: getattr(parallel, name) for name in ("pp", "ep", "tp", "cp")}
        if parallel.etp > 1 or self.config.parallel.etp > 1:
            values["etp"] = parallel.etp
        if parallel.cp > 1:
            values["cp_method"] = parallel.cp_method.value
        keys = {f"parallel.{name}": value for name, value in values.items()}
        return " ".join(f"{key}={value}" for key, value in keys.items() if key not in self.fixed)


def _all_keys(recompute: RecomputeConfig) -> str:
    lists = {key: ",".join(map(str, getattr(recompute, key))) for key in ("segments", "ops", "layer_ids")}
    words = [f"recompute.{key}=[{names}]" for key, names in lists.items()]
    return " ".join([f"recompute.all={str(recompute.all).lower()}", *words])


def without_advice(problem: str) -> str:
    return problem.partition("; ")[0]


def len_of_parts(model: ModelConfig) -> int:
    """Count the parts that stages may have: embedding, layers and loss."""
    return model.num_layers + model.mtp_depth + 2


def _joined(*words: str) -> str:
    return " ".join(filter(None, words))
